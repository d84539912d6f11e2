"""The EXL3 kernel of the CPU engine against torch, one expert of the real model's size, on one thread.

    ENGINE_PYTHON -m tests.bench.exl3        (ENGINE_PYTHON: ds41ctl engine path)

Peers: "rebuild" decodes the trellis with torch operations, rotates and multiplies, as an engine without a kernel does;
"ready" multiplies with fp32 matrices that somebody has rebuilt before (8 to 16 times the memory).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import ds41_kernels
import numpy as np
import torch
from ds41_kernels import exl3
from ds41_kernels.exl3 import cpu

HIDDEN, INNER = 5120, 2304
ROUNDS = 5


def seconds(work: Callable[[], object]) -> float:
    """Median processor time of ROUNDS runs after one that is not counted: other load on the machine counts less."""
    work()
    times = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return statistics.median(times)


class Rebuilt:
    """An EXL3 matrix in torch."""

    def __init__(self, layer: exl3.Exl3Linear) -> None:
        rate = layer.rate
        self.words = torch.from_numpy(layer.trellis.view("<u4").astype(np.int64))
        first = (np.cumsum(rate.own_bits()) - 16) % rate.stream_bits
        self.word = torch.from_numpy(first // 32)
        self.next = (self.word + 1) % self.words.shape[-1]
        self.shift = torch.from_numpy(48 - first % 32)
        self.table = torch.from_numpy(exl3.table(layer.codebook).astype(np.float32))
        rows, columns = exl3.positions()
        self.place = torch.from_numpy(np.argsort(rows * 16 + columns))
        self.suh, self.svh = (torch.from_numpy(v.astype(np.float32)) for v in (layer.suh, layer.svh))
        self.matrix = torch.from_numpy(exl3.hadamard(np.eye(128)).astype(np.float32))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        return (x.unflatten(-1, (-1, 128)) @ self.matrix).flatten(-2)

    def decoded(self) -> torch.Tensor:
        pair = self.words[..., self.word] << 32 | self.words[..., self.next]
        values = self.table[(pair >> self.shift) & 0xFFFF][..., self.place]
        rows, columns, _ = values.shape
        return values.view(rows, columns, 16, 16).transpose(1, 2).reshape(rows * 16, columns * 16)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.rotate(self.rotate(x * self.suh) @ self.decoded()) * self.svh


def expert_output(x: torch.Tensor, w1: Any, w3: Any, w2: Any) -> torch.Tensor:
    """A SwiGLU expert of three callables."""
    gate, up = w1(x).clamp(max=10.0), w3(x).clamp(-10.0, 10.0)
    found: torch.Tensor = w2(torch.nn.functional.silu(gate) * up)
    return found


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    library = ds41_kernels.load()
    random = np.random.default_rng(0)
    print(f"one expert, {HIDDEN} x {INNER}, loops: {cpu.loops(library)}, processor time of one thread")
    print(f"{'bits':>4} {'tokens':>6} {'ours ms':>9} {'rebuild':>9} {'ready':>7}   (peers as multiples of ours)")
    for bits in (2, 3, 5):
        expert = exl3.random_expert(random, HIDDEN, INNER, (exl3.Rate.of(bits),) * 3)
        layer = cpu.CpuExperts(library, [expert])
        rebuilt = [Rebuilt(w) for w in (expert.w1, expert.w3, expert.w2)]
        ready = [torch.from_numpy(w.reconstruct().astype(np.float32)) for w in (expert.w1, expert.w3, expert.w2)]
        products = [lambda x, w=w: x @ w for w in ready]
        for tokens in (1, 6, 64):
            x = random.standard_normal((tokens, HIDDEN)).astype(np.float32)
            chosen, weights = np.zeros((tokens, 1), np.int64), np.ones((tokens, 1), np.float32)
            given = torch.from_numpy(x)
            ours, theirs = layer(x, chosen, weights), expert_output(given, *rebuilt).numpy()
            assert np.abs(ours - theirs).max() < 1e-4 * np.abs(ours).max(), "the peer computes something else"
            mine = seconds(lambda: layer(x, chosen, weights))  # noqa: B023 - called at once
            slow = seconds(lambda: expert_output(given, *rebuilt))  # noqa: B023
            fast = seconds(lambda: expert_output(given, *products))  # noqa: B023
            print(f"{bits:>4} {tokens:>6} {mine * 1000:>9.1f} {slow / mine:>9.1f} {fast / mine:>7.2f}", flush=True)


if __name__ == "__main__":
    main()
