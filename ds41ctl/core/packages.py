"""How a package is installed on each distribution."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_INSTALLERS = {
    "debian": "apt-get install -y",
    "ubuntu": "apt-get install -y",
    "fedora": "dnf install -y",
    "rhel": "dnf install -y",
    "centos": "dnf install -y",
    "arch": "pacman -S --noconfirm",
    "alpine": "apk add",
    "suse": "zypper install -y",
    "opensuse": "zypper install -y",
    "gentoo": "emerge",
}


def install(
    package: str, os_ids: tuple[str, ...], *, root: bool, names: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The line that does it. `os_ids`: ID and ID_LIKE of os-release; `names`: its name where it differs."""
    for distribution in os_ids:
        installer = _INSTALLERS.get(distribution)
        if installer is not None:
            line = f"{installer} {names.get(distribution, package)}"
            return line if root else f"sudo {line}"
    return f"install {package} with this distribution's package manager"


def venv_names(version: str) -> Mapping[str, str]:
    """What Debian splits off as pythonX.Y-venv is in the interpreter's own package elsewhere."""
    return dict.fromkeys(_INSTALLERS.keys() - {"debian", "ubuntu"}, f"python{version}")
