"""The three codebooks of EXL3: a 16-bit trellis state becomes one half-precision value.

Source of the constants: exllamav3 1.6.5 (MIT), the format's authority; nothing of its code is here.
"""

from __future__ import annotations

import enum
import functools

import numpy as np
from numpy.typing import NDArray

STATES = 1 << 16
THREE_INST_FACTOR, THREE_INST_OFFSET = 89_226_354, 64_248_484
MCG_FACTOR = 0xCBAC1FED
MUL1_FACTOR = 0x83DCD12D
HALVES_KEPT, HALVES_FLIPPED = 0x8FFF8FFF, 0x3B603B60  # sign, exponent's low bit and mantissa; then two halves near 1
MUL1_SLOPE_BITS, MUL1_OFFSET_BITS = 0x1EEE, 0xC931  # half 0.0067672729 and -10.3828125
MUL1_BASE = 1024  # half 0x6400 + sum is exactly 1024 + sum, because sums end at 1020

HalfArray = NDArray[np.float16]
StateArray = NDArray[np.uint16]


class Codebook(enum.Enum):
    """Which function decodes a state. The value is the number that exllamav3's kernels call it by."""

    THREE_INST = 0
    MCG = 1
    MUL1 = 2

    @property
    def marker(self) -> str:
        """Name of the tensor whose presence selects this codebook; '' for 3INST, which has none."""
        return {Codebook.THREE_INST: "", Codebook.MCG: "mcg", Codebook.MUL1: "mul1"}[self]

    @property
    def marker_value(self) -> int:
        """What the marker tensor holds (int32 reading of the multiplier). Readers look at its presence only."""
        factor = {Codebook.THREE_INST: 0, Codebook.MCG: MCG_FACTOR, Codebook.MUL1: MUL1_FACTOR}[self]
        return factor - (1 << 32) if factor >> 31 else factor


def _half(bits: int) -> np.float16:
    return np.array([bits], np.uint16).view(np.float16)[0]  # type: ignore[no-any-return]


MUL1_SLOPE, MUL1_OFFSET = _half(MUL1_SLOPE_BITS), _half(MUL1_OFFSET_BITS)


def mul1_sum(states: StateArray) -> NDArray[np.int64]:
    """Sum of the four bytes of ``state * 0x83DCD12D mod 2**32``, 0 to 1020."""
    product = (states.astype(np.uint64) * MUL1_FACTOR) & 0xFFFFFFFF
    total = sum(((product >> shift) & 0xFF).astype(np.int64) for shift in (0, 8, 16, 24))
    return np.asarray(total, np.int64)


def _mul1(states: StateArray) -> HalfArray:
    # One rounding, as a half fma does: the product and the sum are exact in double. A half multiplication followed by a
    # half addition gives another value for 60,326 of the 65,536 states.
    exact = (MUL1_BASE + mul1_sum(states)).astype(np.float64) * np.float64(MUL1_SLOPE) + np.float64(MUL1_OFFSET)
    return exact.astype(np.float16)


def _sum_of_halves(states: StateArray, factor: int, offset: int) -> HalfArray:
    product = (states.astype(np.uint64) * factor + offset) & 0xFFFFFFFF
    bits = ((product & HALVES_KEPT) ^ HALVES_FLIPPED).astype(np.uint32)
    low = (bits & 0xFFFF).astype(np.uint16).view(np.float16)
    high = (bits >> 16).astype(np.uint16).view(np.float16)
    return np.asarray(low + high, np.float16)


@functools.cache
def table(codebook: Codebook) -> HalfArray:
    """Values of all 65,536 states, half precision, read-only."""
    states = np.arange(STATES, dtype=np.uint16)
    if codebook is Codebook.MUL1:
        values = _mul1(states)
    elif codebook is Codebook.MCG:
        values = _sum_of_halves(states, MCG_FACTOR, 0)
    else:
        values = _sum_of_halves(states, THREE_INST_FACTOR, THREE_INST_OFFSET)
    values.setflags(write=False)
    return values


def decode(states: StateArray, codebook: Codebook) -> HalfArray:
    """Half-precision values of trellis states, in the shape of ``states``."""
    return table(codebook)[states]
