"""Processes for real: identities survive pid reuse, families are found whole, nothing foreign is touched."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds41ctl.adapters import proc

SLEEP = [sys.executable, "-c", "import time; time.sleep(120)"]
# a parent with a child that left its session, as a worker may; both ignore SIGTERM
STUBBORN = r"""
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
os.write(1, b"%d\n" % os.getpid())  # one write a line, so that two processes cannot mix theirs
time.sleep(120)
"""


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for child in started:
        child.kill()
        child.wait()


def start(children: list[subprocess.Popen[str]], argv: list[str], **env: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(argv, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True)
    children.append(child)
    return child


def test_an_identity_is_a_pid_and_its_start(children: list[subprocess.Popen[str]]) -> None:
    child = start(children, SLEEP)
    identity = proc.identify(child.pid)
    assert identity is not None and identity.alive()
    assert not proc.Identity(child.pid, identity.start_ticks + 1).alive()  # the pid was reused
    child.kill()
    for _ in range(100):
        if not identity.alive():
            break
        time.sleep(0.02)
    assert not identity.alive()  # already as a zombie


def test_a_family_is_found_by_its_marker_after_its_parent_died(children: list[subprocess.Popen[str]]) -> None:
    marker = f"t{os.getpid()}"
    parent = start(children, [sys.executable, "-c", STUBBORN], DS41_ENGINE_RUN=marker)
    assert parent.stdout is not None
    pids = {int(parent.stdout.readline()), int(parent.stdout.readline())}
    entry = f"DS41_ENGINE_RUN={marker}"
    assert {item.pid for item in proc.family(parent.pid, entry)} == pids
    parent.kill()
    parent.wait()
    orphans = proc.family(0, entry)
    assert [item.pid for item in orphans] == [pid for pid in pids if pid != parent.pid]
    assert proc.terminate(orphans, grace=0.2) == []
    assert proc.family(0, entry) == []


BARE_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={})
print(os.getpid(), child.pid, flush=True)
time.sleep(60)
"""


