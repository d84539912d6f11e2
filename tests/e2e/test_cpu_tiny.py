"""The main job on the real engine, in the order a user meets it: from nothing to a proven engine.

The next file works that engine, the one after it stops it; each also starts one when it is run by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import Cli, gate_prompts
from tests.fakes.packs import flip

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def statuses(document: dict[str, Any]) -> dict[str, str]:
    return {item["id"]: item["status"] for item in document["data"]["findings"]}


def test_up_goes_from_nothing_to_a_proven_engine(cli: Cli) -> None:
    answer = cli("up")
    assert answer.code == 0, answer.out + answer.err
    steps = [f"  {step:<10} OK " for step in ("preflight", "engine", "fetch", "engram", "serve", "smoke")]
    assert all(step in answer.out for step in steps), answer.out
    assert sorted(steps, key=answer.out.index) == steps, "the engine comes before the download"
    assert "12 of 12" in answer.out
    assert f"http://127.0.0.1:{cli.port}/v1/chat/completions" in answer.err


def test_a_second_up_only_says_already_and_the_engine_is_the_same(cli: Cli) -> None:
    before = cli.record()
    answer = cli("up")
    assert answer.code == 0, answer.out + answer.err
    lines = {line.split()[0]: line for line in answer.out.splitlines() if line.startswith("  ")}
    for step in ("fetch", "engine", "engram", "serve"):
        assert "already (" in lines[step], answer.out
    assert cli.record() == before


def test_a_second_serve_is_refused_with_its_own_exit_code(cli: Cli) -> None:
    answer = cli("serve")
    assert answer.code == 17
    assert f"cpu-tiny is already running: pid {cli.record()['pid']}" in answer.err


def test_status_says_who_maps_the_store_and_that_nothing_drifted(cli: Cli) -> None:
    answer = cli("status", "--json")
    tree = answer.json()["data"]
    assert answer.code == 0 and tree["state"] == "ready" and tree["drift"] == []
    assert "mapped by 1 of" in tree["engram"] and tree["load"]["running"] == 0


def test_the_engine_listens_on_loopback_only_and_keeps_its_files_private(cli: Cli) -> None:
    family = set(cli.processes())
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in family]
    # vLLM's own rendezvous may listen as well; nothing of it may be reachable from outside
    assert listening and {c.laddr.ip for c in listening} <= {"127.0.0.1", "::1"}
    record = cli.record()
    for name in ("spec", "log"):
        assert Path(record[name]).stat().st_mode & 0o077 == 0
    assert Path(record["socket"]).parent.stat().st_mode & 0o077 == 0


def test_the_engines_environment_is_the_profiles_and_not_the_shells(cli: Cli) -> None:
    environ = Path(f"/proc/{cli.record()['pid']}/environ").read_bytes().split(b"\0")
    names = {entry.split(b"=")[0].decode() for entry in environ if entry}
    assert "PYTHONDONTWRITEBYTECODE" not in names and "PYTEST_CURRENT_TEST" not in names
    assert {"VLLM_PLUGINS", "DS41_ENGRAM_STORE", "OMP_NUM_THREADS"} <= names


def test_smoke_takes_names_and_writes_junit(cli: Cli) -> None:
    file = cli.root / "smoke.xml"
    answer = cli("smoke", "--only", "copy", "--only", "smoke.arithmetic", "--json", "--junit", str(file))
    assert answer.code == 0, answer.out
    assert statuses(answer.json()) == {"smoke.arithmetic": "ok", "smoke.copy": "ok"}
    assert 'tests="2"' in file.read_text()


def test_the_running_engine_is_the_model_that_the_oracle_computes(cli: Cli) -> None:
    answer = cli("gate", "record", "--prompts", str(gate_prompts(cli.root)), "--threads", "1")
    assert answer.code == 0, answer.out + answer.err
    page = cli.root / "gate.html"
    answer = cli("gate", "compare", "--json", "--html", str(page))
    assert answer.code == 0, answer.out + answer.err
    found = answer.json()["data"]
    assert found["verdict"] == "same" and found["overall"]["kl"] < 2e-5 and not found["left_out"]
    assert {item["name"] for item in found["sets"]} == {"chat", "copy", "prose", "image"}
    assert page.read_text().count("<svg") == 3


def test_logs_are_there_and_the_report_of_the_last_run_is_ok(cli: Cli) -> None:
    assert "ds41: Engram store layer 1" in cli("logs", "-n", "1000").out
    assert Path(cli("logs", "--path").out.strip()).is_file()
    report = cli("report", "--json").json()["data"]
    assert report["command"] == "up" and report["verdict"] == "ok"


def test_dropping_the_store_is_refused_while_the_engine_maps_it(cli: Cli) -> None:
    answer = cli("engram", "drop")
    assert answer.code != 0 and "is mapped by pid" in answer.err and "ds41ctl stop" in answer.err


def test_a_store_damaged_under_a_running_engine_is_named_with_the_process_that_reads_it(cli: Cli) -> None:
    folder = Path(cli("engram", "status", "--json").json()["data"]["data_dir"])
    flip(folder / "layer-001.engram", 3)
    answer = cli("up")
    assert answer.code == 17 and "is mapped by pid" in answer.err and "ds41ctl stop" in answer.err
    assert "record 0 differs" in cli("engram", "status").out
    flip(folder / "layer-001.engram", 3)
    assert cli("engram", "verify", "--full").code == 0
