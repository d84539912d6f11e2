"""The store and the engine's ranks: two tensor-parallel processes, restarts that attach, a reboot that rebuilds."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
TWO = ("--profile", "cpu-tiny-tp2")


def store_status(cli: Cli) -> dict[str, Any]:
    tree: dict[str, Any] = cli("engram", "status", *TWO, "--json").json()["data"]
    return tree


def manifest(cli: Cli) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((Path(store_status(cli)["dir"]) / "manifest.json").read_text())
    return tree


def test_two_ranks_each_prove_their_own_rows_and_together_copy_exactly(cli: Cli) -> None:
    for command in (("fetch",), ("engram", "build"), ("serve",)):
        answer = cli(*command, *TWO)
        assert answer.code == 0, answer.out + answer.err
    log = Path(cli.record("cpu-tiny-tp2")["log"]).read_text()
    for layer in (1, 3):
        for rank in (0, 1):
            assert f"ds41: Engram layer {layer}: rank {rank} of 2 reads rows [" in log
    assert "ds41: Engram gather: ds41_kernels (" in log
    assert "mapped by 2 of" in cli("status", *TWO, "--json").json()["data"]["engram"]
    answer = cli("smoke", *TWO, "--only", "copy", "--only", "repeat", "--json")
    assert answer.code == 0, answer.out


def test_after_a_crash_the_same_store_is_attached(cli: Cli) -> None:
    before = manifest(cli)
    os.kill(cli.record("cpu-tiny-tp2")["pid"], signal.SIGKILL)
    assert cli("stop", *TWO).code == 0
    answer = cli("engram", "build", *TWO)
    assert answer.code == 0 and "already (2 tables" in answer.out
    assert manifest(cli) == before


def test_after_a_reboot_the_store_is_built_again(cli: Cli) -> None:
    """The boot id of another boot is all that a memory-backed manifest keeps of a reboot."""
    path = Path(store_status(cli)["dir"]) / "manifest.json"
    tree = json.loads(path.read_text())
    path.write_text(json.dumps({**tree, "boot_id": "of another boot"}))
    refused = cli("engram", "status", *TWO)
    assert refused.code == 12 and "built before the last reboot" in refused.out
    answer = cli("engram", "build", *TWO)
    assert answer.code == 0 and "already" not in answer.out
    assert manifest(cli)["boot_id"] == tree["boot_id"]


def test_drop_leaves_nothing(cli: Cli) -> None:
    shown = store_status(cli)
    assert cli("engram", "drop", *TWO).code == 0
    assert not Path(shown["data_dir"]).exists() and not Path(shown["dir"]).exists()
    assert cli("engram", "status", *TWO).code == 10


def two_stages_on_disk(cli: Cli) -> str:
    """cpu-tiny-tp2 made into two pipeline stages, one Engram layer each, whose rows are read from the drive."""
    text = (Path(__file__).parents[2] / "profiles" / "cpu-tiny-tp2.toml").read_text()
    for old, new in (
        ('name = "cpu-tiny-tp2"', 'name = "local"'),
        ('"--tensor-parallel-size", "2"', '"--pipeline-parallel-size", "2", "--no-async-scheduling"'),
        ('DS41_ENGRAM_STORE = "${engram}"', 'DS41_ENGRAM_STORE = "${engram}"\nVLLM_PP_LAYER_PARTITION = "2,4"'),
        ('rows"\ncount = 2', 'rows"\ncount = 1'),
        ('storage = "tmpfs"', 'storage = "disk"'),
    ):
        assert old in text
        text = text.replace(old, new)
    path = cli.root / "local.toml"
    path.write_text(text)
    return str(path)


def test_two_pipeline_stages_read_their_own_layers_rows_from_the_drive(cli: Cli) -> None:
    profile = two_stages_on_disk(cli)
    for command in (("fetch",), ("engram", "build"), ("serve",)):
        answer = cli(*command, "--profile", profile)
        assert answer.code == 0, answer.out + answer.err
    log = Path(cli.record("local")["log"]).read_text()
    for layer in (1, 3):
        assert log.count(f"ds41: Engram layer {layer}: rank 0 of 1 reads rows [0, ") == 1
    assert (
        log.count("ds41: Engram gather: ds41_kernels (io_uring, O_DIRECT, 1 thread)") == 2
        or log.count("ds41: Engram gather: ds41_kernels (pread, 1 thread)") == 2
    ), "both stages read from the drive"
    shown = cli("engram", "status", "--profile", profile, "--json").json()["data"]
    assert shown["storage"] == "disk" and len(shown["mapped_by"]) == 2
    answer = cli("smoke", "--profile", profile, "--only", "copy", "--only", "arithmetic", "--json")
    assert answer.code == 0, answer.out
    assert cli("stop", "--profile", profile).code == 0
    assert cli("engram", "drop", "--profile", profile).code == 0
