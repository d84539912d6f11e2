"""Benchmarks on the card: graph replays over several layers' weights (far beyond L2), random data, medians.

    python3 -m tests.gpu.bench --images DIR --out DIR [--target sm_90] [--peer DIR-of-exllamav3_ext]

Bytes of a case are those of the experts that are really used, counted from the ids. The floor is those bytes at the
rate that a device-to-device copy of torch reaches here, reads and writes counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ds41_kernels.moe import Exl3Moe, Images, Workspace, decoded_weights

from tests.gpu import exl3_torch as reference
from tests.gpu.run import EXPERTS, HIDDEN, INNER, TOP_K, batch, device_linear, load, rel_rms

LAYERS = 4
WEIGHTS_PER_EXPERT = 3 * HIDDEN * INNER


class Bench:
    """Prints and keeps one JSON line a case."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.copy_rate = self._copy_rate()
        self.note(case="copy", gb_per_s=round(self.copy_rate / 1e9, 1), device=torch.cuda.get_device_name())

    def note(self, **found: Any) -> None:
        line = json.dumps(found)
        print(line, flush=True)
        with (self.out / "bench.jsonl").open("a") as stream:
            stream.write(line + "\n")

    def _copy_rate(self) -> float:
        """Bytes read and written a second. Not from a graph: there the driver copies with its slower copy engine."""
        source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        found = []
        for _ in range(10):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            found.append(2 * source.numel() / begin.elapsed_time(end) * 1000)
        return statistics.median(found)


def time_us(work: Callable[[], Any], repeats: int = 10, samples: int = 7) -> float:
    """Median over ``samples`` of the mean time of ``repeats`` graph replays, in microseconds."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        graph.replay()
    found = []
    for _ in range(samples):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / repeats)
    return statistics.median(found)


def make_weights(bits: int, codebook: str, seed: int, experts: int = EXPERTS) -> list[list[reference.Linear]]:
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = ((HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN))
    return [[reference.random_linear(k, n, bits, codebook, generator) for k, n in shapes] for _ in range(experts)]


def bench_ours(
    bench: Bench,
    images: Images,
    bits: int,
    codebook: str,
    sizes: list[int],
    weights: list[list[list[reference.Linear]]],
) -> dict[int, float]:
    """Decode and prefill of this package; microseconds a layer by tokens."""
    workspace = Workspace(HIDDEN, INNER, EXPERTS, TOP_K, 1024, torch.device("cuda"))
    layers = [
        Exl3Moe(images, [tuple(map(device_linear, expert)) for expert in layer], codebook, workspace)  # type: ignore[misc]
        for layer in weights
    ]
    found = {}
    for tokens in sizes:
        inputs = [batch(tokens, HIDDEN, EXPERTS, TOP_K, 10 * tokens + i) for i in range(len(layers))]
        out = torch.empty(tokens, HIDDEN, device="cuda")

        def work(inputs: Any = inputs, out: torch.Tensor = out) -> None:
            for layer, (x, ids, scores) in zip(layers, inputs, strict=True):
                layer(x, ids, scores, out)

        us = time_us(work, repeats=10 if tokens <= 64 else 3) / len(layers)
        unique = sum(int(torch.unique(ids).numel()) for _, ids, _ in inputs) / len(inputs)
        size = unique * (WEIGHTS_PER_EXPERT * bits / 8 + 2 * (HIDDEN + 2 * INNER + 2 * HIDDEN + INNER))
        floor = size / bench.copy_rate * 1e6
        found[tokens] = us
        bench.note(
            case="ours",
            target=images.target,
            codebook=codebook,
            bits=bits,
            tokens=tokens,
            us=round(us, 1),
            experts=round(unique, 1),
            mb=round(size / 1e6, 1),
            floor_us=round(floor, 1),
            of_floor=round(floor / us, 3),
            tflops=round(tokens * TOP_K * WEIGHTS_PER_EXPERT * 2 / us / 1e6, 1),
        )
    return found


def bench_parts(bench: Bench, images: Images, bits: int, weights: list[list[list[reference.Linear]]]) -> None:
    """Where the time of a decode step goes: the profiler's time of each kernel."""
    workspace = Workspace(HIDDEN, INNER, EXPERTS, TOP_K, 1024, torch.device("cuda"))
    layers = [
        Exl3Moe(images, [tuple(map(device_linear, expert)) for expert in layer], "mul1", workspace)  # type: ignore[misc]
        for layer in weights
    ]
    for tokens in (1, 6, 64, 1024):
        x, ids, scores = batch(tokens, HIDDEN, EXPERTS, TOP_K, 5)
        out = torch.empty(tokens, HIDDEN, device="cuda")
        for layer in layers:
            layer(x, ids, scores, out)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for layer in layers:
                layer(x, ids, scores, out)
            torch.cuda.synchronize()
        kernels: dict[str, list[float]] = {}
        for event in profile.events():
            if "exl3" in event.name:
                kernels.setdefault(event.name, []).append(round(event.device_time, 1))
        bench.note(case="kernels", bits=bits, tokens=tokens, us=kernels)


