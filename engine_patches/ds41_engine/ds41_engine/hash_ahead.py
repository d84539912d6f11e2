"""Hashing the next chunk of a prompt while the present one computes. numpy only.

Which tokens come next is a guess about the scheduler. A guess is used only where the ids that are then asked for are
the very ids that were hashed, so a wrong one costs time and never a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from .engram_hash import Int64Array

HashRows = Callable[[Int64Array, Int64Array], Int64Array]
"""Token ids and positions ``[T]`` -> row ids ``[T, layers, columns]``."""


@dataclass(frozen=True)
class _Guess:
    start: int
    ids: Int64Array
    rows: Future[Int64Array]


class HashAhead:
    """Row ids of packed sequences, those of expected ones hashed beforehand by a thread.

    Attributes:
        tokens: tokens asked for so far.
        hits: how many of them had been hashed beforehand.
    """

    def __init__(self, hash_rows: HashRows) -> None:
        self._hash = hash_rows
        self._thread = ThreadPoolExecutor(1, "engram-hash")
        self._guesses: list[_Guess] = []
        self.tokens = 0
        self.hits = 0

    def expect(self, coming: Iterable[tuple[int, Int64Array]]) -> None:
        """Begin to hash (first position, token ids of consecutive positions); earlier guesses are forgotten."""
        for guess in self._guesses:
            guess.rows.cancel()
        self._guesses = [
            _Guess(start, ids, self._thread.submit(self._hash, ids, np.arange(start, start + ids.size)))
            for start, ids in coming
        ]

    def rows(self, ids: Int64Array, positions: Int64Array, lengths: Sequence[int]) -> Int64Array:
        """Row ids ``[T, layers, columns]`` of packed sequences, ``lengths`` tokens each.

        As :meth:`ds41_engine.engram_hash.EngramHash.row_ids`: a sequence's first ``max_ngram_size - 1`` rows are right
        only where it begins at position 0.
        """
        spans = [slice(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]
        known = [self._guessed(ids[span], positions[span]) for span in spans]
        missing = [span for span, rows in zip(spans, known, strict=True) if rows is None]
        self.tokens += ids.size
        self.hits += ids.size - sum(span.stop - span.start for span in missing)
        if len(missing) == len(spans):
            return self._hash(ids, positions)
        hashed: list[Int64Array] = []
        if missing:
            together = self._hash(
                np.concatenate([ids[span] for span in missing]), np.concatenate([positions[span] for span in missing])
            )
            hashed = np.split(together, np.cumsum([span.stop - span.start for span in missing])[:-1])
        rest = iter(hashed)
        return np.concatenate([next(rest) if rows is None else rows for rows in known])

    def _guessed(self, ids: Int64Array, positions: Int64Array) -> Int64Array | None:
        for guess in self._guesses:
            if ids.size and guess.start == positions[0] and np.array_equal(guess.ids[: ids.size], ids):
                return guess.rows.result()[: ids.size]
        return None
