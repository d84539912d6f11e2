"""live: what a recorded engine is doing now, and whether it is still what was started. Looks only."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ds41ctl.adapters import clocks, containers, enginevenv, metrics, nvml, proc, running, store, tmux
from ds41ctl.adapters.http import EngineClient, HttpFault, Limits
from ds41ctl.adapters.running import Running
from ds41ctl.core.faults import fingerprint
from ds41ctl.core.launch import RUN_MARKER
from ds41ctl.core.layout import Layout
from ds41ctl.core.lease import changed, settings
from ds41ctl.core.watch import Look, rate
from ds41ctl.steps import proof, serve

RATE_S = 1.0  # between the two looks that give a rate


def collect(layout: Layout, *, before: tuple[float, float | None] | None = None) -> dict[str, Any]:
    """Everything `status` shows, as data. `before`: (monotonic seconds, tokens generated) of an earlier look."""
    record = running.read(layout.record_path)
    if record is None:
        return {"state": "stopped", "profile": layout.name}
    tree: dict[str, Any] = {
        "profile": record.profile,
        "pid": record.pid,
        "url": record.url,
        "started_at": record.started_at,
        "ready_at": record.ready_at,
        "log": record.log,
        "container": record.container,
        "attach": tmux.attach_command(layout.socket_path),
    }
    if not record.alive():
        session = record.identity if record.boot_id == store.boot_id() else None
        left = [proc.describe(item.pid) for item in proc.family(0, record.marker, session=session)]
        return {**tree, "state": "died", "left_behind": left, **death(layout, record)}
    gone = record.gone()
    if gone:
        left = [proc.describe(item.pid) for item in proof.family(record)]
        which = ", ".join(f"{item.title} (pid {item.pid})" for item in gone)
        return {**tree, "state": "died", "left_behind": left, **death(layout, record, f"{which} has ended")}
    health = proof.health(record.url)
    if not record.ready_at:
        tree["state"] = "starting"
    else:
        tree["state"] = "ready" if health == "ok" else f"not answering ({health})"
        tree["uptime_s"] = round((datetime.now(UTC) - datetime.fromisoformat(record.ready_at)).total_seconds())
    tree["engram"] = _engram(layout, record)
    tree["clocks"] = _lease(layout)
    tree["gpus"] = gpus(layout)
    tree["drift"] = drift(layout, record)
    tree["load"] = load(record, before) if tree["state"] == "ready" else None
    return tree


def _engram(layout: Layout, record: Running) -> str:
    if not layout.profile.engram.own_store:
        if layout.profile.engram.storage != "engine":
            return "no store, and nothing proves the tables"
        if layout.profile.engine.plugin:
            return "kept by the engine, proven loaded at its start"
        return f"kept by the engine; {record.growth or 'what its start filled is not known'}"
    folder = store.served(layout)
    if record.container:
        return f"{folder}, mounted into the container"
    family = {item.pid for item in proof.family(record)}
    if store.of_shards(layout):
        read = len(family & set(store.used_by(store.locate(layout))))
        return f"{folder}, shards open in {read} of {len(family)} processes"
    mapped = len(family & set(store.mapped_by(folder)))
    return f"{folder}, mapped by {mapped} of {len(family)} processes"


def _lease(layout: Layout) -> str:
    lease = clocks.read(clocks.journal(layout.dirs.state, layout.name))
    want = layout.profile.clocks
    if lease is None:
        wanted = settings(want.sm_mhz, want.power_limit_w, want.offset_mhz)
        return f"not locked ({wanted} wanted)" if wanted else ""
    if gone := clocks.void(lease):
        return f"not locked any more: the lease is {gone}"
    return "; ".join((f"locked at {lease.text or 'nothing'} on {len(lease.uuids)} GPUs", *lease.missed))


def gpus(layout: Layout) -> list[dict[str, Any]]:
    """Memory, clock and temperature of the profile's GPUs; None: not measured."""
    wanted = {index for _, indices in layout.gpu_groups for index in indices}
    if not wanted:
        return []
    return [
        {
            "index": gpu.index,
            "uuid": gpu.uuid,
            "used_mib": None
            if gpu.memory_total_mib is None or gpu.memory_free_mib is None
            else gpu.memory_total_mib - gpu.memory_free_mib,
            "total_mib": gpu.memory_total_mib,
            "sm_mhz": gpu.sm_mhz,
            "power_limit_w": gpu.power_limit_w,
            "offset_mhz": gpu.offset_mhz,
            "temperature_c": gpu.temperature_c,
            "throttle": gpu.throttle,
        }
        for gpu in nvml.survey().gpus or ()
        if gpu.index in wanted
    ]


