"""The clock lease under every way to die: after the next command at the latest, no lock is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds41ctl.adapters import clocks, proc
from tests.fakes import nvml
from tests.fakes.nvml.fixtures import driver, nvml_library

__all__ = ["driver", "nvml_library"]

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="clocks are root's to lock: unshare -r python -m pytest tests/crash/test_clock_lease.py"
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL)
ALL_LOCKED = dict.fromkeys(range(8), 1530)
WITHIN_S = 5.0  # the promise is 1 s (2 to 100 ms measured); a saturated test machine delays every process


class Machine:
    """A fake driver, a state folder, and the command line that works on both."""

    def __init__(self, driver: nvml.Driver, state: Path, profile: str = "v100-pp2tp4") -> None:
        self.driver, self.state, self.profile = driver, state, profile
        self.journal = clocks.journal(state, profile)

    def run(self, *args: str, code: int = 0) -> dict[str, Any]:
        """`ds41ctl clocks ...` in a process of its own; its JSON document."""
        done = subprocess.run(
            [sys.executable, "-m", "ds41ctl", "clocks", *args, "--profile", self.profile, "--json"],
            env={
                **self.driver.environ,
                "DS41_STATE_DIR": str(self.state),
                "PYTHONPATH": str(Path(__file__).parents[2]),
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == code, done.stdout + done.stderr
        tree: dict[str, Any] = json.loads(done.stdout)
        return tree

    def lease(self) -> dict[str, Any]:
        tree: dict[str, Any] = json.loads(self.journal.read_text())
        return tree

    def guardian(self) -> int:
        pid: int = self.lease()["guardian"]["pid"]
        return pid

    def resets(self) -> int:
        return sum(1 for line in self.driver.calls() if line.startswith("reset"))


@pytest.fixture
def machine(driver: nvml.Driver, tmp_path: Path) -> Iterator[Machine]:
    found = Machine(driver, tmp_path / "state")
    yield found
    end_guardian(found)


def end_guardian(found: Machine) -> None:
    """What a test may have left of it."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # given back, or left half by the test
        if guardian := found.lease()["guardian"]:
            with_identity = proc.Identity(guardian["pid"], guardian["start_ticks"])
            if with_identity.alive():
                os.kill(guardian["pid"], signal.SIGKILL)


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing and dies of every signal, as an engine does."""
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); time.sleep(120)"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        yield process
        process.kill()


def wait_until(true: Callable[[], bool], seconds: float = WITHIN_S) -> float:
    """Seconds until `true()`; fails when it takes longer than `seconds`."""
    started = time.monotonic()
    while not true():
        assert time.monotonic() - started < seconds, "not in time"
        time.sleep(0.005)
    return time.monotonic() - started


def test_a_lease_is_journalled_locked_guarded_and_given_back(machine: Machine, owner: subprocess.Popen[bytes]) -> None:
    machine.run("lock", "--pid", str(owner.pid))
    lease = machine.lease()
    assert machine.driver.locks() == ALL_LOCKED
    assert lease["locked"] and lease["mhz"] == 1530 and lease["owner"]["pid"] == owner.pid
    assert len(lease["uuids"]) == 8 and lease["boot_id"] and lease["guardian"]
    assert oct(machine.journal.stat().st_mode & 0o777) == "0o600"
    guardian = machine.guardian()
    machine.run("unlock")
    assert machine.driver.locks() == {} and not machine.journal.exists()
    wait_until(lambda: proc.identify(guardian) is None, 5)
    assert machine.run("unlock")["data"]["gpus"] == 0, "nothing to do is fine"


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_the_owners_death_by_any_signal_resets_within_a_second(
    machine: Machine, owner: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    machine.run("lock", "--pid", str(owner.pid))
    os.kill(owner.pid, number)
    wait_until(lambda: machine.driver.locks() == {})
    wait_until(lambda: not machine.journal.exists())
    assert machine.resets() == 8, "each GPU of the journal once, no other"


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_guardian_outlives_interrupts_and_undoes_the_lock_when_it_is_ended(
    machine: Machine, owner: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    machine.run("lock", "--pid", str(owner.pid))
    guardian = machine.guardian()
    os.kill(guardian, number)
    if number is signal.SIGTERM:
        wait_until(lambda: machine.driver.locks() == {})
        return
    if number is signal.SIGKILL:
        wait_until(lambda: proc.identify(guardian) is None)
        assert machine.driver.locks() == ALL_LOCKED
        machine.run("status")  # any next command gives the lease a new guardian
        assert machine.guardian() != guardian
    else:
        time.sleep(0.2)
        assert machine.driver.locks() == ALL_LOCKED and proc.identify(guardian) is not None
    os.kill(owner.pid, signal.SIGKILL)
    wait_until(lambda: machine.driver.locks() == {})


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_when_both_are_hit_the_next_command_leaves_no_lock(
    machine: Machine, owner: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    machine.run("lock", "--pid", str(owner.pid))
    guardian = machine.guardian()
    os.kill(guardian, number)
    os.kill(owner.pid, number)
    if number is signal.SIGKILL:
        wait_until(lambda: proc.identify(guardian) is None and proc.identify(owner.pid) is None)
        assert machine.driver.locks() == ALL_LOCKED, "nobody was left to undo it"
        machine.run("status")
    wait_until(lambda: machine.driver.locks() == {})
    wait_until(lambda: not machine.journal.exists())


def test_after_a_reboot_the_journal_is_dropped_and_nothing_is_reset(
    machine: Machine, owner: subprocess.Popen[bytes]
) -> None:
    machine.run("lock", "--pid", str(owner.pid))
    guardian = machine.guardian()
    os.kill(guardian, signal.SIGKILL)
    wait_until(lambda: proc.identify(guardian) is None)
    before = machine.resets()
    machine.journal.write_text(json.dumps({**machine.lease(), "boot_id": "another"}))
    for path in machine.driver.folder.glob("gpu*.lock"):
        path.unlink()  # the driver forgets its locks with the power
    assert "earlier boot" in machine.run("status")["data"]["recovered"][0]
    assert not machine.journal.exists() and machine.resets() == before


def test_nothing_is_reset_that_is_not_in_the_journal(machine: Machine, owner: subprocess.Popen[bytes]) -> None:
    foreign = machine.driver.folder / "gpu7.lock"
    machine.run("lock", "--pid", str(owner.pid))
    lease = machine.lease()
    machine.journal.write_text(json.dumps({**lease, "uuids": lease["uuids"][:7]}))
    foreign.write_text("1200\n")
    os.kill(owner.pid, signal.SIGKILL)
    wait_until(lambda: machine.driver.locks() == {7: 1200})
    assert "reset 7 0" not in machine.driver.calls()


@pytest.mark.parametrize("at", range(1, 9))
def test_a_command_killed_between_two_locks_leaves_none(
    machine: Machine, owner: subprocess.Popen[bytes], at: int
) -> None:
    """The command line dies in the middle; the guardian, which was there first, undoes what it had locked."""
    code = (
        "import os, signal\nfrom ds41ctl.adapters import nvml\nfrom ds41ctl.cli import main\n"
        "plain, done = nvml.Nvml.lock, []\n"
        "def lock(self, uuid, mhz):\n"
        "    text = plain(self, uuid, mhz)\n"
        "    done.append(uuid)\n"
        f"    if len(done) == {at}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return text\n"
        "nvml.Nvml.lock = lock\n"
        f"main(['clocks', 'lock', '--pid', '{owner.pid}', '--profile', 'v100-pp2tp4'])\n"
    )
    environ = {**machine.driver.environ, "DS41_STATE_DIR": str(machine.state)}
    environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert len(machine.driver.locks()) == at and not machine.lease()["locked"]
    os.kill(owner.pid, signal.SIGTERM)
    wait_until(lambda: machine.driver.locks() == {})


@pytest.mark.parametrize("call", ["fsync", "rename"])
@pytest.mark.parametrize("at", range(1, 7))
def test_a_command_killed_at_any_durable_write_leaves_no_lock(
    machine: Machine, owner: subprocess.Popen[bytes], call: str, at: int
) -> None:
    """Three writes of the journal: before the guardian, with it, and when all is locked."""
    target = "os.fsync" if call == "fsync" else "pathlib.Path.rename"
    code = (
        "import os, pathlib, signal\nfrom ds41ctl.cli import main\n"
        f"plain, count = {target}, [0]\n"
        "def counted(*args):\n"
        "    count[0] += 1\n"
        f"    if count[0] == {at}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return plain(*args)\n"
        f"{target} = counted\n"
        f"main(['clocks', 'lock', '--pid', '{owner.pid}', '--profile', 'v100-pp2tp4'])\n"
    )
    environ = {**machine.driver.environ, "DS41_STATE_DIR": str(machine.state)}
    environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, timeout=60)
    reached = at <= (6 if call == "fsync" else 3)
    assert done.returncode == (-signal.SIGKILL if reached else 0)
    assert machine.driver.locks() == {} or machine.journal.exists(), "no lock that nobody has written down"
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    machine.run("status")  # whatever was left, the next command puts right
    wait_until(lambda: machine.driver.locks() == {})
    wait_until(lambda: not machine.journal.exists())


def test_a_gpu_that_refuses_undoes_the_others_and_is_named(machine: Machine, owner: subprocess.Popen[bytes]) -> None:
    cards = nvml.v100()
    cards.gpus[5]["lock_error"] = 3
    machine.driver.play(cards)
    tree = machine.run("lock", "--pid", str(owner.pid), code=70)
    assert "GPU-00000005" in tree["error"]["message"] and "does not support it" in tree["error"]["message"]
    assert machine.driver.locks() == {} and not machine.journal.exists()


def test_without_permission_it_is_an_error_that_names_the_sudoers_lines(
    machine: Machine, owner: subprocess.Popen[bytes]
) -> None:
    cards = nvml.v100()
    cards.system["lock_error"] = 4
    machine.driver.play(cards)
    tree = machine.run("lock", "--pid", str(owner.pid), code=77)
    assert "no permission" in tree["error"]["message"]
    assert any("clocks sudoers" in hint for hint in tree["error"]["hints"])
    assert machine.driver.locks() == {}


def test_a_gpu_that_refuses_its_reset_stays_in_the_journal_and_is_tried_again(
    machine: Machine, owner: subprocess.Popen[bytes]
) -> None:
    machine.run("lock", "--pid", str(owner.pid))
    cards = nvml.v100()
    cards.gpus[2]["reset_error"] = 999
    machine.driver.play(cards)
    tree = machine.run("unlock", code=1)
    assert "GPU-00000002" in tree["error"]["message"]
    assert machine.driver.locks() == {2: 1530} and len(machine.lease()["uuids"]) == 1
    machine.driver.play(nvml.v100())
    machine.run("unlock")
    assert machine.driver.locks() == {} and not machine.journal.exists()


def test_a_gpu_that_fell_off_the_bus_is_no_lock_to_undo(machine: Machine, owner: subprocess.Popen[bytes]) -> None:
    machine.run("lock", "--pid", str(owner.pid))
    cards = nvml.v100()
    cards.gpus[2]["lost_after"] = 0
    machine.driver.play(cards)
    machine.run("unlock")
    assert not machine.journal.exists()
    assert machine.driver.locks() == {2: 1530}, "the stub keeps it; a card that is gone does not"


def test_locking_twice_for_the_same_owner_says_already(machine: Machine, owner: subprocess.Popen[bytes]) -> None:
    machine.run("lock", "--pid", str(owner.pid))
    calls = machine.driver.calls()
    machine.run("lock", "--pid", str(owner.pid))
    assert machine.driver.calls() == calls


def test_another_owner_takes_the_lease_over(machine: Machine, owner: subprocess.Popen[bytes]) -> None:
    machine.run("lock")  # until unlock or reboot
    assert machine.lease()["owner"] is None
    machine.run("lock", "--pid", str(owner.pid))
    assert machine.lease()["owner"]["pid"] == owner.pid and machine.driver.locks() == ALL_LOCKED


def test_the_lock_is_proven_by_samples_under_load_only(machine: Machine, owner: subprocess.Popen[bytes]) -> None:
    machine.run("lock", "--pid", str(owner.pid))
    assert machine.run("status", "--sample", "0.5", code=3)["data"]["finding"]["status"] == "unknown"
    machine.driver.play(nvml.v100().all(busy=90))
    assert machine.run("status", "--sample", "6")["data"]["finding"]["status"] == "ok"
    machine.driver.play(nvml.v100().all(busy=90, dip_every=10, dip_mhz=1380))
    finding = machine.run("status", "--sample", "6", code=1)["data"]["finding"]
    assert finding["status"] == "fail" and "1380 MHz" in finding["summary"]


def test_a_damaged_journal_is_one_clear_line(machine: Machine) -> None:
    machine.journal.parent.mkdir(parents=True)
    machine.journal.write_text("{")
    tree = machine.run("status", code=70)
    assert "cannot be read" in tree["error"]["message"] and any(
        "nvidia-smi -rgc" in hint for hint in tree["error"]["hints"]
    )


# ---- as a step of `serve` and `up`


STEP = """
import json, sys
from pathlib import Path
from ds41ctl.adapters import running
from ds41ctl.adapters.proc import identify
from ds41ctl.adapters.store import boot_id
from ds41ctl.cli import clocks, runs
from ds41ctl.cli.session import open_session
from ds41ctl.core.errors import Ds41Error

