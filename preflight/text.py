"""Wording that several checks share: sizes, commands, how to install a package here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from ds41ctl.core import packages
from ds41ctl.core.facts import SystemFacts
from ds41ctl.core.profile import Profile

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def size(count: float) -> str:
    """`189 GiB`, `2.3 MiB`, `512 B`: three significant digits or so."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= unit:
            value = count / unit
            return f"{value:.0f} {name}" if abs(value) >= 100 else f"{value:.1f} {name}"
    return f"{count:.0f} B"


def version(text: str) -> tuple[int, ...]:
    """`580.173.02` as numbers that compare; () for what is no version."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def command(verb: str, profile: Profile) -> str:
    """`ds41ctl <verb> --profile <name>`."""
    return f"ds41ctl {verb} --profile {profile.name}"


def as_root(line: str, system: SystemFacts) -> str:
    """`line` with `sudo` in front unless this user is root already."""
    return line if system.root else f"sudo {line}"


def install(package: str, system: SystemFacts, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """The line that installs `package` on this distribution; `names` gives its name where it differs."""
    return packages.install(package, system.os_ids, root=system.root, names=names)
