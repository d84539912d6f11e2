"""Pictures as the checkpoint's own image processor makes them: patches and the grid of tokens they become."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

GREY = (127, 127, 127)


@dataclass(frozen=True)
class Picture:
    """``patches [rows * columns, 3 * patch * patch]`` fp32 (rounded to BF16, as the processor does), and both grids."""

    patches: Tensor
    rows: int
    columns: int
    token_rows: int
    token_columns: int

    @property
    def tokens(self) -> int:
        """Prompt tokens: a newline a row, a start and an end."""
        return _tokens(self.token_rows, self.token_columns)


def _tokens(rows: int, columns: int) -> int:
    return rows * (columns + 1) + 2


def _largest(height: float, width: float, patch: int, cell: int, budget: int) -> tuple[int, int]:
    """Pixels of the largest picture of this aspect whose tokens fit the budget."""
    aspect = height / width
    columns = math.sqrt((budget - 2) / aspect + 0.25) - 0.5
    rows = columns * aspect
    if columns < 1.0:
        return (budget - 2) // 2 * cell, cell
    if rows < 1.0:
        return cell, (budget - 3) * cell
    factor = min(math.floor(columns) * cell / width, math.floor(rows) * cell / height)
    return math.floor(height * factor / patch) * patch, math.floor(width * factor / patch) * patch


def prepare(image: Image.Image, config: Mapping[str, Any]) -> Picture:
    """Scale, pad with grey and cut into patches by ``vision_config``."""
    patch, merge, budget = int(config["patch_size"]), int(config["downsample_ratio"]), int(config["max_image_tokens"])
    smallest, widest = int(config["min_pixels"]), config.get("max_wh_ratio")
    image = image.convert("RGB")
    width, height = float(image.width), float(image.height)
    if widest is not None and width > height * widest:
        width = height * widest
    if 0 < width * height < smallest:
        grow = (smallest / (width * height)) ** 0.5
        width, height = int(width * grow), int(height * grow)

    def grid(pixels_high: int, pixels_wide: int) -> tuple[int, int]:
        return math.ceil(pixels_high // patch / merge), math.ceil(pixels_wide // patch / merge)

    high, wide = math.ceil(height / patch) * patch, math.ceil(width / patch) * patch
    if _tokens(*grid(high, wide)) > budget:
        high, wide = _largest(height, width, patch, patch * merge, budget)
    if widest is not None and image.width >= widest * image.height:
        image = image.resize((wide, high))
    else:
        image = ImageOps.pad(image, (wide, high), color=GREY)
    x = torch.from_numpy(np.asarray(image, dtype=np.float32)).permute(2, 0, 1) / 255
    x = ((x - 0.5) / 0.5).to(torch.bfloat16).float()
    rows, columns = high // patch, wide // patch
    patches = x.reshape(3, rows, patch, columns, patch).permute(1, 3, 0, 2, 4).reshape(rows * columns, -1)
    return Picture(patches, rows, columns, *grid(high, wide))
