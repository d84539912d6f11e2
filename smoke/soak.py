"""Soak: work an engine for hours as agents do, and record everything its judge needs.

Sessions grow their context with tool calls; fresh requests, pictures and hung-up streams run beside them, or waves of
long prompts instead. Every few minutes the load is joined by canaries, then drained: what an engine at rest still
holds is what leaks.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import smoke
from ds41ctl.adapters import metrics, telemetry
from ds41ctl.adapters.http import EngineClient, Fault, HttpFault, Limits
from ds41ctl.adapters.metrics import EngineMetrics
from ds41ctl.adapters.running import Running
from ds41ctl.core.errors import ConfigError, NoSpaceError
from ds41ctl.core.finding import Finding
from ds41ctl.core.profile import Profile
from smoke import drafter
from smoke.canaries import Canaries
from smoke.load import BoundReachedError, Bounds, Load, Message, Reading
from smoke.prompts import Prompts
from smoke.trace import WAVE, Canary, Drain, End, Event, Gpu, Sample, TurnKind
from smoke.trace import Turn as TurnEvent

Mode = Literal["mixed", "fresh", "waves"]
MODES: tuple[Mode, ...] = ("mixed", "fresh", "waves")
WAVE_ANSWER = 32  # tokens of an answer in a wave
WAVE_ROOM = 1.03  # texts are made a little longer than wanted, since a token's length varies with the words
PREFILL_TPS_MIN = 250.0  # a tenth of seed 004's 2,514 tok/s
ANSWERS_S = 600.0  # for the answers of a wave and what else a busy engine does
SESSION_TURNS = 12
SESSION_SHARE, IMAGE_SHARE = 0.5, 0.1
LOADED_CANARIES = ("smoke.arithmetic", "smoke.tool-call", "smoke.copy", "smoke.images")
CANARY_S = 300.0  # bound of one round
GRACE_S = 120.0  # for streams that are open when the time is over
SETTLE_S = 10.0  # after the last stream ended, until an engine must be at rest
LIFE_PAUSE_S = 1.0  # between two of the three looks at an engine that may be dead
FAILED_PAUSE_S, LONGEST_PAUSE_S = 0.1, 15.0  # after failed requests in a row: 0.2 s, doubling
QUEUE_FACTOR = 2.5  # of soak.stall_s: a first token may wait for a place in the batch and for its prompt
_DEAD = (Fault.REFUSED, Fault.RESET, Fault.CUT)


@dataclass(frozen=True)
class Target:
    """The engine. `record` None: it was not started here, so its processes are not seen. `drafter`: it was started with
    one (None: nobody knows). `confirmed`: see Load."""

    url: str
    profile: Profile
    canaries: Canaries
    record: Running | None = None
    store_dir: Path | None = None
    confirmed: bool = False
    key: str | None = field(default=None, repr=False)
    drafter: bool | None = None


@dataclass(frozen=True)
class Plan:
    """How long and how: `streams` requests at a time, a sample every `sample_s`, canaries every `canary_s` seconds.

    `prompt_tokens`: length of a wave's prompts (0: that of a session). `waves`: so many waves end the run, and
    `seconds` is its upper bound (0: the time ends it).
    """

    seconds: float
    mode: Mode = "mixed"
    streams: int = 1
    sample_s: float = 5.0
    canary_s: float = 300.0
    seed: int = 0
    waves: int = 0
    prompt_tokens: int = 0

    @property
    def wave_s(self) -> float:
        """Upper bound of one wave, seconds: a prefill at a tenth of the slowest published rate, and the answers."""
        return WAVE * self.prompt_tokens / PREFILL_TPS_MIN + ANSWERS_S

    @staticmethod
    def of_waves(profile: Profile, *, waves: int, prompt_tokens: int, seed: int = 0) -> Plan:
        """`waves` waves of prompts of `prompt_tokens` tokens (0: that of a session), and no more.

        Raises ConfigError for prompts that the profile's context does not hold.
        """
        length = wave_tokens(profile, prompt_tokens)
        plan = Plan(seconds=1, mode="waves", streams=WAVE, seed=seed, waves=waves, prompt_tokens=length)
        sample_s = min(profile.soak.sample_s, 1.0 if length < 10_000 else profile.soak.sample_s)
        return replace(plan, seconds=waves * plan.wave_s, sample_s=sample_s)

    @staticmethod
    def of(
        profile: Profile,
        *,
        minutes: float | None = None,
        mode: Mode = "mixed",
        seed: int = 0,
        prompt_tokens: int = 0,
    ) -> Plan:
        """The plan of a profile: as many streams as it serves at once, at least three rounds of canaries.

        Raises ConfigError for prompts that the profile's context does not hold.
        """
        seconds = 60 * (profile.soak.minutes if minutes is None else minutes)
        return Plan(
            seconds=seconds,
            mode=mode,
            streams=min(profile.serve.max_num_seqs, 64),
            sample_s=min(profile.soak.sample_s, max(0.2, seconds / 60)),
            canary_s=min(60 * profile.soak.canary_minutes, seconds / 3),
            seed=seed,
            prompt_tokens=wave_tokens(profile, prompt_tokens) if mode == "waves" else 0,
        )


def session_tokens(profile: Profile) -> int:
    """Context that a session grows to, tokens."""
    room = profile.serve.max_model_len - 4 * profile.soak.answer_tokens
    return min(profile.soak.session_tokens or profile.serve.max_model_len // 2, room)


def wave_tokens(profile: Profile, wanted: int) -> int:
    """Length of a wave's prompts: `wanted`, or that of a session when it is 0. Raises ConfigError for too long ones."""
    most = int((profile.serve.max_model_len - 2 * WAVE_ANSWER) / WAVE_ROOM)
    if wanted > most:
        raise ConfigError(
            f"prompts of {wanted} tokens: at most {most} expected, {profile.name} has a context of "
            f"{profile.serve.max_model_len}",
            hints=(f"--prompt-tokens {most}",),
        )
    return wanted or min(session_tokens(profile), most)


