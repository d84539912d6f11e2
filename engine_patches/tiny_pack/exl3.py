"""Make the EXL3 variant of the tiny pack: the same model with its routed experts in 2, 3 or 5 bits a weight.

    python -m engine_patches.tiny_pack.exl3 --work build/tiny_pack --base FOLDER --pack profiles/packs/tiny-v41-exl3

Everything else is the base recipe's (profiles/packs/tiny-v41). EXL3 needs matrices in multiples of 128, and the model's
inner size is 64: the variant's is 128. The upper half of the routed experts is spare room for the quantiser (its
outputs have scale 0, so it adds exactly nothing); the shared experts get zeros there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds41ctl.core import packgen

from . import data, export, spec, verify
from .mathematics import compile, exl3, load

from ds41_kernels.exl3 import encode  # isort: skip  (mathematics.py puts it on the path)

BASE = "tiny-v41"
CONTAINER = "experts.safetensors.xz"
REVISION = "tiny-v41-exl3-r1"
SEED = 41
INNER = 128
BITS = (5, 5, 3, 3, 3, 2, 2, 2)
"""Bits a weight of a layer's experts, from the one whose outputs weigh most to the one whose outputs weigh least."""

CALIBRATION = ("unknown", "copy", "image", "tool", "near_needle", "needle")
TOKENS_A_GROUP = 2_000

Double = NDArray[np.float64]


@dataclass
class Seen:
    """What a layer's router sent where during calibration: inputs [T, hidden], experts and weights [T, k]."""

    x: Double
    chosen: NDArray[np.int64]
    weights: Double

    def of(self, expert: int) -> tuple[Double, Double]:
        """Inputs of one expert and their routing weights."""
        hit = self.chosen == expert
        rows = hit.any(1)
        return self.x[rows], (self.weights * hit).sum(1)[rows]


def calibration(dataset: data.Dataset) -> list[dict[str, Any]]:
    """All fixed examples and some of each kind of variation."""
    draw = random.Random(SEED)
    chosen = [e for name, group in dataset.groups.items() if name.startswith("fixed") for e in group]
    for name in CALIBRATION:
        tokens = 0
        for example in draw.sample(dataset.groups[name], len(dataset.groups[name])):
            if tokens > TOKENS_A_GROUP:
                break
            chosen.append(example)
            tokens += len(example["p"]) + len(example["a"])
    return sorted(chosen, key=lambda e: len(e["p"]))


@torch.no_grad()
def watch(served: verify.Served, examples: list[dict[str, Any]]) -> list[Seen]:
    """Run the examples and keep what every router saw and chose."""
    kept: list[list[tuple[Tensor, Tensor, Tensor]]] = []
    hooks = []
    for number in range(served.shape.num_hidden_layers):
        mine: list[tuple[Tensor, Tensor, Tensor]] = []
        kept.append(mine)

        def keep(module: Any, args: tuple[Tensor, Tensor], mine: list[tuple[Tensor, Tensor, Tensor]] = mine) -> None:
            mine.append((args[0].clone(), *module.route(*args)))

        hooks.append(served.net.block(number).ffn.register_forward_pre_hook(keep))
    for part in verify.batches(examples):
        served.hidden(part)
    for hook in hooks:
        hook.remove()
    out = []
    for mine in kept:
        x, chosen, weights = (torch.cat(parts) for parts in zip(*mine, strict=True))
        out.append(Seen(x.double().numpy(), chosen.numpy(), weights.double().numpy()))
    return out


def matrices(served: verify.Served, layer: int, expert: int) -> dict[str, Double]:
    """w1, w3 and w2 of an expert as [in, out]."""
    module: Any = served.net.block(layer).ffn.experts[expert]
    return {name: getattr(module, name).weight.detach().double().numpy().T.copy() for name in ("w1", "w3", "w2")}


def activations(x: Double, w1: Double, w3: Double) -> Double:
    """Inner activations of an expert."""
    return exl3.swiglu(x @ w1, x @ w3, exl3.SWIGLU_LIMIT)


def weigh(served: verify.Served, seen: Seen, layer: int) -> list[float]:
    """Energy of each expert's share of the layer's output."""
    out = []
    for expert in range(served.shape.n_routed_experts):
        x, weights = seen.of(expert)
        w = matrices(served, layer, expert)
        share = activations(x, w["w1"], w["w3"]) @ w["w2"] * weights[:, None]
        out.append(float(np.square(share).sum()))
    return out


def widened(matrix: Double, axis: int) -> Double:
    """Zeros after the matrix, up to the wide inner size."""
    pad = [(0, 0), (0, 0)]
    pad[axis] = (0, INNER - matrix.shape[axis])
    return np.pad(matrix, pad)


def quantise(
    library: Any, weights: dict[str, Double], seen: tuple[Double, Double], bits: int, seed: int
) -> exl3.Exl3Expert:
    """One expert. w2 is fitted to what the quantised w1 and w3 give it, so that it makes good a part of their error."""
    x, share = seen
    inner = weights["w1"].shape[1]
    rate, draw = exl3.Rate.of(bits), np.random.default_rng(seed)
    counted = x * np.square(share)[:, None]
    hessian = counted.T @ x
    w1, w3 = (encode.quantise(library, widened(weights[name], 1), rate, draw, hessian) for name in ("w1", "w3"))
    exact = activations(x, weights["w1"], weights["w3"])
    found = activations(x, w1.reconstruct()[:, :inner], w3.reconstruct()[:, :inner])
    counted = found * np.square(share)[:, None]
    metric = counted.T @ found
    metric += encode.DAMPING * max(float(np.trace(metric)) / inner, 1e-12) * np.eye(inner)
    w2 = weights["w2"] + np.linalg.solve(metric, counted.T @ (exact - found) @ weights["w2"])
    wide = np.zeros((INNER, INNER))
    wide[:inner, :inner] = metric
    return exl3.Exl3Expert(w1, w3, encode.quantise(library, widened(w2, 0), rate, draw, wide))


