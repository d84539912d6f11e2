"""Engram table geometry: the primes that size the sub-tables, straight from the config's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

WEIGHT_BYTES = 256  # one row of F8_E4M3
SCALE_BYTES = 8  # one UE8M0 scale per 32 weights
RECORD_BYTES = WEIGHT_BYTES + SCALE_BYTES


def is_prime(number: int) -> bool:
    """Trial division; table sizes are below 2^25, so at most a few thousand divisions."""
    if number < 4:
        return number > 1
    if number % 2 == 0:
        return False
    divisor = 3
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 2
    return True


def sub_tables(layers: int, vocab_size: int, max_ngram: int, heads: int) -> list[list[int]]:
    """Rows of every sub-table, `layers` lists of (max_ngram - 1) * heads primes in row order.

    Each n-gram size starts above vocab_size - 1 and takes the next prime that no earlier sub-table of any layer
    took (DeepSeek's layout as vLLM 0.33 codes it, common/engram.py; the real model's sums are 384,006,168 and
    384,016,682 rows).
    """
    used: set[int] = set()
    tables: list[list[int]] = []
    for _ in range(layers):
        rows: list[int] = []
        for _ in range(2, max_ngram + 1):
            current = vocab_size - 1
            for _ in range(heads):
                current = next(n for n in _primes_above(current) if n not in used)
                used.add(current)
                rows.append(current)
        tables.append(rows)
    return tables


def _primes_above(number: int) -> Iterator[int]:
    candidate = number + 1
    while True:
        if is_prime(candidate):
            yield candidate
        candidate += 1


@dataclass(frozen=True)
class Geometry:
    """What a pack's config.json says about its Engram tables."""

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    sub_tables: tuple[tuple[int, ...], ...]

    def boundaries(self, index: int) -> list[tuple[int, int]]:
        """(first row, last row) of every sub-table of the index-th Engram layer."""
        found, start = [], 0
        for size in self.sub_tables[index]:
            found.append((start, start + size - 1))
            start += size
        return found


def geometry(config: dict[str, Any]) -> Geometry:
    """Geometry from a parsed config.json. Raises ValueError when keys are missing or rows and primes disagree."""
    text = config.get("text_config", config)
    try:
        layers = tuple(int(layer) for layer in text["engram_layer_ids"])
        rows = tuple(int(count) for count in text["engram_num_embeddings"])
        tables = sub_tables(
            len(layers),
            int(text["engram_vocab_size"]),
            int(text["engram_max_ngram_size"]),
            int(text["engram_n_heads"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"config.json lacks a usable Engram description: {error}") from None
    sums = tuple(sum(table) for table in tables)
    if sums != rows:
        raise ValueError(f"engram_num_embeddings {rows} differs from the sums of the hash primes {sums}")
    return Geometry(layers, rows, tuple(tuple(table) for table in tables))
