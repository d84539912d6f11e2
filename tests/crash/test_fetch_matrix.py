"""Crash matrix of a fetch: killed, or refused by the disk, at every system call that matters.

Whatever happens: no final name holds bytes that are not the pinned ones, no sidecar vouches for any, a later run
reaches the same tree without help, and what it fetches again is what the journal had not claimed yet.
The windows are scaled down (claims every 128 KiB) so that a file of 1 MiB has several; the last two tests use the
real ones. The matrix runs over plain HTTP; Xet shares everything behind the stream and is killed at fewer points.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds41ctl.adapters import pack, part, profiles
from ds41ctl.adapters.download import Limits
from ds41ctl.adapters.hub import Hub
from ds41ctl.core.layout import Layout
from ds41ctl.core.profile import HubSource
from ds41ctl.steps.fetch import Fetch
from tests.fakes.hub import REVISION, FakeHub
from tests.fakes.packs import layout_for

KIB, MIB = 1 << 10, 1 << 20
BIG, SMALL = "model-00001-of-00001.safetensors", "config.json"
CONTENT = {SMALL: b'{"model_type": "x"}', BIG: hashlib.shake_256(b"big").digest(MIB + 77)}
CLAIM_AT, UNCLAIMED_MAX = 128 * KIB, 256 * KIB
CALLS = ("openat", "pwrite64", "write", "ftruncate", "fdatasync", "fsync", "rename", "unlink", "mkdir")
EVERY = {"pwrite64": 3}  # every third of them; the other calls all

PROGRAM = f"""
import sys
from pathlib import Path
from ds41ctl.adapters import part, transfer
from ds41ctl.adapters.download import Limits
from ds41ctl.adapters.hub import Hub
from ds41ctl.core.errors import Ds41Error
from ds41ctl.steps.fetch import Fetch
from tests.crash.test_fetch_matrix import layout
part.CLAIM_AT, part.UNCLAIMED_MAX = {CLAIM_AT}, {UNCLAIMED_MAX}
part._HASH_STEP = part._WRITE_STEP = {64 * KIB}
transfer.SPAN = {512 * KIB}
hub = Hub(sys.argv[1], None, False, sys.argv[3:] == ["xet"], Limits(stall_s=20))
step = Fetch(layout(Path(sys.argv[2])), hub=lambda: hub, connections=2)
try:
    step.do(lambda text, data: None)
except Ds41Error as error:
    print(type(error).__name__, int(error.code), error.message.replace(chr(10), "|"))
    sys.exit(int(error.code))
print("OK")
"""

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


def layout(root: Path) -> Layout:
    """A pack of two files from a loopback Hub, below `root`."""
    base = profiles.read(profiles.find("cpu-tiny"))
    model = base.model.model_copy(update={"sources": (HubSource(repo="owner/pack", revision=REVISION),)})
    return layout_for(base.model_copy(update={"model": model, "name": "crash"}), root)


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with FakeHub() as made:
        made.add("owner/pack", CONTENT)
        yield made


def watched(made: Layout) -> list[Path]:
    """Every path a fetch touches below the pack's folder and the pins."""
    folder, found = made.model_dir, []
    for name, data in CONTENT.items():
        git = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}" if name == BIG else f"git:{git}"
        path = folder / name
        arriving = part.part_path(path, part.Identity(len(data), digest))
        sidecar = path.with_name(path.name + pack.SIDECAR)
        found += [path, arriving, arriving.with_name(arriving.name + part.JOURNAL_SUFFIX), sidecar]
        found.append(sidecar.with_name(sidecar.name + part.SUFFIX))
    pins = made.pins_path
    return [*found, folder, pins, pins.with_name(pins.name + part.SUFFIX), pins.parent]


def traced(made: Layout, hub: FakeHub, *options: str, log: Path, xet: bool = False) -> subprocess.CompletedProcess[str]:
    """The program under strace, looking only at the paths of the pack."""
    argv = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", str(log)]
    for path in watched(made):
        argv += ["-P", str(path)]
    return subprocess.run(
        [*argv, *options, sys.executable, "-c", PROGRAM, hub.url, str(made.dirs.data.parent), *["xet"] * xet],
        capture_output=True, text=True, timeout=120, cwd=Path.cwd(), check=False,
    )  # fmt: skip


