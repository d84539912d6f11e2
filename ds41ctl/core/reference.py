"""Reference files: what a model thought of fixed prompts, read and written without torch or numpy.

The layout is described where the oracle writes it (engine_patches/ds41_engine, oracle/reference.py); a test reads one
with the other. Rows are about the next token: row p belongs to token p + 1.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds41ctl.core.errors import IntegrityError

MAGIC = b"DS41REF1"
FORMAT = 1
_DIGEST = 32
_MAX_HEADER = 256 << 20  # bytes of JSON; texts and pictures are in it


@dataclass(frozen=True)
class Scores:
    """One prompt of n tokens, k kept: `own`, `tail` [n-1], `best_ids`, `best` [(n-1) * k], in falling order.

    `fragile`: rows that hang on a choice which rounding can turn over. `source`: the conversation with its pictures,
    for a prompt that ids cannot express.
    """

    set: str
    name: str
    ids: array[int]
    own: array[float]
    tail: array[float]
    best_ids: array[int]
    best: array[float]
    fragile: frozenset[int] = frozenset()
    source: Mapping[str, Any] | None = None

    def row(self, at: int, k: int) -> dict[int, float]:
        """Token -> log-probability of what is known at a row: the k best, and the prompt's own next token."""
        span = slice(at * k, (at + 1) * k)
        known = dict(zip(self.best_ids[span], self.best[span], strict=True))
        known[self.ids[at + 1]] = self.own[at]
        return known

    def head(self, tokens: int, k: int) -> Scores:
        """The first `tokens` tokens alone: what comes later changes nothing about them."""
        rows = tokens - 1
        return Scores(
            self.set, self.name, self.ids[:tokens], self.own[:rows], self.tail[:rows],
            self.best_ids[: rows * k], self.best[: rows * k], self.fragile, self.source,
        )  # fmt: skip


@dataclass(frozen=True)
class Layers:
    """Hidden states [layers, positions, hidden] of some positions after every layer."""

    layers: int
    positions: int
    hidden: int
    values: array[float] = field(repr=False)

    def row(self, layer: int, position: int) -> array[float]:
        """One hidden state."""
        at = (layer * self.positions + position) * self.hidden
        return self.values[at : at + self.hidden]


@dataclass(frozen=True)
class Reference:
    """A reference: its header, its prompts, and the sha256 of the file."""

    head: Mapping[str, Any]
    prompts: tuple[Scores, ...]
    layers: Layers | None = None
    sha256: str = ""

    @property
    def k(self) -> int:
        """Tokens kept of each row."""
        return int(self.head["k"])

    @property
    def kind(self) -> str:
        """`oracle` or `engine`."""
        return str(self.head.get("kind", ""))

    def piece(self, token: int) -> str:
        """A token's text; its number in angle brackets where the file has none."""
        return str(self.head.get("pieces", {}).get(str(token), f"<{token}>"))


def parse(raw: bytes, where: str) -> Reference:
    """Reference of a file's bytes.

    Raises IntegrityError with one line: not a reference, of another version, cut off, or changed since it was written.
    """
    if raw[: len(MAGIC)] != MAGIC:
        raise IntegrityError(f"{where}: not a reference file of this version (expected {MAGIC.decode()} at its start)")
    if len(raw) < len(MAGIC) + 4 + _DIGEST or hashlib.sha256(raw[:-_DIGEST]).digest() != raw[-_DIGEST:]:
        raise IntegrityError(f"{where}: cut off or changed since it was written", hints=("ds41ctl gate record",))
    (length,) = struct.unpack_from("<I", raw, len(MAGIC))
    base = len(MAGIC) + 4 + length
    try:
        head = json.loads(_inflate(raw[len(MAGIC) + 4 : base], _MAX_HEADER))
        if head["format"] != FORMAT:
            raise IntegrityError(f"{where}: format {head['format']}, this version reads {FORMAT}")
        k = int(head["k"])
        prompts = tuple(_scores(raw, base, item, k) for item in head["prompts"])
        layers = _layers(raw, base, head["layers"]) if "layers" in head else None
    except (KeyError, TypeError, ValueError, struct.error, zlib.error) as error:
        raise IntegrityError(f"{where}: not a whole reference: {type(error).__name__} {error}") from None
    return Reference({k: v for k, v in head.items() if k not in ("prompts", "layers")}, prompts, layers,
                     hashlib.sha256(raw).hexdigest())  # fmt: skip


