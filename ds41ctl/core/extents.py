"""Extents: which bytes of a file are there, as a sorted list of [begin, end) that never touch."""

from __future__ import annotations

import bisect
from collections.abc import Iterable


class Extents:
    """A set of byte offsets. Adding is idempotent; neighbours join."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self._spans: list[tuple[int, int]] = []
        for begin, end in spans:
            self.add(begin, end)

    def add(self, begin: int, end: int) -> None:
        """Add [begin, end). Raises ValueError for a span that is no span."""
        if not 0 <= begin <= end:
            raise ValueError(f"[{begin}, {end}) is no span")
        if begin == end:
            return
        first = bisect.bisect_left(self._spans, begin, key=lambda span: span[1])
        last = bisect.bisect_right(self._spans, end, key=lambda span: span[0])
        touched = self._spans[first:last]
        if touched:
            begin, end = min(begin, touched[0][0]), max(end, touched[-1][1])
        self._spans[first:last] = [(begin, end)]

    def missing(self, size: int) -> list[tuple[int, int]]:
        """The gaps of a file of `size` bytes, in order."""
        gaps, at = [], 0
        for begin, end in self._spans:
            if begin > at:
                gaps.append((at, min(begin, size)))
            at = max(at, end)
        if at < size:
            gaps.append((at, size))
        return [(begin, end) for begin, end in gaps if begin < end]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The spans, in order."""
        return tuple(self._spans)

    @property
    def total(self) -> int:
        """Bytes in all spans."""
        return sum(end - begin for begin, end in self._spans)

    @property
    def front(self) -> int:
        """Bytes from the start of the file without a gap."""
        return self._spans[0][1] if self._spans and self._spans[0][0] == 0 else 0

    def copy(self) -> Extents:
        """An independent copy."""
        new = Extents()
        new._spans = list(self._spans)
        return new
