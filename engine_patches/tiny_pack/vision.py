"""Vision for training: the engine's own tower for pictures of the recipe's one size, and their patches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import images
from .mathematics import vision


def patches(picture: bytes, patch: int) -> Tensor:
    """RGB bytes [SIDE, SIDE, 3] to normalised patches [patches, 3 * patch * patch], as the processor makes them."""
    side, grid = images.SIDE, images.SIDE // patch
    x = torch.frombuffer(bytearray(picture), dtype=torch.uint8).view(side, side, 3).permute(2, 0, 1).float() / 255
    x = (x - 0.5) / 0.5
    return x.reshape(3, grid, patch, grid, patch).permute(1, 3, 0, 2, 4).reshape(grid * grid, -1)


class Vision(vision.Vision):
    """Pictures of one size to image spans."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: dict[str, Any], hidden: int) -> None:
        super().__init__(config, hidden)
        self.grid = images.SIDE // config["patch_size"]
        cos, sin = self.angles(self.grid, self.grid)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[pictures, patches, 3 * patch * patch] to spans [pictures, span, hidden]."""
        return self.spans(x, self.grid, self.grid, self.cos, self.sin)
