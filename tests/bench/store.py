"""python -m tests.bench.store [GIB [REPEATS]]: an Engram table of GIB (4.3) built, attached, gathered, against peers.

Build against `cp` followed by `sha256sum` of the same shard, in turns, REPEATS (3) times; gather (in the engine's
interpreter, DS41_BENCH_PYTHON) against numpy, torch and preads on the same pages. Needs memory for twice the table;
hugepages when root, else tmpfs.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ds41ctl.adapters import profiles, store, storebuild, storeplace
from ds41ctl.core.engram import RECORD_BYTES, geometry, sub_tables
from ds41ctl.core.layout import Dirs, layout
from ds41ctl.core.profile import EngramTable, LocalSource
from ds41ctl.core.settings import Settings
from ds41ctl.steps import engram

SHARD = "model-00001-of-00001.safetensors"


def write_shard(folder: Path, gib: float) -> dict[str, object]:
    """One table of about `gib` GiB of records in a checkpoint folder; returns its config."""
    vocabulary = int(gib * 2**30 / RECORD_BYTES / 24)
    rows = sum(sub_tables(1, vocabulary, 4, 8)[0])
    text = {
        "engram_layer_ids": [1], "engram_vocab_size": vocabulary, "engram_max_ngram_size": 4, "engram_n_heads": 8,
        "engram_num_embeddings": [rows],
    }  # fmt: skip
    names = [f"layers.1.engram.embed.{part}" for part in ("weight", "scale")]
    header = {
        names[0]: {"dtype": "F8_E4M3", "shape": [rows, 256], "data_offsets": [0, rows * 256]},
        names[1]: {"dtype": "F8_E8M0", "shape": [rows, 8], "data_offsets": [rows * 256, rows * 264]},
    }
    raw = json.dumps(header).encode()
    folder.mkdir()
    block = os.urandom((1 << 26) + 1)  # an odd length: no two rows are alike
    with (folder / SHARD).open("wb") as out:
        out.write(len(raw).to_bytes(8, "little") + raw)
        left = rows * 264
        while left:
            left -= out.write(block[: min(len(block), left)])
    (folder / "config.json").write_text(json.dumps({"text_config": text}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, SHARD)}))
    return {"text_config": text}


def seconds(started: float) -> float:
    return time.perf_counter() - started


def copy_and_sum(shard: Path) -> float:
    """Seconds of what a user would do by hand: a copy in memory, then its sha256."""
    copy = Path(f"/dev/shm/ds41ctl-bench-{os.getpid()}")
    try:
        started = time.perf_counter()
        subprocess.run(["cp", str(shard), str(copy)], check=True)
        subprocess.run(["sha256sum", str(copy)], check=True, capture_output=True)
        return seconds(started)
    finally:
        copy.unlink(missing_ok=True)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Run it all and print one line each."""
    gib = float(sys.argv[1]) if len(sys.argv) > 1 else 4.3
    repeats = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        root = Path(name)
        found = geometry(write_shard(root / "pack", gib))
        base = profiles.read(profiles.find("cpu-tiny"))
        model = base.model.model_copy(
            update={
                "sources": (LocalSource(),),
                "engram": (EngramTable(layer=1, rows=found.rows[0], shard=SHARD),),
            }
        )
        is_root = os.getuid() == 0
        keep = base.engram.model_copy(update={"storage": "hugetlb" if is_root else "tmpfs"})
        profile = base.model_copy(update={"model": model, "engram": keep})
        dirs = Dirs(root / "data", root / "state", root / "cache", root / "run", os.getuid())
        it = layout(profile, Settings(model=root / "pack"), dirs, may_mount=is_root)
        shard = root / "pack" / SHARD
        mib = shard.stat().st_size / 2**20
        try:
            peers, ours, ready = [], [], []
            for _ in range(repeats):
                peers.append(copy_and_sum(shard))
                said: list[float] = []
                started = time.perf_counter()
                folder = storebuild.build(it, found, lambda text, data, said=said: said.append(time.perf_counter()))
                ours.append(seconds(started))
                ready.append(said[0] - started)
            facts = store.inspect(it)
            median = statistics.median(ours)
            print(
                f"build {mib:.0f} MiB on {facts.page_kind}: median {spread(ours)}, {mib / median:.0f} MiB/s; "
                f"cp + sha256sum {spread(peers)}; {statistics.median(peers) / median:.2f} times faster, "
                f"best against best {min(peers) / min(ours):.2f}; place ready after {spread(ready)}"
            )
            started = time.perf_counter()
            goal = engram.EngramBuild(it).check()
            print(f"attach (step engram says already): {seconds(started) * 1000:.0f} ms, {goal.text}")
            started = time.perf_counter()
            rows, difference = engram.verify(it, full=True)
            print(f"verify --full: {seconds(started):.2f} s, {rows} rows {difference or 'equal'}")
            python = os.environ.get("DS41_BENCH_PYTHON")
            if python:
                script = Path(__file__).with_name("gather.py")
                subprocess.run([python, str(script), str(folder), str(found.rows[0]), str(it.model_dir)], check=True)
        finally:
            storeplace.release(it)
            shutil.rmtree(root / "state", ignore_errors=True)


if __name__ == "__main__":
    main()