def calls_of_a_fetch(tmp: Path, hub: FakeHub, *, xet: bool = False) -> Counter[str]:
    """How often each call is made when nothing goes wrong."""
    log = tmp / "trace"
    done = traced(layout(tmp / "count"), hub, "-e", "trace=" + ",".join(CALLS), log=log, xet=xet)
    assert done.stdout == "OK\n", done.stderr
    return Counter(re.findall(rf"^\d+ +({'|'.join(CALLS)})\(", log.read_text(), re.MULTILINE))


def points(counts: Counter[str], harm: str) -> list[tuple[str, int]]:
    """(call, which one) of every point where this harm is done to a fetch: kills at all, disk errors at every other."""
    step = {call: EVERY.get(call, 1 if harm == "SIGKILL" else 2) for call in CALLS}
    return [(call, when) for call in CALLS for when in range(1, counts[call] + 1, step[call])]


def written(made: Layout) -> int:
    """Bytes of the big file that lie in its part, right or not."""
    found = list(made.model_dir.glob(f"{BIG}.*{part.SUFFIX}"))
    if not found:
        return 0
    data, right = found[0].read_bytes(), CONTENT[BIG]
    return sum(KIB for at in range(0, len(data), KIB) if data[at : at + KIB] == right[at : at + KIB])


def judge(made: Layout, hub: FakeHub, point: str, *, xet: bool = False) -> None:
    """The invariants after a death, then the run that must put everything right."""
    for name, data in CONTENT.items():
        path = made.model_dir / name
        assert not path.exists() or path.read_bytes() == data, f"{point}: {name} holds other bytes"
        sidecar = path.with_name(name + pack.SIDECAR)
        assert not sidecar.exists() or path.exists(), f"{point}: a sidecar without its file"
    held, there = 0, (made.model_dir / BIG).exists()
    if not there:
        identity = part.Identity(len(CONTENT[BIG]), "sha256:" + hashlib.sha256(CONTENT[BIG]).hexdigest())
        held = part.claimed(made.model_dir / BIG, identity)
        assert written(made) - held <= UNCLAIMED_MAX + KIB, f"{point}: {written(made)} written, {held} claimed"
    before = hub.sent(f"{BIG}?signature=1")
    step = Fetch(made, hub=lambda: Hub(hub.url, None, False, xet, Limits(stall_s=20)))
    step.do(lambda text, data: None)
    assert step.check().reached, point
    again = hub.sent(f"{BIG}?signature=1") - before
    if xet:
        assert again == 0, f"{point}: plain HTTP was asked"
        again = step.check().data.get("received", {}).get("xet", 0)
    assert again == (0 if there else len(CONTENT[BIG]) - held), f"{point}: {again} bytes sent again"
    names = {path.name for path in made.model_dir.iterdir()}
    assert names == {*CONTENT, *(name + pack.SIDECAR for name in CONTENT), pack.LOCK_FILE}, f"{point}: {names}"
    assert all((made.model_dir / name).read_bytes() == data for name, data in CONTENT.items())


HARMS = {"SIGKILL": "signal=KILL", "EIO": "error=EIO", "ENOSPC": "error=ENOSPC"}


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory, hub: FakeHub) -> Counter[str]:
    return calls_of_a_fetch(tmp_path_factory.mktemp("count"), hub)


def test_there_are_at_least_150_points(counts: Counter[str]) -> None:
    assert all(counts[call] for call in CALLS if call != "unlink"), counts
    assert sum(len(points(counts, harm)) for harm in HARMS) >= 150, counts


