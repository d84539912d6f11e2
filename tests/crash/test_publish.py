"""Crash matrix: publish is killed, or the disk fails, at every system call that matters; the final name never lies."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OLD, NEW = b"old" * 1000, b"new" * 400_000
PROGRAM = """
import sys
from pathlib import Path
from ds41ctl.adapters import files
data = b"new" * 400_000
files.publish(Path(sys.argv[1]), (data[at:at + 100_000] for at in range(0, len(data), 100_000)))
"""
CALLS = ["openat", "write", "fsync", "rename", "unlink"]

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


def run(target: Path, call: str, inject: str, when: int) -> subprocess.CompletedProcess[str]:
    """Run the program with the `when`-th `call` on the target's folder injected."""
    argv = ["strace", "-f", "-qq", "-o", "/dev/null", "-P", str(target), "-P", str(target) + ".part"]
    argv += ["-P", str(target.parent), "-e", f"trace={call}", "-e", f"inject={call}:{inject}:when={when}"]
    return subprocess.run(
        [*argv, sys.executable, "-c", PROGRAM, str(target)], capture_output=True, text=True, cwd=Path.cwd(), check=False
    )


def is_whole(path: Path, data: bytes) -> bool:
    return hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(data).digest()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("when", [1, 2, 3])
def test_killed_at_a_call_the_name_holds_the_old_or_the_new_bytes_whole(tmp_path: Path, call: str, when: int) -> None:
    target = tmp_path / "f"
    target.write_bytes(OLD)
    run(target, call, "signal=KILL", when)
    assert is_whole(target, OLD) or is_whole(target, NEW)
    again = [sys.executable, "-c", PROGRAM, str(target)]  # the next run, with nothing injected
    done = subprocess.run(again, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert is_whole(target, NEW) and [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize(("call", "error", "kind"), [
    ("fsync", "ENOSPC", "NoSpaceError"), ("write", "ENOSPC", "NoSpaceError"), ("openat", "ENOSPC", "NoSpaceError"),
    ("fsync", "EIO", "Ds41Error"), ("rename", "EIO", "Ds41Error"), ("openat", "EACCES", "DeniedError"),
    ("rename", "EROFS", "DeniedError"),
])  # fmt: skip
def test_a_failing_disk_is_one_typed_error_and_the_old_bytes_stay(
    tmp_path: Path, call: str, error: str, kind: str
) -> None:
    target = tmp_path / "f"
    target.write_bytes(OLD)
    done = run(target, call, f"error={error}", 1)
    assert done.returncode == 1 and f"{kind}: writing {target}" in done.stderr
    assert is_whole(target, OLD)


def test_one_fsync_of_the_file_one_rename_one_fsync_of_the_folder_in_that_order(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    subprocess.run(
        ["strace", "-f", "-qq", "-y", "-o", str(trace), "-e", "trace=fsync,rename", sys.executable, "-c", PROGRAM,
         str(tmp_path / "f")], check=True
    )  # fmt: skip
    calls = [line.split(" ", 1)[1].strip() for line in trace.read_text().splitlines() if str(tmp_path) in line]
    assert [line.split("(")[0] for line in calls] == ["fsync", "rename", "fsync"]
    assert "f.part" in calls[0] and f"<{tmp_path}>" in calls[2]
