"""soak as cron runs it: an empty environment, two overlapping ticks, a full disk, a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds41ctl.adapters.pack import recipe_folder
from ds41ctl.adapters.tracefile import TraceFile
from ds41ctl.core.errors import NoSpaceError
from smoke import canaries
from tests.fakes.profiles import without_speed
from tests.fakes.sse_server import FakeEngine, ScriptedServer

TINY = canaries.load(recipe_folder("tiny-v41"))
ROOT = Path(__file__).parents[2]
TICK_MINUTES = "0.15"


@pytest.fixture
def url() -> Iterator[str]:
    with ScriptedServer(FakeEngine(TINY, token_s=0.005)) as server:
        yield server.url


@pytest.fixture(autouse=True)
def lenient(tmp_path: Path) -> Path:
    """Nine seconds on a busy machine are too short for criteria of speed."""
    return without_speed(tmp_path)


def start(state: Path, *args: str, **env: str) -> subprocess.Popen[str]:
    """ds41ctl with an environment that holds nothing but what is given."""
    return subprocess.Popen(
        [sys.executable, "-m", "ds41ctl", "soak", *args],
        env={
            "DS41_STATE_DIR": str(state),
            "DS41_DATA_DIR": str(state / "data"),
            "DS41_PROFILE": str(state / "cpu-tiny.toml"),
            **env,
        },
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def cron(state: Path, url: str) -> subprocess.Popen[str]:
    return start(state, "run", "--cron", "--minutes", TICK_MINUTES, "--mode", "fresh", "--target", url)


def wait_for_turns(state: Path, count: int) -> Path:
    """The newest run's record, once it holds so many requests."""
    events = state / "soak" / "latest" / "events.jsonl"
    for _ in range(300):
        if events.exists() and events.read_text().count('"turn"') >= count:
            break
        time.sleep(0.1)
    return events


