"""Crash matrix of single tensors: killed, or refused by the disk, at every system call that matters.

As tests/crash/test_fetch_matrix.py for whole files, with one difference: no digest of the new file is known before it
arrived once, so it is recorded before the file gets its name. Whatever happens, the header is asked for once, no
claimed byte comes again, and every run ends with the same file.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds41ctl.adapters import pack, part, profiles
from ds41ctl.adapters.download import Limits
from ds41ctl.adapters.hub import Hub
from ds41ctl.adapters.safetensors import WORD, read_header
from ds41ctl.core.layout import Layout
from ds41ctl.core.profile import HubSource
from ds41ctl.steps.fetch import Fetch
from tests.fakes.hub import REVISION, FakeHub
from tests.fakes.packs import layout_for, shard_bytes

KIB, MIB = 1 << 10, 1 << 20
BIG = "model-00001-of-00001.safetensors"
SIZES = {"a": 300 * KIB, "layers.0.ffn.experts.0": 2 * MIB, "b": 400 * KIB + 7, "layers.1.ffn.experts.0": 9, "c": 5}
SHARD = shard_bytes({n: ("U8", [s], hashlib.shake_256(n.encode()).digest(s)) for n, s in SIZES.items()})
HEAD = WORD + int.from_bytes(SHARD[:WORD], "little")
GAP = SIZES["layers.1.ffn.experts.0"]  # read through
WANTED = SIZES["a"] + SIZES["b"] + SIZES["c"]
CLAIM_AT, UNCLAIMED_MAX = 128 * KIB, 256 * KIB
CALLS = ("openat", "pwrite64", "write", "ftruncate", "fdatasync", "fsync", "rename", "unlink", "mkdir")
HARMS = {"SIGKILL": "signal=KILL", "EIO": "error=EIO", "ENOSPC": "error=ENOSPC"}

PROGRAM = f"""
import sys
from pathlib import Path
from ds41ctl.adapters import part, transfer
from ds41ctl.adapters.download import Limits
from ds41ctl.adapters.hub import Hub
from ds41ctl.core.errors import Ds41Error
from ds41ctl.steps.fetch import Fetch
from tests.crash.test_tensor_matrix import layout
part.CLAIM_AT, part.UNCLAIMED_MAX = {CLAIM_AT}, {UNCLAIMED_MAX}
part._HASH_STEP = part._WRITE_STEP = {64 * KIB}
transfer.SPAN = {256 * KIB}
step = Fetch(layout(Path(sys.argv[2])), hub=lambda: Hub(sys.argv[1], None, False, False, Limits(stall_s=20)))
try:
    step.do(lambda text, data: None)
except Ds41Error as error:
    print(type(error).__name__, int(error.code), error.message.replace(chr(10), "|"))
    sys.exit(int(error.code))
print("OK")
"""

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


def layout(root: Path) -> Layout:
    """A pack of one shard of which three of five tensors are wanted, below `root`."""
    base = profiles.read(profiles.find("cpu-tiny"))
    source = HubSource(repo="owner/pack", revision=REVISION, leave_out=("layers.*.ffn.experts.*",))
    model = base.model.model_copy(update={"sources": (source,)})
    return layout_for(base.model_copy(update={"model": model, "name": "crash"}), root)


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with FakeHub() as made:
        made.add("owner/pack", {BIG: SHARD})
        yield made


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory, hub: FakeHub) -> pack.Expected:
    """The file as a fetch without harm leaves it."""
    made = layout(tmp_path_factory.mktemp("right"))
    Fetch(made, hub=lambda: Hub(hub.url, None, False, False)).do(lambda text, data: None)
    held = pack.holdings(made)
    assert held is not None and list(read_header(made.model_dir / BIG)) == ["a", "b", "c"]
    return held[0].items[0]


def watched(made: Layout, item: pack.Expected) -> list[Path]:
    """Every path that a fetch touches below the pack's folder, the pins and the headers."""
    path = made.model_dir / BIG
    arriving, sidecar = part.part_path(path, item.identity), path.with_name(BIG + pack.SIDECAR)
    found = [path, arriving, arriving.with_name(arriving.name + part.JOURNAL_SUFFIX)]
    found += [sidecar, sidecar.with_name(sidecar.name + part.SUFFIX), made.model_dir]
    pins = made.pins_path
    name = hashlib.sha256(f"owner/pack {REVISION} {BIG} {hashlib.sha256(SHARD).hexdigest()}".encode()).hexdigest()[:32]
    head = made.heads_dir / name
    return [*found, pins, pins.with_name(pins.name + part.SUFFIX), pins.parent, made.heads_dir, head,
            head.with_name(name + part.SUFFIX)]  # fmt: skip


