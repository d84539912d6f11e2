"""fetch and pack as a user runs them: processes against a loopback Hub, exit codes, one JSON document, one winner."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ds41ctl.adapters import pack, part, profiles
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
    name, data = "model-00099-of-00048.safetensors", os.urandom(8 * MIB)
    cli.hub.add("owner/small", {name: data})
    cli.hub.faults.append(Fault("cdn", "model-00099", cut=6 * MIB, stall=60))

    def written() -> int:
        """Bytes of the file that are on disk, in whole steps of 1 MiB: those sent may still be on their way."""
        found = b"".join(path.read_bytes() for path in cli.folder.glob(f"{name}.*{part.SUFFIX}"))
        return sum(MIB for at in range(0, len(data), MIB) if found[at : at + MIB] == data[at : at + MIB])

    running = cli.start("fetch")
    deadline = time.monotonic() + 60
    while written() < 5 * MIB and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    _, err = running.communicate(timeout=30)
    assert running.returncode == 143 and "terminated" in err and "Traceback" not in err
    cli.hub.faults.clear()
    cli.hub.log.clear()
    assert cli("fetch")[0] == 0
    assert cli.hub.sent("model-00099-of-00048.safetensors?signature=1") <= 3 * MIB


def test_of_eight_at_once_one_fetches_and_the_others_say_who(cli: Cli) -> None:
    ended = threading.Event()
    cli.hub.faults.append(Fault("cdn", SHARD, hold=lambda: ended.wait(120)))
    first = cli.start("fetch")
    deadline = time.monotonic() + 60
    while not cli.hub.requests("cdn", SHARD) and time.monotonic() < deadline:
        time.sleep(0.05)
    losers = [cli.start("fetch") for _ in range(3)]
    for loser in losers:
        _, err = loser.communicate(timeout=60)
        assert loser.returncode == 11, err
        assert f"pid {first.pid}" in err and "fetch --profile" in err and "since 20" in err
    assert first.poll() is None, "they did not wait for the first one"
    ended.set()
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


def fetching(cli: Cli) -> dict[str, Any]:
    """The plan's step that fetches."""
    steps = cli.json("up", "--dry-run")["data"]["steps"]
    return next(step for step in steps if step["step"] == "fetch")


def test_the_plan_names_the_bytes_once_the_pins_are_known(cli: Cli) -> None:
    assert fetching(cli)["bytes"] is None
    assert cli("fetch")[0] == 0
    step = fetching(cli)
    assert step["bytes"] == 0 and step["writes"] == [str(cli.folder)]
    size = (cli.folder / SHARD).stat().st_size
    (cli.folder / SHARD).unlink()
    assert fetching(cli)["bytes"] == size
    plan = cli.json("fetch", "--dry-run")["data"]
    assert (plan["to_come"], plan["sources"][0]["by"]) == (size, "pins") and plan["bytes"] > MIB


def test_a_lock_of_single_tensors_holds_another_machine_to_the_same_bytes(cli: Cli, tmp_path: Path) -> None:
    """Headers before the fetch, digests of the new shards after it; without the state folder nobody else knows them."""
    leave_out = 'leave_out = ["layers.*.ffn.experts.*"]'
    cli.profile.write_text(cli.profile.read_text().replace(f'"{REVISION}"\n', f'"{REVISION}"\n{leave_out}\n'))
    lock = tmp_path / "small.lock.json"

    def digest() -> str:
        (subset,) = json.loads(lock.read_text())["subsets"]
        return next(item["sha256"] for item in subset["files"] if item["path"] == SHARD)

    assert cli("fetch", "--lock", str(lock))[0] == 0 and digest() == "" and not cli.folder.exists()
    assert cli("fetch")[0] == 0 and cli("fetch", "--verify", "--quick")[0] == 0
    assert cli("fetch", "--lock", str(lock))[0] == 0
    assert digest() == hashlib.sha256((cli.folder / SHARD).read_bytes()).hexdigest()
    shutil.rmtree(cli.root / "data")
    shutil.rmtree(cli.root / "state")
    cli.hub.faults.append(Fault("cdn", SHARD, times=99, skip=2, change=lambda data: b"\1" * len(data)))
    code, _, err = cli("fetch")
    assert code == 12 and "nothing was published" in err and not (cli.folder / SHARD).exists()
    cli.hub.faults.clear()
    assert cli("fetch")[0] == 0 and digest() == hashlib.sha256((cli.folder / SHARD).read_bytes()).hexdigest()


def test_a_dry_run_lists_bytes_by_repository_and_disk_and_asks_nobody(cli: Cli) -> None:
    code, out, _ = cli("fetch", "--dry-run")
    assert code == 0 and "owner/small  size not known before the Hub is asked" in out
    assert cli.json("fetch", "--dry-run")["data"]["to_come"] is None
    text = cli.profile.read_text()
    stated = text.replace(f'revision = "{REVISION}"\n', f'revision = "{REVISION}"\nsize_bytes = 3_000_000\n')
    cli.profile.write_text(stated)
    cli.folder.mkdir(parents=True)
    (cli.folder / "config.json").write_bytes(bytes(MIB))
    plan = cli.json("fetch", "--dry-run")["data"]
    assert plan["sources"] == [
        {"repo": "owner/small", "dir": str(cli.folder), "bytes": 3_000_000, "there": MIB,
         "to_come": 3_000_000 - MIB, "by": "profile"}
    ]  # fmt: skip
    (disk,) = plan["disks"]
    assert disk["fits"] and disk["needed"] == int((3_000_000 - MIB) * 1.02) and cli.folder.is_relative_to(disk["mount"])
    assert fetching(cli)["bytes"] == plan["to_come"]
    code, out, _ = cli("fetch", "--dry-run")
    assert code == 0 and "by the profile's figures: the Hub was not asked yet" in out
    assert cli.hub.log == [] and not (cli.root / "state" / "pins").exists()


def test_a_dry_run_says_which_disk_is_too_small_and_ends_with_15(cli: Cli) -> None:
    text = cli.profile.read_text()
    huge = 1 << 49
    cli.profile.write_text(text.replace(f'"{REVISION}"\n', f'"{REVISION}"\nsize_bytes = {huge}\n'))
    code, out, err = cli("fetch", "--dry-run")
    assert code == 15 and "DOES NOT FIT" in out and "DS41_DATA_DIR" in err and cli.hub.log == []
    tree = cli.json("fetch", "--dry-run")
    assert tree["exit_code"] == 15 and tree["data"]["disks"][0]["fits"] is False
    code, _, err = cli("fetch", "--dry-run", "--verify")
    assert code == 2 and "--dry-run goes with a fetch alone" in err
