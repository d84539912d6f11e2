"""tmux: a private server per profile that holds the engine and remembers how it ended."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import libtmux

from ds41ctl.adapters import distro, files, proc
from ds41ctl.adapters.paths import private_dir
from ds41ctl.core.errors import Ds41Error, UnsupportedError

# remain-on-exit keeps the dead pane, so that its exit status or signal can still be read
CONFIG = "set -g remain-on-exit on\nset -g history-limit 5000\nset -g status-left-length 40\n"


@dataclass(frozen=True)
class Pane:
    """The engine's pane. `status` and `signal` are set once it is dead (one of them)."""

    pid: int
    dead: bool
    status: int | None
    signal: int | None

    def ending(self) -> str:
        """`exit status 1` or `signal 9`."""
        if self.signal is not None:
            return f"signal {self.signal}"
        return "a status tmux did not keep" if self.status is None else f"exit status {self.status}"


def start(socket: Path, session: str, argv: Sequence[str]) -> Pane:
    """Start `argv` in a new session of a private server. Raises UnsupportedError without tmux."""
    private_dir(socket.parent)
    config = socket.with_suffix(".conf")
    files.publish(config, [CONFIG.encode()], mode=0o600)
    try:
        server = libtmux.Server(socket_path=str(socket), config_file=str(config))
        server.new_session(session_name=session, window_command=shlex.join(argv), x=200, y=50)
    except libtmux.exc.TmuxCommandNotFound:
        raise UnsupportedError(
            "tmux is not installed (3.2a or newer is needed)", hints=(distro.install_line("tmux"),)
        ) from None
    except libtmux.exc.LibTmuxException as error:
        raise Ds41Error(f"tmux would not start the session: {error}") from None
    pane = read(socket)
    if pane is None:
        raise Ds41Error("tmux lost the session it just started")
    return pane


def read(socket: Path) -> Pane | None:
    """The pane as tmux sees it, None when there is no server.

    tmux calls a pane dead when its terminal is closed, and learns how it ended when it waits for the process, which
    can be much later (measured with tmux 3.3a: over a second in some of the runs). Until then the kernel is asked.
    """
    for _ in range(20):
        pane = _read_once(socket)
        if pane is None or not pane.dead or pane.status is not None or pane.signal is not None:
            return pane
        ending = proc.zombie_ending(pane.pid)
        if ending is not None:
            return replace(pane, status=ending[0], signal=ending[1])
        time.sleep(0.05)
    return pane


def _read_once(socket: Path) -> Pane | None:
    if not socket.exists():
        return None
    form = "#{pane_pid} #{pane_dead} s#{pane_dead_status} k#{pane_dead_signal}"
    done = proc.run(["tmux", "-S", str(socket), "list-panes", "-a", "-F", form], timeout=10)
    if not done.ok or not done.stdout.strip():
        return None
    pid, dead, status, signal = done.stdout.splitlines()[0].split()
    return Pane(
        pid=int(pid),
        dead=dead == "1",
        status=int(status[1:]) if status[1:] else None,
        signal=int(signal[1:]) if signal[1:] else None,
    )


def kill(socket: Path) -> None:
    """End the private server and remove its socket and config."""
    if socket.exists():
        proc.run(["tmux", "-S", str(socket), "kill-server"], timeout=10)
    for path in (socket, socket.with_suffix(".conf")):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def attach_command(socket: Path) -> str:
    """What a person types to look at the pane."""
    return f"tmux -S {shlex.quote(str(socket))} attach"
