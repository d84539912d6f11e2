"""Subset: some tensors of a safetensors file as a new file of the same name, and the ranges that bring them.

The new file is a function of the Hub's file and of the globs alone: its header keeps the metadata and every tensor's
name, dtype and shape, in the order of the data; the data are packed without gaps. So two fetches give the same bytes.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ds41ctl.core.tensors import Tensor

ALIGN = 8  # the format's own writers pad a header with blanks so that the data begin at a multiple of it
# policy: bytes of tensors nobody wants that are read through rather than asked around: a request of its own costs a
# round trip, in which a gigabit line brings several MiB
GAP = 1 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` bytes at `at` of the new file lie at `source` of the Hub's file."""

    at: int
    source: int
    length: int


@dataclass(frozen=True)
class Plan:
    """How a new file is made: `head` (length word and header) in front, then the pieces in order."""

    head: bytes
    pieces: tuple[Piece, ...]
    kept: int
    tensors: int

    @property
    def size(self) -> int:
        """Bytes of the new file."""
        return len(self.head) + sum(piece.length for piece in self.pieces)

    def digest(self, source: str, head_sha256: str) -> str:
        """sha256 of what the new file is made from: the Hub's file by its digest, its header, and what is kept."""
        made = hashlib.sha256(f"{source} {head_sha256} ".encode())
        made.update(self.head)
        return made.hexdigest()

    def requests(self, begin: int, end: int) -> Iterator[tuple[int, int, tuple[Piece, ...]]]:
        """Ranges [first, last) of the Hub's file that bring bytes [begin, end) of the new one, with what of each
        counts; ranges with at most GAP between them are one. The header's own part of [begin, end) needs none."""
        group: list[Piece] = []
        for piece in self._clipped(begin, end):
            if group and not 0 <= piece.source - (group[-1].source + group[-1].length) <= GAP:
                yield group[0].source, group[-1].source + group[-1].length, tuple(group)
                group = []
            group.append(piece)
        if group:
            yield group[0].source, group[-1].source + group[-1].length, tuple(group)

    def _clipped(self, begin: int, end: int) -> Iterator[Piece]:
        for piece in self.pieces:
            first, last = max(begin, piece.at), min(end, piece.at + piece.length)
            if first < last:
                yield Piece(first, piece.source + first - piece.at, last - first)


def plan(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], leave_out: Sequence[str]) -> Plan:
    """The plan for the tensors of a checked header that no glob of `leave_out` matches."""
    dropped = [re.compile(fnmatch.translate(glob)) for glob in leave_out]
    wanted = sorted(
        (t for t in tensors.values() if not any(glob.match(t.name) for glob in dropped)),
        key=lambda t: (t.begin, t.end, t.name),
    )
    tree: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    spans: list[tuple[int, int]] = []  # (begin in the Hub's file, length), neighbours joined
    at = 0
    for tensor in wanted:
        length = tensor.end - tensor.begin
        tree[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + length]}
        if spans and sum(spans[-1]) == tensor.begin:
            spans[-1] = (spans[-1][0], spans[-1][1] + length)
        elif length:
            spans.append((tensor.begin, length))
        at += length
    raw = json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % ALIGN)
    head = struct.pack("<Q", len(raw)) + raw
    pieces, at = [], len(head)
    for begin, length in spans:
        pieces.append(Piece(at, begin, length))
        at += length
    return Plan(head, tuple(pieces), len(wanted), len(tensors))
