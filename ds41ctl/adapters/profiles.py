"""Profiles on disk: the built-in ones and those a user added."""

from __future__ import annotations

import importlib.resources
import os
import tomllib
from pathlib import Path
from typing import Any

from ds41ctl.adapters.paths import config_paths
from ds41ctl.core.errors import ConfigError, NotFoundError
from ds41ctl.core.nearest import nearest
from ds41ctl.core.profile import Profile, parse_profile

DEFAULT = "cpu-tiny"


def builtin_folder() -> Path:
    """Folder of the profiles that travel with the package."""
    return Path(str(importlib.resources.files("profiles")))


def user_folder() -> Path:
    """Folder where a user's own profiles are found by name."""
    return config_paths(os.environ)[0].parent / "profiles"


def paths() -> dict[str, Path]:
    """Profile name (file stem) -> file; a user's file wins over a built-in one of the same name."""
    found = {}
    for folder in (builtin_folder(), user_folder()):
        if folder.is_dir():
            found.update({path.stem: path for path in sorted(folder.glob("*.toml"))})
    return dict(sorted(found.items()))


def names() -> list[str]:
    """Names that --profile accepts."""
    return list(paths())


def find(name: str) -> Path:
    """File of a profile given by name or by path. Raises NotFoundError with the near name."""
    if name.endswith(".toml") or os.sep in name:
        path = Path(name)
        if not path.is_file():
            raise NotFoundError(f"no profile file {name}", hints=("ds41ctl profile list",))
        return path.absolute()
    known = paths()
    if name not in known:
        near = nearest(name, known)
        raise NotFoundError(
            f"no profile {name!r}" + (f"; did you mean {near}?" if near else ""),
            hints=("ds41ctl profile list",),
        )
    return known[name]


def tree(path: Path) -> dict[str, Any]:
    """A profile's TOML as it is."""
    return tomllib.loads(path.read_text(encoding="utf-8-sig"))


def read(path: Path) -> Profile:
    """Parse one file; its name must be the file's stem. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    profile = parse_profile(text, str(path))
    if profile.name != path.stem:
        raise ConfigError(f"{path}: name is {profile.name!r}, expected the file's name {path.stem!r}")
    return profile