def bench_dense(bench: Bench, images: Images, weights: list[list[reference.Linear]]) -> None:
    """The other way: reconstruct fp16 weights of the used experts with our kernel, then torch.bmm; products only."""
    for tokens in (1, 6, 1024):
        x, ids, _ = batch(tokens, HIDDEN, EXPERTS, TOP_K, 77)
        used = torch.unique(ids).tolist()
        rows = max(1, -(-tokens * TOP_K // len(used)))
        inputs = x[:1].expand(rows, HIDDEN).contiguous()
        middle = torch.zeros(rows, INNER, dtype=torch.float16, device="cuda")

        def work(used: Any = used, inputs: torch.Tensor = inputs, middle: torch.Tensor = middle) -> None:
            for number in used:
                gate, up, down = (decoded_weights(images, device_linear(linear), "mul1") for linear in weights[number])
                torch.mm(inputs, gate)
                torch.mm(inputs, up)
                torch.mm(middle, down)

        bench.note(case="reconstruct and mm", tokens=tokens, bits=3, us=round(time_us(work, repeats=2, samples=3), 1))


def pointers(layer: list[list[reference.Linear]], projection: int) -> list[torch.Tensor]:
    parts = [expert[projection] for expert in layer]
    return [
        torch.tensor([getattr(part, name).data_ptr() for part in parts], dtype=torch.int64, device="cuda")
        for name in ("trellis", "suh", "svh")
    ]


def bench_peer(
    bench: Bench, peer: Any, sizes: list[int], weights: list[list[list[reference.Linear]]], ours: dict[int, float]
) -> None:
    """exllamav3's own kernels on the same weights: the cooperative decode and the grouped kernel with its row tiles."""
    bits, table = 3, reference.values("mul1", "cuda")
    tables = [[pointers(layer, projection) for projection in range(3)] for layer in weights]
    for tokens in [n for n in sizes if n * TOP_K <= 256]:
        slots = tokens * TOP_K
        inputs = [batch(tokens, HIDDEN, EXPERTS, TOP_K, 10 * tokens + i) for i in range(len(weights))]
        half = [(x, ids.long(), scores.half()) for x, ids, scores in inputs]

        def buffer(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device="cuda")

        had = [buffer(slots, HIDDEN) for _ in range(2)]
        inner = [buffer(slots, INNER) for _ in range(3)]
        down, out = buffer(slots, HIDDEN, dtype=torch.float32), buffer(tokens, HIDDEN, dtype=torch.float32)
        counters = buffer(peer.ctr_len(slots, tokens, INNER, HIDDEN), dtype=torch.int32)

        def one(i: int, h: Any = half, s: Any = (had, inner, down, out, counters)) -> torch.Tensor:
            x, ids, scores = h[i]
            had, inner, down, out, counters = s
            peer.exl3_moe_coop(
                x, ids, scores, -1, -1, HIDDEN, *tables[i][0], *tables[i][1], *tables[i][2], None, None, None,
                bits, bits, bits, False, True, 0, 10.0, True, had[0], had[1], inner[0], inner[1], inner[2],
                down, counters, out, None, None,
            )  # fmt: skip
            return out

        x, ids, scores = inputs[0]
        error = rel_rms(one(0), reference.layer(weights[0], x, ids, scores, table)) if tokens in (1, 6) else None

        def work(one: Any = one) -> None:
            for i in range(len(weights)):
                one(i)

        us = time_us(work) / len(weights)
        bench.note(
            case="exllamav3 coop", bits=bits, tokens=tokens, us=round(us, 1), error=error,
            ratio=round(us / ours[tokens], 2) if tokens in ours else None,
        )  # fmt: skip
    concurrency = peer.exl3_moe_max_concurrency(0)
    for tokens in [n for n in sizes if n >= 16]:
        counts_of = []
        for i in range(len(weights)):
            x, ids, scores = batch(tokens, HIDDEN, EXPERTS, TOP_K, 10 * tokens + i)
            flat = ids.long().reshape(-1)
            order = flat.argsort(stable=True)
            counts = torch.bincount(flat, minlength=EXPERTS + 1)
            token = torch.arange(tokens, device="cuda").repeat_interleave(TOP_K)
            counts_of.append((x, ids, scores, counts, token[order], scores.reshape(-1).half()[order].contiguous()))
        most = max(64, *(int(entry[3].max()) for entry in counts_of))
        state = [torch.zeros(concurrency, most, HIDDEN, dtype=torch.float16, device="cuda") for _ in range(2)]
        inner = [torch.zeros(concurrency, most, INNER, dtype=torch.float16, device="cuda") for _ in range(2)]
        out = torch.zeros(tokens, HIDDEN, device="cuda")
        ranges = [(1, 16, 16), (17, 32, 32), (33, most, 64)]
        plans = []
        for entry in counts_of:
            counts = entry[3][:EXPERTS].tolist()
            plans.append([(sum(lo <= c <= hi for c in counts), lo, hi, tile) for lo, hi, tile in ranges])

        def one(i: int, data: Any = counts_of, s: Any = (state, inner, out), plans: Any = plans) -> torch.Tensor:
            x, _, _, counts, token, score = data[i]
            state, inner, out = s
            out.zero_()
            for active, lo, hi, tile in reversed(plans[i]):
                if active:
                    peer.exl3_moe(
                        x, out, counts, token, score, state[0], state[1], inner[0], inner[1], 0, bits, bits, bits,
                        *tables[i][0], *tables[i][1], *tables[i][2], False, True, False, True, False, True, 10.0,
                        active, None, None, lo, hi, tile,
                    )  # fmt: skip
            return out

        x, ids, scores = counts_of[0][:3]
        error = rel_rms(one(0), reference.layer(weights[0], x, ids, scores, table))

        def work(one: Any = one) -> None:
            for i in range(len(weights)):
                one(i)

        us = time_us(work, repeats=3) / len(weights)
        bench.note(
            case="exllamav3 grouped", bits=bits, tokens=tokens, us=round(us, 1), error=error,
            ratio=round(us / ours[tokens], 2) if tokens in ours else None,
        )  # fmt: skip


def build_peer(sources: Path, out: Path) -> Any:
    """exllamav3's MoE kernels for K = 3, mul1, compiled here with the image's nvcc and the package's own flags."""
    from torch.utils.cpp_extension import load as load_extension

    units = (
        "quant/exl3_devctx.cu", "quant/exl3_moe.cu", "quant/exl3_moe_coop.cu",
        "quant/comp_units/exl3_moe_coop_inst_k3.cu", "quant/comp_units/exl3_moe_inst_k3_cb2.cu",
        "quant/comp_units/exl3_moe_inst_k3_cb2_m32.cu", "quant/comp_units/exl3_moe_inst_k3_cb2_m64.cu",
    )  # fmt: skip
    build = out / "peer-build"
    build.mkdir(parents=True, exist_ok=True)
    return load_extension(
        name="peer_exl3",
        sources=[str(sources / unit) for unit in units] + [str(Path(__file__).with_name("peer.cpp"))],
        extra_include_paths=[str(sources)],
        extra_cflags=["-O3"],
        extra_cuda_cflags=["-O3", "-lineinfo", "--use_fast_math"],
        build_directory=str(build),
        verbose=False,
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--build-only", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.zeros(1, device="cuda")
    scratch = Path("/tmp/ds41-peer")
    if options.build_only:
        started = time.monotonic()
        build_peer(options.peer, scratch)
        print(f"# exllamav3 built in {time.monotonic() - started:.0f} s", flush=True)
        return 0
    bench = Bench(options.out)
    images, _ = load(options.images, options.target)
    sizes = [1, 2, 6, 16, 32, 64, 256, 1024]
    ours: dict[int, float] = {}
    status = 0

    def part(name: str, work: Callable[[], Any]) -> None:
        nonlocal status
        try:
            work()
        except Exception as error:
            status = 1
            bench.note(case=name, error=repr(error)[:300], at=traceback.format_exc()[-500:])

    weights = [make_weights(3, "mul1", seed) for seed in range(LAYERS)]
    part("ours", lambda: ours.update(bench_ours(bench, images, 3, "mul1", sizes, weights)))
    if options.peer is not None:
        part("peer", lambda: bench_peer(bench, build_peer(options.peer, scratch), sizes, weights, ours))
    part("kernels", lambda: bench_parts(bench, images, 3, weights))
    part("dense", lambda: bench_dense(bench, images, weights[0]))
    for bits, codebook in ((2, "mul1"), (4, "mul1"), (5, "mul1"), (3, "mcg")):
        weights.clear()
        torch.cuda.empty_cache()
        weights.extend(make_weights(bits, codebook, seed) for seed in range(LAYERS))
        part("ours", lambda b=bits, c=codebook: bench_ours(bench, images, b, c, [1, 6, 64, 1024], weights))  # type: ignore[misc]
    return status


if __name__ == "__main__":
    sys.exit(main())
