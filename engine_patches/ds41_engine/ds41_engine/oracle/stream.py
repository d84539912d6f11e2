"""Reading ahead: one thread reads what the layers will need, in their order, into a bounded number of buffers."""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..backbone import clamped_swiglu
from ..quant import FP4_GROUP, decode_mxfp4
from .rounding import Rounding
from .shards import Entry, Shards, span_bytes

MATRICES = ("w1", "w3", "w2")


class Pending:
    """Tensors that are being read. Take them once, then release the buffer they lie in."""

    def __init__(self, future: Future[tuple[dict[str, Tensor], Tensor | None]], free: queue.SimpleQueue[Tensor | None]):
        self._future, self._free = future, free

    def take(self) -> dict[str, Tensor]:
        """The tensors, as stored; waits for them."""
        return self._future.result()[0]

    def release(self) -> None:
        """Give the buffer back (also of a read that nobody took)."""
        if self._future.cancel():
            return
        try:
            buffer = self._future.result()[1]
        except CancelledError:
            return
        if buffer is not None:
            self._free.put(buffer)


class ReadAhead:
    """A reading thread and its buffers.

    Args:
        shards: what is read.
        slots: buffers for experts.
        slot_bytes: size of one, the largest expert's.
    """

    def __init__(self, shards: Shards, slots: int, slot_bytes: int) -> None:
        self._shards = shards
        self._free: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        for _ in range(slots):
            self._free.put(torch.empty(slot_bytes, dtype=torch.uint8))
        self._thread = ThreadPoolExecutor(1, "read-ahead")

    def expert(self, entries: Sequence[Entry]) -> Pending:
        """Read one expert as soon as a buffer is free."""
        return Pending(self._thread.submit(self._into_slot, list(entries)), self._free)

    def whole(self, entries: Sequence[Entry]) -> Pending:
        """Read tensors into memory of their own."""
        return Pending(self._thread.submit(self._alone, list(entries)), self._free)

    def _into_slot(self, entries: list[Entry]) -> tuple[dict[str, Tensor], Tensor | None]:
        buffer = self._free.get()
        if buffer is None:
            raise CancelledError
        try:
            return self._shards.fill(entries, buffer), buffer
        except BaseException:
            self._free.put(buffer)
            raise

    def _alone(self, entries: list[Entry]) -> tuple[dict[str, Tensor], Tensor | None]:
        return self._shards.fill(entries, torch.empty(span_bytes(entries), dtype=torch.uint8)), None

    def close(self) -> None:
        """End the thread, whatever it waits for."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._free.put(None)
        self._thread.shutdown(wait=True)


FEW_ROWS = 32
"""Up to this many rows an MXFP4 matrix is decoded and multiplied row by row in the cache, beyond it decoded whole."""


def compiled(path: Path | None) -> ctypes.CDLL | None:
    """The compiled loops of ds41_kernels; None where they are not to be had, and torch does their work."""
    try:
        import ds41_kernels

        return ds41_kernels.load(path)
    except Exception:  # not installed, not compiled, of another version: all the same here
        return None


class Experts:
    """What single experts make of their tokens; buffers are used again and again.

    Args:
        library: from :func:`compiled`.
        threads: that share a matrix.
    """

    def __init__(self, library: ctypes.CDLL | None, threads: int) -> None:
        self._library, self._threads = library, threads
        self._pool = ThreadPoolExecutor(threads, "experts")
        self._out: dict[str, Tensor] = {}
        self._scratch = torch.empty(0, dtype=torch.int32)

    @property
    def kind(self) -> str:
        """How few rows are multiplied; part of the result's bits."""
        return "torch" if self._library is None else "compiled"

    def feed(self, stem: str, tensors: Mapping[str, Tensor], x: Tensor, limit: float, rounding: Rounding) -> Tensor:
        """The expert ``stem`` of ``x [T, hidden]`` -> ``[T, hidden]``."""
        exl3 = f"{stem}.w1.trellis" in tensors
        whole = dict(zip(MATRICES, exl3_matrices(stem, tensors), strict=True)) if exl3 else {}

        def linear(matrix: str, rows: Tensor) -> Tensor:
            if exl3:
                return F.linear(rows, whole[matrix])
            codes, scale = tensors[f"{stem}.{matrix}.weight"], tensors[f"{stem}.{matrix}.scale"]
            if self._library is not None and rows.shape[0] <= FEW_ROWS:
                return self._few(self._library, codes, scale, rows)
            return F.linear(rows, self._decoded(matrix, codes, scale))

        rows = rounding.matrix_input(x)
        inside = clamped_swiglu(linear("w1", rows), linear("w3", rows), limit)
        return linear("w2", rounding.matrix_input(inside))

    def _few(self, library: ctypes.CDLL, codes: Tensor, scale: Tensor, x: Tensor) -> Tensor:
        outputs, inputs = codes.shape[0], 2 * codes.shape[1]
        if scale.shape != (outputs, inputs // FP4_GROUP) or x.shape[1] != inputs or inputs % FP4_GROUP:
            raise ValueError(
                f"MXFP4: scales {tuple(scale.shape)} do not fit {outputs}x{inputs} for {x.shape[1]} inputs"
            )
        if bool((scale == 255).any()):
            raise ValueError("UE8M0 scale: expected bytes 0..254, found 255 (NaN); the tensor is damaged")
        x, codes, scale = x.contiguous(), codes.contiguous(), scale.contiguous()
        out = torch.empty(x.shape[0], outputs)

        def part(number: int) -> int:
            first, end = outputs * number // self._threads, outputs * (number + 1) // self._threads
            status: int = library.ds41_mxfp4_linear(
                codes.data_ptr(),
                scale.data_ptr(),
                first,
                end,
                outputs,
                inputs,
                x.data_ptr(),
                x.shape[0],
                out.data_ptr(),
            )
            return status

        if any(self._pool.map(part, range(self._threads)) if self._threads > 1 else (part(0),)):
            raise MemoryError("MXFP4: no memory for a row")
        return out

    def _decoded(self, matrix: str, codes: Tensor, scale: Tensor) -> Tensor:
        half = codes.numel()
        out = self._out.get(matrix)
        if out is None or out.numel() != 2 * half:
            out = self._out[matrix] = torch.empty(2 * half)
        if self._scratch.numel() < half:
            self._scratch = torch.empty(half, dtype=torch.int32)
        return decode_mxfp4(codes, scale, out, self._scratch[:half])


def exl3_matrices(stem: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The fp32 matrices of an EXL3 expert: its tiles decoded, both rotations undone, its scales applied.

    Raises:
        ValueError: ds41_kernels, which knows the format, is not there, or a tensor does not fit; one line.
    """
    try:
        from ds41_kernels import exl3
    except ImportError:
        raise ValueError("EXL3 experts need ds41_kernels beside ds41_engine") from None
    expert = exl3.Exl3Expert.from_tensors(stem, {name: tensor.numpy() for name, tensor in tensors.items()})
    rotation = torch.from_numpy(exl3.hadamard(np.eye(exl3.HADAMARD))).float()
    made = []
    for layer in (expert.w1, expert.w3, expert.w2):
        tiles = torch.from_numpy(layer.decoded()).float()
        inputs, outputs = tiles.shape
        turned = (rotation @ tiles.view(-1, exl3.HADAMARD, outputs)).view(-1, exl3.HADAMARD) @ rotation
        scaled = turned.view(inputs, outputs) * torch.from_numpy(layer.suh).float()[:, None]
        made.append((scaled * torch.from_numpy(layer.svh).float()[None]).t().contiguous())
    return made[0], made[1], made[2]
