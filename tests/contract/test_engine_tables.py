"""An engine that loads its own Engram tables: it serves when it has, and is ended when its memory shows none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import preflight
from ds41ctl.adapters import hostmem, profiles, running
from ds41ctl.core.errors import EngineDiedError
from ds41ctl.core.finding import Finding, Status
from ds41ctl.core.growth import Holding, Levels
from ds41ctl.core.layout import Dirs, Layout, layout
from ds41ctl.core.profile import EngramTable, Profile
from ds41ctl.core.settings import Settings
from ds41ctl.steps import live, stop
from ds41ctl.steps.serve import Serve
from tests.facts.replay import changed, machine

pytestmark = pytest.mark.timeout(120)
V100 = profiles.read(profiles.find("v100-pp2tp4"))
MIB = 1 << 20
ROWS = 125_000  # 33 MB a table: more than a bare interpreter holds

# what an engine in the shape of the mission's is to a launcher: a log, /health, a completion, tables of its own
ENGINE = """
import json, mmap, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

how, size, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
print("INFO 11-29 10:00:00 non-default args: {}", flush=True)
for rank in range(4):
    print(f"(Worker_TP{rank} pid=1) INFO Built engram token map (129280 -> 99092 ids) for layers (1, 14)")
if how == "filled":
    tables = bytearray(b"x") * size
elif how == "reserved":
    tables = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE


class Handler(BaseHTTPRequestHandler):
    def answer(self, tree):
        body = json.dumps(tree).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"usage": {"completion_tokens": 1}, "choices": [{"text": "1"}]})

    def log_message(self, *_):
        pass


print("INFO 11-29 10:00:00 Application startup complete.", flush=True)
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def silent(text: str, data: dict[str, Any]) -> None:
    """Nobody looks."""


