"""An EXL3 layer in plain torch, double precision, written from the format: what the kernels are compared with.

It shares nothing with the kernels. ``tests/engine/test_exl3_torch.py`` compares it with the numpy library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from ds41_kernels import exl3
from ds41_kernels.exl3 import Codebook

CODEBOOKS = {"3inst": Codebook.THREE_INST, "mcg": Codebook.MCG, "mul1": Codebook.MUL1}


@dataclass
class Linear:
    """One projection: ``trellis [k/16, n/16, 16 K]`` int16, ``suh [k]``, ``svh [n]`` half; ``dense`` keeps ``T``."""

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    codebook: str
    dense: torch.Tensor | None = None


def values(codebook: str, device: torch.device | str) -> torch.Tensor:
    """The codebook's 65,536 values, half."""
    return torch.from_numpy(np.array(exl3.table(CODEBOOKS[codebook]))).to(device)


def states(trellis: torch.Tensor) -> torch.Tensor:
    """``[k/16, n/16, 256]`` int64, by position."""
    rows, columns, halves = trellis.shape
    bits, words = halves // 16, halves // 2
    pairs = (trellis.to(torch.int64) & 0xFFFF).reshape(rows, columns, words, 2)
    stream = pairs[..., 0] | pairs[..., 1] << 16  # 32-bit words, most significant bit first
    end = (torch.arange(256, device=trellis.device) + 1) * bits
    begin = (end - 16) % (256 * bits)
    first = stream[..., begin // 32]
    second = stream[..., (begin // 32 + 1) % words]
    return ((first << 32 | second) >> (48 - begin % 32)) & 0xFFFF


def decoded(linear: Linear, table: torch.Tensor) -> torch.Tensor:
    """``T [k, n]`` half."""
    if linear.dense is not None:
        return linear.dense
    rows, columns, _ = linear.trellis.shape
    position = torch.arange(256, device=table.device)
    lane, j = position // 8, position % 8
    k = lane % 4 * 2 + (j & 1) + 8 * (j >> 1 & 1)
    n = lane // 4 + 8 * (j >> 2)
    tiles = torch.empty(rows, columns, 16, 16, dtype=torch.float16, device=table.device)
    tiles[:, :, k, n] = table[states(linear.trellis)]
    return tiles.permute(0, 2, 1, 3).reshape(rows * 16, columns * 16)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Blocks of 128 of the last axis times the orthogonal Sylvester matrix."""
    matrix = torch.ones(1, 1, dtype=torch.float64, device=x.device)
    while matrix.shape[0] < 128:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    blocks = x.double().reshape(*x.shape[:-1], -1, 128)
    return (blocks @ matrix / 128**0.5).reshape(x.shape)


def rotate(x: torch.Tensor, suh: torch.Tensor) -> torch.Tensor:
    """Rotated activations: ``x * suh`` and the result in half."""
    return hadamard(x.half() * suh).float().half()


def product(x: torch.Tensor, linear: Linear, table: torch.Tensor) -> torch.Tensor:
    """``x W`` in double, with the kernels' rounding points of the activations."""
    return hadamard(rotate(x, linear.suh).double() @ decoded(linear, table).double()) * linear.svh.double()


def layer(
    experts: Sequence[Sequence[Linear]],
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor,
    limit: float = 10.0,
) -> torch.Tensor:
    """``[T, hidden]`` double; ids outside the experts add nothing."""
    parts = torch.zeros(*ids.shape, x.shape[-1], dtype=torch.float64, device=x.device)
    for number, (gate, up, down) in enumerate(experts):
        token, slot = torch.nonzero(ids == number, as_tuple=True)
        if not len(token):
            continue
        g = product(x[token], gate, table).clamp(max=limit)
        u = product(x[token], up, table).clamp(-limit, limit)
        parts[token, slot] = product(g * torch.sigmoid(g) * u, down, table)
    return (parts * weights.double()[..., None]).sum(1)


def random_linear(k: int, n: int, bits: int, codebook: str, generator: torch.Generator) -> Linear:
    """Random tiles (every bit pattern is valid), scales of random sign that keep the size of activations."""
    device = generator.device
    trellis = torch.randint(-32768, 32768, (k // 16, n // 16, 16 * bits), generator=generator, device=device)

    def scales(count: int, size: float) -> torch.Tensor:
        sign = torch.randint(0, 2, (count,), generator=generator, device=device) * 2 - 1
        return (sign * size * (0.8 + 0.4 * torch.rand(count, generator=generator, device=device))).half()

    spread = k**-0.5 / (1.0 if codebook == "mul1" else 1.24)
    return Linear(trellis.to(torch.int16), scales(k, 1.0), scales(n, spread), codebook)