def traced(
    made: Layout, item: pack.Expected, hub: FakeHub, *options: str, log: Path
) -> subprocess.CompletedProcess[str]:
    argv = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", str(log)]
    for path in watched(made, item):
        argv += ["-P", str(path)]
    return subprocess.run(
        [*argv, *options, sys.executable, "-c", PROGRAM, hub.url, str(made.dirs.data.parent)],
        capture_output=True, text=True, timeout=120, cwd=Path.cwd(), check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory, hub: FakeHub, right: pack.Expected) -> Counter[str]:
    """How often each call is made when nothing goes wrong."""
    tmp = tmp_path_factory.mktemp("count")
    done = traced(layout(tmp / "made"), right, hub, "-e", "trace=" + ",".join(CALLS), log=tmp / "trace")
    assert done.stdout == "OK\n", done.stderr
    return Counter(re.findall(rf"^\d+ +({'|'.join(CALLS)})\(", (tmp / "trace").read_text(), re.MULTILINE))


def points(counts: Counter[str], harm: str) -> list[tuple[str, int]]:
    """(call, which one) of every point where this harm is done: kills at all, disk errors at every third."""
    step = 1 if harm == "SIGKILL" else 3
    return [(call, when) for call in CALLS for when in range(1, counts[call] + 1, step)]


def judge(made: Layout, right: pack.Expected, hub: FakeHub, point: str) -> None:
    """The invariants after a death, then the run that must put everything right."""
    path = made.model_dir / BIG
    there = path.exists()
    assert not there or hashlib.sha256(path.read_bytes()).hexdigest() == right.sha256, f"{point}: other bytes"
    assert there or not path.with_name(BIG + pack.SIDECAR).exists(), f"{point}: a sidecar without its file"
    held = part.claimed(path, right.identity)
    heads = len(list(made.heads_dir.glob("*[0-9a-f]"))) if made.heads_dir.exists() else 0
    before = sum(entry.sent for entry in hub.requests("cdn"))
    step = Fetch(made, hub=lambda: Hub(hub.url, None, False, False, Limits(stall_s=20)))
    step.do(lambda text, data: None)
    assert step.check().reached, point
    again = sum(entry.sent for entry in hub.requests("cdn")) - before
    left = 0 if there else right.size - held
    # a claim may begin in the header, which comes from memory: no more than what is left, the gap and a lost header
    assert again <= left + (GAP if left else 0) + (0 if heads else HEAD), f"{point}: {again} bytes sent, {left} left"
    assert not there or again <= (0 if heads else HEAD), f"{point}: the file was there, {again} bytes came"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == right.sha256, point
    names = {entry.name for entry in made.model_dir.iterdir()}
    assert names == {BIG, BIG + pack.SIDECAR, pack.LOCK_FILE}, f"{point}: {names}"
    held_again = pack.holdings(made)
    assert held_again is not None and held_again[0].items[0].sha256 == right.sha256, point


def test_there_are_at_least_100_points(counts: Counter[str]) -> None:
    assert all(counts[call] for call in CALLS if call != "unlink"), counts
    assert sum(len(points(counts, harm)) for harm in HARMS) >= 100, counts


@pytest.mark.timeout(600)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("harm", HARMS)
def test_at_every_point_nothing_is_lost_and_the_next_run_ends_with_the_same_file(
    tmp_path: Path, hub: FakeHub, right: pack.Expected, counts: Counter[str], call: str, harm: str
) -> None:
    for wanted, when in points(counts, harm):
        if wanted != call:
            continue
        made = layout(tmp_path / f"{when}")
        upto = "+" if harm == "ENOSPC" and call in ("pwrite64", "write", "fdatasync", "fsync") else ""
        inject = f"inject={call}:{HARMS[harm]}:when={when}{upto}"
        done = traced(made, right, hub, "-e", f"trace={call}", "-e", inject, log=tmp_path / "trace")
        point = f"{harm} at {call} {when} of {counts[call]}: {done.stdout.strip()} {done.stderr.strip()[-300:]}"
        log = (tmp_path / "trace").read_text()
        if harm == "SIGKILL":
            assert done.returncode == (-signal.SIGKILL if "killed by" in log else 0), point
        elif done.returncode:
            assert "Traceback" not in done.stderr, point
            kind, code, _ = done.stdout.split(" ", 2)
            expected = {"NoSpaceError"} if harm == "ENOSPC" else {"Ds41Error", "IntegrityError"}
            assert kind in expected and int(code) == done.returncode, point
        judge(made, right, hub, point)
        shutil.rmtree(tmp_path / f"{when}")
