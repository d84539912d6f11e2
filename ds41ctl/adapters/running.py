"""Running engines: one record a profile, trusted only as far as pid, start time and boot agree."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ds41ctl.adapters import containers, files
from ds41ctl.adapters.proc import Identity
from ds41ctl.adapters.store import boot_id
from ds41ctl.core.growth import Growth, Levels
from ds41ctl.core.layout import base_url


class Member(BaseModel):
    """A process of the engine beside its first one, as it was when the engine became ready."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    start_ticks: int
    title: str

    def alive(self) -> bool:
        """True while that very process runs."""
        return Identity(self.pid, self.start_ticks).alive()


class Running(BaseModel):
    """What was started. `marker` is an environment entry that every process of this engine carries.

    `levels`: host memory before the start, `growth`: what the start filled; of an engine that keeps its own tables.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 1
    profile: str
    profile_path: str
    profile_digest: str
    engine_digest: str
    boot_id: str
    pid: int
    start_ticks: int
    marker: str
    host: str
    port: int
    served_name: str
    argv: tuple[str, ...]
    environment_sha256: str
    log: str
    socket: str
    spec: str
    started_at: str
    ready_at: str = ""
    api_key_file: str = ""
    container: str = ""
    runtime: str = ""
    idle_vram_mib: dict[str, int] = {}
    members: tuple[Member, ...] = ()
    segments: tuple[str, ...] = ()
    levels: Levels | None = None
    growth: Growth | None = None

    @property
    def identity(self) -> Identity:
        """The engine's first process."""
        return Identity(self.pid, self.start_ticks)

    @property
    def url(self) -> str:
        """Base URL of its API."""
        return base_url(self.host, self.port)

    def alive(self) -> bool:
        """True while that very process (or its container) runs in this boot."""
        if self.boot_id != boot_id():
            return False
        if self.container:
            found = containers.state(self.runtime, self.container)
            return found is not None and found.running
        return self.identity.alive()

    def gone(self) -> list[Member]:
        """Members that have ended: the engine is dead though its first process may not know it yet."""
        return (
            [] if self.container or self.boot_id != boot_id() else [item for item in self.members if not item.alive()]
        )


def write(path: Path, record: Running) -> None:
    """Publish a record (0600)."""
    files.publish(path, [record.model_dump_json(indent=1).encode()], mode=0o600)


def read(path: Path) -> Running | None:
    """A record, None when there is none or it is not ours to understand."""
    try:
        tree = files.read_json(path)
        return None if tree is None else Running.model_validate(tree)
    except (ValueError, ValidationError, OSError):
        return None


def all_records(state: Path) -> list[Running]:
    """All records below the state folder, newest start first."""
    folder = state / "running"
    found = [read(path) for path in folder.glob("*.json")] if folder.is_dir() else []
    return sorted((item for item in found if item is not None), key=lambda item: item.started_at, reverse=True)


def forget(path: Path, record: Running | None) -> None:
    """Remove a record and its spec file (which holds the environment)."""
    names = [path] + ([Path(record.spec)] if record else [])
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            name.unlink()
