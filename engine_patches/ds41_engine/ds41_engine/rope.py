"""Rotary position embedding: plain for window-only layers, YaRN for compressed ones (GPT-J interleaved)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .shape import BackboneShape, YarnScaling


def inverse_frequencies(dim: int, theta: float) -> Tensor:
    """Plain RoPE inverse frequencies, ``[dim // 2]`` fp32."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def yarn_inverse_frequencies(dim: int, theta: float, yarn: YarnScaling) -> Tensor:
    """YaRN inverse frequencies, ``[dim // 2]`` fp32: interpolated below ``beta_slow``, kept above ``beta_fast``."""
    kept = inverse_frequencies(dim, theta)
    interpolated = 1.0 / (yarn.factor * theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))

    def boundary(rotations: float) -> float:
        length = yarn.original_max_position_embeddings
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = float(max(math.floor(boundary(yarn.beta_fast)), 0))
    high = float(min(math.ceil(boundary(yarn.beta_slow)), dim - 1))
    if low == high:
        high += 0.001
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return interpolated * (1 - keep) + kept * keep


class RotaryTable(nn.Module):
    """cos and sin of positions ``0 .. max_positions-1`` as non-persistent buffers ``[max_positions, dim // 2]``."""

    cos: Tensor
    sin: Tensor

    def __init__(self, frequencies: Tensor, max_positions: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
        """Rotate the last ``2 * cos.shape[1]`` channels of ``x``.

        ``x`` is ``[T, D]`` or ``[T, H, D]``, ``positions`` is ``[T]`` int64. ``inverse`` rotates back.
        """
        cos, sin = self.cos[positions], self.sin[positions]
        if x.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]
        if inverse:
            sin = -sin
        width = 2 * self.cos.shape[1]
        passed, turned = x[..., :-width], x[..., -width:]
        even, odd = turned[..., 0::2], turned[..., 1::2]
        rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
        return torch.cat((passed, rotated), -1)


class RotaryTables(nn.Module):
    """The two tables of the backbone: ``window`` for ratio-0 layers, ``compressed`` for the others."""

    def __init__(self, shape: BackboneShape, max_positions: int) -> None:
        super().__init__()
        dim = shape.qk_rope_head_dim
        self.window = RotaryTable(inverse_frequencies(dim, shape.rope_theta), max_positions)
        self.compressed = RotaryTable(
            yarn_inverse_frequencies(dim, shape.compress_rope_theta, shape.yarn), max_positions
        )

    def for_ratio(self, ratio: int) -> RotaryTable:
        return self.compressed if ratio else self.window
