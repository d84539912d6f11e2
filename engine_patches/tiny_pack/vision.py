"""The vision tower and aligner in plain torch, with the checkpoint's own tensor names (vision.*, aligner.*, image_*).

Serving uses upstream's tower (vllm models/deepseek_v4/common/vision.py); this is the same mathematics for training:
rotary halves over (row, column), bidirectional attention per picture, 3 x 3 merge with channel-major rows, exact GELU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import images


def patches(picture: bytes, patch: int) -> Tensor:
    """RGB bytes [SIDE, SIDE, 3] to normalised patches [patches, 3 * patch * patch], as the processor makes them."""
    side, grid = images.SIDE, images.SIDE // patch
    x = torch.frombuffer(bytearray(picture), dtype=torch.uint8).view(side, side, 3).permute(2, 0, 1).float() / 255
    x = (x - 0.5) / 0.5
    return x.reshape(3, grid, patch, grid, patch).permute(1, 3, 0, 2, 4).reshape(grid * grid, -1)


class _Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


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
    def __init__(self, config: dict[str, Any]) -> None:
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
    """Pictures of one size to image spans."""

    image_start: Tensor
    image_end: Tensor
    image_newline: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, config: dict[str, Any], hidden: int) -> None:
        super().__init__()
        self.config = config
        self.merge = config["downsample_ratio"]
        self.grid = images.SIDE // config["patch_size"]
        self.vision = _Tower(config)
        self.aligner = _Aligner(config["hidden_size"] * self.merge**2, hidden)
        for name in ("image_start", "image_end", "image_newline"):
            self.register_parameter(name, nn.Parameter(torch.randn(hidden) * 0.5))
        rope_dim = config["hidden_size"] // config["num_attention_heads"] // 2
        freq = 1.0 / config["rope_theta"] ** (torch.arange(0, rope_dim, 2).float() / rope_dim)
        rows = torch.arange(self.grid).float()
        place = torch.stack((rows.repeat_interleave(self.grid), rows.repeat(self.grid)), -1)
        angle = (place[:, :, None] * freq).flatten(1)[:, None]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[pictures, patches, 3 * patch * patch] to spans [pictures, span, hidden]."""
        count, m = x.shape[0], self.merge
        y = self.vision.patch_embed.proj(x)
        for block in self.vision.blocks:
            y = block(y, self.cos, self.sin)
        y = self.vision.norm(y).view(count, self.grid // m, m, self.grid // m, m, -1)
        y = y.permute(0, 1, 3, 5, 2, 4).reshape(count, self.grid // m, self.grid // m, -1)
        y = self.aligner.w2(F.gelu(self.aligner.w1(y)))

        def delimiter(vector: Tensor, *shape: int) -> Tensor:
            return vector.expand(*shape, -1)

        rows = torch.cat((y, delimiter(self.image_newline, count, y.shape[1], 1)), 2).flatten(1, 2)
        ends = (delimiter(self.image_start, count, 1), delimiter(self.image_end, count, 1))
        return torch.cat((ends[0], rows, ends[1]), 1)
