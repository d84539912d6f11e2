"""Killed at every step, memory taken away, the shard cut off: no store lies and nothing leaks.

A program builds (or drops) in a child that kills itself before its n-th operation on the system, for n = 1, 2, ...
until the child lives to its end; after each death the parent looks at what is there, drops it, and looks again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

PROGRAM = Path(__file__).with_name("store_program.py")
ROOT = os.getuid() == 0


@pytest.fixture
def alone() -> Iterator[None]:
    """Hugepage pools and mounts are the machine's: one such test at a time."""
    with FileLock("/tmp/ds41ctl-test-hugepages.lock", timeout=250):
        yield


def run(what: str, kind: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), what, kind, str(folder)],
        capture_output=True, text=True, check=False, timeout=280, cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    tree: dict[str, Any] = json.loads(done.stdout)
    return tree


KINDS = [
    "folder",
    "disk",
    pytest.param("tmpfs", marks=[pytest.mark.root, pytest.mark.skipif(not ROOT, reason="needs root to mount")]),
    "shards-folder",
    pytest.param("at", marks=[pytest.mark.root, pytest.mark.skipif(not ROOT, reason="needs root to mount")]),
    pytest.param("shards-at", marks=[pytest.mark.root, pytest.mark.skipif(not ROOT, reason="needs root to mount")]),
    pytest.param("hugetlb", marks=[pytest.mark.root, pytest.mark.skipif(not ROOT, reason="needs root for hugepages")]),
]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "disk"])  # to the builder a disk is a folder
@pytest.mark.parametrize("what", ["build", "rebuild", "drop"])
@pytest.mark.usefixtures("alone")
def test_killed_before_each_operation_no_store_lies_and_drop_finds_everything(
    tmp_path: Path, what: str, kind: str
) -> None:
    report = run(what, kind, tmp_path)
    assert report["deaths"] >= (8 if what == "drop" else 20), report
    assert report["faults"] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("alone")
def test_a_shard_cut_off_while_it_is_read_gives_no_store_and_leaves_nothing(tmp_path: Path, kind: str) -> None:
    report = run("truncated", kind, tmp_path)
    assert "ended at byte" in report["error"] and report["faults"] == []


@pytest.mark.root
@pytest.mark.skipif(not ROOT, reason="needs root for mounts and hugepages")
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("taken", "for layer-003.engram: the pages are not to be had (hugetlbfs with 2M pages)"),
        ("full", "for layer-003.engram: the pages are not to be had (tmpfs with 2M pages)"),
        ("small", "are free"),
    ],
)
def test_memory_that_is_not_there_any_more_is_an_error_with_words_not_a_signal(
    tmp_path: Path, what: str, message: str
) -> None:
    report = run(what, "hugetlb" if what == "taken" else "prepared", tmp_path)
    assert message in report["error"] and report["faults"] == []
