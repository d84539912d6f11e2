"""A pack's tensors by name, read from their shards with plain reads: nothing is mapped, nothing is kept."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import CheckpointError
from ..quant import decode_fp8_blocks, decode_mxfp4

INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000
READ_BYTES = 8 << 20
"""Bytes of one read call."""
GAP_BYTES = 64 << 10
"""Tensors this close together are read in one go."""

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
}
"""safetensors' names; UE8M0 scales are kept as their bytes."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor's bytes lie."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.begin

    def view(self, raw: Tensor) -> Tensor:
        """The tensor in ``raw`` (uint8, its bytes)."""
        return raw.view(DTYPES[self.dtype]).view(self.shape)


@dataclass
class Traffic:
    """What was read: bytes, and the seconds that reading took (in whichever thread)."""

    bytes: int = 0
    seconds: float = 0.0


class Shards:
    """The tensors that a pack's index names.

    Raises:
        CheckpointError: index or shard missing, damaged, or not naming each other's tensors; one line.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.traffic = Traffic()
        self._fds: dict[str, int] = {}
        self.headers: dict[str, tuple[int, str]] = {}
        """Shard -> (bytes, sha256 of its header)."""
        try:
            tree = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            named = {str(name): str(file) for name, file in tree.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"pack {folder}: expected {INDEX} with a weight_map, found {error}; run: ds41ctl fetch"
            ) from None
        found: dict[str, Entry] = {}
        for file in sorted(set(named.values())):
            found |= {entry.name: entry for entry in self._header(file) if named.get(entry.name) == file}
        missing = sorted(set(named) - set(found))
        if missing:
            raise CheckpointError(
                f"pack {folder}: expected tensor {missing[0]} in {named[missing[0]]}, found none "
                f"({len(missing)} such); run: ds41ctl fetch --verify --repair"
            )
        self.entries: Mapping[str, Entry] = found

    def _header(self, file: str) -> list[Entry]:
        path = self.folder / file
        try:
            size = path.stat().st_size
            with path.open("rb") as source:
                (length,) = struct.unpack("<Q", source.read(8))
                if length > min(MAX_HEADER, size - 8):
                    raise ValueError(f"a header of {length} bytes")
                raw = source.read(length)
            entries = []
            for name, item in json.loads(raw).items():
                if name == "__metadata__":
                    continue
                begin, end = (8 + length + int(offset) for offset in item["data_offsets"])
                if not 8 + length <= begin <= end <= size:
                    raise ValueError(f"tensor {name} outside the file")
                entries.append(Entry(name, file, str(item["dtype"]), tuple(map(int, item["shape"])), begin, end))
        except (OSError, struct.error, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"shard {path}: expected a whole safetensors file, found {error}; run: ds41ctl fetch --verify --repair"
            ) from None
        self.headers[file] = (size, hashlib.sha256(raw).hexdigest())
        return entries

    def entry(self, name: str) -> Entry:
        """Where a tensor lies; CheckpointError when the pack lacks it."""
        try:
            return self.entries[name]
        except KeyError:
            raise CheckpointError(
                f"pack {self.folder}: expected tensor {name}, found none; run: ds41ctl fetch --verify --repair"
            ) from None

    def _fd(self, file: str) -> int:
        if file not in self._fds:
            self._fds[file] = os.open(self.folder / file, os.O_RDONLY | os.O_CLOEXEC)
        return self._fds[file]

    def close(self) -> None:
        """Close the shards."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def fill(self, entries: Sequence[Entry], buffer: Tensor) -> dict[str, Tensor]:
        """Read tensors into ``buffer`` (uint8, at least :func:`span_bytes` long); views of it by name.

        The page cache is told to forget what was read: a pack larger than memory would only push out others' pages.
        """
        started = time.monotonic()
        found, at = {}, 0
        memory = memoryview(buffer.numpy())
        for file, begin, end, members in spans(entries):
            fd, done = self._fd(file), 0
            while begin + done < end:
                count = os.preadv(fd, [memory[at + done : at + min(done + READ_BYTES, end - begin)]], begin + done)
                if not count:
                    raise CheckpointError(f"shard {file}: ends at byte {begin + done}, its header says {end}")
                done += count
            os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)
            for entry in members:
                offset = at + entry.begin - begin
                raw = buffer[offset : offset + entry.size]
                # a view of a wider type needs its bytes at a multiple of its size
                found[entry.name] = entry.view(raw if not offset % 8 else raw.clone())
            at += _padded(end - begin)
            self.traffic.bytes += end - begin
        self.traffic.seconds += time.monotonic() - started
        return found

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors as they are stored, in memory of their own."""
        entries = [self.entry(name) for name in names]
        return self.fill(entries, torch.empty(span_bytes(entries), dtype=torch.uint8))

    def rows(self, name: str, ids: Iterable[int]) -> Tensor:
        """Some rows of a matrix, as stored: one read a row."""
        entry = self.entry(name)
        chosen = list(ids)
        width = entry.size // entry.shape[0] if entry.shape[0] else 0
        out = torch.empty(len(chosen) * width, dtype=torch.uint8)
        memory, fd = memoryview(out.numpy()), self._fd(entry.file)
        started = time.monotonic()
        for place, row in enumerate(chosen):
            if not 0 <= row < entry.shape[0]:
                raise CheckpointError(f"tensor {name}: expected a row below {entry.shape[0]}, found {row}")
            if os.preadv(fd, [memory[place * width : (place + 1) * width]], entry.begin + row * width) != width:
                raise CheckpointError(f"shard {entry.file}: ends within {name}")
        self.traffic.bytes += out.numel()
        self.traffic.seconds += time.monotonic() - started
        return out.view(DTYPES[entry.dtype]).view(len(chosen), *entry.shape[1:])


def spans(entries: Sequence[Entry]) -> list[tuple[str, int, int, list[Entry]]]:
    """(file, begin, end, tensors) of the reads that bring ``entries``, neighbours together."""
    found: list[tuple[str, int, int, list[Entry]]] = []
    for entry in sorted(entries, key=lambda item: (item.file, item.begin)):
        if found:
            file, begin, end, members = found[-1]
            if file == entry.file and entry.begin - end <= GAP_BYTES:
                found[-1] = (file, begin, max(end, entry.end), [*members, entry])
                continue
        found.append((entry.file, entry.begin, entry.end, [entry]))
    return found


def span_bytes(entries: Sequence[Entry]) -> int:
    """Size of the buffer that :meth:`Shards.fill` needs."""
    return sum(_padded(end - begin) for _, begin, end, _ in spans(entries))


def _padded(size: int) -> int:
    return -(-size // 64) * 64


def decoded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stored tensors as fp32 by the name of their weight: FP8 32x32 and MXFP4 with their scales, others converted."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if kind == "scale":
            if f"{stem}.weight" not in tensors:
                raise CheckpointError(f"checkpoint tensor {name}: expected its .weight beside it, found none")
            continue
        if tensor.dtype not in (torch.float8_e4m3fn, torch.int8):
            found[name] = tensor.float()
            continue
        scale = tensors.get(f"{stem}.scale")
        if scale is None:
            raise CheckpointError(f"checkpoint tensor {name}: expected its .scale beside it, found none")
        try:
            decode = decode_fp8_blocks if tensor.dtype == torch.float8_e4m3fn else decode_mxfp4
            found[name] = decode(tensor, scale)
        except ValueError as error:
            raise CheckpointError(f"checkpoint tensor {stem}: {error}; run: ds41ctl fetch --verify") from None
    return found


def digests(shards: Shards) -> dict[str, Any]:
    """What tells this pack from another: sha256 of its small files, of each shard's header, and of what was verified.

    A shard's own sha256 is taken from the sidecar that ``ds41ctl fetch`` leaves; '' where there is none, since hashing
    hundreds of gigabytes is not this program's work.
    """
    small = {}
    for name in ("config.json", "tokenizer.json", INDEX):
        path = shards.folder / name
        small[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    found = {}
    for file, (size, header) in sorted(shards.headers.items()):
        sidecar = shards.folder / f"{file}.sha256-ok"
        word = sidecar.read_text(encoding="utf-8").split(maxsplit=1)[:1] if sidecar.is_file() else []
        whole = word[0] if word and len(word[0]) == 64 else ""
        found[file] = {"bytes": size, "header_sha256": header, "sha256": whole}
    return {"files": small, "shards": found}