def read_metrics(record: Running) -> metrics.EngineMetrics | None:
    """The engine's own counters now, None when it does not give them."""
    try:
        reply = EngineClient(record.url, proof.key_of(record)).get("/metrics", Limits(connect_s=2, total_s=5))
    except HttpFault:
        return None
    return metrics.parse(reply.body.decode(errors="replace")) if reply.status == 200 else None


def load(record: Running, before: tuple[float, float | None] | None = None) -> dict[str, Any] | None:
    """Requests, rate, KV use and drafter acceptance. Without `before` a running request costs a second look."""
    first = read_metrics(record)
    if first is None:
        return None
    samples = [before] if before else []
    samples.append((time.monotonic(), first.generated))
    now = first
    if first.running and not before:
        time.sleep(RATE_S)
        now = read_metrics(record) or first
        samples.append((time.monotonic(), now.generated))
    spoken = rate(samples)
    return {
        "running": now.running,
        "waiting": now.waiting,
        "generated": now.generated,
        "kv": now.kv,
        "tokens_per_s": None if spoken is None else round(spoken, 2),
        "acceptance": now.accepted / now.drafted if now.accepted is not None and now.drafted else None,
    }


def look(layout: Layout) -> Look:
    """One look for the watchdog."""
    record = running.read(layout.record_path)
    at = time.monotonic()
    if record is None or not record.alive() or record.gone():
        return Look(at, alive=False)
    found = read_metrics(record) if record.ready_at else None
    answers = proof.health(record.url) == "ok" if record.ready_at else True
    return Look(
        at,
        alive=True,
        ready=bool(record.ready_at),
        answers=answers,
        running=found.running if found else None,
        generated=found.generated if found else None,
    )


def drift(layout: Layout, record: Running) -> list[str]:
    """What of the live engine differs from its profile, its manifest or its start."""
    found = []
    if record.profile_digest != layout.profile.digest():
        found.append("the profile changed since the start")
    if record.engine_digest != enginevenv.manifest_digest(layout.engine_dir):
        found.append("the engine on disk is not the one that runs")
    lease = clocks.read(clocks.journal(layout.dirs.state, layout.name))
    if lease is not None and not clocks.void(lease) and (lease.power_limit_w, lease.offset_mhz) != (None, None):
        found += changed(lease, nvml.survey().gpus or ())
    if record.container:
        state = containers.state(record.runtime, record.container)
        if state is not None and state.restarts:
            found.append(f"the container was restarted {state.restarts} times")
        return found
    live = _live_argv(record.pid)
    # what stands before the program (numactl, a wrapper that executes the real interpreter) is gone once it runs
    if live is not None and live[1:] != list(record.argv)[-(len(live) - 1) :]:
        found.append("the live command line differs from the one that was started")
    return found + _changed_environment(record)


def _live_argv(pid: int) -> list[str] | None:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    # a process that set its own title shows one string only: nothing to compare
    parts = raw.rstrip(b"\0").split(b"\0")
    return [part.decode(errors="replace") for part in parts] if len(parts) > 1 else None


def _changed_environment(record: Running) -> list[str]:
    """Names that were given a value at the start and have another one, or none, in the live process."""
    try:
        given = json.loads(Path(record.spec).read_text(encoding="utf-8"))["env"]
        raw = Path(f"/proc/{record.pid}/environ").read_bytes()
    except (OSError, ValueError, KeyError):
        return []  # another user's process, or a record whose spec is gone: nothing to compare
    entries = [entry.decode(errors="replace").partition("=") for entry in raw.split(b"\0") if entry]
    live = {name: value for name, _, value in entries}
    names = sorted(name for name, value in given.items() if live.get(name) != value and name != RUN_MARKER)
    return [f"the live environment differs: {', '.join(names)}"] if names else []


def death(layout: Layout, record: Running, ending: str = "") -> dict[str, Any]:
    """How it ended and what its log says of that."""
    ending = ending or serve.holder_of(layout, record).ending() or "how is not known"
    path = Path(record.log)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    known = fingerprint(lines, ending)
    return {
        "ending": ending,
        "meaning": known.meaning if known else "a fault that ds41ctl does not know",
        "fix": known.fix if known else "",
        "last_lines": [line[:200] for line in lines if line.strip()][-5:],
    }
