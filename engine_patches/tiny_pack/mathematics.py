"""Makes the maths modules of the engine plugin importable from the repository: one home of the mathematics."""

from __future__ import annotations

import sys
from pathlib import Path

_PLUGIN = str(Path(__file__).resolve().parents[1] / "ds41_engine")
if _PLUGIN not in sys.path:
    sys.path.insert(0, _PLUGIN)

from ds41_engine import backbone, engram_hash, quant, shape, vision  # noqa: E402

__all__ = ["backbone", "engram_hash", "quant", "shape", "vision"]
