"""The scripted GPU run: correctness of every image against the reference, then benchmarks. Writes JSON lines.

    python3 -m tests.gpu.run --images DIR --out DIR [--targets sm_90,compute_80,compute_70] [--parts ...]

The images come from ``python -m ds41_kernels.build``. Every check prints what was measured, also when it passes; the
exit status is 1 when one fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ds41_kernels import exl3
from ds41_kernels.census import Census
from ds41_kernels.moe import DeviceLinear, Exl3Moe, Images, Workspace, decoded_weights

from tests.gpu import exl3_torch as reference

HIDDEN, INNER, EXPERTS, TOP_K = 5120, 2304, 96, 6
GEMV_LIMIT, LAYER_LIMIT = 3e-4, 1e-3
CODEBOOKS = ("mul1", "mcg", "3inst")
VERSIONS = {"sm_90": (90, 90), "compute_80": (80, 90), "compute_70": (70, 90), "sm_80": (80, 80), "sm_70": (70, 70)}


@dataclass
class Run:
    """Where results go; ``failed`` collects the names of checks."""

    out: Path
    failed: list[str]

    def note(self, name: str, ok: bool, **found: Any) -> None:
        """One check."""
        line = json.dumps({"check": name, "ok": bool(ok), **found})
        print(line, flush=True)
        with (self.out / "checks.jsonl").open("a") as stream:
            stream.write(line + "\n")
        if not ok:
            self.failed.append(name)


def rel_rms(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def device_linear(linear: reference.Linear) -> DeviceLinear:
    return DeviceLinear(linear.trellis, linear.suh, linear.svh)


@dataclass
class Layer:
    """Random experts and the kernels' object for them."""

    experts: list[list[reference.Linear]]
    moe: Exl3Moe
    table: torch.Tensor

    def want(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return reference.layer(self.experts, x, ids, weights, self.table)


def make_layer(
    images: Images,
    codebook: str,
    shape: tuple[int, int, int],
    rates: list[tuple[int, int, int]],
    seed: int,
    prefill_tokens: int = 64,
    top_k: int = TOP_K,
    workspace: Workspace | None = None,
    census: Census | None = None,
) -> Layer:
    hidden, inner, experts = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    made = []
    for number in range(experts):
        gate, up, down = rates[number % len(rates)]
        made.append(
            [
                reference.random_linear(hidden, inner, gate, codebook, generator),
                reference.random_linear(hidden, inner, up, codebook, generator),
                reference.random_linear(inner, hidden, down, codebook, generator),
            ]
        )
    if workspace is None:
        workspace = Workspace(hidden, inner, experts, top_k, prefill_tokens, torch.device("cuda"))
    parts = [tuple(device_linear(linear) for linear in expert) for expert in made]
    moe = Exl3Moe(images, parts, codebook, workspace, census=census, name=f"layer{seed}")  # type: ignore[arg-type]
    table = reference.values(codebook, "cuda")
    for expert in made:
        for linear in expert:
            linear.dense = reference.decoded(linear, table)
    return Layer(made, moe, table)


def batch(tokens: int, hidden: int, experts: int, top_k: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Random activations, distinct experts a token, weights that sum to one."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator, device="cuda").half()
    scores = torch.rand(tokens, max(experts, top_k), generator=generator, device="cuda")
    ids = scores.topk(top_k, 1).indices.int().contiguous()
    ids[ids >= experts] = -1
    weights = torch.rand(tokens, top_k, generator=generator, device="cuda")
    return x, ids, (weights / weights.sum(1, keepdim=True)).contiguous()


# ------------------------------------------------------------------------------------------------ checks


def check_image(run: Run, images: Images) -> None:
    """The image that runs is the one meant: the architecture it was written for and the one it was compiled to."""
    for module, name in ((images.decode, None), (images.prefill, "exl3_prefill_multiply_mul1")):
        for kernel in [name] if name else [f"exl3_decode_multiply{n}_mul1" for n in images.geometry.group_rows]:
            found = module.kernel(kernel).attributes()
            ok = (found["ptx_version"], found["binary_version"]) == VERSIONS[images.target]
            clean = found["local_bytes"] == 0 or images.target == "compute_70"  # the driver emulates m8n8k4 there
            run.note(f"{images.target} image {kernel}", ok and clean, **found)


def check_tiles(run: Run, images: Images) -> None:
    """Decoded weights bit for bit, all rates and codebooks; together the tiles hold all 65,536 states."""
    generator = torch.Generator("cuda").manual_seed(1)
    for codebook in CODEBOOKS:
        table = reference.values(codebook, "cuda")
        for bits in range(1, 9):
            linear = reference.random_linear(512, 4096, bits, codebook, generator)
            found = decoded_weights(images, device_linear(linear), codebook)
            wanted = reference.decoded(linear, table)
            seen = int(torch.unique(reference.states(linear.trellis)).numel())
            # the numpy library, on a corner
            corner = linear.trellis[:4, :4].cpu().numpy().view("uint16")
            tiles = (
                torch.from_numpy(exl3.decode_tiles(corner, reference.CODEBOOKS[codebook]))
                .permute(0, 2, 1, 3)
                .reshape(64, 64)
            )
            same = torch.equal(found.view(torch.int16), wanted.view(torch.int16))
            same_library = torch.equal(found[:64, :64].cpu().view(torch.int16), tiles.contiguous().view(torch.int16))
            run.note(f"{images.target} tiles {codebook} K{bits}", same and same_library and seen == 65536, states=seen)


def check_gemv(run: Run, images: Images, shapes: list[tuple[int, int]], codebooks: tuple[str, ...]) -> None:
    """The product of one projection, before its output rotation: relative RMS against double precision."""
    for codebook in codebooks:
        for hidden, inner in shapes:
            for bits in range(1, 9):
                layer = make_layer(images, codebook, (hidden, inner, 1), [(bits, bits, bits)], 10 + bits, top_k=1)
                x, _, weights = batch(3, hidden, 1, 1, bits)
                ids = torch.zeros(3, 1, dtype=torch.int32, device="cuda")
                layer.moe(x, ids, weights)
                torch.cuda.synchronize()
                w = layer.moe._workspace
                gate, _, down = layer.experts[0]
                errors = {}
                wanted = reference.rotate(x, gate.suh).double() @ reference.decoded(gate, layer.table).double()
                errors["gate"] = rel_rms(w.sums_in[:3, 0], wanted)
                g = reference.product(x, gate, layer.table).clamp(max=10.0)
                u = reference.product(x, layer.experts[0][1], layer.table).clamp(-10.0, 10.0)
                h = g * torch.sigmoid(g) * u
                # the input of down is the kernels' own, so that only this product is judged
                errors["layer"] = rel_rms(layer.moe(x, ids, weights), layer.want(x, ids, weights))
                wanted = reference.rotate(h, down.suh).double() @ reference.decoded(down, layer.table).double()
                errors["down"] = rel_rms(w.sums_out[:3], wanted)
                ok = errors["gate"] <= GEMV_LIMIT and errors["layer"] <= LAYER_LIMIT
                run.note(f"{images.target} gemv {codebook} {hidden}x{inner} K{bits}", ok, **errors)


def check_layer(run: Run, images: Images, shape: tuple[int, int, int], codebook: str, prefill: list[int]) -> None:
    """A whole layer of mixed rates: error, three runs, batch invariance, permutation, edge cases, prefill, slices."""
    hidden, inner, experts = shape
    where = f"{images.target} {codebook} {hidden}x{inner}x{experts}"
    rates = [(2, 2, 2), (3, 3, 3), (5, 5, 5), (3, 4, 2), (3, 3, 3)]
    census = Census()
    layer = make_layer(images, codebook, shape, rates, 7, max(prefill, default=64), census=census)
    x, ids, weights = batch(64, hidden, experts, TOP_K, 3)
    wanted = layer.want(x, ids, weights)
    whole = layer.moe(x, ids, weights)
    error = rel_rms(whole, wanted)
    run.note(f"{where} layer of 64 tokens", error <= LAYER_LIMIT, error=error)
    again = [layer.moe(x, ids, weights) for _ in range(2)]
    run.note(f"{where} three runs bit-equal", all(torch.equal(whole, other) for other in again))
    different = []
    for tokens in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 31, 32, 48, 63):
        begin = (7 * tokens) % (64 - tokens)
        part = slice(begin, begin + tokens)
        if not torch.equal(layer.moe(x[part], ids[part].contiguous(), weights[part].contiguous()), whole[part]):
            different.append(tokens)
    for token in range(64):
        part = slice(token, token + 1)
        if not torch.equal(layer.moe(x[part], ids[part].contiguous(), weights[part].contiguous()), whole[part]):
            different.append(-token)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).cuda()
    if not torch.equal(layer.moe(x[order], ids[order].contiguous(), weights[order].contiguous()), whole[order]):
        different.append(1000)
    run.note(f"{where} batch invariance 1..64 and any order", not different, different=different)

    none = layer.moe(x, torch.full_like(ids, -1), weights)
    run.note(f"{where} no expert of this rank", bool((none == 0).all()))
    run.note(f"{where} no token", tuple(layer.moe(x[:0], ids[:0], weights[:0]).shape) == (0, hidden))
    one = torch.full_like(ids, -1)
    one[:, 0] = experts - 1
    error = rel_rms(layer.moe(x, one, weights), layer.want(x, one, weights))
    run.note(f"{where} all rows on one expert", error <= LAYER_LIMIT, error=error)
    single = torch.full_like(ids, -1)
    single[41, 3] = 1
    found, expected = layer.moe(x, single, weights), layer.want(x, single, weights)
    others = torch.arange(64, device="cuda") != 41
    run.note(
        f"{where} one row in all", rel_rms(found[41], expected[41]) <= LAYER_LIMIT and bool((found[others] == 0).all())
    )
    bad = x.clone()
    bad[5, 17] = float("nan")
    bad[9, 3] = float("inf")
    found = layer.moe(bad, ids, weights)
    rows = ~torch.isfinite(found).all(1)
    run.note(f"{where} NaN stays in its rows", rows.nonzero().flatten().tolist() == [5, 9])

    graph = torch.cuda.CUDAGraph()
    replayed = torch.empty_like(whole)
    with torch.cuda.graph(graph):
        layer.moe(x, ids, weights, replayed)
    replayed.zero_()
    graph.replay()
    run.note(f"{where} graph replay equals eager", torch.equal(replayed, whole))

    for tokens in prefill:
        x, ids, weights = batch(tokens, hidden, experts, TOP_K, 100 + tokens)
        ids[:, 5] = torch.where(ids[:, 5] % 3 == 0, -1, ids[:, 5])  # rows of other ranks in between
        out = torch.empty(tokens, hidden, device="cuda")
        layer.moe.prefill(x, ids, weights, out)
        error = rel_rms(out, layer.want(x, ids, weights))
        twice = torch.empty_like(out)
        layer.moe.prefill(x, ids, weights, twice)
        sliced = torch.empty_like(out)
        for begin in range(0, tokens, 333):
            part = slice(begin, min(tokens, begin + 333))
            layer.moe.prefill(x[part], ids[part], weights[part], sliced[part])
        run.note(
            f"{where} prefill {tokens}",
            error <= LAYER_LIMIT and torch.equal(out, twice) and torch.equal(out, sliced),
            error=error,
            runs_equal=torch.equal(out, twice),
            slices_equal=torch.equal(out, sliced),
        )
    if prefill:
        tokens = min(max(prefill), 512)
        x, ids, weights = batch(tokens, hidden, experts, TOP_K, 5)
        one = torch.full_like(ids, -1)
        one[:, 2] = 0
        out = torch.empty(tokens, hidden, device="cuda")
        layer.moe.prefill(x, one, weights, out)
        error = rel_rms(out, layer.want(x, one, weights))
        run.note(f"{where} prefill all on one expert", error <= LAYER_LIMIT, error=error)
        layer.moe.prefill(x, torch.full_like(ids, experts), weights, out)
        run.note(f"{where} prefill no expert of this rank", bool((out == 0).all()))
    run.note(f"{where} census", not census.missing(["layer7"], ["decode"]), lines=census.lines())


