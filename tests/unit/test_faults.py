"""Known faults: logs of real failed starts and reconstructed ones are named rightly, and an unknown one is unknown."""

from __future__ import annotations

import gzip
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ds41ctl.core.faults import ENDINGS, KNOWN, fingerprint
from ds41ctl.core.logscan import LogScan
from ds41ctl.steps.proof import died

LOGS = Path(__file__).parent.parent / "facts" / "engine-logs"
RECONSTRUCTED = tomllib.loads((LOGS / "reconstructed.toml").read_text())["log"]

# log of a real engine -> (how it ended, fault, words of its meaning); how each was made: README beside them
REAL: dict[str, tuple[str, str, str]] = {
    "gpu-eager": ("", "", ""),
    "gpu-noengram": ("", "", ""),
    "gpu-noengram-track": ("exit status 1", "weights", "engram.embed"),
    "gpu-full-track": ("exit status 1", "weights", "wo_a.weight_scale"),
    "gpu-graphs": ("exit status 1", "indexer", "32 or 64"),
    "gpu-tiny-ready": ("", "", ""),
    "gpu-tiny-core-killed": ("exit status 0", "engine-core", "core process died"),
    "gpu-tiny-stripped": ("exit status 1", "plugin", "layers.1.engram.embed.weight"),
    "gpu-tiny-stripped-served": ("", "", ""),
    "gpu-tp2-ready": ("", "", ""),
    "gpu-tp2-core-killed": ("exit status 0", "engine-core", "core process died"),
    "gpu-tp2-worker-killed": ("exit status 0", "worker", "a worker process died"),
    "gpu-tp2-stripped": ("exit status 1", "plugin", "layers.1.engram.embed.weight"),
    "gpu-pp2-layouts": ("exit status 1", "pipeline-layouts", "different kinds of layers"),
    "gpu-pp2-replay": ("exit status 1", "pipeline-replay", "last layer that owns a KV cache"),
    "gpu-pp2-kv-group": ("exit status 1", "pipeline-kv-group", "does not own"),
    "gpu-pp2-ready": ("", "", ""),
    "gpu-pp2-core-killed": ("exit status 0", "engine-core", "core process died"),
    "gpu-pp2-worker-killed": ("exit status 0", "worker", "a worker process died"),
    "gpu-pp2-stripped": ("exit status 1", "plugin", "layers.1.engram.embed.weight"),
    "cpu-ready": ("", "", ""),
    "cpu-port": ("exit status 1", "port", "taken"),
    "cpu-bad-flag": ("exit status 2", "arguments", "--speculative-tokens"),
    "cpu-context": ("exit status 1", "context", "1048576000"),
    "cpu-kv-space": ("exit status 1", "kv-cache", "longest context"),
    "cpu-no-store": ("exit status 1", "plugin", "DS41_ENGRAM_STORE"),
    "cpu-stale-store": ("exit status 1", "plugin", "(stale)"),
    "cpu-store-format": ("exit status 1", "plugin", "format: expected 1, found 2"),
    "cpu-no-model": ("exit status 1", "pack-missing", "no pack"),
    "cpu-missing-shard": ("exit status 1", "shard-missing", "not there"),
    "cpu-cut-shard": ("exit status 1", "shard-cut", "not fully covered"),
    "cpu-missing-tensor": ("exit status 1", "plugin", "layers.2.attn.wq_a"),
    "cpu-bad-config": ("exit status 1", "config", "not JSON"),
    "cpu-no-plugin": ("exit status 1", "no-kernel", "plugin"),
    "cpu-parser": ("exit status 1", "parser", "deepseek_v4l"),
    "cpu-worker-killed": ("exit status 0", "worker", "(exit code: -9)"),
    "cpu-nofile": ("exit status 1", "descriptors", "open files"),
    "cpu-drafter": ("exit status 1", "drafter", "drafter"),
    "cpu-shadow": ("exit status 1", "shadowed", "folder named vllm"),
}
HEAD = gzip.decompress((LOGS / "cpu-ready.log.gz").read_bytes()).decode().splitlines()[:40]


def real(name: str) -> str:
    return gzip.decompress((LOGS / f"{name}.log.gz").read_bytes()).decode()


def test_there_are_enough_logs_and_every_one_is_judged() -> None:
    assert {path.name.removesuffix(".log.gz") for path in LOGS.glob("*.log.gz")} == set(REAL)
    assert sum(1 for _, fault, _ in REAL.values() if fault) >= 15
    assert len(REAL) + len(RECONSTRUCTED) >= 55
    readme = (LOGS / "README.md").read_text()
    assert [name for name in REAL if f"| {name} |" not in readme] == []


