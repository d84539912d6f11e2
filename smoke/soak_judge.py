"""The judge of a soak: a trace and a profile in, one finding a criterion and one verdict out. Pure.

`fail` needs evidence against the engine, `pass` needs evidence for it; whatever lies between (too short, too noisy,
not measured, broken off) is `inconclusive`. A figure near its limit is judged by its interval, not by its value alone.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ds41ctl.core.exits import Exit
from ds41ctl.core.finding import Finding, Status
from ds41ctl.core.lease import TOLERANCE_W
from ds41ctl.core.profile import Profile
from smoke import drafter, stats
from smoke.trace import WAVE, Sample, Trace, Turn

COMPLETE_SHARE = 0.9  # of the planned time; below it the run says nothing about the rest
LATE_SHARE = 0.05  # the last turns, looked at on their own: a collapse may be younger than a fifth of the run
LATE_RETENTION = 0.5  # of soak.decode_retention_min
NOISE_ROOM = 0.10  # how far below its limit the interval of a good figure may reach
FEWEST = 5  # values in a fifth that give it a median
FEWEST_P95 = 20
TOKENS_AGREE = 0.02
GAP_SHARE = 0.2  # of the run without a sample: nobody was looking
WALL_STEP_S = 5.0

LENGTH_MIN = 0.97  # of the length a wave's prompts were to have
CACHED_MAX = 0.02  # of a prompt nobody sent before
# what needs many requests over a long time
_TRENDS = ("soak.decode", "soak.ttft", "soak.vram", "soak.rss")

# nvml.h, nvmlClocksEventReasons
_THROTTLES = {0x8: "HW slowdown", 0x20: "SW thermal", 0x40: "HW thermal", 0x80: "HW power brake"}
_POWER_CAP = 0x4

VerdictWord = Literal["pass", "fail", "inconclusive"]
EXIT: dict[VerdictWord, Exit] = {"pass": Exit.OK, "fail": Exit.FINDINGS, "inconclusive": Exit.INCONCLUSIVE}


@dataclass(frozen=True)
class SoakVerdict:
    """One finding a criterion, in the order of CRITERIA, and what they amount to."""

    word: VerdictWord
    findings: tuple[Finding, ...]
    not_proved: tuple[str, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Ids of the criteria that made it what it is (empty for a pass)."""
        wanted = (Status.FAIL,) if self.word == "fail" else (Status.UNKNOWN, Status.CRASH)
        return tuple(item.id for item in self.findings if self.word != "pass" and item.status in wanted)


@dataclass(frozen=True)
class _Case:
    trace: Trace
    profile: Profile

    @property
    def waves(self) -> int:
        """Waves that were to be sent and no more, 0 when the time was the measure."""
        return self.trace.start.waves if self.trace.start is not None else 0

    @property
    def drafter(self) -> bool:
        """True when the engine drafts, as far as anybody knows."""
        known = self.trace.start.drafter if self.trace.start is not None else None
        return self.profile.drafter if known is None else known

    @property
    def loaded(self) -> tuple[float, float]:
        """When the load began and ended, by the requests sent. The first one is apart: it pays what a first one costs
        (minutes, where kernels are compiled), and after the last one come drains and canaries only."""
        times = sorted(turn.at for turn in self.trace.turns)
        return (times[1], times[-1]) if len(times) > 1 else (0.0, 0.0)

    @property
    def warm_at(self) -> float | None:
        """End of the first whole session without an error: from there on memory may be compared. None: there is none.

        A baseline from a dying or still loading engine would show a leak that is none.
        """
        ends: dict[int, float] = {}
        sizes: dict[int, int] = {}
        bad: set[int] = set()
        for turn in self.trace.turns:
            if turn.kind in ("session", "wave"):
                ends[turn.session] = max(ends.get(turn.session, 0.0), turn.at + turn.seconds)
                sizes[turn.session] = sizes.get(turn.session, 0) + 1
                if turn.outcome != "ok":
                    bad.add(turn.session)
        good = [end for session, end in ends.items() if session not in bad and sizes[session] >= 2]
        first = min(good, default=None)
        return first if first is not None and first <= 0.5 * self.trace.seconds else None


def judge(trace: Trace, profile: Profile) -> SoakVerdict:
    """Verdict on `trace` by the criteria of `profile`. Never raises: a criterion that crashes is a finding."""
    case = _Case(trace, profile)
    findings = tuple(_guarded(name, criterion, case) for name, _, criterion in CRITERIA)
    if case.waves:
        findings = tuple(_without_trend(item, case.waves) for item in findings)
    kinds = {item.status for item in findings}
    word: VerdictWord = "pass"
    if Status.FAIL in kinds:
        word = "fail"
    elif kinds & {Status.UNKNOWN, Status.CRASH}:
        word = "inconclusive"
    return SoakVerdict(word, findings, _not_proved(case, findings))


