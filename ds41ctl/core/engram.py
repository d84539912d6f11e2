"""Engram table geometry: the primes that size the sub-tables, straight from the config's numbers; who reads what."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
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


@dataclass(frozen=True)
class Part:
    """Rows `first_row` to `first_row + rows - 1` of a table, kept in one file on NUMA node `node`.

    `size`: bytes of that file when it is a copy of the whole shard; 0 for records, whose size the rows give.
    """

    node: int
    first_row: int
    rows: int
    size: int = 0

    @property
    def bytes(self) -> int:
        """Bytes that the file holds."""
        return self.size or self.rows * RECORD_BYTES


def placement(boundaries: Sequence[tuple[int, int]], nodes: Sequence[int]) -> tuple[Part, ...]:
    """How a table is split over NUMA nodes: whole sub-tables in row order, as many on each node as can be.

    `boundaries` are (first row, last row) of its sub-tables. One node, or none known, keeps the table whole.
    """
    chosen = tuple(nodes)[: len(boundaries)] or (0,)
    parts = []
    for index, node in enumerate(chosen):
        mine = boundaries[len(boundaries) * index // len(chosen) : len(boundaries) * (index + 1) // len(chosen)]
        parts.append(Part(node, mine[0][0], mine[-1][1] + 1 - mine[0][0]))
    return tuple(parts)


def pages(size: int, page_bytes: int) -> int:
    """Pages that hold `size` bytes."""
    return -(-size // page_bytes)


def node_pages(tables: Iterable[Sequence[Part]], page_bytes: int) -> dict[int, int]:
    """Pages of `page_bytes` that tables in these parts, one file each, take on every NUMA node."""
    wanted: dict[int, int] = {}
    for parts in tables:
        for part in parts:
            wanted[part.node] = wanted.get(part.node, 0) + pages(part.bytes, page_bytes)
    return wanted


SUB_TABLES = 24  # n-gram sizes 2 to 4, 8 heads each
RAGGED_ROWS = 7_900  # just below 2 MiB: by how much equal sub-tables may put a border wrongly (the model's: 2,688 rows)


def planned_placement(rows: int, nodes: Sequence[int]) -> tuple[Part, ...]:
    """`placement` of a table whose config.json is not there yet: sub-tables of equal size, split parts a bit larger."""
    bounds = [(rows * k // SUB_TABLES, rows * (k + 1) // SUB_TABLES - 1) for k in range(SUB_TABLES)]
    parts = placement(bounds, nodes)
    extra = RAGGED_ROWS if len(parts) > 1 else 0
    return tuple(Part(part.node, part.first_row, part.rows + extra) for part in parts)


@dataclass(frozen=True)
class RankRange:
    """What one tensor-parallel rank reads of a layer's table: rows and columns, the ends not included."""

    layer: int
    rank: int
    ranks: int
    rows: tuple[int, int]
    columns: tuple[int, int]


def rank_ranges(geometry: Geometry, ranks: int) -> tuple[RankRange, ...]:
    """Every rank's share of every layer: whole sub-tables (columns), as evenly as can be, rank 0 first."""
    found = []
    for index, layer in enumerate(geometry.layers):
        bounds = geometry.boundaries(index)
        for rank in range(ranks):
            first, end = len(bounds) * rank // ranks, len(bounds) * (rank + 1) // ranks
            rows = (bounds[first][0], bounds[end - 1][1] + 1) if end > first else (0, 0)
            found.append(RankRange(layer, rank, ranks, rows, (first, end)))
    return tuple(found)


_RANK_LINE = re.compile(
    r"ds41: Engram layer (\d+): rank (\d+) of (\d+) reads rows \[(\d+), (\d+)\) columns \[(\d+), (\d+)\), "
    r"(\d+) rows proven"
)


def unproven_rank(lines: Iterable[str], wanted: Sequence[RankRange]) -> str:
    """'' when the engine's log holds each rank's line with its own range, else what is wrong in one line.

    The engine writes `ds41: Engram layer L: rank R of N reads rows [a, b) columns [c, d), K rows proven` after it has
    gathered the first and the last row of each of that rank's sub-tables and found the shard's bytes.
    """
    said: dict[tuple[int, int], RankRange] = {}
    for line in lines:
        match = _RANK_LINE.search(line)
        if match:
            layer, rank, ranks, begin, end, first, last, proven = (int(text) for text in match.groups())
            if proven:
                said[layer, rank] = RankRange(layer, rank, ranks, (begin, end), (first, last))
    for item in wanted:
        found = said.get((item.layer, item.rank))
        if found is None:
            return f"rank {item.rank} of {item.ranks} has not proven that it reads the table of layer {item.layer}"
        if found != item:
            return (
                f"rank {item.rank} reads rows {list(found.rows)} of layer {item.layer} as one of {found.ranks} ranks, "
                f"its own are {list(item.rows)} of {item.ranks}"
            )
    return ""


def parallel_sizes(argv: Sequence[str]) -> tuple[int, int]:
    """(tensor parallel, pipeline parallel) of an engine's command line; 1 where it says nothing."""
    names = (("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp"))
    sizes = [1, 1]
    for at, word in enumerate(argv):
        name, _, value = word.partition("=")
        for number, known in enumerate(names):
            text = value or (argv[at + 1] if at + 1 < len(argv) else "")
            if name in known and text.isdecimal():
                sizes[number] = int(text)
    return sizes[0], sizes[1]
