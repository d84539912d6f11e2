"""safetensors headers: read with a length cap and checked whole, without loading a byte of data."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds41ctl.core.errors import IntegrityError

HEADER_CAP = 100 << 20  # the format's own limit


@dataclass(frozen=True)
class Tensor:
    """One tensor: `begin` and `end` are absolute file offsets in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Tensor]:
    """Tensors of a shard by name.

    Raises IntegrityError with one line when the file is not a whole safetensors file: length word, JSON, offsets
    contiguous from 0, and file size equal to 8 + header + data.
    """
    size = path.stat().st_size
    with path.open("rb") as source:
        word = source.read(8)
        if len(word) < 8:
            raise IntegrityError(f"{path.name}: {size} bytes is too short for a safetensors file")
        (length,) = struct.unpack("<Q", word)
        if not 2 <= length <= HEADER_CAP or length > size - 8:
            raise IntegrityError(f"{path.name}: header length {length} is impossible in a file of {size} bytes")
        raw = source.read(length)
    try:
        tree = json.loads(raw)
        spans = _spans(tree)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise IntegrityError(f"{path.name}: the safetensors header cannot be read: {error}") from None
    start = 8 + length
    expected = 0
    for begin, end, name in sorted((t.begin, t.end, t.name) for t in spans):
        if begin != expected or end < begin:
            raise IntegrityError(f"{path.name}: tensor {name} starts at {begin}, expected {expected}")
        expected = end
    if start + expected != size:
        raise IntegrityError(f"{path.name}: {size} bytes, but its header describes {start + expected}")
    return {t.name: Tensor(t.name, t.dtype, t.shape, start + t.begin, start + t.end) for t in spans}


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
        tree = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): str(file) for name, file in tree["weight_map"].items()}
    except FileNotFoundError:
        raise IntegrityError(f"{path.name} is missing") from None
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise IntegrityError(f"{path.name}: not a safetensors index: {error}") from None
