"""fetch and pack as a user runs them: processes against a loopback Hub, exit codes, one JSON document, one winner."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ds41ctl.adapters import pack, profiles
from tests.fakes.hub import REVISION, FakeHub, Fault
from tests.fakes.v41 import ENGRAM_LAYERS, ROWS, files_of, official

MIB = 1 << 20
SHARD = "model-00005-of-00048.safetensors"


@dataclass
class Cli:
    """ds41ctl with folders of its own and a profile whose pack is on the loopback Hub."""

    root: Path
    hub: FakeHub
    profile: Path

    def env(self, **more: str) -> dict[str, str]:
        base = {name: value for name, value in os.environ.items() if not name.startswith(("DS41_", "HF_"))}
        return base | {
            "DS41_DATA_DIR": str(self.root / "data"), "DS41_STATE_DIR": str(self.root / "state"),
            "HF_ENDPOINT": self.hub.url, "NO_COLOR": "1", **more,
        }  # fmt: skip

    def start(self, *args: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "ds41ctl", *args, "--profile", str(self.profile)],
            env=self.env(**env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __call__(self, *args: str, **env: str) -> tuple[int, str, str]:
        running = self.start(*args, **env)
        out, err = running.communicate(timeout=120)
        assert "Traceback" not in err
        return running.returncode, out, err

    def json(self, *args: str) -> dict[str, Any]:
        code, out, _ = self(*args, "--json")
        tree: dict[str, Any] = json.loads(out)
        assert tree["exit_code"] == code
        return tree

    @property
    def folder(self) -> Path:
        return self.root / "data" / "models" / "small"


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    text = profiles.find("cpu-tiny").read_text()
    head, rest = text.split("[[model.sources]]", 1)
    tail = rest[rest.index("[engine]") :]
    head = head.replace('name = "cpu-tiny"', 'name = "small"').replace("models/tiny-v41", "models/small")
    source = f'[[model.sources]]\nkind = "hub"\nrepo = "owner/small"\nrevision = "{REVISION}"\n'
    tables = "".join(
        f'[[model.engram]]\nlayer = {layer}\nrows = {rows}\nshard = "model-000{47 + n}-of-00048.safetensors"\n'
        for n, (layer, rows) in enumerate(zip(ENGRAM_LAYERS, ROWS, strict=True))
    )
    (tmp_path / "small.toml").write_text(head + source + tables + tail)
    with FakeHub() as hub:
        hub.add("owner/small", files_of(official()))
        yield Cli(tmp_path, hub, tmp_path / "small.toml")


def test_fetch_then_already_then_verify_then_inspect(cli: Cli) -> None:
    code, out, err = cli("fetch")
    assert code == 0 and "sha256 verified" in out and "MiB by http" in out, err
    assert f"53 files from {cli.hub.url.removeprefix('http://')}, plain HTTP" in err
    cli.hub.log.clear()
    code, out, _ = cli("fetch")
    assert code == 0 and "already" in out and cli.hub.log == []
    code, out, _ = cli("fetch", "--verify")
    assert code == 0 and "every byte hashed" in out
    assert cli("fetch", "--verify", "--quick")[0] == 0
    document = cli.json("pack", "inspect")["data"]
    assert document["experts"] == "mxfp4" and document["layer_bits"]["0"] == "4.25" and document["shards"] == 48
    assert all(role["found"] == role["expected"] for role in document["roles"].values())
    assert cli.hub.log == []


def test_a_damaged_shard_is_12_with_the_fix_and_repair_ends_well(cli: Cli) -> None:
    assert cli("fetch")[0] == 0
    path = cli.folder / SHARD
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for args in (("fetch",), ("fetch", "--verify"), ("fetch", "--verify", "--quick")):
        code, _, err = cli(*args)
        assert code == 12 and SHARD in err and "ds41ctl fetch --repair" in err
    document = cli.json("fetch", "--verify")
    assert document["error"]["code"] == "integrity" and document["data"]["findings"][0]["status"] == "fail"
    assert cli("fetch", "--repair")[0] == 0 and cli("fetch", "--verify")[0] == 0
    assert (cli.folder / (SHARD + pack.QUARANTINE)).exists()


def test_what_breaks_the_contract_is_found_although_every_byte_is_the_pinned_one(cli: Cli) -> None:
    shards = official()
    shards[SHARD].pop("layers.4.attn.attn_sink")
    cli.hub.add("owner/small", files_of(shards))
    assert cli("fetch")[0] == 0
    code, out, err = cli("fetch", "--verify")
    assert code == 12 and "layers.4.attn.attn_sink (attention) is missing" in out + err
    code, out, _ = cli("pack", "inspect")
    assert code == 12 and "attention 519 of 520" in out


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        (Fault("api", times=99, status=401), 14, "HF_TOKEN"),
        (Fault("api", times=99, status=404, headers={"X-Error-Code": "RepoNotFound"}), 10, "no such repository"),
        (Fault("cdn", SHARD, times=99, change=lambda b: bytes(len(b))), 12, "nothing was published"),
        (Fault("cdn", SHARD, times=99, html=True), 13, "web page"),
    ],
)
def test_each_kind_of_failure_has_its_exit_code(cli: Cli, fault: Fault, code: int, text: str) -> None:
    cli.hub.faults.append(fault)
    found, _, err = cli("fetch")
    assert found == code and text in err and err.count("error:") == 1


def test_the_lock_can_be_written_to_be_committed_and_then_needs_no_list(cli: Cli, tmp_path: Path) -> None:
    target = tmp_path / "small.lock.json"
    code, out, _ = cli("fetch", "--lock", str(target))
    assert code == 0 and "files of 1 repositories" in out and not cli.folder.exists()
    tree = json.loads(target.read_text())
    assert tree["trees"][0]["revision"] == REVISION
    (cli.root / "state" / "pins" / "small.json").unlink()
    cli.hub.log.clear()
    assert cli("fetch")[0] == 0  # the lock lies beside the profile
    assert cli.hub.requests("tree") == []
    cli.hub.add("owner/small", {"tokenizer.json": b"moved"})
    code, _, err = cli("fetch", "--lock", str(target))
    assert code == 12 and "tokenizer.json" in err
    assert json.loads(target.read_text()) == tree, "a moved pin is never a refresh"


def test_offline_is_said_and_a_whole_pack_needs_no_network(cli: Cli) -> None:
    code, _, err = cli("fetch", HF_HUB_OFFLINE="1")
    assert code == 13 and "HF_HUB_OFFLINE is set" in err
    assert cli("fetch")[0] == 0
    (cli.folder / (SHARD + pack.SIDECAR)).unlink()
    code, out, _ = cli("fetch", HF_HUB_OFFLINE="1")
    assert code == 0 and "sha256 verified" in out


def test_secrets_are_in_no_journal_and_no_output(cli: Cli) -> None:
    token = "hf_" + "q" * 30
    cli.hub.token = token
    code, out, err = cli("fetch", HF_TOKEN=token)
    assert code == 0
    written = "".join(path.read_text() for path in (cli.root / "state").rglob("*") if path.is_file())
    assert token not in out + err + written


def test_a_terminated_fetch_keeps_what_it_received(cli: Cli) -> None:
    cli.hub.add("owner/small", {"model-00099-of-00048.safetensors": os.urandom(8 * MIB)})
    cli.hub.faults.append(Fault("cdn", "model-00099", cut=6 * MIB, stall=60))
    running = cli.start("fetch")
    deadline = time.monotonic() + 60
    while cli.hub.sent("model-00099-of-00048.safetensors?signature=1") < 6 * MIB and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    running.send_signal(signal.SIGTERM)
    _, err = running.communicate(timeout=30)
    assert running.returncode == 143 and "terminated" in err and "Traceback" not in err
    cli.hub.faults.clear()
    cli.hub.log.clear()
    assert cli("fetch")[0] == 0
    assert cli.hub.sent("model-00099-of-00048.safetensors?signature=1") <= 3 * MIB


def test_of_eight_at_once_one_fetches_and_the_others_say_who(cli: Cli) -> None:
    cli.hub.faults.append(Fault("cdn", SHARD, delay=6))
    first = cli.start("fetch")
    deadline = time.monotonic() + 60
    while not cli.hub.requests("cdn", SHARD) and time.monotonic() < deadline:
        time.sleep(0.05)
    began = time.monotonic()
    losers = [cli.start("fetch") for _ in range(3)]
    for loser in losers:
        _, err = loser.communicate(timeout=60)
        assert loser.returncode == 11, err
        assert f"pid {first.pid}" in err and "fetch --profile" in err and "since 20" in err
    waited = time.monotonic() - began
    assert waited < 6, "they did not wait for the first one"
    assert first.wait(timeout=60) == 0
    # all at the same instant: one wins, or a later one finds it done; nothing is fetched twice
    for path in cli.folder.glob("*.safetensors*"):
        path.unlink()
    cli.hub.log.clear()
    with contextlib.ExitStack() as running:
        together = [running.enter_context(cli.start("fetch")) for _ in range(8)]
        codes = sorted(process.wait(timeout=120) for process in together)
    assert codes[0] == 0 and set(codes) <= {0, 11}
    assert sum(entry.sent for entry in cli.hub.requests("cdn", SHARD)) == (cli.folder / SHARD).stat().st_size


def test_gc_says_what_it_freed(cli: Cli) -> None:
    assert cli("fetch")[0] == 0
    (cli.folder / "old.safetensors.0123456789abcdef.part").write_bytes(bytes(2 * MIB))
    code, out, _ = cli("fetch", "--gc")
    assert code == 0 and "1 files, 2 MiB freed" in out
    assert cli.json("fetch", "--gc")["data"]["removed"] == []


def test_the_plan_names_the_bytes_once_the_pins_are_known(cli: Cli) -> None:
    def fetching() -> dict[str, Any]:
        steps = cli.json("up", "--dry-run")["data"]["steps"]
        return next(step for step in steps if step["step"] == "fetch")

    assert fetching()["bytes"] is None
    assert cli("fetch")[0] == 0
    step = fetching()
    assert step["bytes"] > MIB and step["writes"] == [str(cli.folder)]