def table() -> list[tuple[str, str]]:
    """(id, what it means to keep it) of every criterion, in order."""
    return [(name, keeps) for name, keeps, _ in CRITERIA]


def _guarded(name: str, criterion: Callable[[str, _Case], Finding], case: _Case) -> Finding:
    try:
        return criterion(name, case)
    except Exception as error:
        text = f"the judge crashed: {type(error).__name__}: {error}"
        return Finding(id=name, status=Status.CRASH, summary=text, why="a bug in ds41ctl, not in the engine")


def _without_trend(found: Finding, waves: int) -> Finding:
    """A counted run is a stress test: it has too few requests to say what grew or slowed down, and claims nothing."""
    if found.id not in _TRENDS or found.status is not Status.UNKNOWN:
        return found
    return _skip(found.id, f"{waves} waves show no trend ({found.summary})")


def _ok(name: str, found: str, expected: str = "") -> Finding:
    return Finding(id=name, status=Status.OK, summary=found, found=found, expected=expected)


def _warn(name: str, found: str, expected: str, why: str, *fix: str) -> Finding:
    return Finding(id=name, status=Status.WARN, summary=found, expected=expected, found=found, why=why, fix=fix)


def _fail(name: str, found: str, expected: str, why: str, *fix: str) -> Finding:
    return Finding(id=name, status=Status.FAIL, summary=found, expected=expected, found=found, why=why, fix=fix)


def _unknown(name: str, found: str, expected: str = "", *fix: str) -> Finding:
    return Finding(
        id=name,
        status=Status.UNKNOWN,
        summary=found,
        expected=expected,
        found=found,
        why="without it this soak proves nothing either way",
        fix=fix or ("ds41ctl soak run   # again, undisturbed",),
    )


def _skip(name: str, reason: str) -> Finding:
    return Finding(id=name, status=Status.SKIP, summary=reason)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"


# the run itself


def _complete(name: str, case: _Case) -> Finding:
    trace = case.trace
    if trace.start is None:
        return _unknown(name, "the trace has no start: nothing says what was planned")
    planned, ran = trace.start.planned_s, trace.seconds
    if case.waves and trace.end is not None and trace.end.reason == "complete":
        sent: dict[int, int] = {}
        for turn in trace.turns:
            if turn.kind == "wave" and turn.outcome != "unfinished":
                sent[turn.session] = sent.get(turn.session, 0) + 1
        done = sum(count >= WAVE for count in sent.values())
        expected = f"{case.waves} waves of {WAVE} requests"
        if done < case.waves:
            return _unknown(name, f"{done} waves within {_minutes(ran)}", expected)
        return _ok(name, f"{done} waves in {_minutes(ran)}", expected)
    expected = f"at least {COMPLETE_SHARE:.0%} of the planned {_minutes(planned)}"
    if trace.end is None:
        return _unknown(name, f"no end was recorded; the last entry is of {_minutes(ran)}", expected)
    if trace.end.reason == "engine-died":
        found = f"the engine stopped answering after {_minutes(trace.end.at)}" + (
            f": {trace.end.text}" if trace.end.text else ""
        )
        why = "an engine that dies under its daily load will die again"
        return _fail(name, found, expected, why, "ds41ctl status", "ds41ctl logs")
    if trace.end.reason != "complete" or ran < COMPLETE_SHARE * planned:
        return _unknown(name, f"ended after {_minutes(ran)} ({trace.end.reason})", expected)
    return _ok(name, f"{_minutes(ran)} of {_minutes(planned)}", expected)


def _recording(name: str, case: _Case) -> Finding:
    trace = case.trace
    samples = trace.samples
    if len(samples) < FEWEST or trace.start is None:
        return _unknown(name, f"{len(samples)} samples of engine and machine", f"at least {FEWEST}")
    allowed = max(5 * trace.start.sample_s, 15.0)
    times = [item.at for item in samples]
    gaps = [b - a for a, b in itertools.pairwise(times) if b - a > allowed]
    expected = f"a sample every {trace.start.sample_s:g} s"
    if sum(gaps) > GAP_SHARE * trace.seconds:
        return _unknown(name, f"no sample for {_minutes(sum(gaps))}: the soak itself stood still", expected)
    notes = []
    if gaps:
        notes.append(f"{len(gaps)} gaps, the longest {max(gaps):.0f} s")
    skew = [item.wall - item.at for item in samples if item.wall is not None]
    steps = [b - a for a, b in itertools.pairwise(skew) if abs(b - a) > WALL_STEP_S]
    if steps:
        notes.append(f"the wall clock was stepped by {sum(steps):+.0f} s (intervals here do not use it)")
    if trace.unreadable:
        notes.append(f"{trace.unreadable} lines of the record could not be read")
    if notes:
        why = "what happened there was not seen"
        return _warn(name, "; ".join(notes), expected, why, "look for a suspended or overloaded machine at that time")
    return _ok(name, f"{len(samples)} samples", expected)


