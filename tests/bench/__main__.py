"""make bench: our ways against a named peer in one run, as ratios (below 1 means ours is faster)."""

from __future__ import annotations

import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ds41ctl.adapters import files, pack, store
from tests.bench import fetch
from tests.fakes import nvml

MIB = 1 << 20
ROUNDS = 5


def median(work: Callable[[], object]) -> float:
    """Median wall time of ROUNDS runs, seconds, after one that is not counted."""
    work()
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def row(what: str, ours: Callable[[], object], peer_name: str, peer: Callable[[], object], mib: float | None) -> None:
    """Print one comparison."""
    mine, theirs = median(ours), median(peer)
    rate = f"{mib / mine:7.0f} MiB/s" if mib else f"{mine * 1000:7.1f} ms   "
    print(f"{what:<44} {rate}   {mine / theirs:5.2f} x {peer_name}")


BREAKDOWN = """
import os, time
t0 = time.perf_counter()
import preflight, pynvml
from ds41ctl.adapters import host, nvml
from ds41ctl.adapters.probe import probe
from ds41ctl.cli.session import open_session
t1 = time.perf_counter()
session = open_session("v100-pp2tp4")
t2 = time.perf_counter()
assert len(nvml.survey().gpus) == 8
t3 = time.perf_counter()
facts = probe(session.layout)
t4 = time.perf_counter()
findings = preflight.run(session.profile, facts)
t5 = time.perf_counter()
print(f"imports {t1 - t0:.3f} s, profile {t2 - t1:.3f} s, probe {t4 - t3:.3f} s (of it NVML {t3 - t2:.3f} s), "
      f"{len(findings)} checks {t5 - t4:.3f} s")
"""


def preflight_of_a_played_machine(folder: Path) -> None:
    """Level 1 on a fake 8x V100: the wall time of the command, and what it is made of."""
    library = nvml.build(folder)
    if library is None:
        print("preflight, level 1, on a fake 8x V100          no C compiler")
        return
    driver = nvml.Driver(library, folder / "driver")
    driver.play(nvml.v100())
    environ = {**driver.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    argv = [sys.executable, "-m", "ds41ctl", "preflight", "--profile", "v100-pp2tp4", "--json"]
    wall = median(lambda: subprocess.run(argv, env=environ, capture_output=True, check=False))
    print(f"{'preflight, level 1, on a fake 8x V100':<44} {wall * 1000:7.1f} ms     (nvidia-smi -q: no card here)")
    done = subprocess.run([sys.executable, "-c", BREAKDOWN], env=environ, capture_output=True, text=True, check=True)
    print(f"    {done.stdout.strip()}")


def main() -> None:
    """Run every comparison."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        big = folder / "big"
        block = os.urandom(MIB)
        big.write_bytes(block * 256)
        item = pack.Expected("big", 256 * MIB, files.file_sha256(big), "r")

        def digest() -> None:
            with big.open("rb") as source:
                hashlib.file_digest(source, "sha256")

        def plain() -> None:
            with (folder / "plain").open("wb") as out:
                for _ in range(64):
                    out.write(block)
                out.flush()
                os.fsync(out.fileno())

        row(
            "fetch --verify of 256 MiB",
            lambda: pack.file_problem(folder, item, hash_it=True),
            "hashlib.file_digest",
            digest,
            256,
        )
        row(
            "publish 64 MiB (sha256, fsync, rename)",
            lambda: files.publish(folder / "p", (block for _ in range(64))),
            "write + fsync",
            plain,
            64,
        )
        rows = 65536
        weights, scales = os.urandom(rows * 256), os.urandom(rows * 8)

        def one_by_one() -> bytes:
            return b"".join(weights[i * 256 : i * 256 + 256] + scales[i * 8 : i * 8 + 8] for i in range(rows))

        def chunked() -> None:
            step = store.ROWS_AT_ONCE
            for at in range(0, rows, step):
                store.interleave(weights[at * 256 : (at + step) * 256], scales[at * 8 : (at + step) * 8])

        row("Engram records from 65,536 rows", chunked, "joining row by row", one_by_one, rows * 264 / MIB)

        preflight_of_a_played_machine(folder)

    def start(*argv: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, *argv], capture_output=True, check=True)

    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        fetch.main(Path(name))
    row(
        "ds41ctl --help",
        start("-m", "ds41ctl", "--help"),
        "python -c 'import typer'",
        start("-c", "import typer"),
        None,
    )


if __name__ == "__main__":
    main()
