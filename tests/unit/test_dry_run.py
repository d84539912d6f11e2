"""`serve` and `up --dry-run --strict`: the checks beside the plan, and nothing is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds41ctl.adapters import probe
from ds41ctl.cli import main
from tests.facts.replay import machine

TINY = "cpu-tiny"


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    code = main(args)
    return code, capsys.readouterr().out


def on(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(probe, "probe", lambda layout, given=None, level=1: machine(name))


@pytest.mark.parametrize("command", ["serve", "up"])
@pytest.mark.parametrize(
    ("name", "code", "last"),
    [("ubuntu2404-ready", 0, "OK "), ("container-cgroup-4gb", 1, "FAIL "), ("nothing-readable", 1, "FAIL ")],
)
def test_strict_shows_findings_and_plan_and_says_which_in_its_exit_code(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    isolated: Path,
    command: str,
    name: str,
    code: int,
    last: str,
) -> None:
    on(monkeypatch, name)
    args = (command, "--profile", TINY, "--dry-run", "--strict")
    found, out = run(capsys, *args)
    assert found == code
    assert out.index("host.ram") < out.index(f"plan  {command}") < out.index("engine command, as a shell script")
    assert out.splitlines()[-1].startswith(last)
    again, text = run(capsys, *args, "--json")
    tree: dict[str, Any] = json.loads(text)
    assert again == code and tree["ok"] == (code == 0) and tree["data"]["argv"] and tree["data"]["steps"]
    assert any(item["id"] == "host.ram" for item in tree["data"]["findings"])
    assert not any(isolated.rglob("*")), "a dry run wrote something"


def test_without_strict_a_dry_run_is_the_plan_alone_on_any_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, "nothing-readable")
    code, out = run(capsys, "serve", "--profile", TINY, "--dry-run")
    assert code == 0 and out.startswith("plan  serve") and "host.ram" not in out


def test_serve_demands_what_up_would_still_make(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, "debian12-container-24gb")
    assert run(capsys, "up", "--profile", TINY, "--dry-run", "--strict")[0] == 0
    code, out = run(capsys, "serve", "--profile", TINY, "--dry-run", "--strict")
    assert code == 1 and "FAIL    engram.store" in out
    left_out = ("--skip-check", "pack", "--skip-check", "engram.store", "--skip-check", "engine.installed")
    assert run(capsys, "serve", "--profile", TINY, "--dry-run", "--strict", *left_out)[0] == 0