def _work(name: str, case: _Case) -> Finding:
    if case.waves:
        return _wave_work(name, case)
    least = case.profile.soak.min_turns
    done = [turn for turn in case.trace.turns if turn.outcome == "ok"]
    tokens = sum(turn.completion_tokens or 0 for turn in done)
    found = f"{len(done)} requests answered, {tokens} tokens"
    expected = f"at least {least} answered requests"
    if len(done) < least:
        return _unknown(name, found, expected, "run longer: ds41ctl soak run --minutes 30")
    return _ok(name, found, expected)


def _wave_work(name: str, case: _Case) -> Finding:
    wanted = case.trace.start.prompt_tokens if case.trace.start is not None else 0
    turns = [turn for turn in case.trace.turns if turn.kind == "wave"]
    done = [turn for turn in turns if turn.outcome == "ok"]
    lengths = [turn.prompt_tokens or 0 for turn in done]
    length = f"{min(lengths, default=0)} to {max(lengths, default=0)} tokens"
    found = f"{len(done)}/{case.waves * WAVE} prompts answered, {length}"
    expected = f"{case.waves * WAVE} prompts of {wanted} tokens answered"
    cached = [
        turn for turn in done if turn.cached_tokens and turn.cached_tokens > CACHED_MAX * (turn.prompt_tokens or 0)
    ]
    if len(done) < case.waves * WAVE or min(lengths) < LENGTH_MIN * wanted:
        return _unknown(name, found, expected)
    if cached:
        return _unknown(name, f"{found}; {len(cached)} of them came from the prefix cache", expected)
    return _ok(name, found, expected)


def _engine(name: str, case: _Case) -> Finding:
    samples = case.trace.samples
    expected = "one and the same engine process all the way"
    seen = list(dict.fromkeys(item.engine for item in samples if item.engine))
    if len(seen) > 1:
        why = "it was restarted in between: what came before says nothing about what runs now"
        return _fail(
            name, f"{len(seen)} engines: {', '.join(seen[:3])}", expected, why, "ds41ctl logs", "journalctl -k"
        )
    resets = _increase([item.generated for item in samples])[1]
    if resets:
        return _unknown(name, f"the engine's counters were reset {resets} times, though its process did not change")
    if not seen and case.trace.start is not None and case.trace.start.identity_known:
        return _unknown(name, "the engine's process was never seen", expected, "ds41ctl status")
    return _ok(name, seen[0] if seen else "its counters never went back (process not known)", expected)


# requests


def _counted(outcomes: Sequence[str], what: str, why: str, *fix: str) -> Callable[[str, _Case], Finding]:
    def criterion(name: str, case: _Case) -> Finding:
        turns = case.trace.turns
        bad = [turn for turn in turns if turn.outcome in outcomes]
        expected = f"0 {what}"
        if not turns:
            return _unknown(name, "no request was made", expected)
        if not bad:
            return _ok(name, f"0 of {len(turns)}", expected)
        first = bad[0]
        detail = f"; the first after {_minutes(first.at)}" + (f": {first.fault}" if first.fault else "")
        return _fail(name, f"{len(bad)} of {len(turns)} {what}{detail}", expected, why, *fix)

    return criterion


def _canaries(name: str, case: _Case) -> Finding:
    expected = "every canary of every round right"
    # the drafter's has a criterion of its own
    asked = [item for item in case.trace.canaries if item.status != "skip" and item.id != drafter.TEST]
    if not asked:
        return _unknown(name, "no canary was asked", expected)
    wrong = [item for item in asked if item.status == "fail"]
    if wrong:
        first = wrong[0]
        found = f"{len(wrong)} of {len(asked)} wrong; the first is {first.id} after {_minutes(first.at)}: {first.text}"
        why = "the engine answers, and answers wrongly: speed and error counts do not show it"
        return _fail(name, found, expected, why, f"ds41ctl smoke --only {first.id}", "ds41ctl engram verify --full")
    unjudged = [item for item in asked if item.status in ("unknown", "crash")]
    if unjudged:
        first = unjudged[0]
        return _unknown(
            name, f"{len(unjudged)} of {len(asked)} not judged; the first is {first.id}: {first.text}", expected
        )
    return _ok(name, f"{len(asked)} of {len(asked)}", expected)


def _relative(turns: Sequence[Turn], value: Callable[[Turn], float | None]) -> tuple[list[float], list[float]]:
    """(times, values over the median of their like): requests are compared with requests of the same kind, place in
    their session and company, since a long context or a full batch is slower without being a fault."""
    groups: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for turn in turns:
        found = value(turn)
        if turn.outcome == "ok" and found is not None and found > 0:
            groups.setdefault((turn.kind, turn.index, turn.streams), []).append((turn.at, found))
    points = []
    for group in groups.values():
        if len(group) >= 3:
            middle = statistics.median(v for _, v in group)
            points += [(at, v / middle) for at, v in group]
    points.sort()
    return [at for at, _ in points], [v for _, v in points]


