"""Engram rows of one tensor-parallel rank: it reads its own sub-tables' rows, and the ranks exchange what they read.

The columns of a token's row ids (one per n-gram size and head) are dealt out to the ranks in order, whole sub-tables
each, as upstream shards the heads. A rank can read nothing but its own rows: an id outside them is an error, not a
wrong row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .backbone import RowLookup
from .engram_hash import EngramHash, Int64Array
from .quant import decode_engram_records
from .store import RECORD_BYTES, EngramStore, StoreError, shard_rows

AHEAD_ROWS = 1024
"""From this many rows a layer on, rows are gathered by a thread of their own while earlier layers compute."""

AllGather = Callable[[Tensor], Tensor]
"""``[T, columns, n]`` of this rank -> ``[T, ranks * columns, n]`` of all, in the order of the ranks."""


class EngramRows:
    """The rows that one rank reads.

    Args:
        store: an opened store; restricted here to this rank's rows.
        hashing: the model's hash, for the sub-tables' sizes.
        rank: this rank, 0-based.
        ranks: how many there are; at most as many as columns.
        all_gather: exchanges the ranks' rows; not called when there is one rank.

    Raises:
        StoreError: more ranks than columns.
    """

    def __init__(
        self, store: EngramStore, hashing: EngramHash, rank: int, ranks: int, all_gather: AllGather | None = None
    ) -> None:
        columns = hashing.offsets.shape[1]
        if not 0 <= rank < ranks <= columns:
            raise StoreError(
                f"--tensor-parallel-size: expected at most {columns} (Engram columns), found {ranks}; use fewer ranks"
            )
        self.store = store
        self.rank, self.ranks, self.columns = rank, ranks, columns
        self.first, self.end = columns * rank // ranks, columns * (rank + 1) // ranks
        self._widest = -(-columns // ranks)
        self._all_gather = all_gather
        self._spans = {
            layer: (int(hashing.offsets[index, self.first]), self._stop(hashing, index))
            for index, layer in enumerate(hashing.layer_ids)
        }
        store.restrict({layer: span for layer, span in self._spans.items() if layer in store.layers})
        # first and last row of each sub-table [2, columns]: what a rank proves that it reads
        last = hashing.offsets + hashing.primes.reshape(hashing.offsets.shape) - 1
        self._borders = {
            layer: np.stack((hashing.offsets[index], last[index])) for index, layer in enumerate(hashing.layer_ids)
        }
        self._buffers: dict[int, NDArray[np.uint8]] = {}
        self._ahead: dict[int, Future[NDArray[np.uint8]]] = {}
        self._thread = ThreadPoolExecutor(1, "engram-ahead")

    def _stop(self, hashing: EngramHash, index: int) -> int:
        last = self.end - 1
        return int(hashing.offsets[index, last] + hashing.primes[index].reshape(-1)[last])

    def span(self, layer: int) -> tuple[int, int]:
        """Rows of ``layer`` that this rank reads, the end not included."""
        return self._spans[layer]

    def _own(self, row_ids: Int64Array) -> Int64Array:
        """This rank's columns of ``[T, columns]``."""
        return np.ascontiguousarray(row_ids[:, self.first : self.end])

    def prove(self, layer: int, pack: Path) -> int:
        """Gather the first and last row of each of this rank's sub-tables and compare them with the shard.

        Goes the way every lookup goes. Returns how many rows were compared: 0 when the shard is not there.

        Raises:
            StoreError: a row has other bytes than the shard.
        """
        ids = self._own(self._borders[layer])
        expected = shard_rows(pack, layer, ids.reshape(-1).tolist())
        if expected is None:
            return 0
        found = self.store.gather(layer, ids).reshape(-1, RECORD_BYTES)
        for row, record, wanted in zip(ids.reshape(-1).tolist(), found, expected, strict=True):
            if record.tobytes() != wanted:
                raise StoreError(
                    f"Engram layer {layer}: rank {self.rank} of {self.ranks} read other bytes for row {row}: expected "
                    "the shard's, found another row's; run: ds41ctl engram verify --full"
                )
        return ids.size

    def start(self, row_ids: Int64Array, layers: Iterable[int]) -> None:
        """Begin to gather ``[T, layers, columns]`` for layers that compute later, those of other stages left out."""
        for index, layer in enumerate(layers):
            if layer not in self.store.layers:
                continue
            own = self._own(row_ids[:, index])
            if own.size >= AHEAD_ROWS:
                self._ahead[layer] = self._thread.submit(self._gather, layer, own)

    def _gather(self, layer: int, own: Int64Array) -> NDArray[np.uint8]:
        """This rank's rows, in the layer's buffer: good until the layer's next gather."""
        needed = own.size * RECORD_BYTES
        buffer = self._buffers.get(layer)
        if buffer is None or buffer.size < needed:
            buffer = self._buffers[layer] = np.empty(needed, dtype=np.uint8)
        return self.store.gather(layer, own, buffer[:needed].reshape(*own.shape, RECORD_BYTES))

    def lookup(self, layer: int) -> RowLookup:
        """``[T, columns]`` int64 -> decoded rows ``[T, columns, 256]`` fp32, the same on every rank."""

        def decoded(row_ids: Tensor) -> Tensor:
            begun = self._ahead.pop(layer, None)
            mine = begun.result() if begun is not None else self._gather(layer, self._own(row_ids.numpy()))
            return decode_engram_records(self._exchange(torch.from_numpy(mine)))

        return decoded

    def _exchange(self, mine: Tensor) -> Tensor:
        if self.ranks == 1 or self._all_gather is None:
            return mine
        # as floats: the CPU platform's exchange knows no bytes and copies; a rank with a column less sends an empty one
        words = F.pad(mine.view(torch.float32), (0, 0, 0, self._widest - mine.shape[1]))
        everything = self._all_gather(words.contiguous()).view(torch.uint8)
        pieces = [
            everything[:, rank * self._widest : rank * self._widest + self._width(rank)] for rank in range(self.ranks)
        ]
        return torch.cat(pieces, 1)

    def _width(self, rank: int) -> int:
        return self.columns * (rank + 1) // self.ranks - self.columns * rank // self.ranks
