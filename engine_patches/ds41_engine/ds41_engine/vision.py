"""The vision tower and aligner in plain torch, with the checkpoint's own tensor names (vision.*, aligner.*, image_*).

Serving uses upstream's tower; training and the oracle use this one: rotary halves over (row, column), bidirectional
attention per picture, spatial merge with channel-major rows, exact GELU. ``tests/engine`` compares it with upstream's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPS = 1e-6


class _Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS)


class _Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wqkv = nn.Linear(dim, 3 * dim)
        self.wo = nn.Linear(dim, dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, count, dim = x.shape
        q, k, v = (t.view(batch, count, self.heads, -1) for t in self.wqkv(x).chunk(3, -1))

        def rotate(t: Tensor) -> Tensor:
            a, b = t.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        q, k, v = (t.transpose(1, 2) for t in (rotate(q), rotate(k), v))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.wo(out.transpose(1, 2).reshape(batch, count, dim))  # type: ignore[no-any-return]


class _Mlp(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, 2 * inner, bias=False)
        self.w2 = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x).chunk(2, -1)
        return self.w2(F.silu(gate) * up)  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, dim: int, heads: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = _Norm(dim), _Norm(dim)
        self.attn = _Attention(dim, heads)
        self.mlp = _Mlp(dim, inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class _PatchEmbed(nn.Module):
    def __init__(self, patch: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(3 * patch * patch, dim)


class _Tower(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        dim, heads = config["hidden_size"], config["num_attention_heads"]
        self.patch_embed = _PatchEmbed(config["patch_size"], dim)
        self.blocks = nn.ModuleList(
            _Block(dim, heads, config["intermediate_size"]) for _ in range(config["num_hidden_layers"])
        )
        self.norm = _Norm(dim)


class _Aligner(nn.Module):
    def __init__(self, inner: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(inner, hidden)
        self.w2 = nn.Linear(hidden, hidden)


class Vision(nn.Module):
    """Pictures of one size to image spans.

    Args:
        config: the checkpoint's ``vision_config``.
        hidden: width of the text model.
    """

    image_start: Tensor
    image_end: Tensor
    image_newline: Tensor

    def __init__(self, config: Mapping[str, Any], hidden: int) -> None:
        super().__init__()
        self.config = config
        self.merge = int(config["downsample_ratio"])
        self.vision = _Tower(config)
        self.aligner = _Aligner(config["hidden_size"] * self.merge**2, hidden)
        for name in ("image_start", "image_end", "image_newline"):
            self.register_parameter(name, nn.Parameter(torch.randn(hidden) * 0.5))

    def angles(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """cos and sin ``[height * width, 1, head dim / 2]`` of a grid of patches."""
        config = self.config
        rope_dim = config["hidden_size"] // config["num_attention_heads"] // 2
        freq = 1.0 / config["rope_theta"] ** (torch.arange(0, rope_dim, 2).float() / rope_dim)
        rows, columns = torch.arange(height).float(), torch.arange(width).float()
        place = torch.stack((rows.repeat_interleave(width), columns.repeat(height)), -1)
        angle = (place[:, :, None] * freq).flatten(1)[:, None]
        return angle.cos(), angle.sin()

    def spans(self, x: Tensor, height: int, width: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Patches ``[pictures, height * width, 3 * patch * patch]`` to spans ``[pictures, span, hidden]``.

        ``cos`` and ``sin`` are :meth:`angles` of the grid. A grid that the merge does not divide is padded with zeros.
        """
        count, m = x.shape[0], self.merge
        y = self.vision.patch_embed.proj(x)
        for block in self.vision.blocks:
            y = block(y, cos, sin)
        y = self.vision.norm(y).view(count, height, width, -1)
        y = F.pad(y, (0, 0, 0, -width % m, 0, -height % m))
        rows, columns = math.ceil(height / m), math.ceil(width / m)
        y = y.view(count, rows, m, columns, m, -1).permute(0, 1, 3, 5, 2, 4).reshape(count, rows, columns, -1)
        y = self.aligner.w2(F.gelu(self.aligner.w1(y)))
        newline = self.image_newline.expand(count, rows, 1, -1)
        body = torch.cat((y, newline), 2).flatten(1, 2)
        return torch.cat((self.image_start.expand(count, 1, -1), body, self.image_end.expand(count, 1, -1)), 1)