def _decode(name: str, case: _Case) -> Finding:
    limits = case.profile.soak
    times, rates = _relative(case.trace.turns, lambda turn: turn.decode_tps)
    expected = f"last fifth at least {limits.decode_retention_min:g} of the first"
    parts = stats.fifths(*case.loaded, times, rates)
    first, last = parts[0], parts[4]
    if len(first) < FEWEST or len(last) < FEWEST:
        return _unknown(name, f"{len(first)} rates in the first fifth, {len(last)} in the last", expected)
    kept = stats.ratio(first, last, statistics.median)
    drift = stats.slope(times, rates)
    began, ended = case.loaded
    per_run = stats.Interval(*(v * (ended - began) for v in (drift.value, drift.low, drift.high)))
    found = f"{kept.show()} of the first fifth; trend over the run {per_run.show()}"
    why = "the engine slows down while it runs: clocks, memory, a growing queue or cache"
    fix = ("ds41ctl status", "nvidia-smi -q -d CLOCK,PERFORMANCE", "ds41ctl logs")
    late = rates[-max(FEWEST, round(LATE_SHARE * len(rates))) :]
    if statistics.median(late) < LATE_RETENTION * limits.decode_retention_min * statistics.median(first):
        share = statistics.median(late) / statistics.median(first)
        return _fail(name, f"collapsed at the end to {share:.2f} of the first fifth", expected, why, *fix)
    limit = limits.decode_retention_min
    if kept.high < limit or 1 + per_run.high < limit:
        return _fail(name, found, expected, why, *fix)
    if kept.value < limit or kept.low < limit - NOISE_ROOM:
        return _unknown(name, f"too noisy to tell: {found}", expected, "stop what else uses this machine, run longer")
    if kept.value < limits.decode_retention_warn:
        return _warn(name, found, expected, why, *fix)
    return _ok(name, found, expected)


def _ttft(name: str, case: _Case) -> Finding:
    limit = case.profile.soak.ttft_ratio_max
    times, waits = _relative(case.trace.turns, lambda turn: turn.ttft_s)
    parts = stats.fifths(*case.loaded, times, waits)
    first, last = parts[0], parts[4]
    fewest = min(len(first), len(last))
    if fewest < FEWEST:
        return _unknown(
            name, f"{len(first)} times in the first fifth, {len(last)} in the last", f"at most {limit:g} times"
        )
    of, label = (stats.p95, "p95") if fewest >= FEWEST_P95 else (statistics.median, "median (too few for a p95)")
    expected = f"{label} of the last fifth at most {limit:g} times the first"
    grown = stats.ratio(first, last, of)
    found = f"{label} {grown.show(2)} times the first fifth"
    why = "first tokens come later and later: requests queue up, or the prefix cache no longer helps"
    if grown.low > limit:
        return _fail(name, found, expected, why, "ds41ctl status", "ds41ctl logs")
    if grown.value <= limit:
        return _ok(name, found, expected)
    if statistics.median(last) <= limit * statistics.median(first):
        return _warn(name, f"{found}; the median did not grow", expected, why, "ds41ctl soak run   # longer")
    return _unknown(name, f"too noisy to tell: {found}", expected)


def _stall(name: str, case: _Case) -> Finding:
    limit = case.profile.soak.stall_s
    expected = f"tokens at least every {limit:g} s while requests run"
    samples = [item for item in case.trace.samples if item.running is not None and item.generated is not None]
    if not samples:
        return _unknown(name, "the engine's metrics were never read", expected, "curl -s URL/metrics")
    since: Sample | None = None
    worst = 0.0
    for item in samples:
        if since is None or not item.running or item.generated != since.generated:
            since = item if item.running else None
            continue
        worst = max(worst, item.at - since.at)
    if worst >= limit:
        why = "requests are counted as running and nothing is produced: the engine hangs, though /health is 200"
        return _fail(name, f"no token for {worst:.0f} s", expected, why, "ds41ctl logs", "ds41ctl serve --replace")
    return _ok(name, f"the longest silence is {worst:.0f} s", expected)


def _tokens(name: str, case: _Case) -> Finding:
    expected = f"the engine's own count within {TOKENS_AGREE:.0%} of ours"
    made, resets = _increase([item.generated for item in case.trace.samples])
    if made is None or resets:
        return _skip(name, "the engine's counter of tokens cannot be used")
    turns = case.trace.turns
    ours = sum(turn.completion_tokens or 0 for turn in turns) + sum(item.tokens for item in case.trace.canaries)
    # a stream that was hung up on runs a few tokens further, and one without usage is not counted at all
    loose = sum(16 for turn in turns if turn.outcome in ("cancelled", "unfinished"))
    if not made:
        return _skip(name, "the engine made no token")
    off = abs(made - ours)
    found = f"engine {made:.0f}, ours {ours}"
    if case.trace.end is None or case.trace.end.reason != "complete":
        return _unknown(name, f"{found}; the run broke off after the engine's last count", expected)
    if off <= TOKENS_AGREE * made + loose:
        return _ok(name, found, expected)
    if made > ours:
        why = "somebody else used the engine: the speeds of this run are not comparable"
        return _warn(name, found, expected, why, "run the soak while no other client is connected")
    why = "the server reports more tokens than its engine made: events are counted as tokens, or another engine answers"
    return _fail(name, found, expected, why, "ds41ctl status", "ds41ctl engine verify")


