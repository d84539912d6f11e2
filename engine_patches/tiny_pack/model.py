"""The trainable tiny model: the engine's backbone with fake-quantised weights and noise, embedding, head, vision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import data, frozen, images, spec
from .mathematics import backbone, quant
from .vision import Vision, patches


class Noise:
    """What the GPU engine does to numbers, switched per sequence.

    `mask` is [T, 1], 1.0 for tokens of sequences that get FP8 activations, FP8 key rows and rounding noise, 0.0 for
    those computed exactly (as the CPU engine does). None switches everything off.
    """

    mask: Tensor | None = None
    relative = 0.004  # about half a BF16 step, on every linear output


NOISE = Noise()


def straight_through(value: Tensor, rounded: Tensor) -> Tensor:
    """`rounded` in the forward pass, the gradient of `value`."""
    return value + (rounded - value).detach()


def fake_fp8_groups(x: Tensor, group: int) -> Tensor:
    """Values [..., n] rounded to E4M3 with one power-of-two scale per `group` channels."""
    parts = x.detach().reshape(*x.shape[:-1], -1, group)
    largest = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    scale = torch.exp2(torch.ceil(torch.log2(largest / quant.FP8_MAX)))
    rounded = (parts / scale).clamp(-quant.FP8_MAX, quant.FP8_MAX).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(-2)


def noisy_input(x: Tensor) -> Tensor:
    """A linear's input as an MXFP8 kernel sees it, where the noise mask says so."""
    if NOISE.mask is None:
        return x
    return x + NOISE.mask * (fake_fp8_groups(x, 32) - x.detach())


def noisy_output(y: Tensor) -> Tensor:
    """A result with the relative error of BF16 storage, where the noise mask says so."""
    if NOISE.mask is None:
        return y
    return y * (1 + NOISE.mask * NOISE.relative * torch.randn_like(y))


def noisy_row(row: Tensor, rope_dim: int, mask: Tensor | None) -> Tensor:
    """A key row as the 584-byte record stores it: E4M3 per 64 channels, the rotary part BF16."""
    if mask is None:
        return row
    turned = row[..., -rope_dim:].detach().bfloat16().float()
    stored = torch.cat((fake_fp8_groups(row[..., :-rope_dim], 64), turned), -1)
    return row + mask * (stored - row.detach())


class Fp8Linear(backbone.Linear):
    """A linear whose weight the checkpoint stores as FP8 32x32."""

    def effective_weight(self) -> Tensor:
        return straight_through(self.weight, quant.fake_fp8_blocks(self.weight.detach()))

    def forward(self, x: Tensor) -> Tensor:
        return noisy_output(F.linear(noisy_input(x), self.effective_weight()))


class Fp8IndexLinear(Fp8Linear):
    """The indexer's FP8 linear: no noise of its own, `BucketContext` jitters the scores instead."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.effective_weight())


class PlainLinear(backbone.Linear):
    """A BF16 linear."""

    def effective_weight(self) -> Tensor:
        return straight_through(self.weight, self.weight.detach().bfloat16().float())

    def forward(self, x: Tensor) -> Tensor:
        return noisy_output(F.linear(x, self.effective_weight()))


class PlainIndexLinear(PlainLinear):
    """The indexer's BF16 linears, likewise without noise."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.effective_weight())


