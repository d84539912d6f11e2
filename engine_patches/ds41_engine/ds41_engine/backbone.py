"""The DeepSeek-V4.1 text backbone: the one home of its mathematics, in plain torch.

Serving, training and the fp32 oracle run these modules unchanged. Parameter names are the checkpoint's own
(``layers.N.attn.wq_a.weight``, ``layers.N.ffn.experts.E.w1.weight``, ``norm.weight``). What differs between serving and
training is only where the keys of a query come from: an object that implements :class:`AttentionContext`
(:class:`ds41_engine.packed.PackedBatch` for whole sequences, the paged row cache in serving).

Shapes: T tokens of any number of sequences, H attention heads, D ``head_dim``, C ``hc_mult`` stream copies,
G compressed groups. Everything is computed in the dtype of the inputs and weights; fp32 is what is tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .rope import RotaryTable, RotaryTables
from .shape import BackboneShape

DENSE_EXPERT_LIMIT = 16
"""Up to this many routed experts :class:`MoE` computes all experts for all tokens: no data-dependent loop."""

ROW_TILE = 16
"""Row counts of matrix products are padded to a multiple of this where a result may not depend on its neighbours.

MKL's sgemm takes other code paths for 1, 2, 3 and 5 rows; from 8 rows on, a row's bits no longer depend on the row
count (measured with torch 2.13.0+cpu, seven weight shapes). 16 also fills the widest vector, so that no element
falls into a scalar tail loop.
"""


KEY_TILE = 128
"""Keys are processed in tiles of this many, at absolute positions, where results may not depend on chunking."""

QUERY_TOKENS = 64
"""Queries of one serving attention step at a time; bounds the scratch memory at long context."""


class Linear(nn.Module):
    """``y = x @ weight.T``, no bias. Override :meth:`effective_weight` to compute with another view of the weight."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def effective_weight(self) -> Tensor:
        """The weight used by the forward pass, ``[out, in]``; the hook for fake quantisation."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.effective_weight())


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension with a learned scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class AttentionContext(Protocol):
    """Where the keys of a batch come from. One object serves one forward pass; it keeps what layers share."""

    def attend(self, layer: Attention, x: Tensor, query_latent: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Attention output of one layer.

        Args:
            layer: the layer's modules; ``layer.layer_id``, ``layer.ratio`` say which rows to use.
            x: normed input ``[T, hidden]``, for the compressor and the indexer weights.
            query_latent: ``[T, q_lora_rank]``, for the indexer's queries.
            query: rotated queries ``[T, H, D]``.
            key: rotated window rows ``[T, D]`` (they are key and value at once).

        Returns:
            ``[T, H, D]``, not yet rotated back.
        """
        ...