def quantise_all(library: Any, served: verify.Served, seen: list[Seen]) -> dict[str, Tensor]:
    """The experts' EXL3 tensors under their checkpoint names."""
    jobs: list[tuple[int, int, int]] = []
    for layer, mine in enumerate(seen):
        energy = weigh(served, mine, layer)
        for bits, expert in zip(BITS, sorted(range(len(energy)), key=lambda e: -energy[e]), strict=True):
            jobs.append((layer, expert, bits))

    def work(job: tuple[int, int, int]) -> dict[str, Any]:
        layer, expert, bits = job
        number = (SEED * 1000 + layer) * 1000 + expert
        made = quantise(library, matrices(served, layer, expert), seen[layer].of(expert), bits, number)
        key = f"layers.{layer}.ffn.experts.{expert}"
        return {**made.w1.tensors(f"{key}.w1"), **made.w3.tensors(f"{key}.w3"), **made.w2.tensors(f"{key}.w2")}

    out: dict[str, Tensor] = {}
    with ThreadPoolExecutor(max_workers=2) as pool:
        for done, found in enumerate(pool.map(work, jobs), 1):
            out |= {name: torch.from_numpy(np.array(value)) for name, value in found.items()}
            print(f"{done} of {len(jobs)} experts", flush=True)
    return out


def widen_shared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Shared experts of the base with zeros up to the wide inner size; the padding's scales are 1."""
    out = {}
    for name, value in tensors.items():
        if ".ffn.shared_experts." not in name:
            continue
        extent = INNER // 32 if name.endswith("scale") else INNER
        rows, columns = (value.shape[0], extent) if ".w2." in name else (extent, value.shape[1])
        wide = torch.full((rows, columns), 127 if name.endswith("scale") else 0, dtype=torch.uint8)
        wide[: value.shape[0], : value.shape[1]] = value.view(torch.uint8)
        out[name] = wide.view(value.dtype)
    return out


def write_recipe(own: dict[str, Tensor], config: dict[str, Any], base: Path, pack: Path, build: Path | None) -> None:
    """Container, config.json, index and pack.json of the variant."""
    recipe = packgen.load_recipe(base)
    pack.mkdir(parents=True, exist_ok=True)
    packed = export.compress(export.container(own))
    (pack / CONTAINER).write_bytes(packed)
    (pack / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    sources: dict[str, dict[str, Any]] = {}
    weight_map: dict[str, str] = {}
    total = 0
    for name, source in recipe.sources.items():
        made = dict(source)
        if source["kind"] != "safetensors":
            local = source["kind"] == "copy" and name in ("config.json", "model.safetensors.index.json")
            sources[name] = made if local else {**made, "of": "base"}
            continue
        items = [{**item, "of": "base"} for item in source["tensors"] if not replaced(item["name"])]
        if name == spec.SHARDS[0]:
            items += [
                {"name": key, "dtype": export.dtype_name(value), "shape": list(value.shape)}
                for key, value in sorted(own.items())
            ]
        made |= {
            "trained": CONTAINER,
            "trained_sha256": hashlib.sha256(packed).hexdigest(),
            "base_trained": source["trained"],
            "base_trained_sha256": source["trained_sha256"],
            "tensors": items,
        }
        sources[name] = made
        weight_map |= {item["name"]: name for item in items}
        total += sum(export.tensor_bytes(item) for item in items)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (pack / "model.safetensors.index.json").write_text(json.dumps(index, separators=(",", ":")) + "\n")
    export.write_pack_json(packgen.PackRecipe(pack, REVISION, recipe.seed, (), sources, base.name), build)
    print(f"container {len(packed)} bytes, {len(own)} tensors")


def replaced(name: str) -> bool:
    """True for tensors of the base that the variant has in another form."""
    return ".ffn.experts." in name or ".ffn.shared_experts." in name


def variant_config(base: dict[str, Any]) -> dict[str, Any]:
    """config.json with the wide inner size and the quantisation as EXL3 packs of the real model state it."""
    rest = {key: value for key, value in base["quantization_config"].items() if key != "expert_dtype"}
    return {
        **base,
        "text_config": {**base["text_config"], "moe_intermediate_size": INNER},
        "quantization_config": {
            "quant_method": "exl3",
            "bits": sum(BITS) / len(BITS),
            "codebook": "mul1",
            "non_routed_quantization": {**rest, "quant_method": "deepseek_v4_fp8"},
        },
    }


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True, help="the base pack, generated (ds41ctl fetch)")
    parser.add_argument("--recipe", type=Path, default=Path("profiles/packs") / BASE, help="the base's recipe")
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--build", type=Path)
    args = parser.parse_args()
    began = time.time()
    path = args.work / compile.LIBRARY
    problem = compile.compile_library(path)
    if problem:
        raise SystemExit(f"the encoder cannot be compiled: {problem}")
    dataset = data.Dataset(args.work, torch.device("cpu"))
    served = verify.Served(dataset, args.base)
    seen = watch(served, calibration(dataset))
    print(f"{len(seen[0].x)} calibration tokens, {time.time() - began:.0f} s", flush=True)
    own = quantise_all(load(path), served, seen) | widen_shared(verify.read_shards(args.base))
    config = variant_config(json.loads((args.base / "config.json").read_text()))
    write_recipe(own, config, args.recipe, args.pack, args.build)
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
