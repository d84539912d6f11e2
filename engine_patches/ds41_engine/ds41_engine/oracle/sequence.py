"""Attention over one whole sequence, a chunk of queries after the other; what layers share is kept between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..backbone import Attention, block_scores, index_scores, masked_attention, top_k_mask
from ..rope import RotaryTables
from ..shape import BackboneShape
from .rounding import Rounding

CHUNK = 256
"""Tokens of a sequence that go through a layer together; a multiple of every compression ratio."""
QUERIES = 64
"""Queries of one attention or scoring step: bounds the scratch memory."""
NEAR = 2e-6
"""A choice whose last taken and first left score differ by less than this share of the scores is a toss-up.

<<<<<<< HEAD
Measured on the trained pack, between kernels for other instruction sets: a score moves by 5e-7 of the largest (median
of a row's worst; 1.3e-6 at most), and choices that fell the other way were 3.5e-7 apart at most.
=======
Measured on the trained pack, between MKL's usual and plainest loops and torch's kernels for three instruction sets on
one AMD CPU: a score moves by 5e-7 of the largest (median of a row's worst; 1.3e-6 at most), and choices that fell the
other way were 3.5e-7 apart at most.
>>>>>>> flaky
"""


def toss_ups(scores: Tensor, k: int) -> Tensor:
    """Rows of ``scores [T, N]`` (-inf: not to be had) whose ``k`` highest hang on rounding; bool ``[T]``."""
    if scores.shape[-1] <= k:
        return torch.zeros(scores.shape[0], dtype=torch.bool)
    best = scores.topk(k + 1, dim=-1).values
    scale = best.masked_fill(best.isinf(), 0.0).abs().amax(-1)
    last, first = best[:, k - 1], best[:, k]
    # Groups whose heads are all shut score an exact zero in any arithmetic, and the lower group is taken. Any other two
    # scores that are equal in fp32 differ by less than its spacing, and the next arithmetic tells them apart.
    shut = (last == 0) & (first == 0)
    return (last - first < NEAR * scale) & ~shut


@dataclass
class Shared:
    """What a sequence's layers hand down: the rows of the latest kv source and the choice of the latest index source.

    Attributes:
        keys: compressed keys ``[G, D]``, G complete groups.
        index_keys: ``[G, index_head_dim]``.
        selected: for each chunk the groups its queries attend to, bits packed ``[queries, ceil(G' / 8)]`` over the
            ``G'`` groups complete at the chunk's end; None where all visible ones are.
        candidates: the same of the candidate source, None where nothing restricts.
        fragile: positions where a choice of groups or experts was a toss-up in some layer.
    """

    keys: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    index_keys: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    selected: list[Tensor | None] = field(default_factory=list)
    candidates: list[Tensor | None] = field(default_factory=list)
    fragile: list[int] = field(default_factory=list)

    def note(self, start: int, fragile: Tensor) -> None:
        """Add positions: ``fragile`` is bool ``[T]`` from ``start`` on."""
        self.fragile = sorted({*self.fragile, *(fragile.nonzero().flatten() + start).tolist()})

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "keys": self.keys,
            "index_keys": self.index_keys,
            "selected": self.selected,
            "candidates": self.candidates,
            "fragile": self.fragile,
        }


class Sequence:
    """``AttentionContext`` of one sequence through one layer: call it for its chunks in order.

    Args:
        shape, rope: the model's.
        shared: what earlier layers left; changed by source layers.
        length: tokens of the sequence.
        rounding: grids of the keys.
    """

    def __init__(
        self, shape: BackboneShape, rope: RotaryTables, shared: Shared, length: int, rounding: Rounding
    ) -> None:
        self.shape, self.rope, self.shared, self.length, self.rounding = shape, rope, shared, length, rounding
        self.start = 0
        self._window: Tensor | None = None

    def attend(self, layer: Attention, x: Tensor, query_latent: Tensor, query: Tensor, key: Tensor) -> Tensor:
        shape = self.shape
        count = x.shape[0]
        end = self.start + count
        positions = torch.arange(self.start, end)
        key = self.rounding.window_key(key)
        recent = key if self._window is None else torch.cat((self._window, key))
        first = end - recent.shape[0]
        if layer.is_kv_source:
            self._compress(layer, x)
        if layer.is_index_source:
            if self.start == 0:
                self.shared.selected = []
                if layer.layer_id == shape.candidate_source_layer_id:
                    self.shared.candidates = []
            self.shared.selected.append(self._select(layer, x, query_latent, positions))
        groups = end // layer.ratio if layer.ratio else 0
        out = torch.empty_like(query)
        for begin in range(0, count, QUERIES):
            rows = slice(begin, min(begin + QUERIES, count))
            here = positions[rows]
            low = max(int(here[0]) - shape.sliding_window + 1, first)
            span = torch.arange(low, int(here[-1]) + 1)
            distance = here[:, None] - span[None]
            mask = (distance >= 0) & (distance < shape.sliding_window)
            keys = recent[low - first : low - first + span.numel()]
            if groups:
                keys = torch.cat((keys, self.shared.keys[:groups]))
                mask = torch.cat((mask, self._chosen(layer, rows, here, groups)), 1)
            out[rows] = masked_attention(query[rows], keys, mask, layer.attn_sink, layer.scale)
        self._window = recent[-(shape.sliding_window - 1) :].clone() if shape.sliding_window > 1 else None
        self.start = end
        return out

    def choose(self, layer: int, start: int, scores: Tensor) -> Tensor:
        """Mask ``[T, G]`` of the groups that the queries from position ``start`` on attend to, from their scores."""
        return top_k_mask(scores, self.shape.index_topk)

    def _chosen(self, layer: Attention, rows: slice, positions: Tensor, groups: int) -> Tensor:
        packed = self.shared.selected[self.start // CHUNK]
        if packed is None:
            return torch.arange(groups)[None] < ((positions + 1) // layer.ratio)[:, None]
        return _unpack(packed[rows], groups)

    def _compress(self, layer: Attention, x: Tensor) -> None:
        ratio, shared = layer.ratio, self.shared
        if self.start == 0:
            total = self.length // ratio
            shared.keys = torch.zeros(total, self.shape.head_dim)
            shared.index_keys = torch.zeros(total, self.shape.index_head_dim)
        whole = x.shape[0] // ratio
        if not whole:
            return
        raw = layer.compressor.project(x[: whole * ratio])
        first = torch.arange(self.start, self.start + whole * ratio, ratio)
        keys, index_keys = layer.compress(raw.view(whole, ratio, -1), first, self.rope.compressed)
        at = self.start // ratio
        shared.keys[at : at + whole] = self.rounding.compressed_key(keys)
        shared.index_keys[at : at + whole] = self.rounding.index(index_keys)

    def _select(self, layer: Attention, x: Tensor, query_latent: Tensor, positions: Tensor) -> Tensor | None:
        shape, shared = self.shape, self.shared
        groups = int(positions[-1] + 1) // layer.ratio
        source = layer.layer_id == shape.candidate_source_layer_id and bool(shape.candidate_topk_blocks)
        if groups <= shape.index_topk:
            if source:
                shared.candidates.append(None)
            return None
        visible_count = (positions + 1) // layer.ratio
        chosen, blocks = [], []
        restricting = None
        if not source and len(shared.candidates) > self.start // CHUNK:
            restricting = shared.candidates[self.start // CHUNK]
        for begin in range(0, x.shape[0], QUERIES):
            rows = slice(begin, min(begin + QUERIES, x.shape[0]))
            query, weight = layer.indexer.queries(query_latent[rows], x[rows], positions[rows], self.rope.compressed)
            scores = index_scores(self.rounding.index(query), weight, shared.index_keys[:groups])
            visible = torch.arange(groups)[None] < visible_count[rows, None]
            scores = scores.masked_fill(~visible, -math.inf)
            start = int(positions[rows.start])
            if source:
                size = shape.candidate_block_size
                newest = (visible_count[rows] - 1).div(size, rounding_mode="floor")
                block = torch.arange(groups) // size
                best = block_scores(scores, block, newest, -(-groups // size))
                shared.note(start, toss_ups(best, shape.candidate_topk_blocks))
                blocks.append(_pack(top_k_mask(best, shape.candidate_topk_blocks)[:, block]))
            elif restricting is not None:
                scores = scores.masked_fill(~_unpack(restricting[rows], groups), -math.inf)
            shared.note(start, toss_ups(scores, shape.index_topk))
            chosen.append(_pack(self.choose(layer.layer_id, start, scores)))
        if source:
            shared.candidates.append(torch.cat(blocks))
        return torch.cat(chosen)


def _pack(mask: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(mask.numpy(), axis=1))


def _unpack(packed: Tensor, groups: int) -> Tensor:
    return torch.from_numpy(np.unpackbits(packed.numpy(), axis=1, count=groups)).bool()
