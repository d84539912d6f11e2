"""The checkpoint's number formats: FP8 32x32 with UE8M0 scales, MXFP4, and Engram rows.

Encoders choose power-of-two scales so that the largest magnitude of a block fits the format; decoders return fp32.
``fake_*`` is decode(encode(x)) for quantisation-aware training. All functions work on any device.
"""

from __future__ import annotations

import enum
import functools
import re

import torch
from torch import Tensor

FP8_BLOCK = 32
FP8_MAX = 448.0
FP4_GROUP = 32
FP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
UE8M0_BIAS = 127
ENGRAM_WEIGHT_BYTES = 256
ENGRAM_SCALE_BYTES = 8
ENGRAM_RECORD_BYTES = ENGRAM_WEIGHT_BYTES + ENGRAM_SCALE_BYTES


class TensorFormat(enum.Enum):
    """How the checkpoint stores a tensor."""

    FP8_BLOCK = "F8_E4M3 with .scale UE8M0 per 32x32"
    MXFP4 = "two FP4 codes a byte with .scale UE8M0 per row and 32 columns"
    ENGRAM_ROWS = "F8_E4M3 rows with .scale UE8M0 per 32 columns"
    BF16 = "BF16"
    F32 = "F32"


_FORMATS = (
    (re.compile(r"\.engram\.embed\.weight$"), TensorFormat.ENGRAM_ROWS),
    (re.compile(r"\.ffn\.experts\.\d+\.w[123]\.weight$"), TensorFormat.MXFP4),
    (re.compile(r"\.ffn\.shared_experts\.w[123]\.weight$"), TensorFormat.FP8_BLOCK),
    (re.compile(r"\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b)\.weight$"), TensorFormat.FP8_BLOCK),
    (re.compile(r"\.attn\.indexer\.wq_b\.weight$"), TensorFormat.FP8_BLOCK),
    (re.compile(r"\.engram\.wkv\.weight$"), TensorFormat.FP8_BLOCK),
    (re.compile(r"\.(hc_(attn|ffn)_(fn|base|scale)|attn\.attn_sink|ffn\.gate\.bias(_vl)?)$"), TensorFormat.F32),
    (re.compile(r"^vision\.(norm|blocks\.\d+\.norm[12])\.weight$"), TensorFormat.F32),
    (re.compile(r"^image_(start|end|newline)$"), TensorFormat.F32),
)


def tensor_format(name: str) -> TensorFormat:
    """Format of a checkpoint tensor by its name, e.g. ``layers.3.attn.wq_a.weight``; everything else is BF16."""
    for pattern, kind in _FORMATS:
        if pattern.search(name):
            return kind
    return TensorFormat.BF16


def decode_ue8m0(scale: Tensor) -> Tensor:
    """UE8M0 bytes (uint8 or float8_e8m0fnu) -> fp32 ``2 ** (byte - 127)``; byte 255 (NaN) raises ValueError."""
    codes = scale.view(torch.uint8)
    if bool((codes == 255).any()):
        raise ValueError("UE8M0 scale: expected bytes 0..254, found 255 (NaN); the tensor is damaged")
    return torch.exp2(codes.float() - UE8M0_BIAS)


def _exponents(largest: Tensor, format_max: float) -> Tensor:
    """Smallest power-of-two exponent with ``largest / 2**e <= format_max``, within what UE8M0 holds."""
    exponent = torch.ceil(torch.log2(largest.clamp(min=1e-30) / format_max))
    exponent = torch.where(largest > format_max * torch.exp2(exponent), exponent + 1, exponent)
    return exponent.clamp(-UE8M0_BIAS, UE8M0_BIAS)


def _ue8m0_bytes(exponent: Tensor) -> Tensor:
    return (exponent + UE8M0_BIAS).to(torch.uint8)


