"""Layout: where everything of one profile lives, computed once from dirs, profile and settings."""

from __future__ import annotations

import contextlib
import ipaddress
import sys
from dataclasses import dataclass
from pathlib import Path

from ds41ctl.core.errors import ConfigError
from ds41ctl.core.profile import Profile
from ds41ctl.core.settings import Settings

RECORD_BYTES = 264  # one Engram row: 256 B F8_E4M3 weights + 8 B UE8M0 scales


@dataclass(frozen=True)
class Dirs:
    """Base folders of this user. `runtime` holds sockets and is 0700."""

    data: Path
    state: Path
    cache: Path
    runtime: Path
    uid: int

    def roles(self) -> dict[str, Path]:
        """Role -> folder, for the facts about filesystems."""
        return {"data": self.data, "state": self.state, "tmp": Path("/tmp")}  # noqa: S108 - reported, not written


@dataclass(frozen=True)
class Layout:
    """Paths, port and switches of one profile on this machine."""

    profile: Profile
    dirs: Dirs
    model_dir: Path
    engine_dir: Path
    python: Path
    own_python: bool
    store_dirs: tuple[Path, ...]
    host: str
    port: int
    dspark: bool
    gpu_groups: tuple[tuple[str, tuple[int, ...]], ...]
    committed_pins: Path | None = None
    api_key_file: Path | None = None
    own_model: bool = False
    own_store_dir: bool = False

    @property
    def name(self) -> str:
        """Profile name: the key of locks, logs and records."""
        return self.profile.name

    @property
    def url(self) -> str:
        """Base URL of the API, as a client on this machine reaches it."""
        return base_url(self.host, self.port)

    @property
    def cache_dir(self) -> Path:
        """Compiler and bytecode caches of this engine."""
        return self.dirs.cache / self.profile.engine.name

    @property
    def pins_path(self) -> Path:
        """File list of the profile's Hub repositories, as it was first fetched."""
        return self.dirs.state / "pins" / f"{self.name}.json"

    @property
    def heads_dir(self) -> Path:
        """Headers of the Hub's shards of which only some tensors are fetched."""
        return self.dirs.state / "pins" / f"{self.name}.heads"

    @property
    def own_pins_dir(self) -> Path:
        """What was seen of a hybrid of the user's own: its digests, and the sidecars that bind them."""
        return self.dirs.state / "pins" / f"{self.name}.own"

    def source_dir(self, folder: str) -> Path:
        """Folder of a source's `dir`: below the data folder, or the pack's own when it is empty."""
        return self.dirs.data / folder if folder else self.model_dir

    @property
    def record_path(self) -> Path:
        """Record of the engine that runs for this profile."""
        return self.dirs.state / "running" / f"{self.name}.json"

    @property
    def serve_lock(self) -> Path:
        """Held while a start waits: one start of a profile at a time."""
        return self.dirs.state / "locks" / f"serve-{self.name}.lock"

    @property
    def socket_path(self) -> Path:
        """tmux socket of this profile's private server."""
        return self.dirs.runtime / f"{self.name}.sock"


def layout(
    profile: Profile, settings: Settings, dirs: Dirs, *, may_mount: bool, committed_pins: Path | None = None
) -> Layout:
    """Resolve a profile's paths. `may_mount`: root or `sudo -n` works, so the store may get a mount of its own.
    `committed_pins`: where a lock committed beside the profile would lie.

    Store candidates in order: the folder that the user or the profile names (alone, `own_store_dir`), else a mount of
    our own below the state folder, else a folder in /dev/shm (tmpfs that every user may write). A disk store lies
    below the data folder.
    """
    groups = dict(profile.hardware.gpu_groups)
    for name, chosen in (("a", settings.gpus_a), ("c", settings.gpus_c)):
        if chosen is None:
            continue
        if name not in groups:
            raise ConfigError(
                f"DS41_GPUS_{name.upper()} is set, but profile {profile.name} has no GPU group {name!r}",
                hints=(f"unset DS41_GPUS_{name.upper()}",),
            )
        if len(chosen) != len(groups[name]):
            raise ConfigError(
                f"DS41_GPUS_{name.upper()} names {len(chosen)} GPUs, profile {profile.name} needs {len(groups[name])}",
            )
        groups[name] = chosen
    used = [index for group in groups.values() for index in group]
    if len(set(used)) != len(used):
        raise ConfigError("DS41_GPUS_A and DS41_GPUS_C overlap: each GPU belongs to one group")
    host = settings.host or profile.serve.host
    if not loopback(host) and settings.api_key_file is None:
        raise ConfigError(
            f"host {host} is reachable from other machines, and no API key is set",
            hints=(
                "(umask 077; openssl rand -hex 32 > FILE) and DS41_API_KEY_FILE=FILE",
                "or keep 127.0.0.1, and let a reverse proxy or an ssh tunnel reach it",
            ),
        )
    engine_dir = dirs.data / "engines" / profile.engine.name
    if settings.engram_dir is not None:
        stores = [settings.engram_dir.absolute()]
    elif profile.engram.dir:
        stores = [Path(profile.engram.dir)]
    elif profile.engram.storage == "disk":
        stores = [dirs.data / "engram" / profile.name]
    else:
        stores = [dirs.state / "engram" / profile.name] if may_mount else []
        stores.append(Path("/dev/shm") / f"ds41ctl-{dirs.uid}" / profile.name)  # noqa: S108 - 0700, owner checked
    return Layout(
        profile=profile,
        dirs=dirs,
        model_dir=settings.model or dirs.data / profile.model.dir,
        engine_dir=engine_dir,
        python=settings.python or engine_dir / "venv" / "bin" / "python",
        own_python=settings.python is not None,
        store_dirs=tuple(stores),
        host=host,
        port=settings.port or profile.serve.port,
        dspark=profile.serve.dspark if settings.dspark is None else settings.dspark,
        gpu_groups=tuple(groups.items()),
        committed_pins=committed_pins,
        api_key_file=settings.api_key_file.absolute() if settings.api_key_file else None,
        own_model=settings.model is not None,
        own_store_dir=settings.engram_dir is not None or bool(profile.engram.dir),
    )


def loopback(host: str) -> bool:
    """True when only this machine reaches `host`; a name other than localhost may resolve to anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def base_url(host: str, port: int) -> str:
    """`http://host:port` for a client on this machine; one that listens everywhere is asked on loopback."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def default_python() -> str:
    """major.minor of the interpreter that runs ds41ctl."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"
