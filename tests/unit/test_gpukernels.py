"""GPU kernels for a card: what is asked of pip, the compiler and the self-check, and what their failures become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds41ctl.adapters import gpukernels
from ds41ctl.core.errors import IntegrityError, NetworkError, UnsupportedError


def silent(text: str, data: dict[str, Any]) -> None:
    """No progress."""


def program(path: Path, text: str) -> Path:
    """An interpreter that says what the test wants."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_pip_gets_the_pins_once(tmp_path: Path) -> None:
    python = program(tmp_path / "python", f'echo "$*" >> {tmp_path}/calls; mkdir -p "$8"')
    folder = gpukernels.install_toolchain(tmp_path, python, {}, silent)
    assert folder.is_dir()
    assert gpukernels.install_toolchain(tmp_path, python, {}, silent) == folder
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert "nvidia-cuda-nvrtc-cu12==12.8.93" in call
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


def test_pip_failing_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    python = program(tmp_path / "python", "echo 'No matching distribution' >&2; exit 1")
    with pytest.raises(NetworkError, match="No matching distribution"):
        gpukernels.install_toolchain(tmp_path, python, {}, silent)
    assert not gpukernels.toolchain_dir(tmp_path).exists()


def test_a_card_that_is_too_old_is_named(tmp_path: Path) -> None:
    gpukernels.toolchain_dir(tmp_path).mkdir(parents=True)
    with pytest.raises(UnsupportedError, match=r"found 6\.1"):
        gpukernels.build(tmp_path, "6.1", Path("python"), {}, silent)


def test_a_toolchain_without_its_files_is_named(tmp_path: Path) -> None:
    gpukernels.toolchain_dir(tmp_path).mkdir(parents=True)
    with pytest.raises(UnsupportedError, match="pip install nvidia-cuda-nvrtc"):
        gpukernels.build(tmp_path, "7.0", Path("python"), {}, silent)


@pytest.mark.parametrize("ok", [True, False])
def test_the_checks_are_read(tmp_path: Path, ok: bool) -> None:
    lines = [json.dumps({"check": "weights mul1 K3", "ok": ok, "found": "7 of 9 weights differ"}), "chatter"]
    python = program(tmp_path / "python", "\n".join(f"echo '{line}'" for line in lines) + f"\nexit {int(not ok)}")
    if ok:
        checks = gpukernels.selfcheck(tmp_path, python, {}, bits=(3,), codebooks=("mul1",))
        assert [check["check"] for check in checks] == ["weights mul1 K3"]
    else:
        with pytest.raises(IntegrityError, match="weights mul1 K3: 7 of 9"):
            gpukernels.selfcheck(tmp_path, python, {}, bits=(3,), codebooks=("mul1",))


def test_a_check_that_cannot_run_is_not_a_pass(tmp_path: Path) -> None:
    python = program(tmp_path / "python", "echo 'GPU kernels: no driver' >&2; exit 1")
    with pytest.raises(UnsupportedError, match="no driver"):
        gpukernels.selfcheck(tmp_path, python, {}, bits=(3,), codebooks=("mul1",))
    python = program(tmp_path / "python", "exit 0")
    with pytest.raises(UnsupportedError, match="no check ran"):
        gpukernels.selfcheck(tmp_path, python, {}, bits=(3,), codebooks=("mul1",))
