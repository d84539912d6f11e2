"""serve: the engine runs in a private tmux server, a container or the foreground, and has proven that tokens flow."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from ds41ctl.adapters import (
    containers,
    enginevenv,
    files,
    host,
    hostmem,
    keyfile,
    machine,
    nvml,
    proc,
    running,
    store,
    tmux,
)
from ds41ctl.adapters import pane as pane_module
from ds41ctl.adapters.paths import private_dir
from ds41ctl.adapters.running import Member, Running
from ds41ctl.core.errors import (
    AlreadyRunningError,
    ConfigError,
    DetachedError,
    Ds41Error,
    EngineDiedError,
    IntegrityError,
    NotFoundError,
    UnsupportedError,
)
from ds41ctl.core.faults import fingerprint
from ds41ctl.core.growth import Growth, needed_bytes
from ds41ctl.core.launch import RUN_MARKER, Launch, launch
from ds41ctl.core.layout import Layout
from ds41ctl.core.logscan import LogScan
from ds41ctl.core.profile import option_value
from ds41ctl.steps import proof, stop
from ds41ctl.steps.holders import ChildHolder, ContainerHolder, Holder, TmuxHolder
from ds41ctl.steps.progress import Stall
from ds41ctl.steps.runner import Goal, Progress

POLL_S = 0.25  # how often a start looks at the process: a death is named well within 5 s
PROBE_EVERY_S = 1.0
KEEP_LOGS = 10
LOCK_WAIT_S = 1.0  # a `serve` that finds a ready engine holds the lock for a moment
LOG_LAG_S = 5.0
LAST_WORDS_S = 1.5  # from the end of a worker to that of the engine, which may say in its log what happened
FAILED_GRACE_S = 1.0  # SIGTERM to SIGKILL for an engine that served nobody yet: 13 s of its own grace were seen
LOG_QUIET_S = 0.5


class Serve:
    """Start the engine of a profile and wait until it is proven ready. `alone`: the caller holds the lock of starts."""

    name = "serve"

    def __init__(
        self,
        layout: Layout,
        profile_path: Path,
        environ: Mapping[str, str],
        *,
        foreground: bool = False,
        alone: bool = False,
    ) -> None:
        self.layout = layout
        self.profile_path = profile_path
        self.environ = environ
        self.foreground = foreground
        self.alone = alone
        self.holder: Holder | None = None
        self.record: Running | None = None
        self.growth: Growth | None = None

    # ---- verify
    def check(self) -> Goal:
        """A live engine of this profile that answers /health now."""
        record = running.read(self.layout.record_path)
        if record is None or not record.alive():
            return Goal(False, "not running")
        if not record.ready_at:
            return Goal(False, f"pid {record.pid} is still starting")
        for member in record.gone():
            return Goal(False, f"{member.title} (pid {member.pid}) has ended")
        state = proof.health(record.url)
        if state != "ok":
            return Goal(False, f"pid {record.pid} runs, but /health says {state}")
        if not proof.maps_store(self.layout, record):
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
        if self.alone:
            self._do(progress)
            return
        with files.locked(self.layout.serve_lock, f"starting {self.layout.name}", wait_s=LOCK_WAIT_S):
            self._do(progress)

    def _do(self, progress: Progress) -> None:
        record = refuse_second(self.layout)
        if record is not None:
            progress(f"a start is under way (pid {record.pid}): waiting for it", {})
            self.holder = holder_of(self.layout, record)
        else:
            self.refuse_unfit()
            self._refuse_taken()
            record = self._start(progress)
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
            stop.end(self.layout, self.record, grace_s=FAILED_GRACE_S)
            raise
        self._note(proof.family(record), ready_at=_now())
        if self.growth is not None:
            unknown = self.growth.filled is None
            left = "; smoke.copy is the proof that is left" if unknown else ""
            progress(f"Engram tables: {self.growth}{left}", {"note": True, "growth": self.growth.model_dump()})

    def refuse_unfit(self) -> None:
        """What would cost minutes to find out later, or (before a replacement) the engine that runs now."""
        layout = self.layout
        if layout.profile.engine.kind == "container":
            containers.need_client()
            policy = option_value(layout.profile.serve.argv, "--restart")
            if policy not in (None, "no"):
                raise ConfigError(
                    f"--restart {policy} in serve.argv: the runtime would start the engine again behind ds41ctl's back",
                    hints=("leave it out; ds41ctl status --watch --restart 3 does it within bounds",),
                )
            if self.foreground:
                raise UnsupportedError(
                    "a container engine has no foreground: its daemon holds it",
                    hints=("ds41ctl serve", "ds41ctl logs -f"),
                )
            if not containers.image_digest(layout):
                raise NotFoundError(f"no image {layout.profile.engine.image}", hints=("ds41ctl engine install",))
        elif not os.access(layout.python, os.X_OK):
            raise NotFoundError(f"no engine interpreter at {layout.python}", hints=("ds41ctl engine install",))
        if not layout.model_dir.is_dir():
            raise NotFoundError(f"no pack in {layout.model_dir}", hints=("ds41ctl fetch",))
        if layout.profile.engram.own_store:
            folder = store.locate(layout)
            fault = store.problem(layout, folder)
            if fault:
                raise IntegrityError(f"Engram store in {folder}: {fault}", hints=("ds41ctl engram build",))
        keyfile.read(layout.api_key_file)

    def _refuse_taken(self) -> None:
        """Name and port that somebody else holds."""
        layout = self.layout
        if layout.profile.engine.kind == "container":
            tool, name = containers.need_client(), layout.profile.engine.name
            found = containers.state(tool, name)
            if found is not None:
                raise AlreadyRunningError(
                    f"a container named {name} ({found.id[:12]}, {found.status}) exists, and ds41ctl did not start it",
                    hints=(f"{tool} rm -f {name}   # if it is yours and not needed",),
                )
        port = host.probe_port(layout.host, layout.port)
        if port.free is False:
            who = f" is held by {proc.describe(port.holder.pid)}" if port.holder else f": {port.error or port.reason}"
            raise UnsupportedError(
                f"port {layout.port} on {layout.host}{who}",
                hints=(
                    f"stop it, or choose another: DS41_PORT={layout.port + 1} ds41ctl serve --profile {layout.name}",
                ),
            )

    def _start(self, progress: Progress) -> Running:
        start = launch(
            self.layout, machine.look(self.layout, self.environ), str(store.served(self.layout)), strict=True
        )
        for note in start.notes:
            progress(note, {"note": True})
        if start.dropped:
            progress(f"set in this shell and not passed on: {', '.join(start.dropped)}", {"note": True})
        record, spec = self._prepare(start)
        progress("starting", {})
        if self.layout.profile.engine.kind == "container":
            return self._launch_container(start, record, spec)
        return self._launch([sys.executable, "-I", str(Path(pane_module.__file__)), str(spec)], record)

    def _prepare(self, start: Launch) -> tuple[Running, Path]:
        """Folders, log and the 0600 file the wrapper reads; nothing runs yet."""
        layout = self.layout
        logs = layout.dirs.state / "logs" / layout.name
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = logs / f"engine-{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}.log"
        log.touch(mode=0o600)
        for old in sorted(logs.glob("engine-*.log"))[:-KEEP_LOGS]:
            old.unlink()
        token = secrets.token_hex(8)
        env = {name: self.environ[name] for name in start.inherited if name in self.environ}
        env.update(start.env)
        env[RUN_MARKER] = token
        Path(start.cache).mkdir(parents=True, exist_ok=True)
        # a clean working folder: `python -m` puts it on sys.path, where a stray vllm/ or *.dist-info would win
        private_dir(Path(start.cwd))
        runtime = private_dir(layout.dirs.runtime)
        spec = runtime / f"{layout.name}.spec.json"
        contained = layout.profile.engine.kind == "container"
        told = {
            "argv": list(start.argv),
            "env": env,
            "cwd": start.cwd,
            "log": str(log),
            "limits": start.limits,
            "secrets": {} if contained else start.secrets,
            "die_with_parent": self.foreground,
        }
        files.publish_json(spec, told, mode=0o600)
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
            argv=start.argv,
            environment_sha256=environment_digest(env),
            log=str(log),
            socket=str(layout.socket_path),
            spec=str(spec),
            started_at=_now(),
            api_key_file=str(layout.api_key_file or ""),
            idle_vram_mib=self._idle_vram(),
            levels=hostmem.levels() if needed_bytes(layout.profile) else None,
        )
        return record, spec

    def _idle_vram(self) -> dict[str, int]:
        """UUID -> MiB in use before the start, of the profile's GPUs: `stop` proves that it is reached again."""
        wanted = {index for _, indices in self.layout.gpu_groups for index in indices}
        if not wanted:
            return {}
        return {
            gpu.uuid: gpu.memory_total_mib - gpu.memory_free_mib
            for gpu in nvml.survey().gpus or ()
            if gpu.index in wanted and gpu.memory_total_mib is not None and gpu.memory_free_mib is not None
        }

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
        self.record = record  # an interrupt from here on has something to end
        running.write(self.layout.record_path, record)
        return record

    def _launch_container(self, start: Launch, record: Running, spec: Path) -> Running:
        """`docker run -d`, then a tmux pane that copies its log. Recorded by name before it exists, so that a kill
        between the two leaves nothing that `stop` does not find."""
        tool, name = start.argv[0], self.layout.profile.engine.name
        if start.env_file:
            key = keyfile.read(self.layout.api_key_file)
            lines = "".join(f"{variable}={key}\n" for variable in start.secrets)
            files.publish(Path(start.env_file), [lines.encode()], mode=0o600)
        record = record.model_copy(update={"container": name, "runtime": tool})
        running.write(self.layout.record_path, record)
        told = json.loads(spec.read_text(encoding="utf-8"))
        found, said = containers.start(start.argv, told["env"], Path(start.cwd))
        if not found:
            known = fingerprint(said.splitlines())
            left = containers.state(tool, name)
            if left is not None:
                containers.stop(tool, name, 0)
            running.forget(self.layout.record_path, record)
            raise EngineDiedError(
                f"{tool} did not start the container: {known.meaning if known else said.splitlines()[-1][:200]}",
                detail=said.splitlines()[-proof.TAIL_LINES :],
                hints=(known.fix,) if known and known.fix else (),
            )
        state = containers.state(tool, found)
        identity = proc.identify(state.pid) if state is not None and state.pid else None
        follow = {**told, "argv": [tool, "logs", "-f", found], "limits": {}}
        files.publish_json(spec, follow, mode=0o600)
        tmux.kill(self.layout.socket_path)
        argv = [sys.executable, "-I", str(Path(pane_module.__file__)), str(spec)]
        tmux.start(self.layout.socket_path, "ds41", argv)
        record = record.model_copy(
            update={
                "container": found,
                "pid": state.pid if state is not None else 0,
                "start_ticks": identity.start_ticks if identity else 0,
            }
        )
        running.write(self.layout.record_path, record)
        self.holder = ContainerHolder(tool, found)
        return record

    def _wait(self, record: Running, progress: Progress) -> None:
        """Until process alive, /health 200, one generated token, required markers seen, store mapped."""
        serve = self.layout.profile.serve
        scan = LogScan(serve.required_markers, serve.forbidden_markers)
        watch = Stall(serve.stall_timeout_s, gpus=bool(self.layout.profile.hardware.gpus))
        log = Path(record.log).open(encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
        started = time.monotonic()
        probe_at, lost_at = 0.0, math.inf
        assert self.holder is not None  # noqa: S101 - set by _launch
        with log:
            while True:
                ending = self.holder.ending()
                text = log.read()
                if ending is not None and isinstance(self.holder, ContainerHolder):
                    time.sleep(POLL_S)  # the follower copies the container's last lines
                    text += log.read()
                scan.feed(text)
                watch.read(scan.moved)
                elapsed = time.monotonic() - started
                if ending is not None:
                    raise proof.died(
                        f"the engine died after {elapsed:.0f} s while {scan.phase} ({ending})",
                        scan,
                        record.log,
                        ending,
                    )
                proof.refuse_forbidden(scan, record.log)
                progress(
                    f"{scan.phase}{scan.percent_text}, {elapsed:.0f} s",
                    {"phase": scan.phase, "percent": scan.percent, "elapsed_s": round(elapsed, 1)},
                )
                if elapsed >= probe_at:
                    probe_at = elapsed + PROBE_EVERY_S
                    if proof.health(record.url) == "ok":
                        self._read_up(log, scan)
                        self.growth = proof.prove(self.layout, record, scan)
                        return
                    family = proof.family(record)
                    watch.look([item.pid for item in family], elapsed)
                    gone = self._note(family).gone()
                    lost_at = min(lost_at, elapsed) if gone or scan.given_up else math.inf
                    if elapsed > lost_at + LAST_WORDS_S:
                        what = f"engine's {gone[0].title} (pid {gone[0].pid}) ended" if gone else "engine gave up"
                        raise proof.died(f"the {what} after {lost_at:.0f} s while {scan.phase}", scan, record.log)
                if watch.stalled(elapsed) or elapsed > serve.ready_timeout_s:
                    why = watch.why(elapsed) or f"was not ready after {serve.ready_timeout_s:.0f} s"
                    raise proof.died(f"the engine {why} while {scan.phase}", scan, record.log)
                time.sleep(POLL_S)

    def _note(self, family: list[proc.Identity], *, ready_at: str = "") -> Running:
        """Write down the engine's members, and its shared memory: what is killed does not unlink it, and then nobody
        maps it."""
        record = self.record
        assert record is not None  # noqa: S101 - set by _do
        # a worker's title tells its rank only some seconds after it began
        known = {item.pid: item for item in (*record.members, *members(record.pid, family))}
        shared = {*record.segments, *proc.segments(item.pid for item in family)}
        update = {
            "members": tuple(known.values()),
            "segments": tuple(sorted(shared)),
            "ready_at": ready_at,
            "growth": self.growth,
        }
        self.record = record.model_copy(update=update)
        if self.record != record:
            now = running.read(self.layout.record_path)
            if now is not None and now.marker == record.marker:  # else `stop` has ended it in the meantime
                running.write(self.layout.record_path, self.record)
        return self.record

    def _read_up(self, log: TextIO, scan: LogScan) -> None:
        """The rest of the log. A container's is copied by its runtime's client, which may lag behind the answer."""
        deadline = time.monotonic() + (LOG_LAG_S if isinstance(self.holder, ContainerHolder) else 0.0)
        quiet_since = time.monotonic()
        while True:
            text = log.read()
            scan.feed(text)
            now = time.monotonic()
            quiet_since = now if text else quiet_since
            if now >= deadline or (not scan.missing() and now - quiet_since > LOG_QUIET_S):
                return
            time.sleep(0.1)


def members(first: int, family: list[proc.Identity]) -> tuple[Member, ...]:
    """The engine core and its workers: processes that have a title of their own and whose end is the engine's."""
    found = []
    for item in family:
        title = proc.title(item.pid)
        if item.pid != first and title.startswith("VLLM::"):
            found.append(Member(pid=item.pid, start_ticks=item.start_ticks, title=title))
    return tuple(found)


def environment_digest(env: Mapping[str, str]) -> str:
    """What a start's environment is compared by."""
    return hashlib.sha256(json.dumps(dict(env), sort_keys=True).encode()).hexdigest()


def holder_of(layout: Layout, record: Running) -> Holder:
    """The holder of a recorded engine that this process did not start."""
    if record.container:
        return ContainerHolder(record.runtime or record.argv[0], record.container)
    return TmuxHolder(layout.socket_path, record.identity)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def refuse_second(layout: Layout) -> Running | None:
    """The record of a start that is under way and that nobody waits for (its ds41ctl was interrupted or killed).

    Raises AlreadyRunningError when this profile's engine is ready; clears the record of a dead one.
    """
    record = running.read(layout.record_path)
    if record is None:
        return None
    if not record.alive() or record.gone():
        stop.end(layout, record)
        return None
    if not record.ready_at:
        return record
    raise AlreadyRunningError(
        f"{layout.name} is already running: {proc.describe(record.pid)} on {record.url}",
        hints=("ds41ctl status", "ds41ctl stop"),
    )
