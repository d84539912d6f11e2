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
