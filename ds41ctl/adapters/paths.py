"""Folders of this user, after the XDG convention, private where it matters."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from ds41ctl.core.errors import DeniedError
from ds41ctl.core.layout import Dirs
from ds41ctl.core.settings import Settings

APP = "ds41ctl"
# sun_path holds 108 bytes with its NUL (unix(7)); the longest socket name of ours takes about 32
_SOCKET_ROOM = 70


def config_paths(environ: Mapping[str, str]) -> tuple[Path, Path]:
    """(user config, system config); neither need exist."""
    base = environ.get("XDG_CONFIG_HOME")
    user = Path(base) / APP if base else Path(platformdirs.user_config_dir(APP))
    return user / "config.toml", Path("/etc") / APP / "config.toml"


def dirs(settings: Settings) -> Dirs:
    """Base folders; nothing is created."""
    state = (settings.state_dir or Path(platformdirs.user_state_dir(APP))).absolute()
    runtime = Path(os.environ["XDG_RUNTIME_DIR"]) / APP if _runtime_usable() else state / "run"
    if len(os.fsencode(runtime)) > _SOCKET_ROOM:
        tag = hashlib.sha256(os.fsencode(state)).hexdigest()[:8]
        runtime = Path("/tmp") / f"{APP}-{os.getuid()}-{tag}"  # noqa: S108 - 0700 and owner checked by private_dir
    elif runtime != state / "run" and settings.state_dir is not None:
        # two state folders of one user must not share sockets
        runtime = runtime / hashlib.sha256(os.fsencode(state)).hexdigest()[:8]
    return Dirs(
        data=(settings.data_dir or Path(platformdirs.user_data_dir(APP))).absolute(),
        state=state,
        cache=(settings.cache_dir or Path(platformdirs.user_cache_dir(APP))).absolute(),
        runtime=runtime,
        uid=os.getuid(),
    )


def _runtime_usable() -> bool:
    value = os.environ.get("XDG_RUNTIME_DIR", "")
    if not value:
        return False
    try:
        info = Path(value).stat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()


def private_dir(path: Path) -> Path:
    """Create a 0700 folder of ours. Raises DeniedError when it is someone else's or a symlink."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise DeniedError(f"{path} is not a folder of this user (owner {info.st_uid})", hints=(f"rm -r {path}",))
    if info.st_mode & 0o077:
        path.chmod(0o700)
    return path
