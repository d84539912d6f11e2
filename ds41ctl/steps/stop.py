"""stop: the engine's whole family is ended, and it is proven that nothing of it is left."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ds41ctl.adapters import clocks, host, proc, running, tmux
from ds41ctl.adapters.running import Running
from ds41ctl.core.errors import FindingsError
from ds41ctl.core.layout import Layout
from ds41ctl.core.lease import Process

GRACE_S = 60.0  # SIGTERM to SIGKILL; the CPU engine needs about 2 s, eight GPU workers some more
PORT_WAIT_S = 5.0


@dataclass(frozen=True)
class Stopped:
    """What was ended."""

    processes: int
    seconds: float
    was_alive: bool


def end(layout: Layout, record: Running) -> Stopped:
    """End a recorded engine, dead or alive, and forget it.

    Raises FindingsError with the list when a process survives SIGKILL or the port stays in use by one of ours.
    """
    started = time.monotonic()
    alive = record.alive()
    family = proc.family(record.pid if alive else 0, record.marker) if _same_boot(record) else []
    # the first process ends its workers itself when it is asked; what is left after that is ended one by one
    left = proc.terminate([item for item in family if item.pid == record.pid], grace=GRACE_S)
    left += proc.terminate([item for item in family if item.pid != record.pid and item.alive()], grace=5.0)
    late = proc.family(0, record.marker) if _same_boot(record) else []
    left += proc.terminate(late, grace=1.0)
    tmux.kill(layout.socket_path)
    problems = [proc.describe(item.pid) for item in left if item.alive()]
    if family and not problems and not _port_closed(record):
        holder = host.probe_port(record.host, record.port).holder
        problems.append(f"port {record.port} is still in use" + (f" by {proc.describe(holder.pid)}" if holder else ""))
    owner = Process(pid=record.pid, start_ticks=record.start_ticks)
    problems += [f"clock not reset: {fault}" for fault in clocks.release(layout.dirs.state, layout.name, of=owner)]
    if problems:
        raise FindingsError(
            f"{record.profile} was asked to stop, but something of it is left",
            detail=problems,
            hints=("ds41ctl stop",),
        )
    running.forget(layout.record_path, record)
    return Stopped(len(family), time.monotonic() - started, alive)


def _same_boot(record: Running) -> bool:
    from ds41ctl.adapters.store import boot_id

    return record.boot_id == boot_id()


def _port_closed(record: Running) -> bool:
    deadline = time.monotonic() + PORT_WAIT_S
    while host.probe_port(record.host, record.port).reason == "in-use":
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