# memory


def _floors(begin: float, end: float, times: Sequence[float], values: Sequence[float]) -> list[float] | None:
    """The least value of each fifth: a leak raises the floor, a sawtooth (a collector, a cache) does not."""
    parts = stats.fifths(begin, end, times, values)
    if any(len(part) < 2 for part in (parts[0], parts[2], parts[4])):
        return None
    return [min(part) if part else float("nan") for part in parts]


def _vram(name: str, case: _Case) -> Finding:
    if case.profile.hardware.gpus == 0:
        return _skip(name, "no GPU in this profile")
    limit = case.profile.soak.vram_growth_mib_max
    expected = f"at most {limit:g} MiB a GPU after the warm baseline"
    warm = case.warm_at
    if warm is None:
        return _unknown(name, "no session without an error in the first half: there is no baseline", expected)
    count = max((len(item.gpus or ()) for item in case.trace.samples), default=0)
    if count < case.profile.hardware.gpus:
        return _unknown(name, f"{count} of {case.profile.hardware.gpus} GPUs were measured", expected, "nvidia-smi")
    grown = []
    for index in range(count):
        points = [
            (item.at, used)
            for item in case.trace.samples
            if item.gpus and index < len(item.gpus) and (used := item.gpus[index].used_mib) is not None
        ]
        floors = _floors(warm, case.trace.seconds, [t for t, _ in points], [v for _, v in points])
        if floors is None:
            return _unknown(name, f"too few measurements of GPU {index} after {_minutes(warm)}", expected)
        grown.append(floors[4] - floors[0])
    worst = max(grown)
    found = f"{worst:+.0f} MiB on GPU {grown.index(worst)}, baseline after {_minutes(warm)}"
    if worst > limit:
        why = "memory taken after the profiler ran: it ends in an out-of-memory error, hours from now"
        return _fail(name, found, expected, why, "lower --gpu-memory-utilization", "ds41ctl logs")
    return _ok(name, found, expected)


def _rss(name: str, case: _Case) -> Finding:
    limit = case.profile.soak.rss_gib_per_hour_max
    expected = f"at most {limit:g} GiB an hour after the warm baseline"
    if case.trace.start is not None and not case.trace.start.identity_known:
        return _skip(name, "the engine was not started here: its processes cannot be seen")
    warm = case.warm_at
    if warm is None:
        return _unknown(name, "no session without an error in the first half: there is no baseline", expected)
    points = [(item.at, item.rss_mib) for item in case.trace.samples if item.rss_mib is not None and item.at >= warm]
    end = case.trace.seconds
    times, values = [t for t, _ in points], [v for _, v in points]
    floors = _floors(warm, end, times, values)
    if floors is None or end - warm < 0.4 * end:
        return _unknown(name, f"{len(points)} measurements after the baseline", expected)
    hours = (end - warm) / 3600
    whole = (floors[4] - floors[0]) / 1024 / (0.8 * hours)
    half = (floors[4] - floors[2]) / 1024 / (0.4 * hours)
    trend = stats.slope(times, values)
    per_hour = stats.Interval(*(v * 3600 / 1024 for v in (trend.value, trend.low, trend.high)))
    found = f"floor {whole:+.2f} GiB/h, second half {half:+.2f}, trend {per_hour.show(2)}"
    why = "host memory leaks: the machine swaps or the kernel kills the engine, hours from now"
    if whole <= limit:
        return _ok(name, found, expected)
    if half <= limit:
        return _warn(name, f"grew once and stayed: {found}", expected, why, "ds41ctl soak run   # longer")
    if per_hour.high <= limit:
        return _unknown(name, f"floor and trend disagree: {found}", expected)
    return _fail(name, found, expected, why, "ds41ctl soak run --minutes 60   # confirms it", "ds41ctl logs")


def _kv_idle(name: str, case: _Case) -> Finding:
    margin = case.profile.soak.kv_idle_margin
    expected = f"KV use back to idle + {margin:.0%} after each drain"
    known = [item for item in case.trace.drains if item.kv is not None and item.idle_kv is not None]
    if not known:
        return _unknown(name, "the KV use at rest was never measured", expected, "curl -s URL/metrics")
    over = [(item.kv or 0.0) - (item.idle_kv or 0.0) for item in known]
    found = f"{over[-1]:+.1%} above idle after the last of {len(known)} drains, at most {max(over):+.1%}"
    # a cancelled stream's blocks may come back a moment late: the last drain, or every drain, decides
    if over[-1] > margin:
        why = "blocks of finished or cancelled requests are never given back: the cache fills up and requests queue"
        return _fail(name, found, expected, why, "ds41ctl serve --replace", "ds41ctl logs")
    if max(over) > margin:
        return _warn(name, found, expected, "blocks came back late", "ds41ctl logs")
    return _ok(name, found, expected)


