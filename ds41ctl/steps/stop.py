"""stop: the engine's whole family is ended, and it is proven that nothing of it is left."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime

from ds41ctl.adapters import clocks, containers, host, nvml, proc, running, tmux
from ds41ctl.adapters.running import Running
from ds41ctl.core.errors import Ds41Error, FindingsError
from ds41ctl.core.layout import Layout
from ds41ctl.core.lease import Process

GRACE_S = 60.0  # SIGTERM to SIGKILL; the CPU engine needs about 2 s, eight GPU workers some more
PORT_WAIT_S = 5.0
VRAM_WAIT_S = 15.0  # the driver gives memory back some seconds after the last context is gone
VRAM_SLACK_MIB = 64  # above the idle level noted before the start: a display or the driver moves by less


@dataclass(frozen=True)
class Stopped:
    """What was ended."""

    processes: int
    seconds: float
    was_alive: bool
    kept: tuple[str, ...] = ()  # power limits and the like that somebody else has set since


def end(layout: Layout, record: Running, *, grace_s: float = GRACE_S) -> Stopped:
    """End a recorded engine, dead or alive, and forget it. `grace_s`: from SIGTERM to SIGKILL of its first process.

    Raises FindingsError with the list when a process survives SIGKILL, the port stays in use by one of ours, a GPU
    keeps memory or a process of ours, a container cannot be removed, or a clock cannot be given back.
    """
    started = time.monotonic()
    alive = record.alive()
    same_boot = _same_boot(record)
    family = proc.family(record.pid if alive else 0, record.marker, session=record.identity) if same_boot else []
    segments = set(record.segments) if same_boot else set()
    left: list[proc.Identity] = []
    problems: list[str] = []

    def look() -> None:  # an engine that is still starting makes shared memory until its last moment
        segments.update(proc.segments(item.pid for item in family))

    if record.container and same_boot:
        problems += _end_container(record, grace_s)
    else:
        # the first process ends its workers itself when it is asked; what is left after that is ended one by one
        left += proc.terminate([item for item in family if item.pid == record.pid], grace=grace_s, look=look)
        others = [item for item in family if item.pid != record.pid and item.alive()]
        left += proc.terminate(others, grace=min(5.0, grace_s), look=look)
    late = proc.family(0, record.marker, session=record.identity) if same_boot else []
    left += proc.terminate(late, grace=1.0)
    proc.unlink_segments(segments)
    tmux.kill(layout.socket_path)
    problems += [proc.describe(item.pid) for item in left if item.alive()]
    if family and not problems and not _port_closed(record):
        holder = host.probe_port(record.host, record.port).holder
        problems.append(f"port {record.port} is still in use" + (f" by {proc.describe(holder.pid)}" if holder else ""))
    owner = Process(pid=record.pid, start_ticks=record.start_ticks)
    given = clocks.release(layout.dirs.state, layout.name, of=owner)
    problems += [f"clock not reset: {fault}" for fault in given.stuck]
    if same_boot and record.idle_vram_mib:
        problems += _vram_left(record, family)
    if problems:
        raise FindingsError(
            f"{record.profile} was asked to stop, but something of it is left",
            detail=problems,
            hints=("ds41ctl stop",),
        )
    running.forget(layout.record_path, record)
    return Stopped(len(family), time.monotonic() - started, alive, given.kept)


def _end_container(record: Running, grace_s: float) -> list[str]:
    """Only the container that was started: by its id, or by its name when the start was cut off before it had one."""
    try:
        found = containers.state(record.runtime, record.container)
        if found is None:
            return []
        if found.id != record.container and not _later(found.created, record.started_at):
            return []  # an older container of that name is somebody else's
        fault = containers.stop(record.runtime, found.id, grace_s)
    except Ds41Error as error:
        return [error.message]
    return [fault] if fault else []


def _later(created: str, started: str) -> bool:
    """True when the runtime's stamp is not before ours; one that cannot be read proves nothing."""
    try:
        return datetime.fromisoformat(created) >= datetime.fromisoformat(started)
    except (ValueError, TypeError):
        return False


def _vram_left(record: Running, family: list[proc.Identity]) -> list[str]:
    """Compute processes of ours on our GPUs, or memory above the level before the start."""
    ours = {item.pid for item in family}
    deadline = time.monotonic() + VRAM_WAIT_S
    while True:
        problems = []
        for gpu in nvml.survey().gpus or ():
            idle = record.idle_vram_mib.get(gpu.uuid)
            if idle is None:
                continue
            stuck = [item for item in gpu.processes or () if item.pid in ours or item.ours]
            others = any(item not in stuck for item in gpu.processes or ())
            problems += [f"GPU {gpu.index} still runs pid {item.pid} ({item.used_mib or '?'} MiB)" for item in stuck]
            if gpu.memory_total_mib is None or gpu.memory_free_mib is None:
                problems.append(f"GPU {gpu.index} does not state its memory")
            elif gpu.memory_total_mib - gpu.memory_free_mib > idle + VRAM_SLACK_MIB and not others:
                used = gpu.memory_total_mib - gpu.memory_free_mib
                problems.append(f"GPU {gpu.index} holds {used} MiB, {idle} MiB before the start, and nobody owns it")
        if not problems or time.monotonic() > deadline:
            return problems
        time.sleep(0.5)


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
