"""Every kernel against the numpy reference, on the card it will serve on: a known expert for each rate and codebook.

    python -m ds41_kernels.selfcheck --cache DIR [--bits 2,3,5] [--codebooks mul1]

Builds (or takes from the cache) the image for the card, prints one line of JSON a check, and ends with 1 when one
differs: an engine that fails here must not serve.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import exl3
from .build import CODEBOOKS, BuildError, Variant, build, target_for
from .driver import DriverError, compute_capability
from .moe import DeviceLinear, Exl3Moe, Images, MoeError, Workspace, decoded_weights

HIDDEN, INNER, TOP_K = 256, 384, 2
LIMIT = 1e-3  # relative RMS of a layer; the parts that are exact are compared bit by bit
SEED = 20261017
_LIBRARY = {"3inst": exl3.Codebook.THREE_INST, "mcg": exl3.Codebook.MCG, "mul1": exl3.Codebook.MUL1}


@dataclass(frozen=True)
class Check:
    """One comparison; ``found`` says what was measured."""

    name: str
    ok: bool
    found: str


def to_device(linear: exl3.Exl3Linear, device: torch.device | str = "cuda") -> DeviceLinear:
    """A reference layer's tensors on the card."""
    return DeviceLinear(
        torch.from_numpy(np.ascontiguousarray(linear.trellis).view(np.int16)).to(device),
        torch.from_numpy(np.array(linear.suh)).to(device),
        torch.from_numpy(np.array(linear.svh)).to(device),
    )


def check_images(images: Images, bits: Sequence[int], codebooks: Sequence[str]) -> Iterator[Check]:
    """All comparisons. Needs a CUDA context (any torch tensor on the card)."""
    for name in codebooks:
        experts = []
        for rate in bits:
            random = np.random.default_rng((SEED, rate))
            rates = (exl3.Rate.of(rate),) * 3
            experts.append(exl3.random_expert(random, HIDDEN, INNER, rates, _LIBRARY[name]))
        for rate, expert in zip(bits, experts, strict=True):
            found = decoded_weights(images, to_device(expert.w1), name).cpu().numpy()
            same = int((found.view(np.uint16) != expert.w1.decoded().view(np.uint16)).sum())
            yield Check(f"weights {name} K{rate}", same == 0, f"{same} of {found.size} weights differ")
        workspace = Workspace(HIDDEN, INNER, len(experts), TOP_K, 64, torch.device("cuda"))
        parts = [(to_device(e.w1), to_device(e.w3), to_device(e.w2)) for e in experts]
        layer = Exl3Moe(images, parts, name, workspace)
        random = np.random.default_rng(SEED)
        x = random.standard_normal((20, HIDDEN)).astype(np.float16)
        ids = random.integers(0, len(experts), (20, TOP_K)).astype(np.int32)
        ids[:, 0] = np.arange(20) % len(experts)
        weights = random.uniform(0.1, 1.0, (20, TOP_K)).astype(np.float32)
        wanted = exl3.layer_forward(experts, x, ids, weights)
        on_card = tuple(torch.from_numpy(array).cuda() for array in (x, ids, weights))
        whole = layer(on_card[0], on_card[1], on_card[2])
        yield _close(f"decode {name}", whole, wanted)
        alone = torch.cat([layer(*(array[t : t + 1].contiguous() for array in on_card)) for t in range(20)])
        yield Check(f"decode {name} alone or together", bool(torch.equal(whole, alone)), "rows compared bit by bit")
        out = torch.empty_like(whole)
        layer.prefill(on_card[0], on_card[1], on_card[2], out)
        yield _close(f"prefill {name}", out, wanted)


def _close(name: str, found: torch.Tensor, wanted: np.ndarray[Any, np.dtype[np.float64]]) -> Check:
    values = found.double().cpu().numpy()
    error = float(np.linalg.norm(values - wanted) / np.linalg.norm(wanted))
    return Check(name, bool(error <= LIMIT), f"relative RMS {error:.2e}, at most {LIMIT:g}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line above."""
    parser = argparse.ArgumentParser(prog="ds41_kernels.selfcheck")
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--cache", type=Path, help="directory of images, to which a missing one is added")
    place.add_argument("--images", type=Path, help="directory of images built elsewhere; no compiler is needed")
    parser.add_argument("--bits", default="1,2,3,4,5,6,7,8", help="bits per weight that occur in the pack")
    parser.add_argument("--codebooks", default=",".join(CODEBOOKS), help="codebooks that occur in the pack")
    parser.add_argument("--target", default="", help="image to check; the card's own when not given")
    options = parser.parse_args(argv)
    failed = 0
    try:
        bits = tuple(int(part) if part.isdecimal() else 0 for part in options.bits.split(","))
        variant = Variant(bits, tuple(options.codebooks.split(",")))
        target = options.target or target_for(*compute_capability())
        torch.zeros(1, device="cuda")
        if options.images is not None:
            paths = [path for path in options.images.glob(f"*-{target}-*") if path.suffix != ".json"]
        else:
            paths = [image.path for image in build(target, options.cache, variant)]
        images = Images.load(paths, target)
        for check in check_images(images, variant.bits, variant.codebooks):
            print(json.dumps({"check": check.name, "ok": check.ok, "found": check.found, "target": target}), flush=True)
            failed += not check.ok
    except (BuildError, DriverError, MoeError, RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        print(f"GPU kernels: {error}".splitlines()[0], file=sys.stderr)
        return 1
    if failed:
        print(f"GPU kernels: {failed} checks differ from the reference; this engine must not serve", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