class Compressor(nn.Module):
    """Makes one latent row from ``ratio`` consecutive tokens (per-channel softmax pooling; ratio 1 has no gate)."""

    def __init__(self, shape: BackboneShape, ratio: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.ratio = ratio
        self.wkv = Linear(shape.hidden_size, shape.head_dim)
        if ratio > 1:
            self.wgate = Linear(shape.hidden_size, shape.head_dim)
        self.norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def project(self, x: Tensor) -> Tensor:
        """Per-token rows ``[T, D]`` (ratio 1) or ``[T, 2D]`` (value, gate logit)."""
        value = self.wkv(x)
        return torch.cat((value, self.wgate(x)), -1) if self.ratio > 1 else value

    def pool(self, rows: Tensor) -> Tensor:
        """Latents ``[G, D]`` of complete groups; ``rows`` is ``[G, ratio, D or 2D]``."""
        if self.ratio == 1:
            pooled = rows[:, 0]
        else:
            value, gate = rows[..., : self.head_dim], rows[..., self.head_dim :]
            pooled = (value * gate.softmax(1)).sum(1)
        latent: Tensor = self.norm(pooled)
        return latent


class Indexer(nn.Module):
    """Scores compressed groups for each query; a kv source also owns the key projection."""

    def __init__(self, shape: BackboneShape, owns_keys: bool) -> None:
        super().__init__()
        self.n_heads, self.head_dim = shape.index_n_heads, shape.index_head_dim
        self.wq_b = Linear(shape.q_lora_rank, self.n_heads * self.head_dim)
        self.weights_proj = Linear(shape.hidden_size, self.n_heads)
        if owns_keys:
            self.wk = Linear(shape.head_dim, self.head_dim)
            self.k_norm = RMSNorm(self.head_dim, shape.rms_norm_eps)

    def keys(self, latent: Tensor) -> Tensor:
        """Unrotated index keys ``[G, index_head_dim]`` of latents ``[G, D]``."""
        keys: Tensor = self.k_norm(self.wk(latent))
        return keys

    def queries(self, query_latent: Tensor, x: Tensor, positions: Tensor, rope: RotaryTable) -> tuple[Tensor, Tensor]:
        """Rotated index queries ``[T, h, d]`` and head weights ``[T, h]``."""
        query = self.wq_b(query_latent).view(-1, self.n_heads, self.head_dim)
        weight = self.weights_proj(x) * (self.head_dim**-0.5 * self.n_heads**-0.5)
        return rope.rotate(query, positions), weight


def index_scores(query: Tensor, weight: Tensor, keys: Tensor) -> Tensor:
    """``sum_h weight_h * relu(query_h . key_g)``: ``[T, h, d]``, ``[T, h]``, ``[G, d]`` -> ``[T, G]``."""
    tokens, heads, dim = query.shape
    dots = (query.reshape(tokens * heads, dim) @ keys.t()).relu().view(tokens, heads, -1)
    return torch.bmm(weight[:, None], dots)[:, 0]


def top_k_mask(scores: Tensor, k: int) -> Tensor:
    """Mask of the ``k`` highest finite scores per row; ties at the border go to the lower column.

    The rule for ties makes the answer independent of how many masked (-inf) columns follow.
    """
    finite = scores > -math.inf
    if scores.shape[-1] <= k:
        return finite
    threshold = scores.topk(k, dim=-1).values[..., -1:]
    above = scores > threshold
    tied = (scores == threshold) & finite
    room = k - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


def block_scores(scores: Tensor, block_of_group: Tensor, last_block: Tensor, n_blocks: int) -> Tensor:
    """Each block's best score ``[T, n_blocks]``, inf for the query's newest; arguments of :func:`candidate_mask`."""
    blocks = scores.new_full((scores.shape[0], n_blocks), -math.inf)
    blocks = blocks.scatter_reduce(1, block_of_group.expand_as(scores), scores, "amax")
    newest = torch.arange(n_blocks, device=scores.device)[None] == last_block[:, None]
    return blocks.masked_fill(newest, math.inf)


def candidate_mask(
    scores: Tensor, block_of_group: Tensor, last_block: Tensor, n_blocks: int, top_blocks: int
) -> Tensor:
    """First level of the two-level selection: the groups in each query's best blocks.

    Args:
        scores: ``[T, G]`` with -inf where a group is not visible.
        block_of_group: ``[G]`` int64, block of each group.
        last_block: ``[T]`` int64, block of the query's newest group, always taken; -1 for a query without groups.
        n_blocks: number of blocks.
        top_blocks: blocks to keep.

    Returns:
        Bool ``[T, G]``.
    """
    chosen = top_k_mask(block_scores(scores, block_of_group, last_block, n_blocks), top_blocks)
    return chosen[:, block_of_group]


def masked_attention(query: Tensor, keys: Tensor, mask: Tensor, sink: Tensor, scale: float) -> Tensor:
    """One-pass attention with a sink logit per head, keys used as values.

    ``query [T, H, D]``, ``keys [K, D]``, ``mask [T, K]`` bool, ``sink [H]`` -> ``[T, H, D]``.
    """
    tokens, heads, dim = query.shape
    logits = (query.reshape(tokens * heads, dim) @ keys.t()).view(tokens, heads, -1) * scale
    logits = logits.masked_fill(~mask[:, None], -math.inf)
    logits = torch.cat((logits, sink[None, :, None].expand(tokens, -1, 1)), -1)
    weights = logits.softmax(-1)[..., :-1]
    return (weights.reshape(tokens * heads, -1) @ keys).view(tokens, heads, dim)


def tiled_attention(query: Tensor, segments: Sequence[tuple[Tensor, Tensor]], sink: Tensor, scale: float) -> Tensor:
    """:func:`masked_attention` in a fixed order over tiles of ``KEY_TILE`` keys, without gradients.

    A query's bits depend only on its own visible keys and their places modulo the tile: a tile that is masked for it
    adds exact zeros, tiles are added one after the other, and every product has a multiple of ``ROW_TILE`` rows and of
    ``KEY_TILE`` columns. So chunking, batching and prefix reuse cannot change a result.

    Args:
        query: ``[T, H, D]``.
        segments: ``(keys [K, D], mask [T, K])`` pairs, each K a multiple of ``KEY_TILE`` (0 too).
        sink: ``[H]``.
        scale: factor of the dot products.

    Returns:
        ``[T, H, D]``.
    """
    tokens, heads, dim = query.shape
    unit = ROW_TILE // math.gcd(ROW_TILE, heads)
    step = -(-QUERY_TOKENS // unit) * unit
    out = torch.empty_like(query)
    for begin in range(0, tokens, step):
        count = min(step, tokens - begin)
        padding = -count % unit
        flat = F.pad(query[begin : begin + count], (0, 0, 0, 0, 0, padding)).flatten(0, 1)
        sinks = sink.repeat(count + padding)
        highest = sinks
        pieces = []
        for keys, mask in segments:
            if not keys.shape[0]:
                continue
            hidden = F.pad(~mask[begin : begin + count], (0, 0, 0, padding), value=True)
            logits = (flat @ keys.t()).mul_(scale)
            logits.view(count + padding, heads, -1).masked_fill_(hidden[:, None], -math.inf)
            highest = torch.maximum(highest, logits.amax(-1))
            pieces.append((logits, keys))
        total = torch.exp(sinks - highest)
        mixed = torch.zeros_like(flat)
        for logits, keys in pieces:
            weights = logits.sub_(highest[:, None]).exp_().view(flat.shape[0], -1, KEY_TILE)
            values = torch.bmm(weights.transpose(0, 1), keys.view(-1, KEY_TILE, dim))
            for tile_weight, tile_value in zip(weights.sum(-1).unbind(1), values.unbind(0), strict=True):
                total += tile_weight
                mixed += tile_value
        out[begin : begin + count] = (mixed / total[:, None]).view(-1, heads, dim)[:count]
    return out


class Attention(nn.Module):
    """Multi-query attention over window rows and selected compressed rows; grouped output projection."""

    def __init__(self, shape: BackboneShape, layer_id: int) -> None:
        super().__init__()
        self.shape = shape
        self.layer_id = layer_id
        self.ratio = shape.ratio(layer_id)
        self.scale = shape.head_dim**-0.5
        self.is_kv_source = layer_id in shape.kv_source_layer_ids
        self.is_index_source = layer_id in shape.index_source_layer_ids
        heads, dim = shape.num_attention_heads, shape.head_dim
        self.wq_a = Linear(shape.hidden_size, shape.q_lora_rank)
        self.q_norm = RMSNorm(shape.q_lora_rank, shape.rms_norm_eps)
        self.wq_b = Linear(shape.q_lora_rank, heads * dim)
        self.wkv = Linear(shape.hidden_size, dim)
        self.kv_norm = RMSNorm(dim, shape.rms_norm_eps)
        self.wo_a = Linear(heads * dim // shape.o_groups, shape.o_groups * shape.o_lora_rank)
        self.wo_b = Linear(shape.o_groups * shape.o_lora_rank, shape.hidden_size)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        if self.is_kv_source:
            self.compressor = Compressor(shape, self.ratio)
        if self.is_index_source:
            self.indexer = Indexer(shape, self.is_kv_source)

    def compress(self, rows: Tensor, first_positions: Tensor, rope: RotaryTable) -> tuple[Tensor, Tensor]:
        """Compressed key rows ``[G, D]`` and index keys ``[G, index_head_dim]`` of complete groups (kv source only).

        ``rows`` is ``[G, ratio, D or 2D]`` from :meth:`Compressor.project`, ``first_positions`` ``[G]`` the position of
        each group's first token, where both are rotated.
        """
        latent = self.compressor.pool(rows)
        return rope.rotate(latent, first_positions), rope.rotate(self.indexer.keys(latent), first_positions)

    def project_out(self, heads: Tensor) -> Tensor:
        """``[T, H, D]`` -> ``[T, hidden]``: per-group low-rank, then the common projection."""
        shape = self.shape
        grouped = heads.reshape(heads.shape[0], shape.o_groups, -1).transpose(0, 1)
        weight = self.wo_a.effective_weight().view(shape.o_groups, shape.o_lora_rank, -1)
        low = torch.bmm(grouped, weight.transpose(1, 2)).transpose(0, 1)
        out: Tensor = self.wo_b(low.reshape(heads.shape[0], -1))
        return out

    def forward(self, x: Tensor, positions: Tensor, rope: RotaryTables, context: AttentionContext) -> Tensor:
        table = rope.for_ratio(self.ratio)
        latent = self.q_norm(self.wq_a(x))
        query = self.wq_b(latent).view(-1, self.shape.num_attention_heads, self.shape.head_dim)
        query = table.rotate(query, positions)
        key = table.rotate(self.kv_norm(self.wkv(x)), positions)
        heads = context.attend(self, x, latent, query, key)
        return self.project_out(table.rotate(heads, positions, inverse=True))


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """``silu(gate) * up`` with the gate clamped above and the other side clamped both ways (``limit`` 0: no clamp)."""
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


class Expert(nn.Module):
    """One clamped SwiGLU feed-forward network."""

    def __init__(self, hidden: int, inner: int, limit: float) -> None:
        super().__init__()
        self.w1 = Linear(hidden, inner)
        self.w3 = Linear(hidden, inner)
        self.w2 = Linear(inner, hidden)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(clamped_swiglu(self.w1(x), self.w3(x), self.limit))
        return out


class Gate(nn.Module):
    """Router parameters: ``bias`` steers the selection for text tokens, ``bias_vl`` for image tokens."""

    def __init__(self, hidden: int, n_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, hidden))
        self.bias = nn.Parameter(torch.zeros(n_experts))
        self.bias_vl = nn.Parameter(torch.zeros(n_experts))


class MoE(nn.Module):
    """Routed experts plus the shared one. ``dense`` computes all experts for all tokens and masks."""

    def __init__(self, shape: BackboneShape) -> None:
        super().__init__()
        self.shape = shape
        self.dense = shape.n_routed_experts <= DENSE_EXPERT_LIMIT
        self._frozen: tuple[Tensor, ...] | None = None
        self.routed: nn.Module | None = None
        hidden, inner, limit = shape.hidden_size, shape.moe_intermediate_size, shape.swiglu_limit
        self.gate = Gate(hidden, shape.n_routed_experts)
        self.experts = nn.ModuleList(Expert(hidden, inner, limit) for _ in range(shape.n_routed_experts))
        self.shared_experts = Expert(hidden, inner * shape.n_shared_experts, limit)

    def replace_experts(self, routed: nn.Module) -> None:
        """Let ``routed(x, chosen, weights)`` compute the routed experts, whose weights it holds in its own way."""
        self.experts = nn.ModuleList()
        self.routed = routed

    def effective_expert_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """All experts' ``w1 [E, I, hidden]``, ``w3 [E, I, hidden]``, ``w2 [E, hidden, I]``; a hook like ``Linear``'s.

        A trainer may override it to quantise the stacked weights in one go.
        """
        stacked = []
        for name in ("w1", "w3", "w2"):
            stacked.append(torch.stack([getattr(expert, name).effective_weight() for expert in self.experts]))
        return stacked[0], stacked[1], stacked[2]

    def ranking(self, x: Tensor, is_image: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the experts, which weigh them, and the biased scores, which choose them; both ``[T, experts]``."""
        scores = F.softplus(F.linear(x, self.gate.weight)).sqrt()
        return scores, scores + torch.where(is_image[:, None], self.gate.bias_vl, self.gate.bias)

    def route(self, x: Tensor, is_image: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts ``[T, k]`` and their weights ``[T, k]``: sqrt(softplus) scores, the bias only selects."""
        scores, ranking = self.ranking(x, is_image)
        chosen = ranking.topk(self.shape.num_experts_per_tok, -1).indices
        return chosen, self.weigh(scores, chosen)

    def weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Weights ``[T, k]`` of chosen experts from the scores of all."""
        weights = scores.gather(1, chosen)
        if self.shape.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.shape.routed_scaling_factor

    def forward(self, x: Tensor, is_image: Tensor) -> Tensor:
        """``x [T, hidden]``, ``is_image [T]`` bool -> ``[T, hidden]``."""
        chosen, weights = self.route(x, is_image)
        if self.routed is not None:
            routed: Tensor = self.routed(x, chosen, weights)
        else:
            routed = self._dense(x, chosen, weights) if self.dense else self._sparse(x, chosen, weights)
        shared: Tensor = self.shared_experts(x)
        return shared + routed

    def _dense(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        w1, w3, w2 = self._frozen or self._dense_weights()
        every = weights.new_zeros(x.shape[0], self.shape.n_routed_experts).scatter(1, chosen, weights)
        inside = clamped_swiglu(F.linear(x, w1), F.linear(x, w3), self.shape.swiglu_limit)
        inside = inside.view(x.shape[0], self.shape.n_routed_experts, -1) * every[..., None]
        return inside.flatten(1) @ w2

    def _dense_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """All experts side by side, each ``[E * I, hidden]``."""
        w1, w3, w2 = self.effective_expert_weights()
        return w1.flatten(0, 1), w3.flatten(0, 1), w2.transpose(1, 2).flatten(0, 1)

    def freeze(self) -> None:
        """Keep the stacked weights of the dense form: for serving, once the parameters have their final values."""
        if self.dense and self.routed is None:
            self._frozen = tuple(weight.detach().clone() for weight in self._dense_weights())

    def _sparse(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert_id in chosen.flatten().bincount().nonzero().flatten().tolist():
            token, slot = (chosen == expert_id).nonzero(as_tuple=True)
            rows = F.pad(x[token], (0, 0, 0, -token.numel() % ROW_TILE))
            values = self.experts[expert_id](rows)[: token.numel()]
            out = out.index_add(0, token, values * weights[token, slot, None])
        return out


RowLookup = Callable[[Tensor], Tensor]
"""Row ids ``[T, columns]`` int64 -> decoded rows ``[T, columns, engram_head_dim]``."""


class EngramTable(nn.Module):
    """A decoded table held in memory, for training and tests; serving reads the store instead.

    ``values`` is ``[rows, engram_head_dim]``, kept as a non-persistent buffer: the checkpoint holds it quantised.
    """

    values: Tensor

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("values", values, persistent=False)

    def forward(self, row_ids: Tensor) -> Tensor:
        return self.values[row_ids]


class Engram(nn.Module):
    """Adds what the n-gram tables know about a token to each stream copy, through a gate per copy.

    ``lookup`` must be set before the first forward; it is not a checkpoint parameter.
    """

    def __init__(self, shape: BackboneShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, copies = shape.hidden_size, shape.hc_mult
        self.wkv = Linear(shape.engram_columns * shape.engram_head_dim, hidden * (copies + 1))
        self.q_weight = nn.Parameter(torch.ones(copies, hidden))
        self.k_weight = nn.Parameter(torch.ones(copies, hidden))
        self.lookup: RowLookup | None = None

    def forward(self, stream: Tensor, row_ids: Tensor, keep: Tensor) -> Tensor:
        """``stream [T, C, hidden]``, ``row_ids [T, columns]``, ``keep [T]`` (False shuts the gate) -> stream."""
        if self.lookup is None:
            raise RuntimeError("Engram.lookup is not set; give it a table before the first forward")
        tokens, copies, hidden = stream.shape
        eps = self.shape.rms_norm_eps
        projected: Tensor = self.wkv(self.lookup(row_ids).reshape(tokens, -1)).view(tokens, copies + 1, hidden)
        key, value = projected[:, :-1], projected[:, -1]
        dot = (stream * self.q_weight * self.k_weight * key).sum(-1)
        dot = dot * torch.rsqrt(stream.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
        dot = dot * hidden**-0.5
        gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
        gate = torch.where(keep[:, None], gate, torch.zeros_like(gate))
        return stream + gate[..., None] * value[:, None]


def hyper_connection_mix(
    stream: Tensor, fn: Tensor, scale: Tensor, base: Tensor, shape: BackboneShape
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing coefficients of a sublayer from the stream ``[T, C, hidden]``.

    Returns ``pre [T, C]`` (for the NEXT sublayer's input: delayed), ``post [T, C]`` and the doubly stochastic
    ``comb [T, C, C]`` (softmax, then Sinkhorn normalisation of columns and rows in turn).
    """
    copies, eps = shape.hc_mult, shape.hc_eps
    flat = stream.flatten(1)
    mixes = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + shape.rms_norm_eps)
    pre_logit, post_logit, comb_logit = mixes[:, :copies], mixes[:, copies : 2 * copies], mixes[:, 2 * copies :]
    pre_base, post_base, comb_base = base[:copies], base[copies : 2 * copies], base[2 * copies :]
    pre = torch.sigmoid(pre_logit * scale[0] + pre_base) + eps
    post = torch.sigmoid(post_logit * scale[1] + post_base) * 2.0
    comb = (comb_logit * scale[2] + comb_base).view(-1, copies, copies).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(shape.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre, post, comb


def collapse(stream: Tensor, pre: Tensor | None) -> Tensor:
    """A sublayer's input ``[T, hidden]`` from the stream; ``pre`` None (first sublayer) takes copy 0."""
    return stream[:, 0] if pre is None else (pre[..., None] * stream).sum(1)


def expand(out: Tensor, stream: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New stream ``comb^T . stream + post * out``."""
    return torch.bmm(comb.transpose(1, 2), stream) + post[..., None] * out[:, None]


class Block(nn.Module):
    """One layer: Engram (where present), attention, MoE, each sublayer wrapped in delayed hyper-connections."""

    def __init__(self, shape: BackboneShape, layer_id: int) -> None:
        super().__init__()
        self.shape = shape
        self.layer_id = layer_id
        self.attn = Attention(shape, layer_id)
        self.ffn = MoE(shape)
        self.attn_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.ffn_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        mixes = (2 + shape.hc_mult) * shape.hc_mult
        self.hc_attn_fn = nn.Parameter(torch.empty(mixes, shape.hc_mult * shape.hidden_size))
        self.hc_attn_base = nn.Parameter(torch.zeros(mixes))
        self.hc_attn_scale = nn.Parameter(torch.ones(3))
        self.hc_ffn_fn = nn.Parameter(torch.empty(mixes, shape.hc_mult * shape.hidden_size))
        self.hc_ffn_base = nn.Parameter(torch.zeros(mixes))
        self.hc_ffn_scale = nn.Parameter(torch.ones(3))
        self.engram_index = shape.engram_layer_ids.index(layer_id) if layer_id in shape.engram_layer_ids else None
        if self.engram_index is not None:
            self.engram = Engram(shape)

    def forward(
        self,
        stream: Tensor,
        pre: Tensor | None,
        positions: Tensor,
        rope: RotaryTables,
        context: AttentionContext,
        engram_rows: Tensor | None,
        engram_keep: Tensor,
        is_image: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns the new stream and the ``pre`` mix for whatever comes next."""
        if self.engram_index is not None and engram_rows is not None:
            stream = self.engram(stream, engram_rows[:, self.engram_index], engram_keep)
        stream, pre = self.attend(stream, pre, positions, rope, context)
        x, pre, post, comb = self.enter_ffn(stream, pre)
        return expand(self.ffn(x, is_image), stream, post, comb), pre

    def attend(
        self, stream: Tensor, pre: Tensor | None, positions: Tensor, rope: RotaryTables, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """The attention sublayer: new stream and the ``pre`` mix of the feed-forward sublayer's input."""
        next_pre, post, comb = hyper_connection_mix(
            stream, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base, self.shape
        )
        out = self.attn(self.attn_norm(collapse(stream, pre)), positions, rope, context)
        return expand(out, stream, post, comb), next_pre

    def enter_ffn(self, stream: Tensor, pre: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The feed-forward sublayer up to its experts: input ``[T, hidden]``, next ``pre``, ``post``, ``comb``."""
        next_pre, post, comb = hyper_connection_mix(
            stream, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base, self.shape
        )
        return self.ffn_norm(collapse(stream, pre)), next_pre, post, comb


class Backbone(nn.Module):
    """All layers and the final norm; token embedding and head stay with the caller.

    Args:
        shape: sizes.
        max_positions: length of the RoPE tables, at least the longest sequence.
        local: layers of this pipeline stage; None means all.
    """

    def __init__(self, shape: BackboneShape, max_positions: int, local: range | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.local = range(shape.num_hidden_layers) if local is None else local
        self.layers = nn.ModuleList(
            Block(shape, layer) if layer in self.local else nn.Identity() for layer in range(shape.num_hidden_layers)
        )
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.rope = RotaryTables(shape, max_positions)

    def block(self, layer: int) -> Block:
        """Layer ``layer``, typed."""
        return cast(Block, self.layers[layer])

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        context: AttentionContext,
        engram_rows: Tensor | None,
        engram_keep: Tensor,
        is_image: Tensor,
    ) -> Tensor:
        """Final normed hidden states ``[T, hidden]``.

        Args:
            embeddings: ``[T, hidden]``.
            positions: ``[T]`` int64, position inside each token's own sequence.
            context: where keys come from.
            engram_rows: ``[T, n_engram_layers, columns]`` int64, or None to leave Engram out.
            engram_keep: ``[T]`` bool, False where the Engram gate is shut (image tokens).
            is_image: ``[T]`` bool, True where the router uses ``bias_vl``.
        """
        stream = embeddings[:, None].expand(-1, self.shape.hc_mult, -1)
        stream, pre = self.run_layers(stream, None, positions, context, engram_rows, engram_keep, is_image)
        hidden: Tensor = self.norm(collapse(stream, pre))
        return hidden

    def run_layers(
        self,
        stream: Tensor,
        pre: Tensor | None,
        positions: Tensor,
        context: AttentionContext,
        engram_rows: Tensor | None,
        engram_keep: Tensor,
        is_image: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """The local layers alone: stream ``[T, C, hidden]`` and mix ``pre [T, C]`` (None before the first layer)."""
        for layer in self.local:
            stream, pre = self.layers[layer](
                stream, pre, positions, self.rope, context, engram_rows, engram_keep, is_image
            )
        return stream, pre
