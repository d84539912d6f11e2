"""Reading a checkpoint: quantised tensors become fp32, and nothing the model needs may be missing.

vLLM skips its own missing-tensor check for quantised models, so a checkpoint without ``engram.embed.*`` boots silently.
Here every expected tensor must have been seen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from .quant import decode_fp8_blocks, decode_mxfp4

NAMES_IN_MESSAGE = 8
"""Missing tensors that a message names before it only counts."""


class CheckpointError(Exception):
    """The checkpoint does not fit the model. The text is one line: what, expected, found, fix."""


def decode_tensors(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Pair each quantised ``X.weight`` with its ``X.scale`` and yield ``(X.weight, fp32)``; others pass through.

    Tensors may come in any order. ``mtp.*`` (the drafter) is dropped: there is no drafter on CPU. ``engram.embed.*``
    passes undecoded: its rows are read from the store.

    Raises:
        CheckpointError: a weight without its scale or the reverse, or shapes that do not belong together.
    """
    halves: dict[str, Tensor] = {}
    for name, tensor in weights:
        if name.startswith("mtp."):
            continue
        stem, _, kind = name.rpartition(".")
        quantised = tensor.dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8)
        if stem.endswith(".engram.embed") or not (kind == "scale" or (kind == "weight" and quantised)):
            yield name, tensor
            continue
        other = halves.pop(f"{stem}.{'weight' if kind == 'scale' else 'scale'}", None)
        if other is None:
            halves[name] = tensor
            continue
        codes, scale = (other, tensor) if kind == "scale" else (tensor, other)
        decode = decode_fp8_blocks if codes.dtype == torch.float8_e4m3fn else decode_mxfp4
        try:
            yield f"{stem}.weight", decode(codes, scale)
        except ValueError as error:
            raise CheckpointError(f"checkpoint tensor {stem}: {error}; run: ds41ctl fetch --verify") from None
    if halves:
        raise CheckpointError(
            f"checkpoint: expected weight and scale in pairs, found only one half of {_listing(halves)}; "
            "run: ds41ctl fetch --verify"
        )


def fill(parameter: nn.Parameter, name: str, value: Tensor) -> None:
    """Copy a decoded tensor into a parameter; CheckpointError when the shapes differ."""
    if parameter.shape != value.shape:
        raise CheckpointError(
            f"checkpoint tensor {name}: expected shape {list(parameter.shape)}, found {list(value.shape)}; "
            "config.json and the shards are not of one checkpoint, run: ds41ctl fetch --verify"
        )
    loader = getattr(parameter, "weight_loader", None)
    if loader is not None:
        loader(parameter, value.to(parameter.dtype))
    else:
        parameter.data.copy_(value)


def load(
    parameters: Mapping[str, nn.Parameter],
    also_expected: Collection[str],
    weights: Iterable[tuple[str, Tensor]],
) -> set[str]:
    """Fill ``parameters`` (by checkpoint name) from a checkpoint.

    Args:
        parameters: what to fill; all of it must be seen.
        also_expected: names that must be seen but have no parameter (the Engram rows).
        weights: the checkpoint's tensors.

    Returns:
        The names filled.

    Raises:
        CheckpointError: something is missing or does not fit; one line naming the tensors.
    """
    seen: set[str] = set()
    for name, value in decode_tensors(weights):
        parameter = parameters.get(name)
        if parameter is not None:
            fill(parameter, name, value)
        seen.add(name)
    missing = sorted((set(parameters) | set(also_expected)) - seen)
    if missing:
        raise CheckpointError(
            f"checkpoint: expected {len(parameters) + len(also_expected)} tensors, missing {len(missing)}: "
            f"{_listing(missing)}; run: ds41ctl fetch --verify --repair"
        )
    return seen & set(parameters)


def _listing(names: Collection[str]) -> str:
    shown = sorted(names)[:NAMES_IN_MESSAGE]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
