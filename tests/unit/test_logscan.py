"""Engine logs: phases, markers and the meaning of a death, on logs of a real engine and on single lines."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds41ctl.core.logscan import LogScan, fingerprint
from ds41ctl.core.profile import Marker

LOGS = Path(__file__).parent.parent / "facts" / "engine-logs"


def log(name: str) -> str:
    return gzip.decompress((LOGS / f"{name}.log.gz").read_bytes()).decode()


def scanned(text: str, *, required: tuple[Marker, ...] = (), forbidden: tuple[Marker, ...] = ()) -> LogScan:
    scan = LogScan(required, forbidden)
    scan.feed(text)
    return scan


def test_a_good_start_ends_in_the_phase_answering_with_no_fingerprint_of_death() -> None:
    scan = scanned(log("gpu-eager"))
    assert scan.phase == "answering" and scan.fingerprint() is None


def test_each_phase_of_a_start_on_gpus_is_told_so_no_long_compile_looks_like_loading_weights() -> None:
    scan, told = LogScan((), ()), []
    for line in log("gpu-pp2-ready").splitlines(keepends=True):
        scan.feed(line)
        if scan.phase not in told[-1:]:
            told.append(scan.phase)
    assert told == [
        *("importing", "configuring", "starting workers", "Engram", "loading weights", "KV profile"),
        *("compiling", "capturing graphs", "warming up", "starting API", "answering"),
    ]


def test_death_in_graph_capture_is_named() -> None:
    found = scanned(log("gpu-graphs")).fingerprint()
    assert found is not None and found.name == "indexer"


@pytest.mark.parametrize("name", ["gpu-noengram-track", "gpu-full-track"])
def test_weights_that_were_not_loaded_are_named(name: str) -> None:
    found = scanned(log(name)).fingerprint()
    assert found is not None and found.name == "weights" and ("engram" in found.meaning or "wo_a" in found.meaning)


def test_a_log_without_the_engram_looks_like_one_with_it_so_markers_alone_never_prove_it() -> None:
    token_map = Marker(text="Built engram token map")
    with_tables, without = (
        scanned(log("gpu-eager"), required=(token_map,)),
        scanned(log("gpu-noengram"), required=(token_map,)),
    )
    assert with_tables.missing() == without.missing() == []


def test_a_marker_on_three_of_four_ranks_is_missing() -> None:
    line = "Built engram token map (129280 -> 99092 ids) for layers (1, 14)\n"
    marker = Marker(text=line.strip(), count=4)
    assert scanned(line * 3, required=(marker,)).missing() == [marker]
    assert scanned(line * 4, required=(marker,)).missing() == []


@pytest.mark.parametrize(
    "line",
    [
        "Built engram token map (129280 -> 99090 ids) for layers (1, 14)",
        "Built engram token map (129280 -> 99092 ids) for layers (1, 15)",
    ],
)
def test_another_vocabulary_or_layer_does_not_satisfy_the_marker(line: str) -> None:
    marker = Marker(text="Built engram token map (129280 -> 99092 ids) for layers (1, 14)")
    assert scanned(line + "\n", required=(marker,)).missing() == [marker]


def test_a_forbidden_line_is_seen_once_it_is_there() -> None:
    marker = Marker(text="offloaded to pinned")
    assert scanned("all well\n", forbidden=(marker,)).seen_forbidden() == []
    text = "INFO Engram table offloaded to pinned host memory: 5 rows\n"
    assert scanned(text, forbidden=(marker,)).seen_forbidden() == [marker]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("ImportError: libcudart.so.13: cannot open shared object file", "cuda-13"),
        ("ImportError: /x/_C.abi3.so: undefined symbol: _ZN3c1013MessageLoggerC1", "abi"),
        ("OSError: [Errno 98] Address already in use", "port"),
        ("RuntimeError: operator torchvision::nms does not exist", "torchvision"),
        ("LLVM ERROR: Cannot select: intrinsic %llvm.nvvm", "triton"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", "memory"),
        ("ModuleNotFoundError: No module named 'vllm'", "module"),
        ("ERROR ds41: the Engram store is stale", "plugin"),
    ],
)
def test_known_deaths_have_a_name(line: str, name: str) -> None:
    found = fingerprint(["noise", line, "more noise"])
    assert found is not None and found.name == name and found.meaning and "{" not in found.meaning


def test_information_of_the_plugin_is_no_death() -> None:
    assert fingerprint(["INFO 11-29 [x.py:1] ds41: Engram store layer 1: 5 rows x 264 B mapped"]) is None


@given(st.lists(st.integers(1, 400), max_size=30))
def test_the_same_log_cut_anywhere_gives_the_same_reading(cuts: list[int]) -> None:
    text = "non-default args\nLoading weights took\n\x1b[36mBuilt engram token map\x1b[0m (1)\n"
    text += "Application startup complete\n"
    marker = Marker(text="Built engram token map")
    whole, pieces = scanned(text, required=(marker,)), LogScan((marker,), ())
    start = 0
    for cut in [*cuts, len(text)]:
        pieces.feed(text[start : start + cut])
        start += cut
    assert (pieces.phase, pieces.missing(), pieces.lines) == (whole.phase, whole.missing(), whole.lines)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("INFO 11-12 GPU KV cache size: 2,717,420 tokens", ""),
        ("INFO 11-12 GPU KV cache size: 2,740,000 tokens", ""),  # within one percent
        ("INFO 11-12 GPU KV cache size: 2,417,392 tokens", "holds 2,417,392 tokens, 2,717,420 (within 1%) expected"),
        ("INFO 11-12 nothing of the kind", "states no KV cache size"),
    ],
)
def test_the_kv_pool_is_the_expected_one_within_a_percent(line: str, words: str) -> None:
    scan = LogScan((), ())
    scan.feed(line + "\n")
    assert scan.kv_pool_fault(None, 0.01) == ""
    fault = scan.kv_pool_fault(2_717_420, 0.01)
    assert words in fault and bool(fault) == bool(words)


def test_an_engine_that_serves_or_was_refused_its_options_has_not_given_up_and_one_that_ends_has() -> None:
    names = {path.name.removesuffix(".log.gz") for path in LOGS.glob("*.gz")}
    gave_up = {name for name in names if scanned(log(name)).given_up}
    assert {"cpu-cut-shard", "cpu-worker-killed", "cpu-nofile", "gpu-graphs", "gpu-tiny-stripped"} <= gave_up
    assert not gave_up & {"cpu-ready", "gpu-tiny-ready", "gpu-eager", "gpu-tiny-stripped-served", "cpu-bad-flag"}
