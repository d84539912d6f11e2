"""Fetch and verify against the peers, on the same files and the same loopback source.

`fetch + verify` is ours in one pass (every byte hashed as it arrives, fsynced, published); the peer is
`hf download` of the same repository (plain HTTP) followed by `sha256sum`. Both run as their own process; the server
is a third one. DS41_BENCH_MIB sets the size of the set (default 4,096 MiB).
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from ds41ctl.adapters import pack, profiles
from ds41ctl.core.profile import HubSource
from tests.fakes.hub import REVISION
from tests.fakes.packs import layout_for

MIB = 1 << 20
FILES = 4

OURS = """
import resource, sys, tempfile
from pathlib import Path
from ds41ctl.adapters.hub import Hub
from ds41ctl.steps.fetch import Fetch
from tests.bench.fetch import layout
step = Fetch(layout(Path(sys.argv[2])), hub=lambda: Hub(sys.argv[1], None, False, sys.argv[3] == "xet"))
step.do(lambda text, data: None)
assert step.check().reached
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, *step.check().data["received"])
"""


def layout(root: Path) -> object:
    """A layout below `root` whose pack is the served repository."""
    base = profiles.read(profiles.find("cpu-tiny"))
    model = base.model.model_copy(update={"sources": (HubSource(repo="owner/repo", revision=REVISION),)})
    return layout_for(base.model_copy(update={"model": model, "name": "bench"}), root)


def _make(folder: Path, mib: int) -> None:
    folder.mkdir()
    for number in range(FILES):
        with (folder / f"model-{number + 1:05}-of-{FILES:05}.safetensors").open("wb") as out:
            for _ in range(mib // FILES):
                out.write(os.urandom(MIB))


def _run(argv: list[str], **env: str) -> tuple[float, str]:
    started = time.perf_counter()
    done = subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{argv[:3]} failed: {done.stderr[-2000:]}")
    return time.perf_counter() - started, done.stdout


def fetch_against_hf(work: Path, source: Path, rounds: int = 3) -> None:
    """One-pass fetch+verify against `hf download` and `sha256sum`."""
    size = sum(path.stat().st_size for path in source.iterdir())
    server = subprocess.Popen([sys.executable, "-m", "tests.fakes.hub", str(source)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        hf = str(Path(sys.executable).parent / "hf")
        mine, theirs, memory = [], [], 0
        for _ in range(rounds):
            seconds, out = _run([sys.executable, "-c", OURS, url, str(work / "ours"), "http"])
            mine.append(seconds)
            memory = max(memory, int(out.split()[0]))
            shutil.rmtree(work / "ours")
            env = {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(work / "hf-home")}
            argv = [hf, "download", "owner/repo", "--revision", REVISION, "--local-dir", str(work / "hf")]
            first, _ = _run(argv, **env)
            second, _ = _run(["sha256sum", *map(str, sorted((work / "hf").glob("*.safetensors")))])
            theirs.append((first, second))
            shutil.rmtree(work / "hf")
        ours = sorted(mine)[len(mine) // 2]
        first, second = sorted(theirs, key=sum)[len(theirs) // 2]
        print(
            f"fetch + verify {size / MIB:,.0f} MiB in {FILES} files         {size / MIB / ours:7.0f} MiB/s   "
            f"{(first + second) / ours:5.2f} times faster than hf download + sha256sum "
            f"({ours:.1f} s against {first:.1f} + {second:.1f} s; our peak memory {memory} MiB)"
        )
    finally:
        server.kill()
        server.wait()


def fetch_by_xet(work: Path, mib: int = 1024, rounds: int = 3) -> None:
    """Speed and peak memory of a fetch from a Xet store on this disk; no network is in it."""
    source = work / "xet-source"
    _make(source, mib)
    argv = [sys.executable, "-m", "tests.fakes.hub", str(source), str(work / "xet-store")]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        found = []
        for _ in range(rounds):
            seconds, out = _run([sys.executable, "-c", OURS, url, str(work / "ours"), "xet"])
            assert out.split()[1:] == ["xet"], out
            found.append((seconds, int(out.split()[0])))
            shutil.rmtree(work / "ours")
        seconds = sorted(found)[rounds // 2][0]
        memory = [peak for _, peak in found]
        print(
            f"fetch + verify {mib:,} MiB from a local Xet store    {mib / seconds:7.0f} MiB/s   "
            f"peak memory {min(memory)} to {max(memory)} MiB"
        )
    finally:
        server.kill()
        server.wait()


def verify_against_sha256sum(work: Path, source: Path, rounds: int = 3) -> None:
    """Full verify on all cores against `sha256sum`, and one core of it against OpenSSL's own speed."""
    made = sorted(source.iterdir())
    items = [pack.Expected(path.name, path.stat().st_size, "", "r") for path in made]
    digests = {path.name: hashlib.file_digest(path.open("rb"), "sha256").hexdigest() for path in made}
    wanted = [(source, pack.Expected(i.name, i.size, digests[i.name], "r")) for i in items]

    def ours() -> float:
        for path in made:
            path.with_name(path.name + pack.SIDECAR).unlink(missing_ok=True)
        started = time.perf_counter()
        assert not [entry for entry in pack.hash_all(wanted, lambda number, item: None) if entry[2]]
        return time.perf_counter() - started

    size = sum(item.size for item in items)
    mine = sorted(ours() for _ in range(rounds))[rounds // 2]
    theirs = sorted(_run(["sha256sum", *map(str, made)])[0] for _ in range(rounds))[rounds // 2]
    print(
        f"fetch --verify {size / MIB:,.0f} MiB, {len(os.sched_getaffinity(0))} cores           "
        f"{size / MIB / mine:7.0f} MiB/s   {theirs / mine:5.2f} times faster than sha256sum"
    )
    single, openssl = [], []
    for _ in range(5):  # CPU time, turn by turn: what else runs on the machine does not count
        started = time.process_time()
        pack.bytes_problem(*wanted[0])
        single.append(time.process_time() - started)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        _run(["openssl", "dgst", "-sha256", str(made[0])])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        openssl.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    print(
        f"one file on one core, CPU time               {wanted[0][1].size / MIB / min(single):7.0f} MiB/s   "
        f"{min(openssl) / min(single):5.2f} of the speed of openssl dgst -sha256"
    )


def quick_verify(work: Path) -> None:
    """Quick verify of 48 shards."""
    folder = work / "quick"
    folder.mkdir()
    items = []
    for number in range(48):
        path = folder / f"model-{number + 1:05}-of-00048.safetensors"
        path.write_bytes(b"x")
        item = pack.Expected(path.name, 1, hashlib.sha256(b"x").hexdigest(), "r")
        pack.write_sidecar(path, item)
        items.append(item)
    started = time.perf_counter()
    assert not pack.quick([pack.Holding(folder, tuple(items))])
    print(f"fetch --verify --quick of 48 shards          {(time.perf_counter() - started) * 1000:7.1f} ms")


def main(work: Path) -> None:
    """Everything, below `work`."""
    source = work / "source"
    _make(source, int(os.environ.get("DS41_BENCH_MIB", "4096")))
    quick_verify(work)
    verify_against_sha256sum(work, source)
    for path in source.glob("*" + pack.SIDECAR):
        path.unlink()
    fetch_against_hf(work, source)
    shutil.rmtree(source)
    fetch_by_xet(work)
    print(f"(this process peaked at {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB)")