def check_slices(run: Run, images: Images) -> None:
    """Tensor parallel slices of 640, 640, 512 and 512 inner channels add up to the whole layer."""
    shape = (HIDDEN, INNER, 4)
    layer = make_layer(images, "mul1", shape, [(3, 3, 3), (2, 2, 2)], 21, top_k=2)
    x, ids, weights = batch(5, HIDDEN, 4, 2, 4)
    total = torch.zeros(5, HIDDEN, dtype=torch.float64, device="cuda")
    for begin, end in ((0, 640), (640, 1280), (1280, 1792), (1792, 2304)):
        parts = []
        for gate, up, down in layer.experts:
            columns = slice(begin // 16, end // 16)
            parts.append(
                (
                    DeviceLinear(gate.trellis[:, columns].contiguous(), gate.suh, gate.svh[begin:end].contiguous()),
                    DeviceLinear(up.trellis[:, columns].contiguous(), up.suh, up.svh[begin:end].contiguous()),
                    DeviceLinear(down.trellis[columns].contiguous(), down.suh[begin:end].contiguous(), down.svh),
                )
            )
        workspace = Workspace(HIDDEN, end - begin, 4, 2, 64, torch.device("cuda"))
        total += Exl3Moe(images, parts, "mul1", workspace)(x, ids, weights).double()
    error = rel_rms(total, layer.want(x, ids, weights))
    run.note(f"{images.target} TP4 slices", error <= LAYER_LIMIT, error=error)


def check_sanitized(run: Run, images: Images) -> None:
    """Few calls on small shapes, for compute-sanitizer: every kernel once, odd group sizes, rows of other ranks."""
    for codebook in CODEBOOKS:
        layer = make_layer(images, codebook, (256, 384, 7), [(2, 3, 5), (8, 1, 4), (6, 7, 3)], 3, 65)
        for tokens in (1, 5, 23):
            x, ids, weights = batch(tokens, 256, 7, TOP_K, tokens)
            ids[0, 0] = -1
            layer.moe(x, ids, weights)
        x, ids, weights = batch(65, 256, 7, TOP_K, 65)
        out = torch.empty(65, 256, device="cuda")
        layer.moe.prefill(x, ids, weights, out)
        error = rel_rms(out, layer.want(x, ids, weights))
        run.note(f"{images.target} {codebook} small shapes", error <= LAYER_LIMIT, error=error)


# ------------------------------------------------------------------------------------------------ main


def load(images: Path, target: str) -> tuple[Images, float]:
    started = time.monotonic()
    loaded = Images.load(sorted(p for p in images.glob(f"*-{target}-*") if p.suffix in (".cubin", ".ptx")), target)
    for kernel in ("exl3_finish",):
        loaded.decode.kernel(kernel)
    return loaded, time.monotonic() - started


def parts_of(run: Run, images: Images) -> dict[str, Callable[[], None]]:
    emulated = images.target == "compute_70"  # m8n8k4 is emulated on later cards: correct, but slow
    return {
        "image": lambda: check_image(run, images),
        "tiles": lambda: check_tiles(run, images),
        "gemv": lambda: check_gemv(run, images, [(HIDDEN, INNER)], CODEBOOKS),
        "small": lambda: (
            [check_layer(run, images, (256, 384, 7), codebook, [] if emulated else [65]) for codebook in CODEBOOKS]
            and None
        ),
        "layer": lambda: check_layer(
            run, images, (HIDDEN, INNER, EXPERTS), "mul1", [17, 64, 65, 128, 1024, *([] if emulated else [3000])]
        ),
        "sanitize": lambda: check_sanitized(run, images),
        "slices": lambda: check_slices(run, images),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--targets", default="sm_90,compute_80,compute_70")
    parser.add_argument("--parts", default="image,tiles,gemv,small,layer,slices")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options.out, [])
    torch.zeros(1, device="cuda")
    for target in options.targets.split(","):
        images, seconds = load(options.images, target)
        run.note(f"{target} load", True, seconds=round(seconds, 2))
        for name in options.parts.split(","):
            started = time.monotonic()
            try:
                parts_of(run, images)[name]()
                torch.cuda.synchronize()
            except Exception as error:
                run.note(f"{target} {name}", False, error=repr(error)[:300], at=traceback.format_exc()[-600:])
                if "CUDA" in repr(error):
                    break  # the context is lost
            print(f"# {target} {name} {time.monotonic() - started:.1f} s", flush=True)
            torch.cuda.empty_cache()
    print(f"# failed: {len(run.failed)}", *run.failed, sep="\n# ")
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
