"""proof: what makes an engine that was started a proven one, and the errors of one that is not."""

from __future__ import annotations

from pathlib import Path

from ds41ctl.adapters import keyfile, proc, store
from ds41ctl.adapters.http import EngineClient, HttpFault, Limits
from ds41ctl.adapters.running import Running
from ds41ctl.core.engram import parallel_sizes, rank_ranges, unproven_rank
from ds41ctl.core.errors import EngineDiedError
from ds41ctl.core.layout import Layout
from ds41ctl.core.logscan import LogScan
from ds41ctl.steps import engram

TAIL_LINES = 120


def prove(layout: Layout, record: Running, scan: LogScan) -> None:
    """A token flows, the log says what the profile wants of it, and every rank maps and reads its own Engram rows.

    Raises EngineDiedError with what of it is not so.
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


def _unproven_rank(layout: Layout, record: Running) -> str:
    """'' when the log of our own engine says of every rank that it reads its own rows; else what is missing."""
    profile = layout.profile
    if not profile.engram.own_store or not profile.engine.plugin:
        return ""
    ranks, _ = parallel_sizes(record.argv)
    wanted = rank_ranges(engram.pack_geometry(layout), ranks)
    with Path(record.log).open(encoding="utf-8", errors="replace") as log:
        return unproven_rank(log, wanted)


def maps_store(layout: Layout, record: Running) -> bool:
    """True when the engine's ranks map the store (or the profile keeps none, or a container hides its processes).

    Of our own engine every record file must be mapped by as many processes as there are tensor-parallel ranks: each
    pipeline stage maps the tables of its own layers. Of another engine only the number of processes is known.
    """
    profile, folder = layout.profile, store.locate(layout)
    if not profile.engram.own_store or record.container:
        return True
    ours = {item.pid for item in family(record)}
    ranks, _ = parallel_sizes(record.argv)
    if not profile.engine.plugin:
        return len(ours & set(store.mapped_by(folder))) >= ranks
    users = store.file_users(folder)
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
