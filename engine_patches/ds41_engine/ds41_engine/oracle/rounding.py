"""What the checkpoint was trained to bear: activations in MXFP8, window keys in MXFP8, compressed keys in NVFP4, index
queries and keys in MXFP4.

Each function returns its input rounded to that grid, fp32. The grids and the scale rules are those of the engine's
kernels (vLLM 0.33: ``deepseek_v41/common/ops``): a power of two that brings the largest of 32 values into range for
MXFP8 and MXFP4, an E4M3 scale of a sixth of the largest of 16 for NVFP4; values round to nearest, ties to even.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..backbone import Block, Linear

FP8_MAX = 448.0
FP4_MAX = 6.0
_LEVELS = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
# a tie goes to the even code: down where the lower code is even, up where it is odd
_BORDERS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_BORDERS[1::2] = torch.nextafter(_BORDERS[1::2], torch.zeros(3))


def _groups(x: Tensor, width: int) -> Tensor:
    return torch.unflatten(x, -1, (-1, width))


def _power_scale(groups: Tensor, largest: float) -> Tensor:
    amax = groups.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(amax / largest)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
    return torch.exp2(torch.where(amax == 0, -127, exponent).float())


def mxfp8(x: Tensor) -> Tensor:
    """E4M3 with a power-of-two scale for each 32 values of the last dimension."""
    groups = _groups(x, 32)
    scale = _power_scale(groups, FP8_MAX)
    return ((groups / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def e2m1(x: Tensor) -> Tensor:
    """The nearest FP4 value, at most 6 in magnitude."""
    return torch.copysign(_LEVELS[torch.bucketize(x.abs(), _BORDERS)], x)


def mxfp4(x: Tensor) -> Tensor:
    """FP4 with a power-of-two scale for each 32 values of the last dimension."""
    groups = _groups(x, 32)
    scale = _power_scale(groups, FP4_MAX)
    return (e2m1(groups / scale) * scale).flatten(-2)


def nvfp4(x: Tensor) -> Tensor:
    """FP4 with an E4M3 scale for each 16 values of the last dimension."""
    groups = _groups(x, 16)
    scale = (groups.abs().amax(-1, keepdim=True) / FP4_MAX).clamp(2.0**-9, FP8_MAX)
    scale = scale.to(torch.float8_e4m3fn).float()
    return (e2m1(groups / scale) * scale).flatten(-2)


@dataclass(frozen=True)
class Rounding:
    """Which grids are used; none: plain fp32.

    Attributes:
        activations: inputs of every FP8 and FP4 matrix (MXFP8).
        keys: window keys (MXFP8), compressed keys (NVFP4), index queries and keys (MXFP4).
    """

    activations: bool = False
    keys: bool = False

    def matrix_input(self, x: Tensor) -> Tensor:
        """Input of a quantised matrix."""
        return mxfp8(x) if self.activations else x

    def window_key(self, x: Tensor) -> Tensor:
        """Rotated window row."""
        return mxfp8(x) if self.keys else x

    def compressed_key(self, x: Tensor) -> Tensor:
        """Rotated compressed row."""
        return nvfp4(x) if self.keys else x

    def index(self, x: Tensor) -> Tensor:
        """Rotated index query or key."""
        return mxfp4(x) if self.keys else x

    def apply(self, block: Block) -> None:
        """Round the inputs of a layer's FP8 matrices (the experts' are rounded where they are read)."""
        if not self.activations:
            return
        attn = block.attn
        rounded: list[Linear] = [attn.wq_a, attn.wq_b, attn.wkv, attn.wo_b]
        shared = block.ffn.shared_experts
        rounded += [shared.w1, shared.w3, shared.w2]
        if attn.is_index_source:
            rounded.append(attn.indexer.wq_b)
        if block.engram_index is not None:
            rounded.append(block.engram.wkv)
        for linear in rounded:
            linear.register_forward_pre_hook(_round_input)
        project = attn.project_out
        attn.project_out = lambda heads: project(mxfp8(heads))  # type: ignore[method-assign]


def _round_input(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (mxfp8(args[0]), *args[1:])
