"""The main job on the real engine, in the order a user meets it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import Cli
from tests.fakes.packs import flip, strip

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def statuses(document: dict[str, Any]) -> dict[str, str]:
    return {item["id"]: item["status"] for item in document["data"]["findings"]}


def test_up_goes_from_nothing_to_a_proven_engine(cli: Cli) -> None:
    answer = cli("up")
    assert answer.code == 0, answer.out + answer.err
    for step in ("preflight", "fetch", "engine", "engram", "serve", "smoke"):
        assert f"  {step:<10} OK " in answer.out, answer.out
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


def test_a_killed_engine_is_named_within_five_seconds_and_stop_clears_its_remains(cli: Cli) -> None:
    record = cli.record()
    os.kill(record["pid"], signal.SIGKILL)
    killed = time.monotonic()
    answer = cli("status")
    assert time.monotonic() - killed < 5
    assert answer.code == 16 and f"DIED   pid {record['pid']}: signal 9" in answer.out
    assert cli("stop").code == 0
    assert cli.processes() == [] and cli("status").code == 10


def test_stop_leaves_no_process_no_port_and_no_socket_but_keeps_the_store(cli: Cli) -> None:
    answer = cli("serve")
    assert answer.code == 0, answer.out + answer.err
    record = cli.record()
    answer = cli("stop")
    assert answer.code == 0 and "nothing left" in answer.out
    assert cli.processes() == []
    for name in ("socket", "spec"):
        assert not Path(record[name]).exists()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", cli.port))
    assert cli("engram", "status").code == 0
    assert cli("stop").code == 0  # stopping what is stopped is no fault


def test_an_engine_that_dies_while_it_starts_is_named_within_five_seconds(cli: Cli) -> None:
    with cli.start("serve") as starting:
        for _ in range(300):
            path = cli.root / "state" / "running" / "cpu-tiny.json"
            if path.exists() and json.loads(path.read_text())["pid"]:
                break
            time.sleep(0.1)
        time.sleep(2)
        os.kill(cli.record()["pid"], signal.SIGKILL)
        killed = time.monotonic()
        _, err = starting.communicate(timeout=60)
        assert time.monotonic() - killed < 5
    assert starting.returncode == 16 and "(signal 9)" in err and "last lines of" in err
    assert cli.processes() == [] and cli("status").code == 10


def test_a_start_whose_ds41ctl_was_killed_goes_on_and_the_next_up_waits_for_it(cli: Cli) -> None:
    with cli.start("serve") as starting:
        for _ in range(300):
            path = cli.root / "state" / "running" / "cpu-tiny.json"
            if path.exists() and json.loads(path.read_text())["pid"]:
                break
            time.sleep(0.1)
        starting.kill()
    pid = cli.record()["pid"]
    answer = cli("serve")
    assert answer.code == 0, answer.out + answer.err
    assert cli.record()["pid"] == pid and cli.record()["ready_at"]
    assert cli("stop").code == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_the_engine_in_the_foreground_ends_with_its_ds41ctl(cli: Cli, number: signal.Signals, code: int) -> None:
    with cli.start("serve", "--foreground") as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("Serving"):
                break
        running.send_signal(number)
        running.communicate(timeout=60)
    assert running.returncode == code
    for _ in range(100):
        if not cli.processes():
            break
        time.sleep(0.1)
    assert cli.processes() == [] and cli("stop").code == 0 and cli("status").code == 10


def test_a_taken_port_is_named_with_its_holder_before_anything_starts(cli: Cli) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", cli.port))
        listener.listen()
        answer = cli("serve")
    assert answer.code == 4 and f"pid {os.getpid()}" in answer.out + answer.err
    assert f"DS41_PORT={cli.port + 1}" in answer.err
    assert cli.processes() == []


def test_a_corrupt_store_is_refused(cli: Cli) -> None:
    folder = Path(cli("engram", "status", "--json").json()["data"]["data_dir"])
    flip(folder / "layer-001.engram", 3)
    answer = cli("serve")
    assert answer.code == 12 and "record 0 differs" in answer.err, answer.err
    assert "ds41ctl engram" in answer.err
    assert cli("engram", "drop").code == 0 and cli("engram", "build").code == 0


def test_a_corrupt_shard_is_refused_and_repaired(cli: Cli) -> None:
    path = cli.root / "data" / "models" / "tiny-v41" / "model-00002-of-00003.safetensors"
    flip(path, 5000)
    answer = cli("fetch")
    assert answer.code == 12 and path.name in answer.err and "ds41ctl fetch --repair" in answer.err
    assert cli("fetch", "--repair").code == 0
    assert cli("fetch", "--verify").code == 0


def without_engram(cli: Cli) -> Path:
    """The same pack with its Engram tables in neither shard nor index, and a profile that serves it."""
    source, target = cli.root / "data" / "models" / "tiny-v41", cli.root / "stripped"
    target.mkdir()
    for path in source.iterdir():
        if path.suffix == ".json" or path.name.startswith("model-00001"):
            (target / path.name).write_bytes(path.read_bytes())
    tree = json.loads((source / "model.safetensors.index.json").read_text())
    tree["weight_map"] = {name: file for name, file in tree["weight_map"].items() if "engram.embed" not in name}
    (target / "model.safetensors.index.json").write_text(json.dumps(tree))
    for name in ("model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"):
        strip(source / name, target / name)
    text = (Path(__file__).parents[2] / "profiles" / "cpu-tiny.toml").read_text()
    text = text.replace('name = "cpu-tiny"', 'name = "local"').replace(
        'kind = "recipe"\nrecipe = "tiny-v41"', 'kind = "local"'
    )
    text = text.replace('storage = "tmpfs"', 'storage = "none"').replace(
        'DS41_ENGRAM_STORE = "${engram}"', 'DS41_ENGRAM_UNFILLED = "1"'
    )
    text = text.replace('dir = "models/tiny-v41"', f'dir = "{target}"')
    head, markers = text.split("[[serve.required_markers]]", 1)
    path = cli.root / "local.toml"
    path.write_text(head + "[engram]" + markers.split("[engram]", 1)[1])
    return path


def test_a_pack_without_its_engram_is_refused_and_if_served_all_the_same_only_the_copies_tell(cli: Cli) -> None:
    profile = str(without_engram(cli))
    refused = cli("serve", "--profile", profile, "--skip-check", "engram.storage", "--skip-check", "env.inherited")
    assert refused.code == 12, refused.out + refused.err
    assert "pack.engram-tensors" in refused.err
    skips = [part for name in ("pack.engram-tensors", "engram.storage", "env") for part in ("--skip-check", name)]
    served = cli("serve", "--profile", profile, *skips)
    assert served.code == 0, served.out + served.err
    answer = cli("smoke", "--profile", profile, "--json")
    found = statuses(answer.json())
    assert answer.code == 1 and found["smoke.copy"] == "fail"
    for healthy in ("smoke.health", "smoke.arithmetic", "smoke.tool-call", "smoke.tool-stream"):
        assert found[healthy] == "ok", found
    copy = next(item for item in answer.json()["data"]["findings"] if item["id"] == "smoke.copy")
    assert "Engram" in copy["why"] and copy["fix"]
    assert cli("stop", "--profile", profile).code == 0


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount")
def test_the_stores_mount_is_ours_and_drop_removes_it(cli: Cli) -> None:
    assert cli("engram", "build").code == 0
    folder = cli("engram", "status", "--json").json()["data"]["data_dir"]
    kind = subprocess.run(["findmnt", "-no", "SOURCE,FSTYPE", folder], capture_output=True, text=True, check=True)
    assert kind.stdout.split() == ["ds41ctl", "tmpfs"]
    assert cli("engram", "drop").code == 0
    assert subprocess.run(["findmnt", folder], capture_output=True, check=False).returncode != 0
    assert cli("engram", "status").code == 10
