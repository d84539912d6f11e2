"""Writing a reference file: what a model thinks of fixed prompts.

Layout, little-endian: 8 bytes magic, uint32 length and zlib of a JSON header, then the blocks that the header places
(zlib, offsets from the end of the header), then the sha256 of everything before it. A prompt's block holds, for n
tokens and k kept: ids int32[n], own float32[n-1], tail float32[n-1], best ids int32[(n-1) * k], best
float32[(n-1) * k]. Row p is about token p + 1: ``own`` is its log-probability, ``best`` the k highest in falling order,
``tail`` the probability of all others together. The block ``layers``, when there is one, is float16
``[layers, positions, hidden]``.
``ds41ctl`` reads it (``ds41ctl/core/reference.py``).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"DS41REF1"
FORMAT = 1


@dataclass(frozen=True)
class Scored:
    """What is known of one prompt; shapes as in the file."""

    ids: Sequence[int]
    own: NDArray[np.float32]
    tail: NDArray[np.float32]
    best_ids: NDArray[np.int32]
    best: NDArray[np.float32]

    def block(self) -> bytes:
        """The block's bytes."""
        parts = (
            np.asarray(self.ids, dtype="<i4"),
            self.own.astype("<f4"),
            self.tail.astype("<f4"),
            self.best_ids.astype("<i4"),
            self.best.astype("<f4"),
        )
        return zlib.compress(b"".join(np.ascontiguousarray(part).tobytes() for part in parts), 6)


def write(
    path: Path,
    head: Mapping[str, Any],
    prompts: Sequence[Mapping[str, Any]],
    scored: Sequence[Scored],
    layers: NDArray[np.float16] | None,
) -> str:
    """Write and publish a reference; the same input gives the same bytes. Returns the file's sha256.

    ``head`` is the header without ``prompts``; each of ``prompts`` gets ``tokens``, ``offset`` and ``bytes``.
    """
    blocks = [item.block() for item in scored]
    entries, at = [], 0
    for meta, item, block in zip(prompts, scored, blocks, strict=True):
        entries.append({**meta, "tokens": len(item.ids), "offset": at, "bytes": len(block)})
        at += len(block)
    tree: dict[str, Any] = {**head, "format": FORMAT, "prompts": entries}
    if layers is not None:
        blocks.append(zlib.compress(layers.astype("<f2").tobytes(), 6))
        tree["layers"] = {"shape": list(layers.shape), "offset": at, "bytes": len(blocks[-1])}
    header = zlib.compress(json.dumps(tree, sort_keys=True, ensure_ascii=False).encode(), 9)
    body = b"".join((MAGIC, struct.pack("<I", len(header)), header, *blocks))
    body += hashlib.sha256(body).digest()
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as target:
        target.write(body)
        target.flush()
        os.fsync(target.fileno())
    part.replace(path)
    return hashlib.sha256(body).hexdigest()
