"""Statistics of runs: medians, quantiles, and intervals that say how far a figure can be trusted. Pure, repeatable.

Everything here is non-parametric: latencies and rates have long tails, and one slow request must not move a verdict.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_SEED = 41  # resampling is part of the method: the same trace gives the same interval
_RESAMPLES = 1000
_SLOPE_POINTS = 200  # pairs grow with the square; bins keep a long run affordable


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def show(self, digits: int = 3) -> str:
        """`0.981 [0.962, 1.003]`."""
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def quantile(values: Sequence[float], q: float) -> float:
    """Quantile `q` (0 to 1) by linear interpolation. Raises ValueError for no values."""
    if not values:
        raise ValueError("a quantile of nothing")
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def p95(values: Sequence[float]) -> float:
    """The 95th percentile."""
    return quantile(values, 0.95)


def ratio(first: Sequence[float], last: Sequence[float], of: Callable[[Sequence[float]], float]) -> Interval:
    """`of`(last) / `of`(first) with a 95 % bootstrap interval. Raises ValueError when `of`(first) is not above 0."""
    base = of(first)
    if base <= 0:
        raise ValueError("a ratio to nothing")
    rng = random.Random(_SEED)  # noqa: S311 - resampling, not a secret
    drawn = []
    for _ in range(_RESAMPLES):
        bottom = of(rng.choices(first, k=len(first)))
        if bottom > 0:
            drawn.append(of(rng.choices(last, k=len(last))) / bottom)
    if not drawn:
        raise ValueError("a ratio to nothing")
    return Interval(of(last) / base, quantile(drawn, 0.025), quantile(drawn, 0.975))


def mean_difference(values: Sequence[float]) -> Interval:
    """Mean of paired differences with a 95 % bootstrap interval over the pairs. Raises ValueError for no values."""
    if not values:
        raise ValueError("a mean of nothing")
    rng = random.Random(_SEED)  # noqa: S311 - resampling, not a secret
    drawn = [statistics.fmean(rng.choices(values, k=len(values))) for _ in range(_RESAMPLES)]
    return Interval(statistics.fmean(values), quantile(drawn, 0.025), quantile(drawn, 0.975))


def slope(times: Sequence[float], values: Sequence[float]) -> Interval:
    """Theil-Sen slope (units of `values` per unit of `times`) with Sen's 95 % interval.

    Long series are reduced to medians of equal bins first. Raises ValueError for fewer than three points in time.
    """
    points = _binned(times, values)
    slopes = sorted((b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] > a[0])
    if len(points) < 3 or not slopes:
        raise ValueError("a slope needs three points in time")
    n = len(points)
    spread = 1.96 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)  # of Kendall's S
    low = max(0, round((len(slopes) - spread) / 2) - 1)
    high = min(len(slopes) - 1, round((len(slopes) + spread) / 2))
    return Interval(statistics.median(slopes), slopes[low], slopes[high])


def _binned(times: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    points = sorted(zip(times, values, strict=True))
    size = math.ceil(len(points) / _SLOPE_POINTS) if points else 1
    if size == 1:
        return points
    bins = [points[i : i + size] for i in range(0, len(points), size)]
    return [(statistics.median(t for t, _ in part), statistics.median(v for _, v in part)) for part in bins]


def fifths(begin: float, end: float, times: Sequence[float], values: Sequence[float]) -> list[list[float]]:
    """`values` by the fifth of [begin, end] their time falls into."""
    parts: list[list[float]] = [[] for _ in range(5)]
    width = (end - begin) / 5
    if width <= 0:
        return parts
    for time, value in zip(times, values, strict=True):
        if begin <= time <= end:
            parts[min(4, int((time - begin) / width))].append(value)
    return parts
