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
    """The package that brings Python `version` with ensurepip, where it is not Debian's pythonX.Y-venv. Arch and Alpine
    have one version only."""
    red_hat = dict.fromkeys(("fedora", "rhel", "centos"), f"python{version}")
    suse = dict.fromkeys(("suse", "opensuse"), f"python{version.replace('.', '')}")
    return {**red_hat, **suse, "arch": "python", "alpine": "python3", "gentoo": f"dev-lang/python:{version}"}
