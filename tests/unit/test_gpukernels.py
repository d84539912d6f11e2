"""GPU kernels for a card: what is asked of pip, the compiler and the self-check, and what their failures become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds41ctl.adapters import enginevenv, gpukernels, profiles
from ds41ctl.adapters.supply import Supply
from ds41ctl.core.errors import IntegrityError, NetworkError, UnsupportedError
from ds41ctl.core.facts import EngineFacts
from ds41ctl.core.layout import Layout
from ds41ctl.steps import engine
from tests.fakes.packs import layout_for


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


@pytest.fixture
def volta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """The V100 profile with its engine installed and unchanged."""
    monkeypatch.setattr(enginevenv, "inspect", lambda layout: EngineFacts(dir=str(tmp_path), installed=True))
    return layout_for(profiles.read(profiles.find("v100-pp2tp4")), tmp_path)


def test_an_engine_without_its_kernels_is_not_done_and_only_they_are_made(
    volta: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(gpukernels, "build", lambda cache, capability, *_, **chosen: asked.append((capability, chosen)))
    step = engine.EngineInstall(volta, {})
    goal = step.check()
    assert not goal.reached and goal.text == "GPU kernels for 7.0 are not compiled"
    step.do(silent)
    assert asked == [("7.0", {"bits": (2, 3, 4, 5), "codebooks": ("mul1",)})]


def test_a_folder_of_wheels_is_all_that_the_compiler_comes_from(
    volta: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(gpukernels, "build", lambda cache, capability, python, env, *_, **chosen: seen.append(env))
    shell = {"PATH": "/bin", "PYTHONPATH": "/elsewhere", "PIP_INDEX_URL": "https://index", "PIP_FIND_LINKS": "/other"}
    engine.EngineInstall(volta, shell, Supply(wheels=tmp_path)).do(silent)
    (env,) = seen
    assert env["PIP_NO_INDEX"] == "1" and env["PIP_FIND_LINKS"] == str(tmp_path)
    assert not {"PYTHONPATH", "PIP_INDEX_URL"} & set(env)


def test_an_engine_with_its_kernels_is_done(volta: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpukernels, "compiled", lambda *_, **chosen: True)
    assert engine.EngineInstall(volta, {}).check().reached


def test_verify_refuses_an_engine_whose_kernels_cannot_run_here(volta: Layout) -> None:
    volta.python.parent.mkdir(parents=True)
    program(volta.python, "echo 'GPU kernels: no driver' >&2; exit 1")
    with pytest.raises(UnsupportedError, match="no driver"):
        engine.check_kernels(volta, {"PATH": "/usr/bin:/bin"})


def test_a_profile_without_gpu_kernels_asks_for_none(tmp_path: Path) -> None:
    assert engine.check_kernels(layout_for(profiles.read(profiles.find("cpu-tiny")), tmp_path), {}) is None