def test_a_worker_without_the_marker_is_found_by_the_session_of_the_dead_first_process() -> None:
    """vLLM's engine core writes its title over its environment, so the marker cannot be read there."""
    parent = subprocess.Popen(
        [sys.executable, "-c", BARE_CHILD], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    _, child = (int(word) for word in parent.stdout.readline().split())
    leader = proc.identify(parent.pid)
    assert leader is not None
    parent.kill()
    parent.wait()
    assert proc.family(0, "NO=match") == []
    assert [item.pid for item in proc.family(0, "NO=match", session=leader)] == [child]
    assert proc.terminate(proc.family(0, "NO=match", session=leader), grace=1) == []
    assert proc.family(0, "NO=match", session=leader) == []


def test_a_session_whose_number_was_given_to_another_process_is_left_alone() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        found = proc.identify(other.pid)
        assert found is not None
        of_before = proc.Identity(other.pid, found.start_ticks - 1)
        assert proc.family(0, "NO=match", session=of_before) == []
        assert [item.pid for item in proc.family(0, "NO=match", session=found)] == [other.pid]
    finally:
        other.kill()
        other.wait()


SEGMENT = """
import time
from multiprocessing import shared_memory, resource_tracker
made = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(made._name, "shared_memory")
print(made.name, flush=True)
time.sleep(60)
"""


SEMAPHORE = """
import multiprocessing, os, signal, time
from multiprocessing import resource_tracker
made = multiprocessing.get_context("spawn").Lock()
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
print(made._semlock.name, flush=True)
time.sleep(60)
"""


def test_a_semaphore_is_found_though_its_mapping_names_a_file_that_is_gone(
    children: list[subprocess.Popen[str]],
) -> None:
    holder = start(children, [sys.executable, "-c", SEMAPHORE])
    assert holder.stdout is not None
    name = Path(f"/dev/shm/sem.{holder.stdout.readline().strip().lstrip('/')}")
    assert name.exists() and name.name not in Path(f"/proc/{holder.pid}/maps").read_text()
    found = proc.segments([holder.pid])
    assert found == {str(name)}
    proc.unlink_segments(found)
    assert name.exists(), "it is in use"
    holder.kill()
    holder.wait()
    proc.unlink_segments(found)
    assert not name.exists()


LATE = """
import multiprocessing, os, signal, time
from multiprocessing import resource_tracker
def late(number, frame):
    global made
    made = multiprocessing.get_context("spawn").Lock()
    os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
    time.sleep(0.6)
    os._exit(0)
signal.signal(signal.SIGTERM, late)
print("there", flush=True)
time.sleep(60)
"""


def test_what_a_process_makes_after_it_was_asked_to_end_is_seen_too(children: list[subprocess.Popen[str]]) -> None:
    child = start(children, [sys.executable, "-c", LATE])
    assert child.stdout is not None and child.stdout.readline() == "there\n"
    identity = proc.identify(child.pid)
    assert identity is not None
    found: set[str] = set()
    left = proc.terminate([identity], grace=10, look=lambda: found.update(proc.segments([child.pid])))
    assert left == [] and len(found) == 1 and Path(next(iter(found))).exists()
    child.wait()
    proc.unlink_segments(found)
    assert not Path(next(iter(found))).exists()


def test_shared_memory_of_a_killed_process_is_removed_and_never_anothers(
    children: list[subprocess.Popen[str]],
) -> None:
    killed, alive = (start(children, [sys.executable, "-c", SEGMENT]) for _ in range(2))
    assert killed.stdout is not None and alive.stdout is not None
    gone, kept = (f"/dev/shm/{child.stdout.readline().strip()}" for child in (killed, alive))  # type: ignore[union-attr]
    found = proc.segments([killed.pid, alive.pid])
    assert {gone, kept} <= found
    killed.kill()
    killed.wait()
    assert Path(gone).exists()
    proc.unlink_segments([*found, "/dev/shm/../../etc/hostname", "/etc/hostname"])
    assert not Path(gone).exists() and Path(kept).exists() and Path("/etc/hostname").exists()
    alive.kill()
    alive.wait()
    proc.unlink_segments([kept])
    assert not Path(kept).exists()


def test_terminate_kills_what_ignores_sigterm_and_touches_nobody_else(children: list[subprocess.Popen[str]]) -> None:
    decoy = start(children, SLEEP)
    stubborn = start(children, [sys.executable, "-c", STUBBORN])
    assert stubborn.stdout is not None
    stubborn.stdout.readline()
    stubborn.stdout.readline()
    assert proc.terminate(proc.family(stubborn.pid, "NO=match"), grace=0.3) == []
    assert stubborn.wait(5) == -9 and decoy.poll() is None


@pytest.mark.parametrize(
    ("code", "ending"),
    [("raise SystemExit(7)", (7, None)), ("import os; os.kill(os.getpid(), 9)", (None, 9)), ("pass", (0, None))],
)
def test_how_a_process_ended_is_known_before_anybody_waits_for_it(
    children: list[subprocess.Popen[str]], code: str, ending: tuple[int | None, int | None]
) -> None:
    child = start(children, [sys.executable, "-c", code])
    for _ in range(200):
        if proc.zombie_ending(child.pid) is not None:
            break
        time.sleep(0.02)
    assert proc.zombie_ending(child.pid) == ending
    child.wait()
    assert proc.zombie_ending(child.pid) is None and proc.zombie_ending(os.getpid()) is None


def test_a_missing_program_a_time_out_and_a_bad_status_are_answers_not_exceptions() -> None:
    assert proc.run(["/nowhere/x"], timeout=1).returncode == 127
    late = proc.run(SLEEP, timeout=0.2)
    assert late.timed_out and not late.ok
    assert proc.run([sys.executable, "-c", "raise SystemExit(3)"], timeout=10).returncode == 3


def test_a_streamed_child_dies_with_its_reader() -> None:
    seen: list[int] = []

    def on_line(line: str) -> None:
        seen.append(int(line))
        raise KeyboardInterrupt

    code = "import os, time; print(os.getpid(), flush=True); time.sleep(120)"
    with pytest.raises(KeyboardInterrupt):
        proc.stream([sys.executable, "-c", code], env=dict(os.environ), on_line=on_line)
    assert proc.identify(seen[0]) is None
