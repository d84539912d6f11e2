"""serve: the engine runs in a private tmux server (or in the foreground) and has proven that tokens flow."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from ds41ctl.adapters import enginevenv, files, host, proc, running, store, tmux
from ds41ctl.adapters import pane as pane_module
from ds41ctl.adapters.http import EngineClient, HttpFault, Limits
from ds41ctl.adapters.paths import private_dir
from ds41ctl.adapters.running import Running
from ds41ctl.core.engram import parallel_sizes, rank_ranges, unproven_rank
from ds41ctl.core.errors import (
    AlreadyRunningError,
    DetachedError,
    Ds41Error,
    EngineDiedError,
    IntegrityError,
    NotFoundError,
    UnsupportedError,
)
from ds41ctl.core.layout import Layout
from ds41ctl.core.logscan import LogScan
from ds41ctl.core.plan import INHERITED, RUN_MARKER, engine_argv, engine_env
from ds41ctl.steps import engram, stop
from ds41ctl.steps.runner import Goal, Progress

POLL_S = 0.25  # how often a start looks at the process: a death is named well within 5 s
PROBE_EVERY_S = 1.0
KEEP_LOGS = 10
TAIL_LINES = 20


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


class Serve:
    """Start the engine of a profile and wait until it is proven ready."""

    name = "serve"

    def __init__(
        self, layout: Layout, profile_path: Path, environ: Mapping[str, str], *, foreground: bool = False
    ) -> None:
        self.layout = layout
        self.profile_path = profile_path
        self.environ = environ
        self.foreground = foreground
        self.holder: Holder | None = None
        self.record: Running | None = None

    # ---- verify
    def check(self) -> Goal:
        """A live engine of this profile that answers /health now."""
        record = running.read(self.layout.record_path)
        if record is None or not record.alive():
            return Goal(False, "not running")
        if not record.ready_at:
            return Goal(False, f"pid {record.pid} is still starting")
        state = health(record.url)
        if state != "ok":
            return Goal(False, f"pid {record.pid} runs, but /health says {state}")
        if not self._maps_store(record):
            raise IntegrityError(
                f"the running engine (pid {record.pid}) does not map the Engram store as it is now: "
                "the store was replaced since it started",
                hints=("ds41ctl serve --replace",),
            )
        return Goal(
            True,
            f"ready: pid {record.pid}, {record.url}/v1",
            {"pid": record.pid, "url": record.url + "/v1", "log": record.log},
        )

    # ---- do
    def do(self, progress: Progress) -> None:
        """Start it. On any failure nothing of the engine is left running."""
        lock = self.layout.dirs.state / "locks" / f"serve-{self.layout.name}.lock"
        with files.locked(lock, f"starting {self.layout.name}"):
            record = refuse_second(self.layout)
            if record is not None:
                progress(f"a start is under way (pid {record.pid}): waiting for it", {})
                self.holder = TmuxHolder(self.layout.socket_path, record.identity)
            else:
                self._refuse_unfit()
                record, spec = self._prepare()
                argv = [sys.executable, "-I", str(Path(pane_module.__file__)), str(spec)]
                progress("starting", {})
                record = self._launch(argv, record)
            self.record = record
            try:
                self._wait(record, progress)
            except KeyboardInterrupt:
                if self.foreground:
                    raise
                raise DetachedError(
                    "interrupted; the engine goes on starting in the background",
                    hints=("ds41ctl up   # waits for it again", "ds41ctl stop"),
                ) from None
            except Ds41Error:
                stop.end(self.layout, record)
                raise
            running.write(self.layout.record_path, record.model_copy(update={"ready_at": _now()}))

    def _refuse_unfit(self) -> None:
        """What would cost minutes to find out later."""
        layout = self.layout
        if layout.profile.engine.kind != "venv":
            raise UnsupportedError(
                f"this version cannot start a {layout.profile.engine.kind} engine",
                hints=(
                    *layout.profile.lacks,
                    f"ds41ctl serve --profile {layout.name} --dry-run   # prints the command",
                ),
            )
        if not os.access(layout.python, os.X_OK):
            raise NotFoundError(f"no engine interpreter at {layout.python}", hints=("ds41ctl engine install",))
        if not layout.model_dir.is_dir():
            raise NotFoundError(f"no pack in {layout.model_dir}", hints=("ds41ctl fetch",))
        if layout.profile.engram.storage != "none":
            folder = store.locate(layout)
            fault = store.problem(layout, folder)
            if fault:
                raise IntegrityError(f"Engram store in {folder}: {fault}", hints=("ds41ctl engram build",))
        port = host.probe_port(layout.host, layout.port)
        if port.free is False:
            who = f" is held by {proc.describe(port.holder.pid)}" if port.holder else f": {port.error or port.reason}"
            raise UnsupportedError(
                f"port {layout.port} on {layout.host}{who}",
                hints=(
                    f"stop it, or choose another: DS41_PORT={layout.port + 1} ds41ctl serve --profile {layout.name}",
                ),
            )

    def _prepare(self) -> tuple[Running, Path]:
        layout = self.layout
        logs = layout.dirs.state / "logs" / layout.name
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = logs / f"engine-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.log"
        log.touch(mode=0o600)
        for old in sorted(logs.glob("engine-*.log"))[:-KEEP_LOGS]:
            old.unlink()
        folder = str(store.locate(layout))
        argv = engine_argv(layout, folder)
        token = secrets.token_hex(8)
        env = {name: self.environ[name] for name in INHERITED if name in self.environ}
        env.update(engine_env(layout, folder))
        env[RUN_MARKER] = token
        layout.cache_dir.mkdir(parents=True, exist_ok=True)
        # a clean working folder: `python -m` puts it on sys.path, where a stray vllm/ or *.dist-info would win
        cwd = private_dir(layout.dirs.state / "cwd")
        spec = private_dir(layout.dirs.runtime) / f"{layout.name}.spec.json"
        start = {
            "argv": list(argv),
            "env": env,
            "cwd": str(cwd),
            "log": str(log),
            "die_with_parent": self.foreground,
        }
        files.publish_json(spec, start, mode=0o600)
        record = Running(
            profile=layout.name,
            profile_path=str(self.profile_path),
            profile_digest=layout.profile.digest(),
            engine_digest=enginevenv.manifest_digest(layout.engine_dir),
            boot_id=store.boot_id(),
            pid=0,
            start_ticks=0,
            marker=f"{RUN_MARKER}={token}",
            host=layout.host,
            port=layout.port,
            served_name=layout.profile.model.served_name,
            argv=argv,
            environment_sha256=hashlib.sha256(json.dumps(env, sort_keys=True).encode()).hexdigest(),
            log=str(log),
            socket=str(layout.socket_path),
            spec=str(spec),
            started_at=_now(),
        )
        return record, spec

    def _launch(self, argv: list[str], record: Running) -> Running:
        if self.foreground:
            child = ChildHolder(argv)
            pid, self.holder = child.process.pid, child
        else:
            tmux.kill(self.layout.socket_path)  # a dead session of an earlier engine
            pane = tmux.start(self.layout.socket_path, "ds41", argv)
            pid = pane.pid
        identity = proc.identify(pid)
        if not self.foreground:
            self.holder = TmuxHolder(self.layout.socket_path, identity or proc.Identity(pid, 0))
        record = record.model_copy(update={"pid": pid, "start_ticks": identity.start_ticks if identity else 0})
        running.write(self.layout.record_path, record)
        return record

    def _wait(self, record: Running, progress: Progress) -> None:
        """Until process alive, /health 200, one generated token, required markers seen, store mapped."""
        serve = self.layout.profile.serve
        scan = LogScan(serve.required_markers, serve.forbidden_markers)
        watch = _Stall(serve.stall_timeout_s)
        log = Path(record.log).open(encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
        started = time.monotonic()
        probe_at = 0.0
        assert self.holder is not None  # noqa: S101 - set by _launch
        with log:
            while True:
                ending = self.holder.ending()
                text = log.read()
                scan.feed(text)
                elapsed = time.monotonic() - started
                if ending is not None:
                    raise died(
                        f"the engine died after {elapsed:.0f} s while {scan.phase} ({ending})",
                        scan,
                        record.log,
                    )
                for marker in scan.seen_forbidden():
                    raise EngineDiedError(
                        f"the engine's log holds what this profile forbids: {marker.text!r}",
                        detail=(marker.why,) if marker.why else (),
                        hints=("ds41ctl logs",),
                    )
                progress(f"{scan.phase}, {elapsed:.0f} s", {"phase": scan.phase, "elapsed_s": round(elapsed, 1)})
                if elapsed >= probe_at:
                    probe_at = elapsed + PROBE_EVERY_S
                    if health(record.url) == "ok":
                        scan.feed(log.read())
                        self._prove(record, scan)
                        return
                    watch.look(record, len(text), elapsed)
                if watch.stalled(elapsed) or elapsed > serve.ready_timeout_s:
                    why = "stood still" if watch.stalled(elapsed) else "was not ready"
                    limit = serve.stall_timeout_s if watch.stalled(elapsed) else serve.ready_timeout_s
                    raise died(f"the engine {why} for {limit:.0f} s while {scan.phase}", scan, record.log)
                time.sleep(POLL_S)

    def _prove(self, record: Running, scan: LogScan) -> None:
        fault = first_token(record)
        if fault:
            scan.feed(Path(record.log).read_text(encoding="utf-8", errors="replace")[-20_000:])
            raise died(f"/health says 200, but a one-token completion {fault}", scan, record.log)
        missing = scan.missing()
        if missing:
            marker = missing[0]
            raise EngineDiedError(
                f"the engine answers, but its log lacks {marker.text!r}"
                + (f" ({marker.count} times)" if marker.count > 1 else ""),
                detail=(marker.why,) if marker.why else (),
                hints=("ds41ctl logs",),
            )
        serve = self.layout.profile.serve
        fault = scan.kv_pool_fault(serve.kv_pool_tokens, serve.kv_pool_tolerance)
        if fault:
            raise EngineDiedError(f"the engine answers, but {fault}", hints=("ds41ctl logs",))
        fault = self._unproven_rank(record)
        if fault:
            raise EngineDiedError(
                f"the engine answers, but {fault}",
                detail=("a rank that reads another rank's rows raises no error and spoils copies",),
                hints=("ds41ctl engram verify", "ds41ctl logs"),
            )
        if not self._maps_store(record):
            raise EngineDiedError(
                f"the engine answers, but not every rank of it maps the Engram store in {store.locate(self.layout)}",
                hints=("ds41ctl logs",),
            )

    def _unproven_rank(self, record: Running) -> str:
        """'' when the log of our own engine says of every rank that it reads its own rows; else what is missing."""
        profile = self.layout.profile
        if profile.engram.storage == "none" or not profile.engine.plugin:
            return ""
        ranks, _ = parallel_sizes(record.argv)
        wanted = rank_ranges(engram.pack_geometry(self.layout), ranks)
        with Path(record.log).open(encoding="utf-8", errors="replace") as log:
            return unproven_rank(log, wanted)

    def _maps_store(self, record: Running) -> bool:
        """True when the engine's ranks map the store (or the profile keeps none).

        Of our own engine every record file must be mapped by as many processes as there are tensor-parallel ranks: each
        pipeline stage maps the tables of its own layers. Of another engine only the number of processes is known.
        """
        profile, folder = self.layout.profile, store.locate(self.layout)
        if profile.engram.storage == "none":
            return True
        ours = {item.pid for item in proc.family(record.pid, record.marker)}
        ranks, _ = parallel_sizes(record.argv)
        if not profile.engine.plugin:
            return len(ours & set(store.mapped_by(folder))) >= ranks
        return all(len(ours & pids) >= ranks for pids in store.file_users(folder).values())


@dataclass
class _Stall:
    """Neither a new log line nor CPU time for too long means that a start hangs."""

    limit_s: float
    cpu_s: float = -1.0
    moved_at: float = 0.0

    def look(self, record: Running, new_bytes: int, elapsed: float) -> None:
        used = proc.cpu_seconds(item.pid for item in proc.family(record.pid, record.marker))
        if new_bytes or used > self.cpu_s + 0.05:
            self.cpu_s, self.moved_at = used, elapsed

    def stalled(self, elapsed: float) -> bool:
        return elapsed - self.moved_at > self.limit_s


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def health(url: str) -> str:
    """`ok`, an HTTP status, or what went wrong on the way."""
    try:
        reply = EngineClient(url).get("/health", Limits(connect_s=2, first_s=5, total_s=5))
    except HttpFault as fault:
        return str(fault.message)
    return "ok" if reply.status == 200 else str(reply.status)


def first_token(record: Running) -> str:
    """'' when the engine generates one token, else what it did instead (a dead engine may still say healthy)."""
    body = {"model": record.served_name, "prompt": "1", "max_tokens": 1, "temperature": 0}
    try:
        reply = EngineClient(record.url).post_json("/v1/completions", body, Limits(first_s=300, total_s=300))
        tokens = reply.ok_json().get("usage", {}).get("completion_tokens", 0)
    except HttpFault as fault:
        return f"failed: {fault.message}"
    return "" if tokens == 1 else f"gave {tokens} tokens"


def died(message: str, scan: LogScan, log: str) -> EngineDiedError:
    """The error of a failed start: fingerprint first, then the log's last lines."""
    known = scan.fingerprint()
    tail = [line for line in scan.lines if line.strip()][-TAIL_LINES:]
    hints = [known.fix] if known and known.fix else []
    return EngineDiedError(
        f"{message}: {known.meaning}" if known else message,
        detail=(f"last lines of {log}:", *(f"| {line[:200]}" for line in tail)),
        hints=(*hints, "ds41ctl logs"),
    )


def refuse_second(layout: Layout) -> Running | None:
    """The record of a start that is under way and that nobody waits for (its ds41ctl was interrupted or killed).

    Raises AlreadyRunningError when this profile's engine is ready; clears the record of a dead one.
    """
    record = running.read(layout.record_path)
    if record is None:
        return None
    if not record.alive():
        stop.end(layout, record)
        return None
    if not record.ready_at:
        return record
    raise AlreadyRunningError(
        f"{layout.name} is already running: {proc.describe(record.pid)} on {record.url}",
        hints=("ds41ctl status", "ds41ctl stop"),
    )