Record = Callable[[Event], None]
Progress = Callable[[str], None]


def run(target: Target, plan: Plan, record: Record, progress: Progress) -> None:
    """Soak `target` and hand every event to `record`, the End last, whatever happens.

    Returns when the time is over or the engine is dead. Raises what `record` raises (NoSpaceError for a full disk) and
    KeyboardInterrupt, after the End was recorded.
    """
    soak = _Soak(target, plan, record, progress)
    with _signals(soak):
        asyncio.run(soak.main())
    if soak.signal is not None:
        signal.raise_signal(soak.signal)  # with the caller's own handler back in place


@contextlib.contextmanager
def _signals(soak: _Soak) -> Iterator[None]:
    """SIGTERM and SIGHUP end the run as a cancelled one. An exception out of a handler would be lost in the loop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number in before:
            signal.signal(number, soak.stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _DeadError(Exception):
    """The engine no longer answers."""


class _Soak:
    def __init__(self, target: Target, plan: Plan, record: Record, progress: Progress) -> None:
        self.target, self.plan, self.progress = target, plan, progress
        self._record = record
        self._began = time.monotonic()
        self._load = Load(
            target.url,
            target.profile.model.served_name,
            bounds=Bounds(seconds=plan.seconds + 3600),
            confirmed=target.confirmed,
            key=target.key,
        )
        self._prompts = Prompts(plan.seed)
        self._gate = asyncio.Event()
        self._over = False
        self._sessions = self._silent = self._row = 0
        self._turns = self._failed = self._tokens = 0
        self._idle_kv: float | None = None
        self._metrics = EngineMetrics()
        self.signal: int | None = None
        self._main: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: end the run soon."""
        self.signal = number
        if self._main is not None:
            loop, task = self._main
            loop.call_soon_threadsafe(task.cancel)

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    async def main(self) -> None:
        """The whole run."""
        reason: Literal["complete", "cancelled", "engine-died", "disk-full", "crashed"] = "crashed"
        text = ""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - asyncio.run made it
        self._main = (asyncio.get_running_loop(), task)
        try:
            if self.signal is not None:
                raise asyncio.CancelledError
            await self._work()
            reason = "complete"
        except asyncio.CancelledError:
            reason = "cancelled"
            if self.signal is None:
                raise
        except _DeadError as error:
            reason, text = "engine-died", str(error)
        except NoSpaceError as error:
            reason, text = "disk-full", error.message
            raise
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            raise
        finally:
            await self._load.aclose()
            self._record(End(at=self.now, reason=reason, text=text))

    async def _work(self) -> None:
        await self._read_metrics()
        self._idle_kv = self._metrics.kv
        await self._sample()
        await self._calibrate()
        self._gate.set()
        # a failing task (full disk, dead engine) ends the group, and with it the run
        try:
            async with asyncio.TaskGroup() as group:
                helpers = [group.create_task(self._sampler())]
                workers = [group.create_task(self._worker(i)) for i in range(self._worker_count())]
                await (self._count(workers) if self.plan.waves else self._conduct())
                self._over = True
                self._gate.set()
                await self._finish(workers)
                await self._drain(final=True)
                await self._ask_canaries((*LOADED_CANARIES, *self._at_rest()), loaded=False)
                for task in helpers:
                    task.cancel()
        except BaseExceptionGroup as group_error:
            raise _first(group_error) from None
        await self._sample()

    def _worker_count(self) -> int:
        return 1 if self.plan.mode == "waves" else self.plan.streams

    # ---- conductor
    async def _conduct(self) -> None:
        """Canaries and a drain every `canary_s`, until the time is over."""
        due = self.plan.canary_s
        while self.now < self.plan.seconds:
            await asyncio.sleep(max(0.0, min(due, self.plan.seconds) - self.now))
            if self.now < due or self.plan.seconds - due < 0.5 * self.plan.canary_s:
                continue
            due += self.plan.canary_s
            await self._ask_canaries(LOADED_CANARIES, loaded=True)
            self._gate.clear()
            await self._drain(final=False)
            await self._ask_canaries(self._at_rest(), loaded=False)
            self._gate.set()

    async def _count(self, workers: Sequence[asyncio.Task[None]]) -> None:
        """Wait for the last wave, or for the time that all of them may take."""
        await asyncio.wait(workers, timeout=self.plan.seconds)

    def _at_rest(self) -> tuple[str, ...]:
        """Canaries that need the engine for themselves: a batch may change the last bit of a sum, and the drafter's
        counters are everybody's."""
        drafts = self.target.profile.drafter if self.target.drafter is None else self.target.drafter
        repeat = ("smoke.repeat",) if self.target.profile.soak.repeat else ()
        return (*repeat, *((drafter.TEST,) if drafts else ()))

    async def _finish(self, workers: Sequence[asyncio.Task[None]]) -> None:
        _, late = await asyncio.wait(workers, timeout=GRACE_S)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)

    async def _drain(self, *, final: bool) -> None:
        ends = time.monotonic() + CANARY_S
        while self._load.open and time.monotonic() < ends:
            await asyncio.sleep(0.05)
        settle = time.monotonic() + SETTLE_S
        margin = self.target.profile.soak.kv_idle_margin
        while True:
            await self._read_metrics()
            found = self._metrics
            still = not (found.running or found.waiting)
            empty = found.kv is None or self._idle_kv is None or found.kv <= self._idle_kv + margin
            if (still and empty) or time.monotonic() > settle:
                break
            await asyncio.sleep(0.5)
        self._record(
            Drain(
                at=self.now,
                idle_kv=self._idle_kv,
                kv=found.kv,
                running=found.running,
                waiting=found.waiting,
                final=final,
            )
        )

    async def _ask_canaries(self, names: tuple[str, ...], *, loaded: bool) -> None:
        if not names:
            return
        stuck = ""
        for name in names:
            spent: list[int] = []
            if stuck:  # one unanswered canary costs minutes already
                text = f"not asked: no answer in {stuck}"
                self._record(Canary(at=self.now, id=name, status="unknown", text=text, loaded=loaded))
                continue
            counted = name == drafter.TEST
            if counted:
                await self._read_metrics()
            before = self._metrics
            found = await asyncio.to_thread(self._canary, name, spent)
            if counted:
                await self._read_metrics()
            stuck = name if any(item == "class: harness" for item in found.evidence) else ""
            self._tokens += sum(spent)
            self._record(
                Canary(
                    at=self.now,
                    id=found.id,
                    status=found.status.value,
                    text=found.summary,
                    fault=next((item for item in found.evidence if item.startswith("fault:")), ""),
                    loaded=loaded,
                    tokens=sum(spent),
                    drafts=_growth(before.drafts, self._metrics.drafts) if counted else None,
                    first_accepted=_growth(before.first_accepted, self._metrics.first_accepted) if counted else None,
                )
            )
            self.progress(f"{_clock(self.now)}  canary {found.id} {found.status.upper()}")

    def _canary(self, name: str, spent: list[int]) -> Finding:
        client = EngineClient(self.target.url, self.target.key)
        try:
            return smoke.run(
                client, self.target.canaries, self.target.profile, only=(name,), deadline_s=CANARY_S, spent=spent,
                drafter=self.target.drafter,
            )[0]  # fmt: skip
        finally:
            client.close()

    # ---- load
    async def _calibrate(self) -> None:
        """How long a token is, by one discarded request; it also pays what a first request costs."""
        text = self._prompts.filler(256)
        reading = await self._load.ask(text, 8, min_tokens=2, limits=Limits(first_s=300, total_s=300))
        if reading.answer.prompt_tokens:
            self._prompts.learn(text, reading.answer.prompt_tokens)
        self._note("fresh", reading, self.now - reading.seconds, 0, 99)

    async def _worker(self, number: int) -> None:
        rng = random.Random((self.plan.seed << 8) + number)  # noqa: S311 - repeatable, not a secret
        with contextlib.suppress(BoundReachedError):
            while await self._may_go_on():
                if self.plan.mode == "waves":
                    await self._wave()
                    if self._sessions == self.plan.waves:
                        return
                elif rng.random() < self.target.profile.soak.cancel_share:
                    await self._single("cancel", rng)
                elif self.plan.mode == "mixed" and rng.random() < IMAGE_SHARE and self._pictures():
                    await self._single("image", rng)
                elif self.plan.mode == "mixed" and rng.random() < SESSION_SHARE:
                    await self._session(rng)
                else:
                    await self._single("fresh", rng)

    async def _may_go_on(self) -> bool:
        await self._gate.wait()
        return not self._over

    def _pictures(self) -> bool:
        return self.target.profile.smoke.images and bool(self.target.canaries.images)

    async def _single(self, kind: TurnKind, rng: random.Random) -> None:
        wanted = self.target.profile.soak.answer_tokens
        if kind == "image":
            picture = rng.choice(self.target.canaries.images)
            url = "data:image/png;base64," + base64.b64encode(picture.png).decode()
            parts = [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": f"[{self._prompts.nonce()}] {picture.question}"},
            ]
            await self._turn(kind, [{"role": "user", "content": parts}], wanted, min_tokens=4)
        elif kind == "cancel":
            hang_up = rng.randint(1, max(1, wanted // 2))
            await self._turn(kind, _user(self._prompts.fresh()), wanted, hang_up_after=hang_up, ignore_eos=True)
        else:
            await self._turn(kind, _user(self._prompts.fresh()), wanted, ignore_eos=True)

    async def _wave(self) -> None:
        number, length = self._next_session(), round(WAVE_ROOM * (self.plan.prompt_tokens or self._session_tokens()))
        first_s = max(QUEUE_FACTOR * self.target.profile.soak.stall_s, self.plan.wave_s)
        turns = [
            self._turn(
                "wave",
                _user(self._prompts.filler(length)),
                WAVE_ANSWER,
                session=number,
                first_s=first_s,
                ignore_eos=True,
            )
            for _ in range(WAVE)
        ]
        await asyncio.gather(*turns)

    async def _session(self, rng: random.Random) -> None:
        """A conversation that grows with documents and tool results until it has its length."""
        number, full = self._next_session(), self._session_tokens()
        step = max(16, full // SESSION_TURNS)
        tool, answer_tokens = self.target.canaries.tool, self.target.profile.soak.answer_tokens
        tools: dict[str, Any] = {"tools": list(tool.tools)} if tool else {}
        history: list[Message] = []
        for index in range(SESSION_TURNS):
            question = tool.prompt if tool and index % 2 else "What does it say?"
            history.append({"role": "user", "content": f"{self._prompts.filler(step)}\n\n{question}"})
            reading = await self._turn(
                "session", history, answer_tokens, session=number, index=index, min_tokens=4, **tools
            )
            if reading is None or reading.outcome != "ok" or not await self._may_go_on():
                return
            history += _said(reading, tool.follow_up.result if tool and tool.follow_up else "done")
            if (reading.answer.prompt_tokens or 0) + step + 2 * answer_tokens > full:
                return

    def _next_session(self) -> int:
        self._sessions += 1
        return self._sessions

    def _session_tokens(self) -> int:
        return session_tokens(self.target.profile)

    async def _turn(
        self,
        kind: TurnKind,
        messages: Sequence[Message],
        max_tokens: int,
        *,
        session: int = 0,
        index: int = 0,
        hang_up_after: int | None = None,
        first_s: float | None = None,
        **extra: Any,
    ) -> Reading | None:
        sent = self.now
        stall = self.target.profile.soak.stall_s
        first_s = QUEUE_FACTOR * stall if first_s is None else first_s
        limits = Limits(first_s=first_s, idle_s=stall, total_s=first_s + ANSWERS_S)
        try:
            reading = await self._load.ask(messages, max_tokens, hang_up_after=hang_up_after, limits=limits, **extra)
        except asyncio.CancelledError:
            self._record(
                TurnEvent(
                    at=sent, kind=kind, session=session, index=index, outcome="unfinished", seconds=self.now - sent
                )
            )
            raise
        self._note(kind, reading, sent, session, index)
        if reading.fault_kind in _DEAD:
            await self._require_life(reading.fault)
        self._silent = self._silent + 1 if reading.outcome == "timeout" else 0
        if self._silent >= max(2, self._worker_count()):
            await self._require_token(reading.fault)
        self._row = 0 if reading.outcome in ("ok", "cancelled") else self._row + 1
        if self._row:  # an engine that refuses everything at once is not asked a thousand times a second for hours
            await asyncio.sleep(min(FAILED_PAUSE_S * 2.0 ** min(self._row, 20), LONGEST_PAUSE_S))
        return reading

    def _note(self, kind: TurnKind, reading: Reading, sent: float, session: int, index: int) -> None:
        answer = reading.answer
        self._turns += 1
        self._failed += reading.outcome not in ("ok", "cancelled")
        self._tokens += answer.completion_tokens or 0
        self._record(
            TurnEvent(
                at=sent,
                kind=kind,
                session=session,
                index=index,
                outcome=reading.outcome,
                fault=reading.fault,
                why=reading.why,
                prompt_tokens=answer.prompt_tokens,
                cached_tokens=answer.cached_tokens,
                completion_tokens=answer.completion_tokens,
                ttft_s=reading.ttft_s,
                decode_tps=reading.decode_tps,
                seconds=reading.seconds,
                streams=reading.streams,
            )
        )

    async def _require_life(self, fault: str) -> None:
        """Raise _DeadError when nothing answers /health for some seconds either."""
        for _ in range(3):
            try:
                await self._load.client.get("/health", Limits(total_s=5))
                return
            except HttpFault as caught:
                fault = caught.message
                await asyncio.sleep(LIFE_PAUSE_S)
        raise _DeadError(fault)

    async def _require_token(self, fault: str) -> None:
        """Raise _DeadError when a last request for one token gets none: /health may still be 200."""
        limit = min(60.0, self.target.profile.soak.stall_s)
        reading = await self._load.ask("Hello.", 1, limits=Limits(first_s=limit, idle_s=limit, total_s=limit))
        if reading.outcome == "timeout":
            raise _DeadError(f"no token flows any more ({fault})")
        self._silent = 0

    # ---- samples
    async def _sampler(self) -> None:
        while True:
            await asyncio.sleep(self.plan.sample_s)
            await self._sample()
            found = self._metrics
            kv = "" if found.kv is None else f"  KV {found.kv:.1%}"
            rate = self._tokens / max(self.now, 1.0)
            self.progress(
                f"{_clock(self.now)} of {_clock(self.plan.seconds)}  {self._turns} requests, {self._failed} failed  "
                f"{rate:.1f} tok/s in all{kv}"
            )

    async def _read_metrics(self) -> None:
        try:
            reply = await self._load.client.get("/metrics", Limits(total_s=10))
            self._metrics = metrics.parse(reply.body.decode(errors="replace"))
        except HttpFault:
            self._metrics = EngineMetrics()

    async def _sample(self) -> None:
        await self._read_metrics()
        found = self._metrics
        host = await asyncio.to_thread(
            telemetry.read,
            self.target.record,
            gpus=self.target.profile.hardware.gpus,
            store_dir=self.target.store_dir,
        )
        gpus = None
        if host.gpus is not None:
            gpus = tuple(Gpu(**asdict(gpu)) for gpu in host.gpus)
        self._record(
            Sample(
                at=self.now,
                wall=time.time(),
                running=found.running,
                waiting=found.waiting,
                kv=found.kv,
                generated=found.generated,
                prompted=found.prompted,
                preemptions=found.preemptions,
                drafted=found.drafted,
                accepted=found.accepted,
                rss_mib=host.rss_mib,
                gpus=gpus,
                xid=host.xid,
                swapped_pages=host.swapped_pages,
                store_mapped=host.store_mapped,
                engine=host.engine,
            )
        )


def _growth(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _said(reading: Reading, result: str) -> list[Message]:
    """What the model said, as it enters the conversation, with a result for each tool call."""
    calls = [
        {
            "id": call.id or f"call_{i}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments if _parses(call.arguments) else "{}"},
        }
        for i, call in enumerate(reading.answer.tool_calls)
    ]
    if not calls:
        return [{"role": "assistant", "content": reading.answer.content or "."}]
    results: list[Message] = [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls]
    return [{"role": "assistant", "content": reading.answer.content or None, "tool_calls": calls}, *results]


def _parses(arguments: Any) -> bool:
    """False for arguments that our own max_tokens cut: the engine would refuse them as history."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (TypeError, ValueError, RecursionError):
        return False


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first real failure of a group of tasks."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            return _first(error)
        return error
    return group
