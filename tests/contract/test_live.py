"""What status and watchdog see of real processes: who is gone, and whose command line and environment differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds41ctl.adapters import clocks, files, kernel, nvml, proc, profiles, running, store
from ds41ctl.adapters.running import Member, Running
from ds41ctl.core.facts import GpuFacts
from ds41ctl.core.layout import Dirs, Layout, layout
from ds41ctl.core.lease import Lease
from ds41ctl.core.settings import Settings
from ds41ctl.steps import live
from ds41ctl.steps.watchdog import Watchdog

PROGRAM = "import time; time.sleep(120)"


@pytest.fixture
def where(tmp_path: Path) -> Layout:
    dirs = Dirs(tmp_path / "data", tmp_path / "state", tmp_path / "cache", tmp_path / "run", os.getuid())
    return layout(profiles.read(profiles.find("cpu-tiny")), Settings(port=1), dirs, may_mount=False)


@pytest.fixture
def pair() -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    """A first process and a member of it."""
    env = {**os.environ, "GIVEN": "1"}
    made = [subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, start_new_session=True) for _ in range(2)]
    yield made[0], made[1]
    for process in made:
        process.kill()
        process.wait()


def recorded(where: Layout, first: int, member: int, *, argv: tuple[str, ...], env: dict[str, str]) -> Running:
    """A record of the two, ready since a moment."""
    spec = where.dirs.state / "spec.json"
    files.publish_json(spec, {"env": env})
    log = where.dirs.state / "engine.log"
    log.write_text("INFO 11-29 10:00:00 [core.py:1] all well\n")
    identity, other = proc.identify(first), proc.identify(member)
    assert identity is not None and other is not None
    record = Running(
        profile="cpu-tiny", profile_path="x", profile_digest=where.profile.digest(), engine_digest="",
        boot_id=store.boot_id(), pid=first, start_ticks=identity.start_ticks, marker="NO=match", host="127.0.0.1",
        port=1, served_name="x", argv=argv, environment_sha256="", log=str(log), socket=str(where.socket_path),
        spec=str(spec), started_at="2026-11-29T10:00:00+00:00", ready_at="2026-11-29T10:01:00+00:00",
        members=(Member(pid=member, start_ticks=other.start_ticks, title="VLLM::EngineCore"),),
    )  # fmt: skip
    running.write(where.record_path, record)
    return record


Pair = tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]
ARGV = (sys.executable, "-c", PROGRAM)


def test_an_engine_whose_core_is_gone_is_dead_though_its_first_process_lives(where: Layout, pair: Pair) -> None:
    first, core = pair
    recorded(where, first.pid, core.pid, argv=ARGV, env={"GIVEN": "1"})
    assert live.collect(where)["state"].startswith("not answering") and live.look(where).alive
    core.kill()
    core.wait()
    tree = live.collect(where)
    assert tree["state"] == "died" and tree["ending"] == f"VLLM::EngineCore (pid {core.pid}) has ended"
    assert "VLLM::EngineCore ended without a word" in tree["meaning"] and tree["fix"]
    assert any(str(first.pid) in text for text in tree["left_behind"])
    states = [state for state, _ in Watchdog(where, Path("x"), every_s=0.1).states(lambda text: None)]
    assert states == ["dead"]


def test_a_live_process_as_it_was_started_has_no_drift(where: Layout, pair: Pair) -> None:
    record = recorded(where, pair[0].pid, pair[1].pid, argv=ARGV, env={"GIVEN": "1"})
    assert live.drift(where, record) == []
    # a wrapper or numactl before the program is gone once it runs
    for before in (("/a/wrapper",), ("numactl", "--interleave=all", sys.executable)):
        assert live.drift(where, record.model_copy(update={"argv": (*before, "-c", PROGRAM)})) == []


def test_another_command_line_and_another_environment_are_drift(where: Layout, pair: Pair) -> None:
    record = recorded(
        where, pair[0].pid, pair[1].pid, argv=ARGV, env={"GIVEN": "2", "GONE": "x", "PATH": os.environ["PATH"]}
    )
    assert live.drift(where, record) == ["the live environment differs: GIVEN, GONE"]
    other = record.model_copy(update={"argv": (sys.executable, "-c", "pass")})
    assert "the live command line differs from the one that was started" in live.drift(where, other)


def test_a_power_limit_that_is_not_the_lease_s_any_more_is_drift(
    where: Layout, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = recorded(where, pair[0].pid, pair[1].pid, argv=ARGV, env={"GIVEN": "1"})
    lease = Lease(
        profile="cpu-tiny", boot_id=store.boot_id(), module=kernel.module_load(Path("/")), uuids=("GPU-0",),
        power_limit_w=200, power_before_w={"GPU-0": 250}, locked=True, created_at="now",
    )  # fmt: skip
    path = clocks.journal(where.dirs.state, where.name)
    files.publish(path, [lease.model_dump_json().encode()])
    for watts, found in ((200.0, []), (250.0, ["GPU 0: power limit 250 W now, 200 W was set"])):
        gpu = GpuFacts(index=0, name="card", uuid="GPU-0", power_limit_w=watts)
        monkeypatch.setattr(nvml, "survey", lambda library=None, gpu=gpu: nvml.Survey((gpu,)))
        assert live.drift(where, record) == found
    assert live.collect(where)["clocks"] == "locked at 200 W on 1 GPUs"
    files.publish(path, [lease.model_copy(update={"module": "inode 7"}).model_dump_json().encode()])
    assert live.drift(where, record) == [], "the driver has forgotten it, and the lease is nobody's"
    assert "loaded again" in live.collect(where)["clocks"]


def test_a_record_of_an_older_version_is_still_read(where: Layout, pair: Pair) -> None:
    recorded(where, pair[0].pid, pair[1].pid, argv=ARGV, env={})
    tree = json.loads(where.record_path.read_text())
    for name in ("members", "container", "runtime", "idle_vram_mib", "api_key_file"):
        del tree[name]
    where.record_path.write_text(json.dumps(tree))
    record = running.read(where.record_path)
    assert record is not None and record.alive() and record.gone() == []
