"""Gathering 49,152 random rows (a chunk of 1,024 tokens, 2 layers, 24 columns) by every way there is; engine's Python.

Contenders take turns on fresh ids, so that load of other programs hits all alike. `cpu` is the CPU time of the calling
thread (one-thread ways), `wall` the time until the rows are there; medians and minima in ms.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from ds41_engine.store import EngramStore

TOKENS, COLUMNS, ROUNDS = 2048, 24, 40
THREADS = tuple(count for count in (1, 2, 4, 8) if count <= len(os.sched_getaffinity(0)))


def main() -> None:
    """folder, rows, pack."""
    folder, rows = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(2)
    started = time.perf_counter()
    store = EngramStore.open(folder, {1: rows}, pack=Path(sys.argv[3]))
    opened = time.perf_counter() - started
    table = store.layers[1].records[0]
    warnings.simplefilter("ignore")  # torch has no read-only tensors
    tensor = torch.from_numpy(table)
    table.reshape(-1)[::4096].sum()  # every page mapped
    out = np.empty((TOKENS, COLUMNS, 264), dtype=np.uint8)
    out[:] = 1
    flat, torch_out = out.reshape(-1, 264), torch.from_numpy(out).reshape(-1, 264)
    sub = rows // COLUMNS
    file = os.open(store.layers[1].parts[0].path, os.O_RDONLY)
    pool = ThreadPoolExecutor(2)
    stores = {}
    for threads in THREADS:
        stores[threads] = EngramStore.open(folder, {1: rows})
        stores[threads].use_kernels(threads)

    def preads(ids: list[int]) -> None:
        for row in ids:
            os.pread(file, 264, row * 264)

    ways: dict[str, Callable[[np.ndarray], object]] = {
        **{
            f"ours, {threads} thread{'s' * (threads > 1)}": lambda ids, it=it: it.gather(1, ids, out)
            for threads, it in stores.items()
        },
        "numpy take": lambda ids: np.take(table, ids.reshape(-1), axis=0, out=flat, mode="clip"),
        "torch index_select": lambda ids: torch.index_select(
            tensor, 0, torch.from_numpy(ids.reshape(-1)), out=torch_out
        ),
        "pread, 1 thread": lambda ids: preads(ids.reshape(-1).tolist()),
        "pread, pool of 2": lambda ids: list(pool.map(preads, np.array_split(ids.reshape(-1), 2))),
    }
    walls: dict[str, list[float]] = {name: [] for name in ways}
    cpus: dict[str, list[float]] = {name: [] for name in ways}
    draw = np.random.default_rng(0)
    for turn in range(ROUNDS + 1):
        for name, way in ways.items():
            if name.startswith("pread") and turn > 8:
                continue
            ids = np.ascontiguousarray(draw.integers(0, sub, (TOKENS, COLUMNS)) + np.arange(COLUMNS) * sub)
            wall, cpu = time.perf_counter(), time.thread_time()
            way(ids)
            cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
            if turn:
                walls[name].append(wall * 1000)
                cpus[name].append(cpu * 1000)
    ids = np.ascontiguousarray(draw.integers(0, rows, (TOKENS, COLUMNS)))
    assert np.array_equal(stores[THREADS[-1]].gather(1, ids, out), table[ids])
    print(
        f"open and prove: {opened * 1000:.1f} ms; {store.manifest.page_kind}, {store.huge_share():.0%} on huge pages; "
        + ", ".join(f"{it.how} {it.counters()['gb_per_s']} GB/s" for it in stores.values())
    )
    take = statistics.median(walls["numpy take"]), statistics.median(cpus["numpy take"]), min(walls["numpy take"])
    for name in ways:
        wall, cpu, best = statistics.median(walls[name]), statistics.median(cpus[name]), min(walls[name])
        print(
            f"{name:<20} wall {wall:7.2f} min {best:7.2f} cpu {cpu:7.2f} ms; faster than take: "
            f"wall {take[0] / wall:5.2f} min {take[2] / best:5.2f} cpu {take[1] / cpu:5.2f}"
        )


if __name__ == "__main__":
    main()
