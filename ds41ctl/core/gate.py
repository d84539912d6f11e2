"""The gate: is this still the same model? Divergence of two references, with intervals, and what they amount to. Pure.

The divergence of a row is KL(reference || candidate) over the tokens both sides know and one bucket for all others.
Lumping tokens together can only make it smaller, so it is a lower bound, tight where the known tokens hold nearly all
of the probability; `covered` says how much that is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Any

from ds41ctl.core.errors import ConfigError
from ds41ctl.core.reference import Reference, Scores

RESAMPLES = 2000
BLOCK = 32  # consecutive rows are drawn together: neighbours resemble each other
CONFIDENCE = 0.95
MIN_ROWS = 100  # fewer rows than this prove nothing
MIN_COVERED = 0.5  # least mean probability that both sides know
RANGES = (0, 128, 512, 1024, 4096, 16384, 65536)
SHOWN = 12  # largest rows shown
CONTEXT = 16  # tokens of text before a row
_SEED = 1017
_TINY = 1e-9


class Verdict(StrEnum):
    """What a comparison says."""

    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Row:
    """One row: its prompt (index) and position, divergence in nats, same best token, probability both sides know."""

    prompt: int
    position: int
    kl: float
    agrees: bool
    covered: float


@dataclass(frozen=True)
class Interval:
    """A mean with its bootstrap interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Group:
    """Rows taken together: a text set, a range of positions, or all."""

    name: str
    rows: int
    kl: Interval
    agreement: float


@dataclass(frozen=True)
class Largest:
    """A row that differs much, with its text."""

    prompt: str
    position: int
    kl: float
    before: str
    token: str
    reference_best: str
    candidate_best: str
    fragile: bool


@dataclass(frozen=True)
class Comparison:
    """Everything that was found."""

    verdict: Verdict
    reasons: tuple[str, ...]
    threshold: float | None
    overall: Group
    sets: tuple[Group, ...]
    ranges: tuple[Group, ...]
    largest: tuple[Largest, ...]
    covered: float
    cosines: tuple[float, ...]
    rows: tuple[Row, ...]
    left_out: tuple[str, ...]


def divergence(reference: Mapping[int, float], candidate: Mapping[int, float]) -> tuple[float, float]:
    """(KL in nats, probability of the reference that both sides know) of one row."""
    total = known_p = known_q = 0.0
    for token, log_p in reference.items():
        log_q = candidate.get(token)
        if log_q is None:
            continue
        p = math.exp(log_p)
        total += p * (log_p - log_q)
        known_p += p
        known_q += math.exp(min(log_q, 0.0))
    rest_p, rest_q = max(1.0 - known_p, 0.0), max(1.0 - known_q, _TINY)
    if rest_p > _TINY:
        total += rest_p * math.log(rest_p / rest_q)
    return max(total, 0.0), min(known_p, 1.0)


def compare_rows(reference: Reference, candidate: Reference) -> list[Row]:
    """All rows of prompts that both have. Raises ConfigError when prompts do not carry the same ids."""
    found = []
    for number, (a, b) in enumerate(zip(reference.prompts, candidate.prompts, strict=True)):
        if a.ids != b.ids:
            raise ConfigError(
                f"prompt {a.name}: the two sides do not have the same tokens; a reference is compared with one made "
                "from it"
            )
        for at in range(len(a.own)):
            kl, covered = divergence(a.row(at, reference.k), b.row(at, candidate.k))
            agrees = a.best_ids[at * reference.k] == b.best_ids[at * candidate.k]
            found.append(Row(number, at, kl, agrees, covered))
    return found


