"""Attention for serving: rows of each request in a paged cache, bit-identical under any chunking and batching.

One fp32 row per token and layer::

    [ window key: D | kv source: raw compressor row or finished group | ... | first layer: token id ]

In a kv source the second part of a group's LAST token holds the finished compressed key (D) and index key; the other
tokens of the group hold their raw compressor rows until the group is complete. So nothing is ever compressed twice, and
a prefix-cache hit brings everything along. The token id in the last column of the first layer (of each pipeline stage;
exact in fp32 below 2**24) gives the n-gram hash its lookback across chunks and prefix hits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .backbone import KEY_TILE, ROW_TILE, Attention, candidate_mask, index_scores, tiled_attention, top_k_mask
from .rope import RotaryTables
from .shape import BackboneShape

SCORE_ROWS = 64
"""Queries whose index scores are computed at a time; bounds the scratch memory at long context."""


def row_width(shape: BackboneShape) -> int:
    """fp32 values per token and layer: all layers have the same width, so they share one paged pool."""
    second = 0
    for layer in shape.kv_source_layer_ids:
        if layer < shape.num_hidden_layers:
            raw = shape.head_dim * (2 if shape.ratio(layer) > 1 else 1)
            second = max(second, raw, shape.head_dim + shape.index_head_dim)
    return -(-(shape.head_dim + second + 1) // 16) * 16


@dataclass(frozen=True)
class RequestRows:
    """One request's part of a batch.

    Attributes:
        begin, end: its rows of the batch.
        length: tokens of the request up to and including the last of these rows.
        slots: cache row of every position ``0 .. length-1``, int64.
    """

    begin: int
    end: int
    length: int
    slots: Tensor

    @property
    def first(self) -> int:
        """Position of the first row."""
        return self.length - (self.end - self.begin)


class PagedBatch:
    """``AttentionContext`` over the paged row cache.

    Args:
        shape: backbone shape.
        rope: the backbone's tables.
        requests: the requests, together covering rows ``0 .. n-1`` of the batch. Rows from ``n`` on are padding.
        caches: per layer the cache as ``[slots, row_width(shape)]`` fp32; anything for layers of other stages.
        positions: ``[T]`` positions, padding rows 0.
        first_layer: first layer of this pipeline stage; its rows keep the token ids.
    """

    def __init__(
        self,
        shape: BackboneShape,
        rope: RotaryTables,
        requests: Sequence[RequestRows],
        caches: Sequence[Tensor],
        positions: Tensor,
        first_layer: int = 0,
    ) -> None:
        self.shape = shape
        self.rope = rope
        self.first_layer = first_layer
        self.requests = requests
        self.caches = caches
        self.positions = positions
        self.rows = max((request.end for request in requests), default=0)
        self.new_slots = torch.cat([request.slots[request.first :] for request in requests])
        self._source_layer = -1
        self._group_keys: list[Tensor] = []
        self._selected: list[Tensor] = []
        self._candidates: list[Tensor | None] = [None] * len(requests)

    def lookback(self, token_ids: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Store the batch's token ids and return them with each request's ``depth`` predecessors.

        Returns:
            Token ids and positions of the extended rows, packed by request, and the rows of the batch among them.
        """
        column = self.caches[self.first_layer][:, -1]
        column[self.new_slots] = token_ids[: self.rows].to(column.dtype)
        ids, positions, wanted = [], [], []
        offset = 0
        for request in self.requests:
            start = max(0, request.first - depth)
            ids.append(column[request.slots[start:]].long())
            positions.append(torch.arange(start, request.length))
            wanted.append(torch.arange(request.first - start, request.length - start) + offset)
            offset += request.length - start
        return torch.cat(ids), torch.cat(positions), torch.cat(wanted)

    def attend(self, layer: Attention, x: Tensor, query_latent: Tensor, query: Tensor, key: Tensor) -> Tensor:
        dim = self.shape.head_dim
        cache = self.caches[layer.layer_id]
        cache[self.new_slots, :dim] = key[: self.rows]
        if layer.is_kv_source:
            self._compress(layer, x, cache)
        if layer.is_index_source:
            self._select(layer, x, query_latent)
        out = torch.zeros_like(query)
        for number, request in enumerate(self.requests):
            rows = slice(request.begin, request.end)
            segments = [self._window(request, cache)]
            if layer.ratio:
                segments.append((self._group_keys[number], self._selected[number]))
            out[rows] = tiled_attention(query[rows], segments, layer.attn_sink, layer.scale)
        return out

    def _window(self, request: RequestRows, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Window keys from the aligned tile of the oldest visible position on, and their mask."""
        start = max(0, request.first - self.shape.sliding_window + 1) // KEY_TILE * KEY_TILE
        keys = _gather(cache, request.slots[start:], 0, self.shape.head_dim)
        stop = start + keys.shape[0]
        distance = torch.arange(request.first, request.length)[:, None] - torch.arange(start, stop)[None]
        return keys, (distance >= 0) & (distance < self.shape.sliding_window)

    def _compress(self, layer: Attention, x: Tensor, cache: Tensor) -> None:
        """Store the raw rows, finish the groups that this batch completes, and gather all finished keys."""
        dim, ratio, index_dim = self.shape.head_dim, layer.ratio, self.shape.index_head_dim
        raw = layer.compressor.project(x)[: self.rows]
        cache[self.new_slots, dim : dim + raw.shape[1]] = raw
        members, first = [], []
        for request in self.requests:
            groups = torch.arange(request.first // ratio, request.length // ratio)
            first.append(groups * ratio)
            members.append(request.slots[groups[:, None] * ratio + torch.arange(ratio)[None]])
        slots, positions = torch.cat(members), torch.cat(first)
        count = positions.numel()
        if count:
            padding = -count % ROW_TILE
            rows = F.pad(cache[slots, dim : dim + raw.shape[1]], (0, 0, 0, 0, 0, padding))
            keys, index_keys = layer.compress(rows, F.pad(positions, (0, padding)), self.rope.compressed)
            last = slots[:, -1]
            cache[last, dim : 2 * dim] = keys[:count]
            cache[last, 2 * dim : 2 * dim + index_dim] = index_keys[:count]
        self._source_layer = layer.layer_id
        self._group_keys = [
            _gather(cache, request.slots[ratio - 1 :: ratio], dim, 2 * dim) for request in self.requests
        ]

    def _select(self, layer: Attention, x: Tensor, query_latent: Tensor) -> None:
        """The groups each query attends to, ``[rows, padded groups]`` per request."""
        shape, ratio = self.shape, layer.ratio
        self._selected = []
        for number, request in enumerate(self.requests):
            padded = self._group_keys[number].shape[0]
            visible_count = torch.arange(request.first + 1, request.length + 1) // ratio
            visible = torch.arange(padded)[None] < visible_count[:, None]
            if request.length // ratio > shape.index_topk:
                scores = self._scores(layer, x, query_latent, request).masked_fill_(~visible, -math.inf)
                scores = self._restrict_to_candidates(layer, number, scores, visible_count)
                visible = top_k_mask(scores, shape.index_topk)
            self._selected.append(visible)

    def _scores(self, layer: Attention, x: Tensor, query_latent: Tensor, request: RequestRows) -> Tensor:
        dim = self.shape.head_dim
        source = self.caches[self._source_layer]
        last = request.slots[layer.ratio - 1 :: layer.ratio]
        keys = _gather(source, last, 2 * dim, 2 * dim + self.shape.index_head_dim)
        pieces = []
        for begin in range(request.begin, request.end, SCORE_ROWS):
            rows = slice(begin, min(begin + SCORE_ROWS, request.end))
            count = rows.stop - rows.start
            padding = (0, 0, 0, -count % ROW_TILE)
            query, weight = layer.indexer.queries(
                F.pad(query_latent[rows], padding),
                F.pad(x[rows], padding),
                F.pad(self.positions[rows], padding[2:]),
                self.rope.compressed,
            )
            pieces.append(index_scores(query, weight, keys)[:count])
        return torch.cat(pieces)

    def _restrict_to_candidates(self, layer: Attention, number: int, scores: Tensor, visible_count: Tensor) -> Tensor:
        shape = self.shape
        if layer.layer_id == shape.candidate_source_layer_id and shape.candidate_topk_blocks:
            size = shape.candidate_block_size
            block = torch.arange(scores.shape[1]) // size
            newest = (visible_count - 1).div(size, rounding_mode="floor")
            n_blocks = -(-scores.shape[1] // size)
            self._candidates[number] = candidate_mask(scores, block, newest, n_blocks, shape.candidate_topk_blocks)
            return scores
        candidates = self._candidates[number]
        return scores if candidates is None else scores.masked_fill_(~candidates, -math.inf)


def _gather(cache: Tensor, slots: Tensor, begin: int, end: int) -> Tensor:
    """Columns ``begin .. end-1`` of some rows, padded with zero rows to a multiple of ``KEY_TILE``."""
    count = slots.numel()
    rows = cache.new_empty(-(-count // KEY_TILE) * KEY_TILE, end - begin)
    torch.index_select(cache[:, begin:end], 0, slots, out=rows[:count])
    rows[count:] = 0
    return rows