class Fp4MoE(backbone.MoE):
    """Experts as MXFP4, activations as block FP8 where noisy."""

    def effective_expert_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        out = []
        for name in ("w1", "w3", "w2"):
            weight = torch.stack([getattr(expert, name).weight for expert in self.experts])
            out.append(straight_through(weight, quant.fake_mxfp4(weight.detach())))
        return out[0], out[1], out[2]

    def _dense(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return noisy_output(super()._dense(noisy_input(x), chosen, weights))


@dataclass
class Bucket:
    """Sequences of one padded width inside the flat token batch."""

    start: int
    count: int
    width: int
    answer: int
    needle: Tensor
    length: Tensor


class Layout:
    """What depends on the buckets' sizes alone; built once for all steps."""

    def __init__(self, parts: list[data.Padded], device: torch.device) -> None:
        self.sizes = [tuple(p.ids.shape) for p in parts]
        widths = torch.tensor([w for n, w in self.sizes for _ in range(n)])
        self.sequences = len(widths)
        self.sequence = torch.repeat_interleave(torch.arange(self.sequences), widths).to(device)
        self.positions = torch.cat([torch.arange(w).repeat(n) for n, w in self.sizes]).to(device)


class BucketContext:
    """Attention over several buckets of equally padded sequences: one batched masked product a bucket and layer.

    Keeps the loss of the indexer: where a sequence has a needle, the last positions' scores must put its groups on top.
    `force` (0..1) is the share of sequences whose needle is always selected, for the start of training;
    `jitter` is noise on the selection scores in units of their standard deviation.
    """

    QUERIES = 16

    def __init__(self, shape: Any, rope: Any, buckets: list[Bucket], force: float, jitter: float) -> None:
        self.shape, self.rope, self.buckets = shape, rope, buckets
        self.force, self.jitter = force, jitter
        self.keys: dict[int, Tensor] = {}
        self.index_keys: dict[int, Tensor] = {}
        self.selected: dict[int, Tensor] = {}
        self.index_losses: list[Tensor] = []
        self.recall: list[Tensor] = []

    def attend(self, layer: Any, x: Tensor, query_latent: Tensor, query: Tensor, key: Tensor) -> Tensor:
        shape, out = self.shape, []
        rope_dim = shape.qk_rope_head_dim
        rows = layer.compressor.project(x) if layer.is_kv_source else None
        for number, bucket in enumerate(self.buckets):
            part = slice(bucket.start, bucket.start + bucket.count * bucket.width)
            mask = None if NOISE.mask is None else NOISE.mask[part].view(bucket.count, bucket.width, 1)

            def view(t: Tensor, part: slice = part, bucket: Bucket = bucket) -> Tensor:
                return t[part].view(bucket.count, bucket.width, *t.shape[1:])

            positions = torch.arange(bucket.width, device=x.device)
            distance = positions[:, None] - positions[None]
            allowed = ((distance >= 0) & (distance < shape.sliding_window)).expand(bucket.count, -1, -1)
            keys = noisy_row(view(key), rope_dim, mask)
            if layer.ratio:
                if rows is not None:
                    self._compress(layer, number, bucket, view(rows), mask)
                if layer.is_index_source:
                    self.selected[number] = self._select(layer, number, bucket, view(x), view(query_latent))
                keys = torch.cat((keys, self.keys[number]), 1)
                allowed = torch.cat((allowed, self.selected[number]), 2)
            q = view(query)
            count, width, heads, dim = q.shape
            logits = torch.bmm(q.reshape(count, width * heads, dim), keys.transpose(1, 2))
            logits = logits.view(count, width, heads, -1) * layer.scale
            logits = logits.masked_fill(~allowed[:, :, None], -math.inf)
            sink = layer.attn_sink.view(1, 1, heads, 1).expand(count, width, -1, -1)
            weights = torch.cat((logits, sink), -1).softmax(-1)[..., :-1]
            mixed = torch.bmm(weights.reshape(count, width * heads, -1), keys)
            out.append(mixed.view(count * width, heads, dim))
        return torch.cat(out)

    def _compress(self, layer: Any, number: int, bucket: Bucket, rows: Tensor, mask: Tensor | None) -> None:
        ratio = layer.ratio
        groups = bucket.width // ratio
        members = rows[:, : groups * ratio].reshape(bucket.count * groups, ratio, -1)
        first = (torch.arange(groups, device=rows.device) * ratio).repeat(bucket.count)
        keys, index_keys = layer.compress(members, first, self.rope.compressed)
        keys = keys.view(bucket.count, groups, -1)
        group_mask = None if mask is None else mask[:, :1]
        self.keys[number] = noisy_row(keys, self.shape.qk_rope_head_dim, group_mask)
        self.index_keys[number] = index_keys.view(bucket.count, groups, -1)

    def _scores(self, layer: Any, x: Tensor, latent: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        """Index scores [count, queries, groups]; `positions` is [count, queries]."""
        count, width = x.shape[:2]
        query, weight = layer.indexer.queries(
            latent.flatten(0, 1), x.flatten(0, 1), positions.flatten(), self.rope.compressed
        )
        heads = query.shape[1]
        dots = torch.bmm(query.view(count, width * heads, -1), keys.transpose(1, 2)).relu()
        dots = dots.view(count, width, heads, -1)
        scores: Tensor = (dots * weight.view(count, width, heads, 1)).sum(2)
        return scores

    def _select(self, layer: Any, number: int, bucket: Bucket, x: Tensor, latent: Tensor) -> Tensor:
        ratio, device = layer.ratio, x.device
        groups = bucket.width // ratio
        positions = torch.arange(bucket.width, device=device)
        group = torch.arange(groups, device=device)
        visible: Tensor = (group[None] < ((positions + 1) // ratio)[:, None]).expand(bucket.count, -1, -1)
        if groups <= self.shape.index_topk:
            return visible
        keys = self.index_keys[number]
        with torch.no_grad():
            every = positions[None].expand(bucket.count, -1)
            scores = self._scores(layer, x, latent, every, keys)
            if self.jitter:
                spread = scores.std(-1, keepdim=True)
                scores = scores + self.jitter * spread * torch.randn_like(scores)
            chosen: Tensor = backbone.top_k_mask(scores.masked_fill(~visible, -math.inf), self.shape.index_topk)
        # [count, groups]: the groups that hold the needle's last tokens
        wanted = (group >= bucket.needle[:, :1] // ratio) & (group <= bucket.needle[:, 1:] // ratio)
        wanted = wanted & (bucket.needle[:, :1] >= 0)
        tail = bucket.length[:, None] - 2 - torch.arange(self.QUERIES, device=device)[None]
        tail = tail.clamp(min=0)
        pick = torch.arange(bucket.count, device=device)[:, None]
        grad_scores = self._scores(layer, x[pick, tail], latent[pick, tail], tail, keys)
        hidden = ~visible[pick, tail]
        spread = grad_scores.detach().std(-1, keepdim=True) + 1e-6
        logits = (grad_scores / spread * 2).masked_fill(hidden, -math.inf)
        # Cross-entropy against a uniform choice of the wanted groups: each of them must come out on top.
        has = wanted.any(-1).float()[:, None]
        per_group = logits.logsumexp(-1, keepdim=True) - logits.masked_fill(~wanted[:, None], 0.0)
        share = torch.where(wanted[:, None], per_group, 0.0).sum(-1) / wanted.sum(-1).clamp(min=1)[:, None]
        self.index_losses.append(share.sum() / (has.sum() * self.QUERIES + 1e-6))
        at_tail = chosen[pick, tail] | ~wanted[:, None]
        self.recall.append(((at_tail.all(-1).float() * has).sum() / (has.sum() * self.QUERIES + 1e-6)).detach())
        if self.force:
            lucky = torch.rand(bucket.count, 1, 1, device=device) < self.force
            chosen = chosen | (lucky & wanted[:, None] & visible)
        return chosen


class TinyModel(nn.Module):
    """Everything that is trained. Vocabulary rows are compact: trained ids, then one filler row."""

    pictures: Tensor

    def __init__(self, dataset: data.Dataset, seed: int) -> None:
        super().__init__()
        shape = dataset.shape
        self.shape = shape
        self.filler = len(dataset.vocabulary)
        generator = torch.Generator().manual_seed(seed)
        hidden = shape.hidden_size
        torch.manual_seed(seed)
        self.backbone = backbone.Backbone(shape, 2048)
        self.sight = Vision(dataset.config["vision_config"], hidden)
        self.embed = nn.Parameter(torch.randn(self.filler + 1, hidden, generator=generator) * 0.5)
        self.head = nn.Parameter(torch.randn(self.filler + 1, hidden, generator=generator) * 0.05)
        with torch.no_grad():
            for name, parameter in self.backbone.named_parameters():
                if parameter.dim() == 2 and not name.endswith(("q_weight", "k_weight")):
                    gain = 0.3 if "hc_" in name else 1.0
                    value = torch.randn(parameter.shape, generator=generator) * gain * parameter.shape[1] ** -0.5
                    parameter.copy_(value)
                elif name.endswith(("gate.bias", "gate.bias_vl")):
                    # Fixed and different for text and image tokens: an engine that ignores bias_vl routes otherwise.
                    parameter.copy_((torch.rand(parameter.shape, generator=generator) - 0.5) * 0.2)
                    parameter.requires_grad_(False)
        for name, module in self.backbone.named_modules():
            if isinstance(module, backbone.MoE):
                module.__class__ = Fp4MoE
            elif isinstance(module, backbone.Linear):
                kind = quant.tensor_format(f"{name}.weight")
                fp8 = kind is quant.TensorFormat.FP8_BLOCK
                if ".indexer." in name:
                    module.__class__ = Fp8IndexLinear if fp8 else PlainIndexLinear
                else:
                    module.__class__ = Fp8Linear if fp8 else PlainLinear
        for layer, rows in zip(shape.engram_layer_ids, shape.engram_num_embeddings, strict=True):
            table = backbone.EngramTable(frozen.engram_values(layer, rows))
            block: Any = self.backbone.layers[layer]
            block.engram.lookup = table
        patch = dataset.config["vision_config"]["patch_size"]
        pictures = torch.stack([patches(images.pixels(c, d), patch) for c, d in data.PICTURES])
        self.register_buffer("pictures", pictures, persistent=False)
        self.unused = math.log(spec.VOCAB_SIZE - self.filler)

    def forward(
        self,
        parts: list[data.Padded],
        layout: Layout,
        *,
        force: float = 0.0,
        jitter: float = 0.0,
        noise: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor, BucketContext]:
        """Logits over the compact vocabulary wherever a token may have to be predicted.

        Returns logits [places, filler + 1], target ids [places] (-1: nothing to predict), the flat sequence number of
        each place, and the attention context with the indexer's losses. `noise` is the share of sequences computed with
        FP8 noise.
        """
        buckets, places, start = [], [], 0
        device = self.embed.device
        for part in parts:
            count, width = part.ids.shape
            buckets.append(Bucket(start, count, width, part.answer, part.needle, part.length))
            back = part.length[:, None] - 2 - torch.arange(part.answer, device=device)[None]
            base = start + torch.arange(count, device=device)[:, None] * width
            places.append((base + back.clamp(min=0)).flatten())
            start += count * width

        def flat(name: str) -> Tensor:
            return torch.cat([getattr(p, name).flatten(0, 1) for p in parts])

        NOISE.mask = None
        if noise:
            NOISE.mask = (torch.rand(layout.sequences, device=device) < noise).float()[layout.sequence][:, None]
        span = flat("span")
        pixels = self.pictures
        if noise:
            pixels = pixels + 0.03 * torch.randn_like(pixels)
        spans = self.sight(pixels)
        picture = torch.cat([p.picture for p in parts])[layout.sequence]
        text = F.embedding(flat("ids"), straight_through(self.embed, self.embed.detach().bfloat16().float()))
        is_image = span >= 0
        x = torch.where(is_image[:, None], spans[picture, span.clamp(min=0)], text)
        context = BucketContext(self.shape, self.backbone.rope, buckets, force, jitter)
        hidden = self.backbone(x, layout.positions, context, flat("rows").long(), flat("keep"), is_image)
        where = torch.cat(places)
        head = straight_through(self.head, self.head.detach().bfloat16().float())
        logits = noisy_output_plain(hidden[where]) @ head.t()
        NOISE.mask = None
        bias = torch.zeros(self.filler + 1, device=device)
        bias[self.filler] = self.unused
        return logits + bias, flat("targets")[where], layout.sequence[where], context


def noisy_output_plain(hidden: Tensor) -> Tensor:
    """Final hidden states with BF16-sized noise while any sequence is noisy."""
    if NOISE.mask is None:
        return hidden
    return hidden * (1 + NOISE.relative * torch.randn_like(hidden))