def stand_in(root: Path, how: str, *, rows: int = ROWS, **engram: Any) -> Layout:
    """The shipped V100 profile around the stand-in: foreign engine, markers and [engram] are the profile's own."""
    (root / "engine.py").write_text(ENGINE)
    tables = tuple(EngramTable(layer=table.layer, rows=rows, shard=table.shard) for table in V100.model.engram)
    argv = ("${python}", "-IS", str(root / "engine.py"), how, str(2 * rows * 264), "${port}")
    profile = V100.model_copy(
        update={
            "hardware": V100.hardware.model_copy(update={"gpus": 0, "gpu_groups": {}}),
            "model": V100.model.model_copy(update={"engram": tables}),
            "serve": V100.serve.model_copy(update={"argv": argv, "dspark_argv": (), "env": {}}),
            "engram": V100.engram.model_copy(update=engram),
        }
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dirs = Dirs(root / "data", root / "state", root / "cache", Path(tempfile.mkdtemp(dir="/tmp")), os.getuid())
    settings = Settings.model_validate({"port": port, "python": sys.executable})
    made = layout(profile, settings, dirs, may_mount=False)
    made.model_dir.mkdir(parents=True)
    return made


@pytest.fixture
def ended() -> Iterator[list[Layout]]:
    """Layouts whose engine is ended after the test."""
    made: list[Layout] = []
    yield made
    for item in made:
        record = running.read(item.record_path)
        if record is not None:
            stop.end(item, record)


def test_a_healthy_engine_with_tables_of_its_own_serves_without_a_store_of_ours(
    tmp_path: Path, ended: list[Layout]
) -> None:
    it = stand_in(tmp_path, "filled")
    ended.append(it)
    said: list[str] = []
    step = Serve(it, Path("v100.toml"), os.environ)
    step.do(lambda text, data: said.append(text))
    record = running.read(it.record_path)
    assert record is not None and record.ready_at and record.levels is not None and step.check().reached
    assert record.growth is not None and record.growth.filled is not None
    assert record.growth.filled >= 2 * ROWS * 264 * 0.95
    assert record.growth.held is not None and record.growth.held.anonymous >= 2 * ROWS * 264
    assert any(text.startswith("Engram tables: ") and "tables take 0.1 GiB" in text for text in said)
    assert live.collect(it)["engram"] == f"kept by the engine; {record.growth}"
    assert not (it.dirs.state / "engram").exists()


@pytest.mark.parametrize("how", ["nothing", "reserved"])
def test_one_whose_tables_are_not_in_memory_is_ended_with_the_figures(
    tmp_path: Path, ended: list[Layout], how: str
) -> None:
    # 2 TiB of tables: more than anything else on this machine can have filled meanwhile
    it = stand_in(tmp_path, how, rows=1 << 32)
    ended.append(it)
    with pytest.raises(EngineDiedError, match=r"only -?\d+\.\d GiB .* tables take 2112\.0 GiB") as failed:
        Serve(it, Path("v100.toml"), os.environ).do(silent)
    assert int(failed.value.code) == 16 and any("host_copies = 1" in hint for hint in failed.value.hints)
    assert running.read(it.record_path) is None


def test_memory_that_cannot_be_measured_is_said_and_kept_as_unknown(
    tmp_path: Path, ended: list[Layout], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostmem, "levels", lambda: Levels(available=None))
    monkeypatch.setattr(hostmem, "holding", lambda pids: None)
    it = stand_in(tmp_path, "nothing")
    ended.append(it)
    said: list[str] = []
    Serve(it, Path("v100.toml"), os.environ).do(lambda text, data: said.append(text))
    assert any(text.startswith("Engram tables: unknown: ") and "smoke.copy" in text for text in said)
    assert "unknown: memory could not be measured" in live.collect(it)["engram"]


# ---- what a process holds that is no page cache
HOLDERS = {
    "filled": ("held = bytearray(b'x') * size", lambda found: found.anonymous, True),
    "reserved": ("held = mmap.mmap(-1, size)", lambda found: found.total, False),
    "read from a disk": ("held = open(path, 'rb').read; [None for _ in iter(lambda: held(1 << 20), b'')]",
                         lambda found: found.total, False),
    "mapped from a disk": ("file = open(path, 'rb'); held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ); "
                           "sum(held[at] for at in range(0, size, 4096))", lambda found: found.total, False),
    "mapped from a tmpfs": ("file = open(shm, 'rb'); held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)",
                            lambda found: found.kept, True),
    "open on a tmpfs": ("held = open(shm, 'rb')", lambda found: found.kept, True),
}  # fmt: skip


@pytest.mark.parametrize("name", HOLDERS)
def test_only_memory_that_is_kept_counts(tmp_path: Path, name: str) -> None:
    program, part, counts = HOLDERS[name]
    size, shm = 64 * MIB, Path(f"/dev/shm/ds41ctl-test-{os.getpid()}")
    for path in (tmp_path / "file", shm):
        path.write_bytes(bytes(size))
    text = f"import mmap, sys; size, path, shm = {size}, {str(tmp_path / 'file')!r}, {str(shm)!r}; {program}"
    words = [sys.executable, "-IS", "-c", f"{text}; print('ready', flush=True); sys.stdin.read()"]
    try:
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            found = hostmem.holding([child.pid])
            child.communicate()
    finally:
        shm.unlink()
    assert isinstance(found, Holding)
    assert (part(found) >= size) if counts else (part(found) < size // 2), found


def test_two_processes_with_one_file_hold_it_once_and_a_gone_one_holds_nothing() -> None:
    shm = Path(f"/dev/shm/ds41ctl-test-{os.getpid()}")
    shm.write_bytes(bytes(8 * MIB))
    words = [sys.executable, "-IS", "-c", "import sys; print('ready', flush=True); sys.stdin.read()"]
    try:
        with shm.open("rb") as held:
            made = [
                subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(held.fileno(),))
                for _ in range(2)
            ]
            for child in made:
                assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            both = hostmem.holding(child.pid for child in made)
            for child in made:
                child.communicate()
    finally:
        shm.unlink()
    assert both is not None and both.kept == 8 * MIB
    assert hostmem.holding([made[0].pid]) is None


# ---- what preflight asks of such a profile
def verdict(profile: Profile, check: str, **told: Any) -> Finding:
    facts = machine("v100-8x-hugepages-reserved")
    facts = changed(facts, "memory", **told) if told else facts
    return next(item for item in preflight.run(profile, facts, stage="serve") if item.id == check)


def test_the_shipped_profile_is_accepted_with_what_proves_it_and_no_store_is_asked_for() -> None:
    found = verdict(V100, "engram.storage")
    assert found.status is Status.OK and "20 exact copies" in found.summary
    assert verdict(V100, "engram.store").status is Status.SKIP


@pytest.mark.parametrize(
    ("update", "lacks"),
    [
        ({"engram": V100.engram.model_copy(update={"host_copies": 0})}, "host_copies"),
        ({"serve": V100.serve.model_copy(update={"required_markers": ()})}, "required_markers"),
    ],
)
def test_a_proof_that_the_profile_lacks_is_named(update: dict[str, Any], lacks: str) -> None:
    found = verdict(V100.model_copy(update=update), "engram.storage")
    assert found.status is Status.FAIL and lacks in found.summary


def test_a_store_that_nobody_would_read_is_refused() -> None:
    """What this profile once asked for: 189 GiB of records that its engine knows nothing of."""
    for form, message in (("records", "only ds41_engine reads"), ("shards", "nothing tells the engine")):
        engram = V100.engram.model_copy(update={"storage": "tmpfs", "format": form, "host_copies": 0})
        found = verdict(V100.model_copy(update={"engram": engram}), "engram.storage")
        assert found.status is Status.FAIL and message in found.summary
    cpu = profiles.read(profiles.find("cpu-tiny"))
    assert verdict(cpu, "engram.storage").status is Status.OK
    turned = cpu.model_copy(update={"engram": cpu.engram.model_copy(update={"format": "shards"})})
    assert "reads records" in verdict(turned, "engram.storage").summary


def test_the_memory_asked_for_is_one_copy_of_the_tables_and_hugepages_that_are_free_hold_it_too() -> None:
    gib = 1 << 30
    assert verdict(V100, "host.ram", hugepages=(), available=222 * gib, cgroup_limit=0).status is Status.OK
    short = verdict(V100, "host.ram", hugepages=(), available=220 * gib, cgroup_limit=0)
    assert (
        short.status is Status.FAIL and "221 GiB needed" in short.summary and "that the engine keeps" in short.expected
    )
    # recorded: 189 GiB are reserved as hugepages and free, which MemAvailable leaves out
    assert verdict(V100, "host.ram", available=33 * gib, cgroup_limit=0).status is Status.OK
    two = V100.model_copy(update={"engram": V100.engram.model_copy(update={"host_copies": 2})})
    assert "410 GiB needed" in verdict(two, "host.ram", hugepages=(), available=300 * gib, cgroup_limit=0).summary
