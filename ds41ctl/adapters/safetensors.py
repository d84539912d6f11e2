"""safetensors headers: read with a length cap and checked whole, without loading a byte of data."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from ds41ctl.core.errors import IntegrityError
from ds41ctl.core.tensors import DTYPE_BITS, Tensor

__all__ = ["Tensor", "header_length", "parse_header", "read_header", "read_index"]

WORD = 8  # bytes of the length in front of the header
HEADER_CAP = 100 << 20  # the format's own limit


def read_header(path: Path) -> dict[str, Tensor]:
    """Tensors of a shard by name. Raises IntegrityError as `parse_header` does."""
    try:
        size = path.stat().st_size
        with path.open("rb") as source:
            length = header_length(source.read(WORD), size, path.name)
            raw = source.read(length)
    except OSError as error:
        raise IntegrityError(f"{path.name}: cannot be read: {error.strerror}") from None
    return parse_header(raw, size, path.name)[0]


def header_length(word: bytes, size: int, what: str) -> int:
    """Bytes of the header behind the length word of a file of `size` bytes. Raises IntegrityError."""
    if len(word) < WORD:
        raise IntegrityError(f"{what}: {size} bytes is too short for a safetensors file")
    (length,) = struct.unpack("<Q", word)
    if not 2 <= length <= HEADER_CAP or length > size - WORD:
        raise IntegrityError(f"{what}: header length {length} is impossible in a file of {size} bytes")
    return int(length)


def parse_header(raw: bytes, size: int, what: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors by name, metadata) of the header `raw` of a file of `size` bytes.

    Raises IntegrityError with one line when it does not describe a whole safetensors file: JSON, no name twice, every
    tensor as long as its dtype and shape say, offsets contiguous from 0, and file size equal to 8 + header + data.
    """
    try:
        tree = json.loads(raw, object_pairs_hook=_no_name_twice)
        spans = _spans(tree)
        metadata = {str(key): str(value) for key, value in tree.get("__metadata__", {}).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise IntegrityError(f"{what}: the safetensors header cannot be read: {error}") from None
    start = WORD + len(raw)
    expected = 0
    for begin, end, name in sorted((t.begin, t.end, t.name) for t in spans):
        if begin != expected or end < begin:
            raise IntegrityError(f"{what}: tensor {name} starts at {begin}, expected {expected}")
        expected = end
    for t in spans:
        wanted = (math.prod(t.shape) * DTYPE_BITS[t.dtype] + 7) // 8 if t.dtype in DTYPE_BITS else None
        if wanted is not None and wanted != t.end - t.begin:
            raise IntegrityError(
                f"{what}: tensor {t.name} has {t.end - t.begin} bytes, {t.dtype} {list(t.shape)} takes {wanted}"
            )
    if start + expected != size:
        raise IntegrityError(f"{what}: {size} bytes, but its header describes {start + expected}")
    return {t.name: Tensor(t.name, t.dtype, t.shape, start + t.begin, start + t.end) for t in spans}, metadata


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ValueError("a name stands twice")
    return tree


def _spans(tree: dict[str, Any]) -> list[Tensor]:
    found = []
    for name, item in tree.items():
        if name == "__metadata__":
            continue
        begin, end = item["data_offsets"]
        found.append(Tensor(name, str(item["dtype"]), tuple(int(n) for n in item["shape"]), int(begin), int(end)))
    return found


def read_index(path: Path) -> dict[str, str]:
    """weight_map of model.safetensors.index.json. Raises IntegrityError when it is missing or not an index."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_name_twice)
        return {str(name): str(file) for name, file in tree["weight_map"].items()}
    except FileNotFoundError:
        raise IntegrityError(f"{path.name} is missing") from None
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise IntegrityError(f"{path.name}: not a safetensors index: {error}") from None
