"""Bench: the tables the recipes print, by the server's own counts, with what makes a number comparable beside it.

A point is measured after a discarded request, with texts no cache can know; what spoils it (another client, a cache
hit, a slowed card, swapping, a busy client) is written on it as a mark, and a marked number is never compared.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ds41ctl.adapters import metrics, telemetry
from ds41ctl.adapters.http import HttpFault, Limits
from ds41ctl.adapters.metrics import EngineMetrics
from ds41ctl.adapters.running import Running
from ds41ctl.core.errors import Ds41Error
from ds41ctl.core.exits import Exit
from ds41ctl.core.profile import Profile
from smoke import stats, texts
from smoke.load import Bounds, Load, Reading
from smoke.prompts import CHARS_MAX, Prompts

SUITES = ("structured", "code", "prose")
PARTS = ("decode", "context", "prefill", "during-prefill")
LENGTH_ROOM = 1.03  # texts are made a little longer than wanted, since a token's length varies with the words
LENGTH_MIN = 0.97  # of the prompt length asked for, in tokens the server counted
SHORT_MAX = 2  # texts too short for their point that are measured again
CLIENT_SHARE_MAX = 0.5  # of a core; above it the client may be what is measured
COMPANY_SHARE_MAX = 0.15  # of all cores, used by programs that are neither engine nor client
SWAP_PAGES_MAX = 256  # swapped while a point was measured (1 MiB of 4 KiB pages)
THROTTLE_BAD = 0x8 | 0x20 | 0x40 | 0x80  # HW slowdown, SW and HW thermal, HW power brake (nvml.h)
FOREIGN_SHARE = 0.02

ALONE_S = 2.0  # one stream decodes by itself before the long prompt joins it

_LIMITS = Limits(first_s=900, idle_s=120, total_s=1800)


class ContaminatedError(Ds41Error):
    """Somebody else uses the engine, so no number would mean anything."""

    code = Exit.INCONCLUSIVE


@dataclass(frozen=True)
class Target:
    """The engine. `drift`: what differs from the profile; every number carries it as a mark. `texts`: (name, text) of
    the prompts of prefill.texts, one a length; generated ones when there are none."""

    url: str
    profile: Profile
    record: Running | None = None
    store_dir: Path | None = None
    drift: tuple[str, ...] = ()
    confirmed: bool = False
    key: str | None = field(default=None, repr=False)
    texts: tuple[tuple[str, str], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Row:
    """One measured point. `value` in `unit` (None: `note` says why there is none, else with what); `detail` holds
    further figures in seconds, tokens or shares; `marks` what makes the number not comparable."""

    name: str
    value: float | None
    unit: str
    detail: Mapping[str, float | int | None] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


Show = Callable[[Row], None]


def run(
    target: Target,
    *,
    parts: Sequence[str] = PARTS,
    suites: Sequence[str] = SUITES,
    force: bool = False,
    seed: int = 0,
    show: Show | None = None,
) -> list[Row]:
    """Measure. Raises ContaminatedError when others use the engine and `force` is not set, HttpFault when it fails."""
    return asyncio.run(_Bench(target, seed, show or (lambda row: None)).run(parts, suites, force))


class _Bench:
    def __init__(self, target: Target, seed: int, show: Show) -> None:
        self._target, self._profile, self._show = target, target.profile, show
        self._prompts = Prompts(seed)
        self._load = Load(
            target.url,
            target.profile.model.served_name,
            bounds=Bounds(requests=2000, seconds=6 * 3600),
            confirmed=target.confirmed,
            key=target.key,
        )
        self._rows: list[Row] = []

    async def run(self, parts: Sequence[str], suites: Sequence[str], force: bool) -> list[Row]:
        try:
            before = await self._metrics()
            others = (before.running or 0) + (before.waiting or 0)
            if others and not force:
                raise ContaminatedError(
                    f"{others:.0f} requests of somebody else run on {self._target.url}",
                    hints=("stop the other client, or measure all the same (marked): ds41ctl bench --force",),
                )
            await self._warm_up()
            if "decode" in parts:
                for suite in suites:
                    for streams in self._profile.bench.concurrency:
                        if streams <= self._profile.serve.max_num_seqs:
                            await self._point(lambda s=suite, n=streams: self._decode(s, n))  # type: ignore[misc]
            if "context" in parts:
                for tokens in self._profile.bench.context_tokens:
                    if self._fits(tokens + self._profile.bench.decode_tokens):
                        document = await self._context(tokens)
                        for suite in suites:
                            await self._point(lambda s=suite, d=document, t=tokens: self._decode_at(s, d, t))  # type: ignore[misc]
            if "prefill" in parts:
                for tokens in self._profile.bench.prefill_tokens:
                    if self._fits(tokens):
                        await self._point(lambda t=tokens: self._prefill(t))  # type: ignore[misc]
                if self._profile.bench.prefill_texts:
                    await self._point(self._prefill_texts)
            beside = self._profile.bench.during_prefill_tokens
            if "during-prefill" in parts and beside and self._fits(beside) and self._profile.serve.max_num_seqs > 1:
                await self._point(lambda: self._during_prefill(beside))
            return self._rows
        finally:
            await self._load.aclose()

    def _fits(self, tokens: int) -> bool:
        return 1.1 * tokens + 64 <= self._profile.serve.max_model_len

    async def _warm_up(self) -> None:
        """Two discarded requests: what a first request costs, and how long a token of our texts is."""
        # long enough that the chat template's own tokens do not count
        text = self._prompts.filler(min(1024, self._profile.serve.max_model_len // 4))
        reading = await self._ask(text, 8)
        self._prompts.learn(text, reading.answer.prompt_tokens or 0)
        await self._ask(self._prompts.code(), 32)

    async def _ask(self, text: str, max_tokens: int) -> Reading:
        reading = await self._load.ask(text, max_tokens, limits=_LIMITS, ignore_eos=True)
        if reading.outcome != "ok":
            if reading.fault_kind is not None:
                raise HttpFault(reading.fault_kind, reading.fault, seconds=reading.seconds)
            raise Ds41Error(f"no answer to measure: {reading.fault or reading.outcome}", hints=("ds41ctl smoke",))
        return reading

    async def _metrics(self) -> EngineMetrics:
        try:
            reply = await self._load.client.get("/metrics", Limits(total_s=10))
            return metrics.parse(reply.body.decode(errors="replace"))
        except HttpFault:
            return EngineMetrics()

    async def _host(self) -> telemetry.HostState:
        return await asyncio.to_thread(
            telemetry.read, self._target.record, gpus=self._profile.hardware.gpus, store_dir=None
        )

    async def _point(self, measure: Callable[[], Awaitable[tuple[Row, list[Reading]]]]) -> None:
        """One point between two looks at engine and machine, which give it its marks."""
        engine, host = await self._metrics(), await self._host()
        cpu, began = time.process_time(), time.monotonic()
        row, readings = await measure()
        used, seconds = time.process_time() - cpu, max(time.monotonic() - began, 1e-9)
        busy = used / seconds
        engine_after, host_after = await self._metrics(), await self._host()
        marks = [*self._target.drift, *row.marks]
        marks += _foreign(engine, engine_after, readings)
        marks += _machine(host, host_after)
        marks += _company(host, host_after, used, seconds)
        if busy > CLIENT_SHARE_MAX:
            marks.append(f"the client used {busy:.0%} of a core")
        detail = dict(row.detail)
        if engine.drafted is not None and engine_after.drafted:
            drafted = engine_after.drafted - engine.drafted
            accepted = (engine_after.accepted or 0) - (engine.accepted or 0)
            detail["drafter_acceptance"] = round(accepted / drafted, 4) if drafted > 0 else None
        detail["client_cpu_share"] = round(busy, 4)
        done = replace(row, marks=tuple(marks), detail=detail)
        self._rows.append(done)
        self._show(done)

    async def _decode(self, suite: str, streams: int) -> tuple[Row, list[Reading]]:
        tokens = self._profile.bench.decode_tokens
        texts = [getattr(self._prompts, suite)() for _ in range(streams)]
        began = time.monotonic()
        readings = list(await asyncio.gather(*(self._ask(text, tokens) for text in texts)))
        wall = time.monotonic() - began
        rates = [item.decode_tps for item in readings if item.decode_tps is not None]
        name = f"decode.{suite}.c{streams}"
        if len(rates) < streams:
            why = next(item.why for item in readings if item.decode_tps is None)
            return Row(name, None, "tok/s", note=f"no rate: {why}"), readings
        # from the first token of the first stream to the last of the last: what all streams together got
        begins = [item.ttft_s or 0.0 for item in readings]
        ends = [item.answer.final_s or item.seconds for item in readings]
        made = sum((item.answer.completion_tokens or 0) - (item.answer.first_tokens or 1) for item in readings)
        window = max(ends) - min(begins)
        total = rates[0] if streams == 1 else made / window
        gaps = [gap for item in readings for gap in token_gaps(item)]
        detail: dict[str, float | int | None] = {
            "stream_tps_p50": _rounded(statistics.median(rates)),
            "tokens": sum(item.answer.completion_tokens or 0 for item in readings),
            "wall_s": _rounded(wall),
            **_percentiles("ttft_s", begins),
            **_percentiles("inter_token_s", gaps),
        }
        return Row(name, _rounded(total), "tok/s", detail), readings

    async def _prefill(self, tokens: int) -> tuple[Row, list[Reading]]:
        name, short = f"prefill.{tokens}", 0
        rates: list[float] = []
        waits: list[float] = []
        lengths: list[int] = []
        readings: list[Reading] = []
        marks: list[str] = []
        while len(rates) < self._profile.bench.prefill_runs:
            before = await self._metrics()
            text = self._prompts.filler(round(LENGTH_ROOM * tokens))
            reading = await self._ask(text, 1)
            after = await self._metrics()
            readings.append(reading)
            counted = reading.answer.prompt_tokens
            if counted is None or reading.ttft_s is None:
                return Row(name, None, "tok/s", note="the server sent no usage or no token"), readings
            self._prompts.learn(text, counted)
            if counted < LENGTH_MIN * tokens:
                short += 1
                if short <= SHORT_MAX:
                    continue  # it taught how long a token is; the next text is longer
                marks.append(f"prompt of {counted} tokens, {tokens} wanted")
            marks += cold(reading, before, after)
            rates.append(counted / reading.ttft_s)
            waits.append(reading.ttft_s)
            lengths.append(counted)
        detail: dict[str, float | int | None] = {
            "prompt_tokens": round(statistics.median(lengths)),
            "ttft_s_p50": _rounded(statistics.median(waits)),
            "lowest": _rounded(min(rates)),
            "highest": _rounded(max(rates)),
            "runs": len(rates),
        }
        return Row(name, _rounded(statistics.median(rates)), "tok/s", detail, tuple(dict.fromkeys(marks))), readings

    async def _context(self, tokens: int) -> str:
        """A document of about `tokens` tokens that the prefix cache knows from now on."""
        for _ in range(1 + SHORT_MAX):
            text = self._prompts.filler(round(LENGTH_ROOM * tokens))
            reading = await self._ask(text, 1)
            counted = reading.answer.prompt_tokens
            if counted is None:
                break
            self._prompts.learn(text, counted)
            if counted >= LENGTH_MIN * tokens:
                break
        return text

    async def _decode_at(self, suite: str, document: str, tokens: int) -> tuple[Row, list[Reading]]:
        """The rate of one stream behind a long prompt. Its clock runs from the first token: no prefill is in it."""
        name = f"decode.{suite}.c1@{tokens}"
        question = getattr(self._prompts, suite)()
        reading = await self._ask(f"{document}\n\n{question}", self._profile.bench.decode_tokens)
        counted = reading.answer.prompt_tokens
        detail: dict[str, float | int | None] = {
            "prompt_tokens": counted,
            "cached_tokens": reading.answer.cached_tokens,
            "tokens": reading.answer.completion_tokens,
            **_percentiles("ttft_s", [reading.ttft_s] if reading.ttft_s is not None else []),
            **_percentiles("inter_token_s", token_gaps(reading)),
        }
        if reading.decode_tps is None:
            return Row(name, None, "tok/s", detail, note=f"no rate: {reading.why}"), [reading]
        marks: tuple[str, ...] = ()
        if counted is None or counted < LENGTH_MIN * tokens:
            marks = (f"prompt of {counted if counted is not None else 'an unknown number of'} tokens, {tokens} wanted",)
        return Row(name, _rounded(reading.decode_tps), "tok/s", detail, marks), [reading]

    async def _prefill_texts(self) -> tuple[Row, list[Reading]]:
        """Cold prefill as seed 004 states it: several long texts, each some times over, the median of all runs."""
        wanted = self._profile.bench.prefill_texts
        name, note = "prefill.texts", "texts: " + _text_names(self._target.texts)
        rates: list[float] = []
        lengths: list[int] = []
        readings: list[Reading] = []
        marks: list[str] = []
        for number, tokens in enumerate(wanted):
            if not self._fits(tokens):
                return Row(name, None, "tok/s", note=f"{tokens} tokens do not fit the context"), readings
            source = self._text(number, tokens)
            per_token = self._prompts.chars_per_token
            for _ in range(self._profile.bench.prefill_runs):
                text = f"[{self._prompts.nonce()}] {source[: round(LENGTH_ROOM * tokens * per_token)]}"
                before = await self._metrics()
                reading = await self._ask(text, 1)
                after = await self._metrics()
                readings.append(reading)
                counted = reading.answer.prompt_tokens
                if counted is None or reading.ttft_s is None:
                    return Row(name, None, "tok/s", note="the server sent no usage or no token"), readings
                marks += cold(reading, before, after)
                rates.append(counted / reading.ttft_s)
                lengths.append(counted)
                per_token = len(text) / counted
            if not LENGTH_MIN * tokens <= lengths[-1] <= 1.1 * tokens:
                marks.append(f"text {number + 1} of {lengths[-1]} tokens, {tokens} wanted")
        detail: dict[str, float | int | None] = {
            "runs": len(rates),
            "lowest": _rounded(min(rates)),
            "highest": _rounded(max(rates)),
            "shortest": min(lengths),
            "longest": max(lengths),
        }
        unique = tuple(dict.fromkeys(marks))
        return Row(name, _rounded(statistics.median(rates)), "tok/s", detail, unique, note), readings

    def _text(self, number: int, tokens: int) -> str:
        """The text of a length: the user's, else one of ours, long enough at any believable length of a token."""
        if self._target.texts:
            return self._target.texts[number % len(self._target.texts)][1]
        kind = tuple(texts.KINDS)[number % len(texts.KINDS)]
        return texts.KINDS[kind](round(tokens * CHARS_MAX))

    async def _during_prefill(self, tokens: int) -> tuple[Row, list[Reading]]:
        """The rate of one stream between sending a long prompt beside it and that prompt's first token."""
        name, enough = f"during-prefill.{tokens}", asyncio.Event()
        room = min(self._profile.serve.max_model_len - 256, 65536)
        began = time.monotonic()
        stream = asyncio.create_task(
            self._load.ask(self._prompts.prose(), room, hang_up=enough, limits=_LIMITS, ignore_eos=True)
        )
        try:
            await asyncio.sleep(ALONE_S)
            before = await self._metrics()
            sent = time.monotonic() - began
            other = await self._ask(self._prompts.filler(round(LENGTH_ROOM * tokens)), 1)
            after = await self._metrics()
        finally:
            enough.set()
        reading = await stream
        until = sent + (other.ttft_s or other.seconds)
        alone, _ = _rate_between(reading, 0.0, sent)
        rate, made = _rate_between(reading, sent, until)
        detail: dict[str, float | int | None] = {
            "alone_tps": alone,
            "prompt_tokens": other.answer.prompt_tokens,
            "prefill_tps": _rounded((other.answer.prompt_tokens or 0) / other.ttft_s) if other.ttft_s else None,
            "window_s": _rounded(until - sent),
            "tokens": made,
        }
        note = "" if rate is not None else "the stream ended, or said nothing, while the prompt was read"
        marks = tuple(item for item in cold(other, before, after) if "not proven" not in item)
        return Row(name, rate, "tok/s", detail, marks, note), [other, reading]


