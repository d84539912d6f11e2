"""Ends and beginnings: what stop leaves, starts that die, bytes that are wrong, a pack without its Engram."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Cli, gate_prompts
from tests.fakes.packs import flip, strip

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def ready(cli: Cli) -> None:
    """Pack and store, as the files before this one leave them."""
    if not (cli.root / "data" / "models" / "tiny-v41").is_dir():
        assert cli("fetch").code == 0 and cli("engram", "build").code == 0


def statuses(document: dict[str, Any]) -> dict[str, str]:
    return {item["id"]: item["status"] for item in document["data"]["findings"]}


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


def test_a_pack_without_its_engram_is_refused_and_if_served_all_the_same_only_copies_and_the_gate_tell(
    cli: Cli,
) -> None:
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
    reference = cli.root / "whole.ref"
    recorded = cli(
        "gate", "record", "--prompts", str(gate_prompts(cli.root)), "--out", str(reference), "--threads", "1"
    )
    assert recorded.code == 0, recorded.out + recorded.err
    answer = cli("gate", "compare", str(reference), "--profile", profile, "--json")
    assert answer.code == 1 and answer.json()["data"]["verdict"] == "different", answer.out
    assert answer.json()["data"]["overall"]["kl"] > 0.1
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
