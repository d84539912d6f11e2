"""Seeded byte tables of the frozen Engram rows; the materialiser and the trainer read the same stream."""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor

from ds41ctl.core import packgen

from . import spec
from .mathematics import quant

# Scale bytes vary, so that a reader that mixes up scales and rows gives other values: 2^-1, 2^0 and 2^1.
SCALE_TABLE = bytes(126 + (i * 3) // 256 for i in range(256))


def weight_table() -> bytes:
    """256 FP8 codes at the quantiles of a standard normal distribution: uniform bytes become normal values."""
    normal = NormalDist()
    values = torch.tensor([normal.inv_cdf((i + 0.5) / 256) for i in range(256)])
    return bytes(values.to(torch.float8_e4m3fn).view(torch.uint8).tolist())


def engram_name(layer: int, part: str) -> str:
    """Checkpoint name of a table tensor; `part` is weight or scale."""
    return f"layers.{layer}.engram.embed.{part}"


def engram_values(layer: int, rows: int) -> Tensor:
    """Decoded frozen rows of a layer, fp32 [rows, 256]."""
    parts = []
    for part, width, table in (("weight", spec.ENGRAM_DIM, weight_table()), ("scale", 8, SCALE_TABLE)):
        raw = b"".join(packgen.stream(spec.SEED, engram_name(layer, part), rows * width, table))
        parts.append(torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(rows, width))
    return quant.decode_engram_rows(parts[0].view(torch.float8_e4m3fn), parts[1])