def _text_names(given: Sequence[tuple[str, str]]) -> str:
    return ", ".join(name for name, _ in given) if given else f"generated here ({', '.join(texts.KINDS)})"


def _rate_between(reading: Reading, begin: float, end: float) -> tuple[float | None, int]:
    """(tokens/s, tokens) of a stream between two of its times, by the server's running count."""
    inside = [(at, count) for at, count in reading.answer.marks if begin <= at <= end and count is not None]
    if len(inside) < 2 or end <= begin:
        return None, 0
    made = inside[-1][1] - inside[0][1]
    # silence after the last token inside the window counts: that is what the reader of the stream waits for
    return _rounded(made / (end - inside[0][0])), made


def token_gaps(reading: Reading) -> list[float]:
    """Seconds between tokens: the time between two events, shared among the tokens the later one brought.

    Empty without a running count: a drafter puts several tokens in one event.
    """
    gaps: list[float] = []
    for (at, count), (then, later) in itertools.pairwise(reading.answer.marks):
        if count is not None and later is not None and later > count:
            gaps += [(then - at) / (later - count)] * (later - count)
    return gaps


def cold(reading: Reading, before: EngineMetrics, after: EngineMetrics) -> list[str]:
    """Marks of a prefill that a cache served, or of which nobody can say whether one did."""
    cached: float | None = reading.answer.cached_tokens
    if cached is None and before.cached is not None and after.cached is not None:
        cached = after.cached - before.cached
    if cached is None and before.prefix_hits is not None and after.prefix_hits is not None:
        cached = after.prefix_hits - before.prefix_hits
    if cached is None:
        return ["nobody counts cached tokens: not proven cold (--enable-prompt-tokens-details)"]
    # the template's own first tokens are the same for every request and may share one block
    if cached > max(0.02 * (reading.answer.prompt_tokens or 0), 0):
        return [f"{cached:.0f} tokens came from the prefix cache"]
    return []


