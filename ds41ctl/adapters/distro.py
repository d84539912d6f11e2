"""Which distribution this is, and how it installs a package."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from ds41ctl.adapters.textfile import text
from ds41ctl.core import packages


def install_line(package: str, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """The line that installs `package` on this machine; `names` gives its name by distribution where it differs."""
    return packages.install(package, os_ids(os_release(Path("/"))), root=os.geteuid() == 0, names=names)


def os_ids(release: Mapping[str, str]) -> tuple[str, ...]:
    """ID, then ID_LIKE of an os-release: what this distribution is, and what it was made from."""
    return tuple(f"{release.get('ID', '')} {release.get('ID_LIKE', '')}".split())


def os_release(root: Path) -> dict[str, str]:
    """The pairs of etc/os-release, else of usr/lib/os-release; {} without either."""
    lines = (text(root / "etc/os-release") or text(root / "usr/lib/os-release") or "").splitlines()
    pairs = (line.partition("=") for line in lines if "=" in line and not line.startswith("#"))
    return {name.strip(): value.strip().strip("\"'") for name, _, value in pairs}
