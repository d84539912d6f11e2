"""Holders: what holds the engine's first process and knows how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ds41ctl.adapters import containers, proc, tmux


class Holder(Protocol):
    """What holds the engine's process and knows how it ended."""

    def ending(self) -> str | None:
        """None while it lives, else `exit status 1` or `signal 9`."""
        ...


@dataclass
class TmuxHolder:
    """The engine in its tmux pane."""

    socket: Path
    identity: proc.Identity

    def ending(self) -> str | None:
        """As tmux saw it; a vanished server counts as an ending too."""
        found = tmux.read(self.socket)
        if found is None:
            return None if self.identity.alive() else "an unknown status (its tmux server is gone)"
        return found.ending() if found.dead else None


class ChildHolder:
    """The engine as our own child (serve --foreground)."""

    def __init__(self, argv: list[str]) -> None:
        self.process = proc.spawn_attached(argv)

    def ending(self) -> str | None:
        """As the kernel told us."""
        status = self.process.poll()
        if status is None:
            return None
        return f"signal {-status}" if status < 0 else f"exit status {status}"


@dataclass
class ContainerHolder:
    """The engine in a container of docker or podman."""

    tool: str
    container: str

    def ending(self) -> str | None:
        """As the runtime states it; a container that was restarted is no longer the one we started."""
        found = containers.state(self.tool, self.container)
        return "its container was removed" if found is None else found.ending()