@pytest.mark.parametrize("name", REAL)
def test_a_real_log_is_named_rightly(name: str) -> None:
    ending, fault, words = REAL[name]
    scan = LogScan((), ())
    scan.feed(real(name))
    found = scan.fingerprint(ending)
    assert (found.name if found else "") == fault
    if found:
        assert words in found.meaning and found.fix


@pytest.mark.parametrize("case", RECONSTRUCTED, ids=[case["name"] for case in RECONSTRUCTED])
def test_a_reconstructed_log_is_named_rightly_behind_a_real_ones_first_lines(case: dict[str, Any]) -> None:
    scan = LogScan((), ())
    scan.feed("\n".join(HEAD) + "\n" + case["text"])
    found = scan.fingerprint(case["ending"])
    assert (found.name if found else "") == case["verdict"], found
    assert case["source"]
    if found:
        assert found.meaning and found.fix and "{" not in found.meaning


def test_every_fault_has_a_name_of_its_own_a_cause_and_a_fix() -> None:
    rows = [*KNOWN, *ENDINGS]
    names = [row.fault.name for row in rows]
    assert len(names) == len(set(names))
    for row in rows:
        assert row.fault.meaning and row.fault.fix, row.fault.name
        assert set(re.findall(r"\{(\w+)\}", row.fault.meaning)) <= set(row.pattern.groupindex), row.fault.name


def test_an_unknown_death_is_called_unknown_and_shows_the_last_120_lines() -> None:
    scan = LogScan((), ())
    scan.feed("".join(f"line {number}\n" for number in range(500)))
    error = died("the engine died after 3 s while importing (exit status 3)", scan, "/x.log", "exit status 3")
    assert "a fault that ds41ctl does not know" in error.message and int(error.code) == 16
    assert len(error.detail) == 121 and error.detail[-1] == "| line 499"


def test_a_fault_far_above_its_consequence_is_still_the_one_that_is_named() -> None:
    lines = ["x: nvcc fatal   : Unsupported gpu architecture 'compute_70'", *["noise"] * 200]
    lines.append("Worker proc VllmWorker-0 died unexpectedly (exit code: 1), shutting down executor.")
    found = fingerprint(lines, "exit status 1")
    assert found is not None and found.name == "arch-nvcc" and "compute_70" in found.meaning


def test_phases_are_read_in_order_with_percent_from_a_real_log() -> None:
    scan, seen = LogScan((), ()), []
    for line in real("gpu-graphs").splitlines(keepends=True):
        scan.feed(line)
        shown = scan.phase + scan.percent_text
        if not seen or seen[-1] != shown:
            seen.append(shown)
    assert seen[0] == "importing" and "loading weights 33 %" in seen and "loading weights 100 %" in seen
    assert seen.index("starting workers") < seen.index("Engram") < seen.index("loading weights 100 %")
    assert seen[-1].startswith("capturing graphs")


@pytest.mark.parametrize(
    ("name", "mode"),
    [("gpu-eager", "NONE"), ("gpu-graphs", "FULL_AND_PIECEWISE"), ("gpu-tiny-ready", "FULL_AND_PIECEWISE")],
)
def test_the_resolved_graph_mode_is_read(name: str, mode: str) -> None:
    scan = LogScan((), ())
    scan.feed(real(name))
    assert scan.cudagraph_mode == mode
    assert scan.graphs_fault("") == "" and "expected" in scan.graphs_fault("PIECEWISE")
    assert bool(scan.graphs_fault(mode)) == (name == "gpu-graphs")  # asked for, and its capture died


def test_a_graph_mode_taken_back_by_the_engine_is_the_one_that_counts() -> None:
    scan = LogScan((), ())
    scan.feed(
        "'cudagraph_mode': <CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>\nbackend NEVER; setting cudagraph_mode=NONE\n"
    )
    assert scan.graphs_fault("FULL_AND_PIECEWISE") == "its CUDA graphs are NONE, FULL_AND_PIECEWISE expected"
    assert LogScan((), ()).graphs_fault("PIECEWISE").endswith("unproven")


def test_lines_that_an_engine_repeats_while_it_waits_are_no_progress() -> None:
    scan = LogScan((), ())
    scan.feed("INFO one\n" + "No available shared memory broadcast block found in 60 seconds.\n" * 5)
    assert scan.moved == 1


def test_a_progress_bar_redrawn_in_place_is_read() -> None:
    scan = LogScan((), ())
    scan.feed("Loading safetensors checkpoint shards:   0% Completed\rLoading safetensors checkpoint shards:  45% Comp")
    scan.feed("leted\n")
    assert scan.phase == "loading weights" and scan.percent == 45
