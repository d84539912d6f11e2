"""proof: what makes an engine that was started a proven one, and the errors of one that is not."""

from __future__ import annotations

from pathlib import Path

from ds41ctl.adapters import hostmem, keyfile, proc, store
from ds41ctl.adapters.http import EngineClient, HttpFault, Limits
from ds41ctl.adapters.running import Running
from ds41ctl.core.engram import parallel_sizes, rank_ranges, unproven_rank
from ds41ctl.core.errors import EngineDiedError
from ds41ctl.core.growth import Growth, Levels, needed_bytes
from ds41ctl.core.layout import Layout
from ds41ctl.core.logscan import LogScan
from ds41ctl.steps import engram

TAIL_LINES = 120


def prove(layout: Layout, record: Running, scan: LogScan) -> Growth | None:
    """A token flows, the log says what the profile wants of it, and the Engram tables are where they are read.

    Of our own engine: every rank maps and reads its own rows. Of one that keeps its tables itself: as much host memory
    was filled as they take; returns that measure. What reads shards shows neither: its markers and smoke.copy are the
    proof. Raises EngineDiedError with what of it is not so.
    """
    refuse_forbidden(scan, record.log)
    fault = first_token(record)
    if fault:
        scan.feed(Path(record.log).read_text(encoding="utf-8", errors="replace")[-20_000:])
        raise died(f"/health says 200, but a one-token completion {fault}", scan, record.log)
    missing = scan.missing()
    if missing:
        marker = missing[0]
        raise unproven(
            f"the engine answers, but its log lacks {marker.text!r}"
            + (f" ({marker.count} times)" if marker.count > 1 else ""),
            scan,
            record.log,
            marker.why,
        )
    serve = layout.profile.serve
    fault = scan.kv_pool_fault(serve.kv_pool_tokens, serve.kv_pool_tolerance)
    fault = fault or scan.graphs_fault(serve.cudagraph_mode)
    if fault:
        raise unproven(f"the engine answers, but {fault}", scan, record.log)
    fault = _unproven_rank(layout, record)
    if fault:
        raise EngineDiedError(
            f"the engine answers, but {fault}",
            detail=("a rank that reads another rank's rows raises no error and spoils copies",),
            hints=("ds41ctl engram verify", "ds41ctl logs"),
        )
    if not maps_store(layout, record):
        raise EngineDiedError(
            f"the engine answers, but not every rank of it maps the Engram store in {store.locate(layout)}",
            hints=("ds41ctl logs",),
        )
    growth = tables_in_memory(layout, record)
    if growth is not None and growth.fault:
        raise EngineDiedError(
            f"the engine answers, but {growth.fault}",
            detail=(
                "an Engram table that is empty raises no error: speed and arithmetic stay right, copies are spoilt",
                f"memory: {growth.model_dump_json()}",
            ),
            hints=(
                "ds41ctl logs   # what its start says of the Engram tables",
                "ds41ctl fetch --verify   # the shards it reads them from",
                f"engram.host_copies = {layout.profile.engram.host_copies} in the profile is what is asked for",
            ),
        )
    return growth


def tables_in_memory(layout: Layout, record: Running) -> Growth | None:
    """How much memory the start of an engine that keeps its own tables has filled; None where that is not judged."""
    needed = needed_bytes(layout.profile)
    if not needed or layout.profile.engine.plugin:  # the plugin has counted every tensor as it was loaded
        return None
    held = hostmem.holding(item.pid for item in family(record))
    return Growth(before=record.levels or Levels(available=None), ready=hostmem.levels(), held=held, needed=needed)


def _unproven_rank(layout: Layout, record: Running) -> str:
    """'' when the log of our own engine says of every rank that it reads its own rows; else what is missing."""
    if not reads_records(layout):
        return ""
    ranks, _ = parallel_sizes(record.argv)
    wanted = rank_ranges(engram.pack_geometry(layout), ranks)
    with Path(record.log).open(encoding="utf-8", errors="replace") as log:
        return unproven_rank(log, wanted)


def reads_records(layout: Layout) -> bool:
    """True when our own engine reads a store of ours: its processes map it and its log says what each rank reads."""
    engram, engine = layout.profile.engram, layout.profile.engine
    return engram.own_store and engram.format == "records" and engine.plugin and engine.kind == "venv"


def maps_store(layout: Layout, record: Running) -> bool:
    """True when the engine's ranks map the store of records; of anything else nothing of the kind is asked.

    Every record file must be mapped by as many processes as there are tensor-parallel ranks: each pipeline stage maps
    the tables of its own layers.
    """
    if not reads_records(layout):
        return True
    ours = {item.pid for item in family(record)}
    ranks, _ = parallel_sizes(record.argv)
    users = store.file_users(store.locate(layout))
    return bool(users) and all(len(ours & pids) >= ranks for pids in users.values())


def family(record: Running) -> list[proc.Identity]:
    """The processes of a recorded engine."""
    return proc.family(record.pid, record.marker, session=record.identity)


def health(url: str) -> str:
    """`ok`, an HTTP status, or what went wrong on the way."""
    try:
        reply = EngineClient(url).get("/health", Limits(connect_s=2, first_s=5, total_s=5))
    except HttpFault as fault:
        return str(fault.message)
    return "ok" if reply.status == 200 else str(reply.status)


def key_of(record: Running) -> str | None:
    """The key a running engine was started with."""
    return keyfile.read(Path(record.api_key_file)) if record.api_key_file else None


def first_token(record: Running, timeout_s: float = 300) -> str:
    """'' when the engine generates one token, else what it did instead (a dead engine may still say healthy)."""
    body = {"model": record.served_name, "prompt": "1", "max_tokens": 1, "temperature": 0}
    limits = Limits(first_s=timeout_s, total_s=timeout_s)
    try:
        reply = EngineClient(record.url, key_of(record)).post_json("/v1/completions", body, limits)
        tokens = reply.ok_json().get("usage", {}).get("completion_tokens", 0)
    except HttpFault as fault:
        return f"failed: {fault.message}"
    return "" if tokens == 1 else f"gave {tokens} tokens"


def died(message: str, scan: LogScan, log: str, ending: str = "") -> EngineDiedError:
    """The error of a failed start: what is known of the fault, then the log's last lines."""
    known = scan.fingerprint(ending)
    hints = [known.fix] if known and known.fix else []
    meaning = known.meaning if known else "a fault that ds41ctl does not know; the lines below are all there is"
    return EngineDiedError(
        f"{message}: {meaning}",
        detail=_last_lines(scan, log),
        hints=(*hints, "ds41ctl logs"),
    )


def refuse_forbidden(scan: LogScan, log: str) -> None:
    """Raises EngineDiedError when the log holds a forbidden line."""
    for marker in scan.seen_forbidden():
        raise unproven(f"the engine's log holds what this profile forbids: {marker.text!r}", scan, log, marker.why)


def unproven(message: str, scan: LogScan, log: str, why: str = "") -> EngineDiedError:
    """The error of an engine that answers and is not what its profile says."""
    said = (why,) if why else ()
    return EngineDiedError(
        message,
        detail=(*said, *_last_lines(scan, log)),
        hints=("ds41ctl logs",),
    )


def _last_lines(scan: LogScan, log: str) -> tuple[str, ...]:
    tail = [line for line in scan.lines if line.strip()][-TAIL_LINES:]
    return (f"last lines of {log}:", *(f"| {line[:200]}" for line in tail))