def _blocks(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    if rows % FP8_BLOCK or columns % FP8_BLOCK:
        raise ValueError(f"FP8 32x32: expected a shape in multiples of 32, found {rows}x{columns}")
    return weight.reshape(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)


def _scaled_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    blocks = _blocks(weight.float())
    exponent = _exponents(blocks.abs().amax((1, 3), keepdim=True), FP8_MAX)
    codes = (blocks / torch.exp2(exponent)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes, exponent


def encode_fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``[o, i]`` -> codes ``[o, i]`` float8_e4m3fn and scales ``[o/32, i/32]`` uint8 (UE8M0).

    Raises:
        ValueError: a dimension is not a multiple of 32.
    """
    codes, exponent = _scaled_blocks(weight)
    return codes.reshape(weight.shape), _ue8m0_bytes(exponent[:, 0, :, 0])


def decode_fp8_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """Codes ``[o, i]`` and scales ``[ceil(o/32), ceil(i/32)]`` -> fp32 ``[o, i]``."""
    rows, columns = codes.shape
    expected = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    if tuple(scale.shape) != expected:
        raise ValueError(f"FP8 32x32: expected scales {expected} for {rows}x{columns}, found {tuple(scale.shape)}")
    factors = decode_ue8m0(scale).repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return codes.float() * factors


def fake_fp8_blocks(weight: Tensor) -> Tensor:
    """``decode(encode(weight))`` in one step."""
    codes, exponent = _scaled_blocks(weight)
    return (codes.float() * torch.exp2(exponent)).reshape(weight.shape)


def _fp4_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP4 codes (0..15, sign in bit 3) grouped ``[..., i/32, 32]`` and exponents ``[..., i/32, 1]``."""
    if weight.shape[-1] % FP4_GROUP:
        raise ValueError(f"MXFP4: expected columns in multiples of 32, found {weight.shape[-1]}")
    groups = torch.unflatten(weight.float(), -1, (-1, FP4_GROUP))
    exponent = _exponents(groups.abs().amax(-1, keepdim=True), FP4_LEVELS[-1])
    scaled = groups / torch.exp2(exponent)
    levels = torch.tensor(FP4_LEVELS, device=weight.device)
    borders = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(scaled.abs(), borders)
    return codes + 8 * (scaled < 0), exponent


def _fp4_values(codes: Tensor) -> Tensor:
    levels = FP4_LEVELS + tuple(-level for level in FP4_LEVELS)
    table = torch.tensor(levels, dtype=torch.float32, device=codes.device)
    return table[codes.long()]


def encode_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``[o, i]`` -> packed codes ``[o, i/2]`` int8 (low nibble first) and scales ``[o, i/32]`` uint8 (UE8M0).

    Halfway values round towards zero. Raises ValueError when ``i`` is not a multiple of 32.
    """
    codes, exponent = _fp4_codes(weight)
    flat = codes.flatten(-2).to(torch.uint8)
    packed = (flat[..., 0::2] | (flat[..., 1::2] << 4)).contiguous().view(torch.int8)
    return packed, _ue8m0_bytes(exponent.squeeze(-1))


def decode_mxfp4(packed: Tensor, scale: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """Packed codes ``[o, i/2]`` and scales ``[o, i/32]`` -> fp32 ``[o, i]``.

    ``out`` (fp32, contiguous, ``o * i`` values) and ``scratch`` (int32, ``o * i / 2`` values) are used when given: a
    caller that decodes thousands of matrices spares the system that many fresh pages.
    """
    rows, half = packed.shape
    expected = (rows, half * 2 // FP4_GROUP)
    if tuple(scale.shape) != expected:
        raise ValueError(f"MXFP4: expected scales {expected} for {rows}x{half * 2}, found {tuple(scale.shape)}")
    codes = packed.view(torch.uint8).flatten()
    index = codes.int() if scratch is None else scratch.copy_(codes)
    if out is None:
        out = torch.empty(rows * half * 2, dtype=torch.float32, device=packed.device)
    torch.index_select(_fp4_pairs(packed.device), 0, index, out=out.view(torch.int64))
    out.view(rows, -1, FP4_GROUP).mul_(decode_ue8m0(scale).view(rows, -1, 1))
    return out.view(rows, half * 2)


@functools.cache
def _fp4_pairs(device: torch.device) -> Tensor:
    """The two fp32 values of each byte of packed codes, as one int64: ``[256]``. One gather instead of ten passes."""
    byte = torch.arange(256, device=device)
    return _fp4_values(torch.stack((byte & 15, byte >> 4), -1)).view(torch.int64).flatten()


def fake_mxfp4(weight: Tensor) -> Tensor:
    """``decode(encode(weight))``; ``weight`` may have leading dimensions (all experts at once: ``[E, o, i]``)."""
    codes, exponent = _fp4_codes(weight)
    return (_fp4_values(codes) * torch.exp2(exponent)).flatten(-2)


def encode_engram_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """``[rows, 256]`` -> codes ``[rows, 256]`` float8_e4m3fn and scales ``[rows, 8]`` uint8 (one per 32 values)."""
    groups = torch.unflatten(values.float(), -1, (-1, FP8_BLOCK))
    exponent = _exponents(groups.abs().amax(-1, keepdim=True), FP8_MAX)
    codes = (groups / torch.exp2(exponent)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2), _ue8m0_bytes(exponent.squeeze(-1))


def decode_engram_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """Codes ``[..., 256]`` float8_e4m3fn and scales ``[..., 8]`` -> fp32 ``[..., 256]``.

    A scale byte 0 is 2**-127, as in the engine; nothing is treated as a marker.
    """
    factors = torch.exp2(scale.view(torch.uint8).float() - UE8M0_BIAS)
    return (torch.unflatten(codes.float(), -1, (-1, FP8_BLOCK)) * factors[..., None]).flatten(-2)


def decode_engram_records(records: Tensor) -> Tensor:
    """Store records ``[..., 264]`` uint8 (256 weights, then 8 scales) -> fp32 ``[..., 256]``."""
    codes = records[..., :ENGRAM_WEIGHT_BYTES].contiguous().view(torch.float8_e4m3fn)
    return decode_engram_rows(codes, records[..., ENGRAM_WEIGHT_BYTES:].contiguous())
