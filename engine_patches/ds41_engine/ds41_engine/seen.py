"""Was every tensor that the pack must have seen by the loader? For the engine's GPU path; no torch, no vLLM.

Upstream skips its own check for quantised models, and its switch ``enable_weights_track`` names six
``attn.wo_a.weight_scale`` of a complete pack, which 0.33 fills another way. What is asked here is another question:
not whether each parameter was filled, but whether each tensor of the checkpoint came by.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .inventory import expected

NAMES_IN_MESSAGE = 8
T = TypeVar("T")


class MissingTensorsError(RuntimeError):
    """Tensors that the pack must have never came. The text is one line: what, found, fix."""


class Seen:
    """Remembers the names that pass through :meth:`watch`."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def watch(self, weights: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        """The same weights, their names noted."""
        for name, tensor in weights:
            self.names.add(name.removeprefix("model."))
            yield name, tensor

    def missing(self, config: Mapping[str, Any], *, tables_elsewhere: bool = False) -> list[str]:
        """Names that never came. ``tables_elsewhere``: the Engram tables are not read from the checkpoint."""
        wanted = expected(config)
        if tables_elsewhere:
            wanted = {name for name in wanted if ".engram.embed." not in name}
        return sorted(wanted - self.names)


def config_of(model: str) -> dict[str, Any] | None:
    """config.json of a local checkpoint folder, None when the model is no folder."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return None
    tree = json.loads(path.read_text(encoding="utf-8"))
    return tree if isinstance(tree, dict) else None


def complaint(missing: list[str]) -> str:
    """The one line that names what is missing."""
    shown = ", ".join(missing[:NAMES_IN_MESSAGE]) + (
        f" and {len(missing) - NAMES_IN_MESSAGE} more" if len(missing) > NAMES_IN_MESSAGE else ""
    )
    return f"checkpoint: {len(missing)} tensors are missing: {shown}; run: ds41ctl fetch --verify"
