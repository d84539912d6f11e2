"""Reading ahead: one thread reads what the layers will need, in their order, into a bounded number of buffers."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from ..quant import decode_mxfp4
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


class ExpertDecoder:
    """fp32 matrices of one expert at a time, in buffers that are used again and again."""

    def __init__(self) -> None:
        self._out: dict[str, Tensor] = {}
        self._scratch = torch.empty(0, dtype=torch.int32)

    def __call__(self, stem: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """w1 and w3 ``[I, hidden]``, w2 ``[hidden, I]`` of the expert ``stem``; valid until the next call."""
        if f"{stem}.w1.trellis" in tensors:
            return exl3_matrices(stem, tensors)
        w1, w3, w2 = (self._matrix(matrix, f"{stem}.{matrix}", tensors) for matrix in MATRICES)
        return w1, w3, w2

    def _matrix(self, matrix: str, stem: str, tensors: Mapping[str, Tensor]) -> Tensor:
        packed, scale = tensors[f"{stem}.weight"], tensors[f"{stem}.scale"]
        half = packed.numel()
        out = self._out.get(matrix)
        if out is None or out.numel() != 2 * half:
            out = self._out[matrix] = torch.empty(2 * half)
        if self._scratch.numel() < half:
            self._scratch = torch.empty(half, dtype=torch.int32)
        return decode_mxfp4(packed, scale, out, self._scratch[:half])


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
