"""Makes the maths modules of the engine's packages importable from the repository: one home of the mathematics."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
for _folder in (_ROOT / "engine_patches" / "ds41_engine", _ROOT / "kernels" / "ds41_kernels"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

from ds41_engine import backbone, engram_hash, quant, shape, vision  # noqa: E402
from ds41_kernels import compile, exl3, load  # noqa: E402

__all__ = ["backbone", "compile", "engram_hash", "exl3", "load", "quant", "shape", "vision"]
