"""The EXL3 weight format: trellis-coded 16x16 tiles of 1 to 8 bits a weight between two Hadamard rotations. numpy only.

Written from the format as published (exllamav3 is its authority). What a kernel computes is compared with this.
"""

from .codebook import Codebook, decode, mul1_sum, table
from .experts import SWIGLU_LIMIT, Exl3Expert, layer_forward, random_expert, swiglu
from .linear import HADAMARD, Exl3Linear, hadamard, random_linear
from .tile import EDGE, WEIGHTS, FormatError, Rate, decode_tiles, pack_states, positions, random_tiles, tile_states

__all__ = [
    "EDGE",
    "HADAMARD",
    "SWIGLU_LIMIT",
    "WEIGHTS",
    "Codebook",
    "Exl3Expert",
    "Exl3Linear",
    "FormatError",
    "Rate",
    "decode",
    "decode_tiles",
    "hadamard",
    "layer_forward",
    "mul1_sum",
    "pack_states",
    "positions",
    "random_expert",
    "random_linear",
    "random_tiles",
    "swiglu",
    "table",
    "tile_states",
]