def _zombie(name: str, case: _Case) -> Finding:
    expected = "0 running and 0 waiting after each drain"
    known = [item for item in case.trace.drains if item.running is not None]
    if not known:
        return _unknown(name, "the queue at rest was never measured", expected)
    left = [item for item in known if (item.running or 0) + (item.waiting or 0) > 0]
    if left:
        first = left[0]
        found = f"{first.running:.0f} running, {first.waiting or 0:.0f} waiting at rest, after {_minutes(first.at)}"
        if left[-1] is not known[-1]:
            return _warn(name, found, expected, "another client, or a request that ended late", "ds41ctl status")
        why = "a request that nobody waits for any more holds its place: a hung-up stream was not aborted"
        return _fail(name, found, expected, why, "ds41ctl logs", "ds41ctl serve --replace")
    return _ok(name, f"0 after {len(known)} drains", expected)


# drafter, GPUs, store


def _acceptance(name: str, case: _Case) -> Finding:
    floor = case.profile.soak.acceptance_min
    drafted = _increase([item.drafted for item in case.trace.samples])[0]
    accepted = _increase([item.accepted for item in case.trace.samples])[0]
    if not case.drafter and not drafted:
        return _skip(name, "no drafter, or the engine was started without it")
    if not drafted:
        if floor is not None:
            why = "the engine was started with its drafter, and it drafts nothing"
            return _fail(name, "no token was drafted", f"at least {floor:g}", why, "ds41ctl logs")
        return _skip(name, "no token was drafted, and the profile has no floor (soak.acceptance_min)")
    share = (accepted or 0.0) / drafted
    found = f"{share:.3f} of {drafted:.0f} drafted tokens"
    if floor is None:
        return _skip(name, f"{found}; the profile has no floor (soak.acceptance_min)")
    if share < floor:
        why = "the drafter guesses blindly (wrong KV, NaN taps): it costs time and gives none"
        return _fail(name, found, f"at least {floor:g}", why, "ds41ctl serve --no-dspark --replace", "ds41ctl logs")
    return _ok(name, found, f"at least {floor:g}")


def _first_acceptance(name: str, case: _Case) -> Finding:
    asked = [item for item in case.trace.canaries if item.id == drafter.TEST]
    if not case.drafter and not asked:
        return _skip(name, "no drafter, or the engine was started without it")
    floor = case.profile.soak.first_acceptance_min
    known = [item for item in asked if item.drafts is not None and item.first_accepted is not None]
    if not known:
        if floor is None:
            return _skip(name, "the profile has no floor (soak.first_acceptance_min)")
        found = "accepted drafts by position were never counted"
        return _unknown(name, found, f"at least {floor:g}", "curl -s URL/metrics | grep spec_decode")
    drafts, accepted = sum(item.drafts or 0 for item in known), sum(item.first_accepted or 0 for item in known)
    return drafter.judge(drafts, accepted, floor, test=name)


def _headroom(name: str, case: _Case) -> Finding:
    least = case.profile.soak.vram_headroom_mib_min
    if case.profile.hardware.gpus == 0 or least is None:
        return _skip(name, "no GPU in this profile, or no limit (soak.vram_headroom_mib_min)")
    expected = f"at least {least:g} MiB left on each GPU at the highest sample"
    left: dict[int, tuple[float, float, float]] = {}
    for sample in case.trace.samples:
        for index, gpu in enumerate(sample.gpus or ()):
            if gpu.used_mib is not None and gpu.total_mib is not None:
                here = (gpu.total_mib - gpu.used_mib, gpu.used_mib, gpu.total_mib)
                left[index] = min(left.get(index, here), here)
    if len(left) < case.profile.hardware.gpus:
        return _unknown(name, f"{len(left)} of {case.profile.hardware.gpus} GPUs were measured", expected, "nvidia-smi")
    worst = min(left, key=lambda index: left[index][0])
    room, used, total = left[worst]
    found = f"{room:,.0f} MiB left on GPU {worst}: {used:,.0f} of {total:,.0f} in use at the most"
    if room < least:
        why = "the next larger prompt, or a request for prompt_logprobs, finds no memory: the engine dies of it"
        fix = ("lower serve.gpu_memory_utilization in the profile", "ds41ctl logs")
        return _fail(name, found, expected, why, *fix)
    return _ok(name, found, expected)