def interval(rows: Sequence[Row], resamples: int = RESAMPLES) -> Interval:
    """Mean divergence with its bootstrap interval over blocks of consecutive rows of one prompt."""
    sums: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        sums.setdefault((row.prompt, row.position // BLOCK), []).append(row.kl)
    units = [(sum(values), len(values)) for values in sums.values()]
    mean = fmean(row.kl for row in rows)
    if len(units) < 2:
        return Interval(mean, 0.0, math.inf)
    rng = random.Random(_SEED)  # noqa: S311 - repeatable, not a secret
    means = []
    for _ in range(resamples):
        drawn = rng.choices(units, k=len(units))
        means.append(sum(total for total, _ in drawn) / sum(count for _, count in drawn))
    means.sort()
    edge = int(resamples * (1 - CONFIDENCE) / 2)
    return Interval(mean, means[edge], means[-1 - edge])


def _group(name: str, rows: Sequence[Row]) -> Group:
    return Group(name, len(rows), interval(rows), fmean(row.agrees for row in rows))


def nats(value: float) -> str:
    """A divergence for people: five places, or two digits and an exponent where those would show nothing."""
    return f"{value:.5f}" if value >= 0.001 or not value else f"{value:.1e}"


def _by(rows: Iterable[Row], key: Callable[[Row], str]) -> list[Group]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return [_group(name, members) for name, members in found.items()]


def range_name(position: int) -> str:
    """`128-511`: the range that a position lies in."""
    low = max(edge for edge in RANGES if edge <= position)
    high = min((edge for edge in RANGES if edge > position), default=None)
    return f"{low}-{high - 1}" if high is not None else f"{low} on"


def compare(
    reference: Reference, candidate: Reference, threshold: float | None, left_out: Sequence[str] = ()
) -> Comparison:
    """Compare a candidate with a reference. `left_out`: prompts that could not be asked, with the reason."""
    rows = compare_rows(reference, candidate)
    if not rows:
        raise ConfigError("nothing to compare: no prompt of the reference could be asked", hints=tuple(left_out[:3]))
    overall = _group("all", rows)
    covered = fmean(row.covered for row in rows)
    verdict, reasons = judge(overall, covered, threshold)
    ranges = sorted(
        _by(rows, lambda row: range_name(row.position)), key=lambda item: int(item.name.split("-")[0].split()[0])
    )
    return Comparison(
        verdict=verdict,
        reasons=tuple(reasons),
        threshold=threshold,
        overall=overall,
        sets=tuple(_by(rows, lambda row: reference.prompts[row.prompt].set)),
        ranges=tuple(ranges),
        largest=tuple(_largest(reference, candidate, rows)),
        covered=covered,
        cosines=cosines(reference, candidate),
        rows=tuple(rows),
        left_out=tuple(left_out),
    )


def judge(overall: Group, covered: float, threshold: float | None) -> tuple[Verdict, list[str]]:
    """Different above the threshold; the same when the whole interval lies below it; else it cannot be said."""
    kl = overall.kl
    doubts = []
    if threshold is None:
        doubts.append("no threshold: the profile has no gate.kl_max; give --threshold")
    if overall.rows < MIN_ROWS:
        doubts.append(f"{overall.rows} rows, at least {MIN_ROWS} are needed")
    if covered < MIN_COVERED:
        doubts.append(
            f"both sides together know {covered:.0%} of the probability, at least {MIN_COVERED:.0%} is needed"
        )
    if threshold is not None and kl.mean > threshold and overall.rows >= MIN_ROWS:
        # a lower bound above the threshold stays above it, whatever is not known
        return Verdict.DIFFERENT, [f"mean {nats(kl.mean)} nats is above {threshold:g}", *doubts]
    if doubts:
        return Verdict.UNKNOWN, doubts
    if threshold is not None and kl.high > threshold:
        return Verdict.UNKNOWN, [f"the interval reaches {nats(kl.high)}, above {threshold:g}: more text is needed"]
    return Verdict.SAME, [f"mean {nats(kl.mean)} nats, at most {nats(kl.high)}, is below {threshold:g}"]


def _largest(reference: Reference, candidate: Reference, rows: Sequence[Row]) -> list[Largest]:
    found = []
    for row in sorted(rows, key=lambda item: -item.kl)[:SHOWN]:
        a, b = reference.prompts[row.prompt], candidate.prompts[row.prompt]
        at = row.position
        before = "".join(reference.piece(token) for token in a.ids[max(0, at + 1 - CONTEXT) : at + 1])
        found.append(
            Largest(
                prompt=f"{a.set}/{a.name}",
                position=at,
                kl=row.kl,
                before=before,
                token=reference.piece(a.ids[at + 1]),
                reference_best=reference.piece(a.best_ids[at * reference.k]),
                candidate_best=_piece(reference, candidate, b.best_ids[at * candidate.k]),
                fragile=at in a.fragile,
            )
        )
    return found


def _piece(reference: Reference, candidate: Reference, token: int) -> str:
    text = reference.piece(token)
    return text if not text.startswith("<") else candidate.piece(token)


def cosines(reference: Reference, candidate: Reference) -> tuple[float, ...]:
    """Mean cosine of the hidden states after each layer; () when one side has none or they are of other positions."""
    a, b = reference.layers, candidate.layers
    if a is None or b is None or (a.layers, a.positions, a.hidden) != (b.layers, b.positions, b.hidden):
        return ()
    return tuple(
        fmean(_cosine(a.row(layer, position), b.row(layer, position)) for position in range(a.positions))
        for layer in range(a.layers)
    )


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    dot = math.sumprod(a, b) if hasattr(math, "sumprod") else sum(x * y for x, y in zip(a, b, strict=True))
    size = math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    return dot / size if size else 1.0


@dataclass(frozen=True)
class Ranked:
    """A pack's place: its divergence from the reference, and how it differs from the best one (paired, row by row)."""

    name: str
    comparison: Comparison
    behind: Interval


def rank(compared: Mapping[str, Comparison]) -> list[Ranked]:
    """Packs by mean divergence, the nearest first. All must have the same rows."""
    order = sorted(compared.items(), key=lambda item: item[1].overall.kl.mean)
    best = order[0][1].rows
    found = []
    for name, comparison in order:
        if len(comparison.rows) != len(best):
            raise ConfigError(f"{name}: {len(comparison.rows)} rows, the others have {len(best)}; record it anew")
        differences = [
            Row(a.prompt, a.position, a.kl - b.kl, a.agrees, a.covered)
            for a, b in zip(comparison.rows, best, strict=True)
        ]
        found.append(Ranked(name, comparison, interval(differences)))
    return found


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The document of `--json`, without single rows."""

    def group(item: Group) -> dict[str, Any]:
        return {"name": item.name, "rows": item.rows, "kl": item.kl.mean, "low": item.kl.low,
                "high": None if math.isinf(item.kl.high) else item.kl.high,
                "top1_agreement": item.agreement}  # fmt: skip

    return {
        "verdict": comparison.verdict.value,
        "reasons": list(comparison.reasons),
        "threshold": comparison.threshold,
        "overall": group(comparison.overall),
        "sets": [group(item) for item in comparison.sets],
        "positions": [group(item) for item in comparison.ranges],
        "covered": comparison.covered,
        "layer_cosines": list(comparison.cosines),
        "largest": [vars(item) for item in comparison.largest],
        "left_out": list(comparison.left_out),
    }


def same_prompts(reference: Reference, chosen: Sequence[int], scores: Sequence[Scores]) -> Reference:
    """The reference with `chosen` prompts alone, each cut to the tokens that the candidate was asked for."""
    cut = tuple(
        reference.prompts[number].head(len(item.ids), reference.k) for number, item in zip(chosen, scores, strict=True)
    )
    return Reference(reference.head, cut, reference.layers, reference.sha256)