def _foreign(before: EngineMetrics, after: EngineMetrics, readings: Sequence[Reading]) -> list[str]:
    if before.generated is None or after.generated is None:
        return ["the engine's own token count could not be read"]
    made = after.generated - before.generated
    ours = sum(item.answer.completion_tokens or 0 for item in readings)
    if made < 0:
        return ["the engine was restarted while it was measured"]
    if made > ours * (1 + FOREIGN_SHARE) + 2:
        return [f"another client: the engine made {made:.0f} tokens, {ours} of them ours"]
    return []


def _machine(before: telemetry.HostState, after: telemetry.HostState) -> list[str]:
    marks = []
    if before.swapped_pages is not None and after.swapped_pages is not None:
        swapped = after.swapped_pages - before.swapped_pages
        if swapped > SWAP_PAGES_MAX:
            marks.append(f"the machine swapped {swapped} pages")
    for state in (before, after):
        for index, gpu in enumerate(state.gpus or ()):
            if gpu.throttle is not None and gpu.throttle & THROTTLE_BAD:
                marks.append(f"GPU {index} throttles (reasons {gpu.throttle:#x})")
    for index, (was, now) in enumerate(zip(before.gpus or (), after.gpus or (), strict=False)):
        if was.power_limit_w is not None and now.power_limit_w is not None and was.power_limit_w != now.power_limit_w:
            marks.append(f"GPU {index}: power limit {was.power_limit_w:g} W before and {now.power_limit_w:g} W after")
        if was.offset_mhz is not None and now.offset_mhz is not None and was.offset_mhz != now.offset_mhz:
            marks.append(f"GPU {index}: clock offset {was.offset_mhz:+d} MHz before and {now.offset_mhz:+d} MHz after")
    return list(dict.fromkeys(marks))


def _company(before: telemetry.HostState, after: telemetry.HostState, client_s: float, seconds: float) -> list[str]:
    """Mark of a machine that worked for somebody else meanwhile. CPU time of all that is neither engine nor client."""
    times = (before.engine_cpu_s, before.machine_cpu_s, after.engine_cpu_s, after.machine_cpu_s)
    if any(item is None for item in times):
        return []
    engine_before, machine_before, engine_after, machine_after = (item or 0.0 for item in times)
    others = ((machine_after - machine_before) - (engine_after - engine_before) - client_s) / seconds
    cores = os.cpu_count() or 1
    if others > COMPANY_SHARE_MAX * cores:
        return [f"other programs used {others:.1f} of {cores} cores"]
    return []


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float | int | None]:
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    return {f"{name}_{label}": _rounded(stats.quantile(values, q)) if values else None for label, q in shares.items()}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