def _clocks(name: str, case: _Case) -> Finding:
    target, limits = case.profile.clocks.sm_mhz, case.profile.soak
    if target is None:
        return _skip(name, "the profile locks no clock")
    least = target - limits.clock_margin_mhz
    expected = f"at least {least} MHz in {limits.clock_share_min:.0%} of the samples under load"
    loaded = [
        gpu.sm_mhz
        for item in case.trace.samples
        if item.running and item.gpus
        for gpu in item.gpus
        if gpu.sm_mhz is not None
    ]
    if not loaded:
        return _unknown(name, "no clock was read under load", expected, "nvidia-smi -q -d CLOCK")
    share = sum(mhz >= least for mhz in loaded) / len(loaded)
    found = f"{share:.1%} of {len(loaded)} samples, lowest {min(loaded)} MHz"
    if share < limits.clock_share_min:
        why = "a card runs below the clock that was locked: the lock is gone, latched low, or the card throttles"
        return _fail(name, found, expected, why, "ds41ctl clocks status", "nvidia-smi -q -d CLOCK,PERFORMANCE")
    return _ok(name, found, expected)


def _power(name: str, case: _Case) -> Finding:
    """A limit above the profile's, and any limit or offset that changed while the engine worked."""
    if case.profile.hardware.gpus == 0:
        return _skip(name, "no GPU in this profile")
    wanted = case.profile.clocks.power_limit_w
    expected = "the same power limit and clock offset from start to end"
    fix = ("ds41ctl clocks status", "nvidia-smi -q -d POWER", "ds41ctl clocks lock")
    rows = [(item.at, item.gpus) for item in case.trace.samples if item.gpus]
    changes: list[str] = []
    over: list[str] = []
    read = 0
    for index in range(max((len(gpus) for _, gpus in rows), default=0)):
        cards = [(at, gpus[index]) for at, gpus in rows if index < len(gpus)]
        limits = [(at, gpu.power_limit_w) for at, gpu in cards if gpu.power_limit_w is not None]
        offsets = [(at, gpu.offset_mhz) for at, gpu in cards if gpu.offset_mhz is not None]
        read += bool(limits)
        for (_, was), (at, now) in itertools.pairwise(limits):
            if abs(now - was) > TOLERANCE_W:
                changes.append(f"GPU {index}: power limit {was:g} W, {now:g} W after {at / 60:.0f} min")
        for (_, before), (at, after) in itertools.pairwise(offsets):
            if after != before:
                changes.append(f"GPU {index}: clock offset {before:+d} MHz, {after:+d} MHz after {at / 60:.0f} min")
        highest = max((watts for _, watts in limits), default=0.0)
        if wanted is not None and highest > wanted + TOLERANCE_W:
            over.append(f"GPU {index} {highest:g} W")
    if changes:
        why = "somebody set it since, or the driver was loaded again: rates before and after are not comparable"
        found = changes[0] + (f" and {len(changes) - 1} more changes" if changes[1:] else "")
        return _fail(name, found, expected, why, *fix)
    if over and wanted is not None:
        why = "the profile's limit was not set: other rates, and cards that can fall off the bus"
        return _fail(name, f"above {wanted:g} W: {', '.join(over)}", f"at most {wanted:g} W", why, *fix)
    if read < case.profile.hardware.gpus:
        if wanted is None:
            return _skip(name, "the profile sets no power limit, and not every card states one")
        return _unknown(name, f"a power limit of {read} GPUs was read", expected, "nvidia-smi -q -d POWER")
    return _ok(name, "unchanged", expected)


def _throttle(name: str, case: _Case) -> Finding:
    if case.profile.hardware.gpus == 0:
        return _skip(name, "no GPU in this profile")
    masks = [gpu.throttle for item in case.trace.samples for gpu in item.gpus or () if gpu.throttle is not None]
    expected = "no thermal or power slowdown"
    if not masks:
        return _unknown(name, "no throttle reason was read", expected, "nvidia-smi -q -d PERFORMANCE")
    seen = [text for bit, text in _THROTTLES.items() if any(mask & bit for mask in masks)]
    if seen:
        hit = sum(any(mask & bit for bit in _THROTTLES) for mask in masks)
        why = "the card slows itself down: numbers of this run are not the machine's"
        found = f"{', '.join(seen)} in {hit} of {len(masks)} samples"
        return _fail(name, found, expected, why, "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER")
    capped = sum(bool(mask & _POWER_CAP) for mask in masks)
    if capped:
        found = f"power cap reached in {capped} of {len(masks)} samples"
        return _warn(name, found, expected, "the power limit bounds the speed", "nvidia-smi -q -d POWER")
    return _ok(name, f"none in {len(masks)} samples", expected)