session = open_session("v100-pp2tp4")
pid, strict = int(sys.argv[1]), sys.argv[2] == "strict"
running.write(session.layout.record_path, running.Running(
    profile="v100-pp2tp4", profile_path=str(session.profile_path), profile_digest="", engine_digest="",
    boot_id=boot_id(), pid=pid, start_ticks=identify(pid).start_ticks, marker="DS41_ENGINE_RUN=x", host="127.0.0.1",
    port=1, served_name="m", argv=(), environment_sha256="", log="", socket="", spec=str(session.layout.record_path),
    started_at="now", ready_at="now"))
if len(sys.argv) > 3:  # not root, and no sudo
    from ds41ctl.adapters import clocks as adapter, proc
    adapter.way_of_this_user = lambda: "sudo"
    proc.sudo_passwordless = lambda: False
try:
    with runs.run(session, "serve") as runner:
        clocks.hold(runner, session, strict=strict)
        clocks.hold(runner, session, strict=strict)
except Ds41Error as error:
    print("error", int(error.code), error.message, error.hints)
    raise SystemExit(0)
"""


def hold(machine: Machine, pid: int, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {
        **machine.driver.environ,
        "DS41_STATE_DIR": str(machine.state),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", STEP, str(pid), *words], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_run_holds_the_clock_for_the_engine_and_says_already_the_second_time(
    machine: Machine, owner: subprocess.Popen[bytes]
) -> None:
    done = hold(machine, owner.pid, "plain")
    lines = [line for line in done.stdout.splitlines() if line.startswith("  clocks")]
    assert "1530 MHz asked of 8 GPUs" in lines[0] and "already" in lines[1], done.stdout
    assert machine.driver.locks() == ALL_LOCKED and machine.lease()["owner"]["pid"] == owner.pid
    owner.kill()
    wait_until(lambda: machine.driver.locks() == {})


def test_without_permission_a_run_goes_on_and_names_the_sudoers_lines(
    machine: Machine, owner: subprocess.Popen[bytes]
) -> None:
    done = hold(machine, owner.pid, "plain", "nobody")
    assert "SKIP" in done.stdout and "not locked" in done.stdout
    assert "clocks sudoers" in done.stderr
    assert machine.driver.calls() == []


def test_without_permission_a_strict_run_ends(machine: Machine, owner: subprocess.Popen[bytes]) -> None:
    done = hold(machine, owner.pid, "strict", "nobody")
    assert done.stdout.splitlines()[-1].startswith("error 77 1530 MHz cannot be set")
    assert "clocks sudoers" in done.stdout
    assert machine.driver.calls() == []


def test_stop_gives_back_the_clocks_of_the_engine_it_ends(machine: Machine, owner: subprocess.Popen[bytes]) -> None:
    hold(machine, owner.pid, "plain")
    environ = {
        **machine.driver.environ,
        "DS41_STATE_DIR": str(machine.state),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "ds41ctl", "stop", "--profile", "v100-pp2tp4", "--json"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert machine.driver.locks() == {} and not machine.journal.exists()


@pytest.mark.parametrize("command", ["lock", "unlock", "status", "sudoers"])
def test_a_profile_that_leaves_clocks_alone_is_told_so(machine: Machine, command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ds41ctl", "clocks", command, "--profile", "cpu-tiny", "--json"],
        env={
            **machine.driver.environ,
            "DS41_STATE_DIR": str(machine.state),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    tree = json.loads(done.stdout)
    if command == "unlock":
        assert done.returncode == 0 and tree["data"]["gpus"] == 0
    else:
        assert done.returncode == 4 and "leaves clocks alone" in tree["error"]["message"]


def test_the_sudoers_lines_name_every_card(machine: Machine) -> None:
    lines = machine.run("sudoers")["data"]["lines"]
    assert lines[0].count("-lgc 1530\\,1530") == 8 and "GPU-00000007" in lines[0]