def dump(reference: Reference) -> bytes:
    """The file's bytes (hidden states are left out: only oracles have them, and they write their own files)."""
    blocks, entries, at = [], [], 0
    for item in reference.prompts:
        parts = (item.ids, item.own, item.tail, item.best_ids, item.best)
        block = zlib.compress(b"".join(_little(part) for part in parts), 6)
        entry: dict[str, Any] = {"set": item.set, "name": item.name, "tokens": len(item.ids), "offset": at,
                                 "bytes": len(block), "fragile": sorted(item.fragile)}  # fmt: skip
        if item.source is not None:
            entry["source"] = item.source
        entries.append(entry)
        blocks.append(block)
        at += len(block)
    tree = {**reference.head, "format": FORMAT, "prompts": entries}
    header = zlib.compress(json.dumps(tree, sort_keys=True, ensure_ascii=False).encode(), 9)
    body = b"".join((MAGIC, struct.pack("<I", len(header)), header, *blocks))
    return body + hashlib.sha256(body).digest()


def scores(
    set: str, name: str, ids: Sequence[int], rows: Sequence[Mapping[int, float]], k: int,
    source: Mapping[str, Any] | None = None,
) -> Scores:  # fmt: skip
    """Scores from token -> log-probability mappings, one a row; each must know the prompt's next token.

    A row with fewer than `k` tokens is filled up with token -1 of no probability.
    """
    own, tail, best_ids, best = array("f"), array("f"), array("i"), array("f")
    for at, row in enumerate(rows):
        ordered = sorted(row.items(), key=lambda item: (-item[1], item[0]))[:k]
        ordered += [(-1, -1e30)] * (k - len(ordered))
        own.append(row[ids[at + 1]])
        best_ids.extend(token for token, _ in ordered)
        best.extend(value for _, value in ordered)
        tail.append(max(0.0, 1 - sum(math.exp(max(value, -745.0)) for _, value in ordered)))
    return Scores(set, name, array("i", ids), own, tail, best_ids, best, frozenset(), source)


def _inflate(data: bytes, cap: int) -> bytes:
    inflater = zlib.decompressobj()
    found = inflater.decompress(data, cap)
    if inflater.unconsumed_tail or not inflater.eof:
        raise ValueError(f"a part of more than {cap} bytes, or cut off")
    return found


def _little(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def _take(data: memoryview, code: str, at: int, count: int) -> tuple[array[Any], int]:
    found: array[Any] = array(code)
    end = at + count * found.itemsize
    if end > len(data):
        raise ValueError("a block that is too short")
    found.frombytes(data[at:end])
    if sys.byteorder == "big":
        found.byteswap()
    return found, end


def _scores(raw: bytes, base: int, item: Mapping[str, Any], k: int) -> Scores:
    tokens = int(item["tokens"])
    rows = tokens - 1
    size = 4 * (tokens + 2 * rows + 2 * rows * k)
    begin = base + int(item["offset"])
    data = memoryview(_inflate(raw[begin : begin + int(item["bytes"])], size))
    if len(data) != size or rows < 1:
        raise ValueError(f"prompt {item['name']}: {len(data)} bytes, expected {size}")
    ids, at = _take(data, "i", 0, tokens)
    own, at = _take(data, "f", at, rows)
    tail, at = _take(data, "f", at, rows)
    best_ids, at = _take(data, "i", at, rows * k)
    best, at = _take(data, "f", at, rows * k)
    fragile = frozenset(int(position) for position in item.get("fragile", ()))
    return Scores(str(item["set"]), str(item["name"]), ids, own, tail, best_ids, best, fragile, item.get("source"))


def _layers(raw: bytes, base: int, item: Mapping[str, Any]) -> Layers:
    layers, positions, hidden = (int(n) for n in item["shape"])
    count = layers * positions * hidden
    begin = base + int(item["offset"])
    data = _inflate(raw[begin : begin + int(item["bytes"])], 2 * count)
    if len(data) != 2 * count:
        raise ValueError(f"hidden states: {len(data)} bytes, expected {2 * count}")
    return Layers(layers, positions, hidden, array("f", struct.unpack(f"<{count}e", data)))