def _xid(name: str, case: _Case) -> Finding:
    if case.profile.hardware.gpus == 0:
        return _skip(name, "no GPU in this profile")
    counts = [item.xid for item in case.trace.samples if item.xid is not None]
    if not counts:
        return _unknown(name, "the kernel log could not be read", "0 Xid", "sudo sysctl kernel.dmesg_restrict=0")
    # a full ring buffer forgets its oldest messages: only a growing count is a new one
    new = sum(max(0, b - a) for a, b in itertools.pairwise(counts))
    if new > 0:
        why = "the driver reported a GPU fault: results since then cannot be trusted"
        return _fail(name, f"{new} new Xid messages", "0 Xid", why, "dmesg | grep -i xid")
    return _ok(name, "0 new", "0 Xid")


def _store(name: str, case: _Case) -> Finding:
    if case.trace.start is None or not case.trace.start.store_expected:
        return _skip(name, "this profile's engine keeps its own tables, or reads shards without mapping them")
    expected = "the engine maps the Engram store all the way"
    seen = [item for item in case.trace.samples if item.store_mapped is not None]
    if not seen:
        return _unknown(name, "the mapping was never looked at", expected, "ds41ctl engram status")
    lost = next((item for item in seen if not item.store_mapped), None)
    if lost is not None:
        why = "without its tables the engine goes on, and spoils exact copies without an error"
        return _fail(
            name, f"not mapped after {_minutes(lost.at)}", expected, why, "ds41ctl engram status", "ds41ctl logs"
        )
    return _ok(name, f"mapped in {len(seen)} of {len(seen)} samples", expected)


def _increase(values: Sequence[float | None]) -> tuple[float | None, int]:
    """(growth of a counter over its known values, times it went back); a counter that was reset starts from 0."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return None, 0
    total, resets = 0.0, 0
    for before, after in itertools.pairwise(known):
        if after < before:
            resets += 1
            total += after
        else:
            total += after - before
    return total, resets


CRITERIA: tuple[tuple[str, str, Callable[[str, _Case], Finding]], ...] = (
    ("soak.complete", "the run lasted as long as planned, and the engine with it", _complete),
    ("soak.recording", "somebody was looking all the time", _recording),
    ("soak.work", "enough requests were answered to judge by", _work),
    ("soak.engine", "one engine process from start to end", _engine),
    (
        "soak.errors",
        "no request failed or timed out",
        _counted(("error", "timeout"), "failed requests", "an agent's run would have stopped there", "ds41ctl logs"),
    ),
    (
        "soak.interrupted",
        "no stream broke off",
        _counted(("interrupted",), "broken streams", "half an answer looks like a whole one", "ds41ctl logs"),
    ),
    (
        "soak.silent-empty",
        "no HTTP 200 without a token",
        _counted(("empty",), "silent empty answers", "HTTP 200 and nothing said: no client notices", "ds41ctl logs"),
    ),
    (
        "soak.tool-calls",
        "every tool call could be parsed",
        _counted(("bad-tool",), "invalid tool calls", "an agent cannot run them", "ds41ctl smoke --only tool-call"),
    ),
    ("soak.canaries", "391, the tool call, exact copies, repeats and pictures stayed right", _canaries),
    ("soak.decode", "decode did not slow down", _decode),
    ("soak.ttft", "first tokens did not come later", _ttft),
    ("soak.stall", "tokens flowed whenever requests ran", _stall),
    ("soak.tokens", "our count of tokens is the engine's", _tokens),
    ("soak.vram", "GPU memory did not grow", _vram),
    ("soak.headroom", "GPU memory was left at the highest sample", _headroom),
    ("soak.rss", "host memory did not grow", _rss),
    ("soak.kv-idle", "the KV cache came back after each drain", _kv_idle),
    ("soak.zombie", "no request was left behind", _zombie),
    ("soak.acceptance", "the drafter stayed useful", _acceptance),
    ("soak.first-acceptance", "first drafts of code in a chat were accepted", _first_acceptance),
    ("soak.clocks", "locked clocks stayed locked under load", _clocks),
    ("soak.power-limit", "power limits and clock offsets stayed as they were", _power),
    ("soak.throttle", "no card slowed itself down", _throttle),
    ("soak.xid", "the driver reported no GPU fault", _xid),
    ("soak.store", "the Engram store stayed mapped", _store),
)


def _not_proved(case: _Case, findings: Sequence[Finding]) -> tuple[str, ...]:
    """What even a pass does not say."""
    trace = case.trace
    longest = max((turn.prompt_tokens or 0 for turn in trace.turns), default=0)
    most = max((turn.streams for turn in trace.turns), default=0)
    rss = case.profile.soak.rss_gib_per_hour_max
    lines = [
        f"longer than this run: a leak below {rss:g} GiB an hour, or a fault that comes once a day, stays unseen",
        f"contexts above {longest} tokens (the profile allows {case.profile.serve.max_model_len})",
        f"more than {most} streams at once",
        "quality beyond the canaries: they find broken tables, parsers and kernels, not a weaker model",
        "another profile, engine build, driver or machine",
    ]
    skipped = [item.id for item in findings if item.status is Status.SKIP]
    if skipped:
        lines.append("what does not apply here or could not be asked: " + ", ".join(skipped))
    return tuple(lines)
