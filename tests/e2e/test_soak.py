"""Soak, bench and the wider smoke tests on the real engine; a seeded leak and a frozen engine are caught."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SLOW = os.environ.get("DS41_TEST_SLOW") == "1"  # the ten-minute soak


@pytest.fixture(scope="module", autouse=True)
def engine(cli: Cli) -> None:
    answer = cli("up")
    assert answer.code == 0, answer.out + answer.err


def soak(cli: Cli, *args: str) -> tuple[int, dict[str, Any]]:
    answer = cli("soak", "run", "--json", *args, timeout=900)
    return answer.code, answer.json()["data"]


def statuses(data: dict[str, Any]) -> dict[str, str]:
    return {item["id"]: item["status"] for item in data["findings"]}


def test_every_smoke_test_of_level_thorough_passes(cli: Cli) -> None:
    answer = cli("smoke", "--level", "thorough", "--json")
    findings = answer.json()["data"]["findings"]
    assert len(findings) == 17 and {item["status"] for item in findings} == {"ok"}, findings
    assert answer.code == 0


def test_a_soak_passes_and_its_tokens_are_the_engines(cli: Cli) -> None:
    code, data = soak(cli, "--minutes", "10" if SLOW else "2")
    assert (code, data["verdict"]) == (0, "pass"), [item for item in data["findings"] if item["status"] != "ok"]
    found = statuses(data)
    for name in ("complete", "engine", "errors", "canaries", "stall", "tokens", "rss", "kv-idle", "zombie", "store"):
        assert found[f"soak.{name}"] == "ok", data["findings"]
    assert data["figures"]["longest_prompt"] > 1500


class Leak:
    """A helper of the engine's family that takes 4 MiB a second; it carries the marker as a worker does."""

    CODE = "import time\nheld = []\nwhile True:\n    held.append(bytearray(b'x' * 4194304))\n    time.sleep(1)\n"

    def __init__(self, cli: Cli) -> None:
        import subprocess
        import sys

        environ = Path(f"/proc/{cli.record()['pid']}/environ").read_bytes().split(b"\0")
        marker = next(item for item in environ if item.startswith(b"DS41_ENGINE_RUN=")).decode()
        name, _, value = marker.partition("=")
        self.child = subprocess.Popen([sys.executable, "-c", self.CODE], env={**os.environ, name: value})

    def end(self) -> None:
        self.child.kill()
        self.child.wait()


def test_a_seeded_leak_fails_the_soak_for_that_reason_alone(cli: Cli) -> None:
    leak = Leak(cli)
    try:
        code, data = soak(cli, "--minutes", "1.5")
    finally:
        leak.end()
    assert (code, data["verdict"]) == (1, "fail")
    assert data["reasons"] == ["soak.rss"], data["findings"]


def test_a_second_soak_is_refused_while_one_runs(cli: Cli) -> None:
    with cli.start("soak", "run", "--minutes", "5") as first:
        latest = cli.root / "state" / "soak" / "latest" / "events.jsonl"
        before = latest.resolve()
        for _ in range(100):
            if latest.resolve() != before and latest.exists():
                break
            time.sleep(0.1)
        assert cli("soak", "run", "--cron").code == 11
        assert cli("bench").code == 11
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=60)
    assert first.returncode == 143


def test_bench_measures_what_fits_and_every_number_can_be_compared(cli: Cli) -> None:
    file = cli.root / "recipe.json"
    answer = cli("bench", "--suite", "code", "--json", "--recipe", str(file))
    data = answer.json()["data"]
    names = [row["name"] for row in data["rows"]]
    assert names == ["decode.code.c1", "decode.code.c2", "prefill.1024", "prefill.3072", "during-prefill.3072"]
    assert all(row["value"] for row in data["rows"]), data["rows"]
    marks = {mark for row in data["rows"] for mark in row["marks"]}
    assert not marks, marks
    assert json.loads(file.read_text())["performance"]


def test_a_frozen_engine_is_named_by_soak_though_its_process_lives(cli: Cli) -> None:
    """SIGSTOP: the port accepts, nothing answers. The profile's patience is cut so that the test is short."""
    text = (Path(__file__).parents[2] / "profiles" / "cpu-tiny.toml").read_text()
    path = cli.root / "short" / "cpu-tiny.toml"
    path.parent.mkdir()
    path.write_text(text.replace("[soak]\n", "[soak]\nstall_s = 5\n"))
    pids = [pid for pid in cli.processes() if psutil.pid_exists(pid)]

    def freeze() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

    timer = threading.Timer(20, freeze)
    timer.start()
    try:
        code, data = soak(cli, "--minutes", "5", "--profile", str(path))
    finally:
        timer.cancel()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert (code, data["verdict"]) == (1, "fail")
    assert data["figures"]["seconds"] < 150 and "soak.complete" in data["reasons"]
    assert any("no token flows" in item["summary"] for item in data["findings"]), data["findings"]


def test_a_dead_engine_fails_the_soak_within_seconds(cli: Cli) -> None:
    pid = cli.record()["pid"]
    timer = threading.Timer(15, lambda: os.kill(pid, signal.SIGKILL))
    timer.start()
    began = time.monotonic()
    code, data = soak(cli, "--minutes", "5")
    assert (code, data["verdict"]) == (1, "fail") and time.monotonic() - began < 60
    assert "soak.complete" in data["reasons"]