def from_crontab(state: Path, url: str) -> subprocess.Popen[str]:
    """The printed line as cron starts it: by /bin/sh, with nothing in the environment."""
    shown = start(state, "schedule", "--json")
    command = json.loads(shown.communicate(timeout=60)[0])["data"]["cron"].split(" ", 5)[5]
    command = command.replace("\\%", "%").replace(
        "--minutes 30", f"--minutes {TICK_MINUTES} --mode fresh --target {url}"
    )
    return subprocess.Popen(
        ["/bin/sh", "-c", command], env={}, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_killed_run_is_reported_and_of_two_overlapping_ticks_one_runs_silently(tmp_path: Path, url: str) -> None:
    killed = start(tmp_path, "run", "--minutes", "5", "--target", url)
    wait_for_turns(tmp_path, 5)
    killed.kill()
    killed.communicate(timeout=60)
    out, _ = start(tmp_path, "report", "--json").communicate(timeout=60)
    assert json.loads(out)["data"]["verdict"] == "inconclusive"

    before = {path.name for path in (tmp_path / "soak").iterdir() if not path.is_symlink()}
    first = from_crontab(tmp_path, url)  # the dead run's lock is free
    while {path.name for path in (tmp_path / "soak").iterdir() if not path.is_symlink()} == before:
        assert first.poll() is None
        time.sleep(0.05)
    second = cron(tmp_path, url)
    out, err = second.communicate(timeout=60)
    assert second.returncode == 11 and out == ""
    assert len(err.splitlines()) == 1 and "another ds41ctl run" in err
    out, err = first.communicate(timeout=120)
    newest = (tmp_path / "soak" / "latest").resolve()
    assert (first.returncode, out, err) == (0, "", ""), json.loads((newest / "report.json").read_text())["reasons"]

    runs = [path for path in (tmp_path / "soak").iterdir() if path.is_dir() and not path.is_symlink()]
    assert len(runs) == 2
    names = {path.name for path in newest.iterdir()}
    assert names == {
        "events.jsonl",
        "profile.json",
        "report.json",
        "report.md",
        "report.html",
        "plots.png",
        "junit.xml",
    }
    page = (newest / "report.html").read_text()
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert (newest / "plots.png").read_bytes().startswith(b"\x89PNG")
    prom = (tmp_path / "soak" / "ds41_soak.prom").read_text()
    assert 'ds41_soak_verdict{profile="cpu-tiny",verdict="pass"} 1.0' in prom
    assert "ds41_soak_last_success_timestamp_seconds" in prom
    shown = start(tmp_path, "report")
    out, _ = shown.communicate(timeout=60)
    assert shown.returncode == 0 and "**PASS" in out and "It does not prove" in out
    compared = start(tmp_path, "report", "--last", "2", "--json")
    out, _ = compared.communicate(timeout=60)
    assert [row["verdict"] for row in json.loads(out)["data"]] == ["inconclusive", "pass"]


def test_a_tick_on_a_dead_engine_says_one_line_and_its_exit_code(tmp_path: Path) -> None:
    tick = cron(tmp_path, "http://127.0.0.1:9")
    out, err = tick.communicate(timeout=120)
    assert tick.returncode == 1 and out == ""
    assert len(err.splitlines()) == 1 and "FAIL" in err and "ds41ctl soak report" in err


def test_no_engine_at_all_is_not_found(tmp_path: Path) -> None:
    tick = start(tmp_path, "run", "--cron")
    out, err = tick.communicate(timeout=60)
    assert tick.returncode == 10 and out == "" and "is not running" in err


def test_another_machine_must_be_confirmed(tmp_path: Path) -> None:
    tick = start(tmp_path, "run", "--target", "http://192.0.2.1:8011")
    _, err = tick.communicate(timeout=60)
    assert tick.returncode == 2 and "another machine" in err and "--yes" in err
    assert not (tmp_path / "soak").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_with_a_report_that_is_inconclusive(
    tmp_path: Path, url: str, number: signal.Signals, code: int
) -> None:
    running = start(tmp_path, "run", "--minutes", "5", "--target", url, "--json")
    events = wait_for_turns(tmp_path, 5)
    running.send_signal(number)
    out, _ = running.communicate(timeout=60)
    assert running.returncode == code
    assert json.loads(out)["data"]["verdict"] == "inconclusive"
    assert json.loads(events.read_text().splitlines()[-1])["reason"] == "cancelled"
    assert json.loads((events.parent / "report.json").read_text())["verdict"] == "inconclusive"


@pytest.fixture
def small_disk(tmp_path: Path, lenient: Path) -> Iterator[Path]:
    if os.getuid() != 0:
        pytest.skip("needs root to mount")
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "ds41test", str(folder)], check=False)
    if done.returncode:
        pytest.skip("tmpfs cannot be mounted here")
    (folder / "cpu-tiny.toml").symlink_to(lenient)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.root
def test_a_full_disk_loses_only_the_line_that_did_not_fit(small_disk: Path) -> None:
    path = small_disk / "events.jsonl"
    file = TraceFile(path)
    written = 0
    with pytest.raises(NoSpaceError, match="no space left"):
        for number in range(10_000):
            file.append(json.dumps({"n": number, "text": "x" * 100}))
            written += 1
    lines = path.read_text().splitlines()
    assert len(lines) == written > 100
    assert [json.loads(line)["n"] for line in lines] == list(range(written))


@pytest.mark.root
def test_a_soak_on_a_full_disk_says_so_and_keeps_what_it_had(small_disk: Path, url: str) -> None:
    running = start(small_disk, "run", "--minutes", "5", "--target", url)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 15 and "no space left" in err
    lines = (small_disk / "soak" / "latest" / "events.jsonl").read_text().splitlines()
    assert len(lines) > 50 and all(json.loads(line) for line in lines)


def test_the_printed_schedule_is_what_cron_and_systemd_take(tmp_path: Path) -> None:
    shown = start(tmp_path, "schedule", "--at", "4:05", "--minutes", "20", "--json", DS41_PROFILE="cpu-tiny")
    out, _ = shown.communicate(timeout=60)
    tree = json.loads(out)["data"]
    assert tree["cron"].startswith("5 4 * * * PATH=") and "--cron --minutes 20 --profile cpu-tiny" in tree["cron"]
    assert f"DS41_STATE_DIR={tmp_path}" in tree["cron"]
    assert "OnCalendar=*-*-* 04:05:00" in tree["timer"] and "Persistent=true" in tree["timer"]
    assert f'Environment="DS41_STATE_DIR={tmp_path}"' in tree["service"]
    assert "SuccessExitStatus=11" in tree["service"]
