"""Attention over whole sequences packed into one batch: training and the oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .backbone import Attention, candidate_mask, index_scores, masked_attention, top_k_mask
from .rope import RotaryTables
from .shape import BackboneShape


class PackedGroups:
    """The complete groups of one compression ratio in a packed batch, ``G`` in all, in packing order.

    Attributes:
        position: position of each group's first token in its own sequence, ``[G]``.
        sequence: number of the sequence, ``[G]``.
        members: packed rows of the group's tokens, ``[G, ratio]``.
        longest: groups of the longest sequence.
    """

    def __init__(self, lengths: Sequence[int], ratio: int, block_size: int, device: torch.device) -> None:
        first: list[int] = []
        position: list[int] = []
        sequence: list[int] = []
        block: list[int] = []
        block_base: list[int] = []
        start = blocks = 0
        self.longest = 0
        for number, length in enumerate(lengths):
            count = length // ratio
            self.longest = max(self.longest, count)
            first += [start + g * ratio for g in range(count)]
            position += [g * ratio for g in range(count)]
            sequence += [number] * count
            block_base.append(blocks)
            if block_size:
                block += [blocks + g // block_size for g in range(count)]
                blocks += -(-count // block_size)
            start += length

        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self.n_blocks = blocks
        self.position = tensor(position)
        self.sequence = tensor(sequence)
        self.block = tensor(block)
        self.block_base = tensor(block_base)
        self.members = tensor(first)[:, None] + torch.arange(ratio, device=device)[None]


class PackedBatch:
    """One masked attention over packed whole sequences; implements ``AttentionContext`` and is autograd-friendly.

    Build it once per batch, call :meth:`reset` (or make a new one) before each forward pass.

    Args:
        shape: backbone shape.
        lengths: length of each sequence, in packing order; every sequence starts at position 0.
        rope: the backbone's tables (``backbone.rope``).
        device: where the masks live.
        record_index_scores: keep ``(layer_id, scores [T, G], visible [T, G])`` of every index source in
            :attr:`index_record`, also where fewer groups than ``index_topk`` exist. The top-k choice itself passes no
            gradient, so a trainer needs these scores for a loss of its own.
    """

    def __init__(
        self,
        shape: BackboneShape,
        lengths: Sequence[int],
        rope: RotaryTables,
        device: torch.device | str = "cpu",
        record_index_scores: bool = False,
    ) -> None:
        device = torch.device(device)
        self.shape = shape
        self.rope = rope
        self.record_index_scores = record_index_scores
        lengths_tensor = torch.tensor(list(lengths), dtype=torch.int64, device=device)
        self.sequence = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths_tensor)
        starts = lengths_tensor.cumsum(0) - lengths_tensor
        self.positions = torch.arange(self.sequence.numel(), device=device) - starts[self.sequence]
        distance = self.positions[:, None] - self.positions[None]
        same = self.sequence[:, None] == self.sequence[None]
        self.window_mask = same & (distance >= 0) & (distance < shape.sliding_window)
        self.groups: dict[int, PackedGroups] = {}
        self._visible: dict[int, Tensor] = {}
        for ratio in {shape.ratio(layer) for layer in range(shape.num_hidden_layers)} - {0}:
            groups = PackedGroups(lengths, ratio, shape.candidate_block_size, device)
            complete = groups.position[None] + ratio <= self.positions[:, None] + 1
            self.groups[ratio] = groups
            self._visible[ratio] = complete & (groups.sequence[None] == self.sequence[:, None])
        self.reset()

    def reset(self) -> None:
        """Forget what the layers of the previous forward pass shared."""
        self.index_record: list[tuple[int, Tensor, Tensor]] = []
        self._keys: Tensor | None = None
        self._index_keys: Tensor | None = None
        self._selected: Tensor | None = None
        self._candidates: Tensor | None = None

    def attend(self, layer: Attention, x: Tensor, query_latent: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if not layer.ratio:
            return masked_attention(query, key, self.window_mask, layer.attn_sink, layer.scale)
        groups = self.groups[layer.ratio]
        if layer.is_kv_source:
            rows = layer.compressor.project(x)[groups.members]
            self._keys, self._index_keys = layer.compress(rows, groups.position, self.rope.compressed)
        if layer.is_index_source:
            self._selected = self._select(layer, x, query_latent)
        if self._keys is None or self._selected is None:
            raise RuntimeError("a source layer must run before the layers that use its rows; run all layers in order")
        keys = torch.cat((key, self._keys))
        mask = torch.cat((self.window_mask, self._selected), 1)
        return masked_attention(query, keys, mask, layer.attn_sink, layer.scale)

    def _select(self, layer: Attention, x: Tensor, query_latent: Tensor) -> Tensor:
        shape, groups, visible = self.shape, self.groups[layer.ratio], self._visible[layer.ratio]
        everything_fits = groups.longest <= shape.index_topk
        if everything_fits and not self.record_index_scores:
            return visible
        if self._index_keys is None:
            raise RuntimeError("a kv source must run before the indexers that score its rows; run all layers in order")
        query, weight = layer.indexer.queries(query_latent, x, self.positions, self.rope.compressed)
        raw = index_scores(query, weight, self._index_keys)
        if self.record_index_scores:
            self.index_record.append((layer.layer_id, raw, visible))
        if everything_fits:
            return visible
        scores = raw.detach().masked_fill(~visible, -math.inf)
        if layer.layer_id == shape.candidate_source_layer_id and shape.candidate_topk_blocks:
            newest = (self.positions + 1) // layer.ratio - 1
            newest_block = newest.div(shape.candidate_block_size, rounding_mode="floor")
            newest_block = groups.block_base[self.sequence] + newest_block
            newest_block = torch.where(newest >= 0, newest_block, -1)
            self._candidates = candidate_mask(
                scores, groups.block, newest_block, groups.n_blocks, shape.candidate_topk_blocks
            )
        elif self._candidates is not None:
            scores = scores.masked_fill(~self._candidates, -math.inf)
        return top_k_mask(scores, shape.index_topk)