@pytest.mark.timeout(600)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("harm", HARMS)
def test_at_every_point_nothing_wrong_is_published_and_the_next_run_ends_well(
    tmp_path: Path, hub: FakeHub, counts: Counter[str], call: str, harm: str
) -> None:
    for wanted, when in points(counts, harm):
        if wanted != call:
            continue
        made = layout(tmp_path / f"{when}")
        # a full disk stays full, a broken sector does not break the next one
        upto = "+" if harm == "ENOSPC" and call in ("pwrite64", "write", "fdatasync", "fsync") else ""
        inject = f"inject={call}:{HARMS[harm]}:when={when}{upto}"
        done = traced(made, hub, "-e", f"trace={call}", "-e", inject, log=tmp_path / "trace")
        point = f"{harm} at {call} {when} of {counts[call]}: {done.stdout.strip()} {done.stderr.strip()[-300:]}"
        hit = "INJECTED" in (tmp_path / "trace").read_text() or "killed by" in (tmp_path / "trace").read_text()
        if harm == "SIGKILL":
            assert done.returncode == (-signal.SIGKILL if hit else 0), point
        elif done.returncode:
            assert "Traceback" not in done.stderr, point
            kind, code, _ = done.stdout.split(" ", 2)
            expected = {"NoSpaceError"} if harm == "ENOSPC" else {"Ds41Error", "IntegrityError"}
            assert kind in expected and int(code) == done.returncode, point
        judge(made, hub, point)
        shutil.rmtree(tmp_path / f"{when}")


@pytest.mark.timeout(600)
def test_killed_while_xet_brings_the_bytes_nothing_wrong_is_published_either(tmp_path: Path, hub: FakeHub) -> None:
    hub.store_in_xet("owner/pack", tmp_path / "store", [BIG])
    try:
        calls = calls_of_a_fetch(tmp_path, hub, xet=True)
        wanted = {"pwrite64": 6, "fdatasync": 6, "fsync": 6, "rename": 2}
        chosen = [(call, when) for call, step in wanted.items() for when in range(1, calls[call] + 1, step)]
        assert len(chosen) >= 8, calls
        for call, when in chosen:
            made, log = layout(tmp_path / f"{call}-{when}"), tmp_path / "trace"
            inject = f"inject={call}:signal=KILL:when={when}"
            done = traced(made, hub, "-e", f"trace={call}", "-e", inject, log=log, xet=True)
            point = f"Xet, SIGKILL at {call} {when} of {calls[call]}: {done.stderr.strip()[-300:]}"
            assert done.returncode == (-signal.SIGKILL if "killed by" in log.read_text() else 0), point
            judge(made, hub, point, xet=True)
    finally:
        hub.repos["owner/pack"][BIG].xet = ""


def test_two_streams_of_xet_and_what_is_not_claimed_stay_below_64_mib() -> None:
    """What a kill can cost of a file that Xet brings: no server's log shows what its library had asked for."""
    from ds41ctl.adapters import transfer

    assert transfer.XET_RANGES_PER_FILE * transfer.XET_SPAN + part.UNCLAIMED_MAX <= 64 * MIB
    item = transfer._File.__new__(transfer._File)
    item.sources, item.flying, item.single, item.finishing = [type("Xet", (), {"label": "xet"})()], [], False, False  # type: ignore[list-item]
    item.order = transfer.Order(Path("f"), 1 << 30, "", (), lambda sha256: None)
    item.part = type("Empty", (), {"missing": lambda self: [(0, 1 << 30)]})()  # type: ignore[assignment]
    while (span := item.gap()) is not None:
        item.flying.append(span)
    assert sum(end - begin for begin, end in item.flying) == transfer.XET_RANGES_PER_FILE * transfer.XET_SPAN


def test_killed_at_ninety_percent_of_a_big_file_less_than_64_mib_are_fetched_again(tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as out:
        for _ in range(400):
            out.write(os.urandom(MIB))
    with FakeHub() as hub:
        hub.add("owner/pack", {BIG: source})
        made = layout(tmp_path)
        real = "\n".join(line for line in PROGRAM.split("\n") if "CLAIM_AT" not in line and "SPAN" not in line)
        running = subprocess.Popen([sys.executable, "-c", real, hub.url, str(tmp_path)], cwd=Path.cwd())
        deadline = time.monotonic() + 60
        while running.poll() is None and time.monotonic() < deadline:
            if hub.sent(f"{BIG}?signature=1") > 360 * MIB:
                running.kill()
        running.wait()
        assert running.returncode == -signal.SIGKILL, "it was quicker than the kill"
        hub.log.clear()
        began = time.monotonic()
        Fetch(made, hub=lambda: Hub(hub.url, None, False, False)).do(lambda text, data: None)
        again = sum(entry.sent for entry in hub.requests("cdn")) - 40 * MIB
        print(f"{again / MIB:.1f} MiB fetched again, {time.monotonic() - began:.2f} s")
        assert again <= 64 * MIB
        assert Fetch(made).check().reached
