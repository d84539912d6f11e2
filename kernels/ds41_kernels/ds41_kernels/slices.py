"""How an expert's inner channels are shared among tensor-parallel ranks. Standard library only."""

from __future__ import annotations

HADAMARD = 128


def inner_slice(inner: int, ranks: int, rank: int, layer: int) -> tuple[int, int]:
    """The channels ``[begin, end)`` of ``rank``, in whole Hadamard blocks of 128.

    2304 channels on four ranks are 640, 640, 512 and 512; which rank holds which piece moves on by one a layer, so
    that over the layers all ranks hold the same amount. An even split (576) would cut a Hadamard block and decode
    against the wrong transform without any error.

    Raises:
        ValueError: no multiple of 128, or fewer blocks than ranks.
    """
    blocks = inner // HADAMARD
    if inner % HADAMARD or blocks < ranks or not 0 <= rank < ranks:
        raise ValueError(
            f"expert slices: expected {ranks} ranks with a block of {HADAMARD} each, found {inner} channels"
        )
    piece = (rank + layer) % ranks
    small, larger = divmod(blocks, ranks)
    begin = piece * small + min(piece, larger)
    return begin * HADAMARD, (begin + small + (piece < larger)) * HADAMARD
