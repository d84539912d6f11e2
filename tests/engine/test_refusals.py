"""A whole engine process: it refuses with one findable line and a non-zero status, or serves as the switch asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BOOT = """
import sys
from ds41_engine import register
register(); register()
from vllm import LLM, SamplingParams
engine = LLM(model=sys.argv[1], enforce_eager=True, max_model_len=256, max_num_seqs=2, max_num_batched_tokens=64,
             tensor_parallel_size=int(sys.argv[2]), mm_encoder_tp_mode=sys.argv[3],
             pipeline_parallel_size=int(sys.argv[4]))
sampling = SamplingParams(temperature=0, max_tokens=2, detokenize=False)
out = engine.generate([{"prompt_token_ids": [5]}], sampling)
print("GENERATED", len(out[0].outputs[0].token_ids))
sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
out = engine.generate([{"prompt_token_ids": [3 + n * n % 37 for n in range(k)]} for k in (150, 40)], sampling)
print("TOKENS", [list(o.outputs[0].token_ids) for o in out])
"""


def boot(
    model: Path, tensor_parallel: int = 1, vision: str = "data", stages: int = 1, **env: str
) -> subprocess.CompletedProcess[str]:
    settings = {key: value for key, value in os.environ.items() if not key.startswith("DS41_")} | env
    return subprocess.run(
        [sys.executable, "-c", BOOT, str(model), str(tensor_parallel), vision, str(stages)],
        capture_output=True,
        text=True,
        env=settings,
        timeout=900,
        check=False,
    )


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """The one ERROR line of a refused start."""
    assert result.returncode != 0
    assert "GENERATED" not in result.stdout
    lines = [line for line in (result.stdout + result.stderr).splitlines() if "ERROR" in line and "] ds41: " in line]
    assert len(lines) == 1, result.stderr[-2000:]
    return lines[0]


@pytest.fixture(scope="module")
def stripped(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """The checkpoint without ``engram.embed.*``: what boots silently upstream."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("stripped")
    for source in checkpoint.iterdir():
        if source.suffix != ".safetensors":
            (folder / source.name).symlink_to(source)
            continue
        kept = {name: value for name, value in load_file(source).items() if ".engram.embed." not in name}
        save_file(kept, folder / source.name, metadata={"format": "pt"})
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if ".engram.embed." not in k}
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_no_store_is_refused(checkpoint: Path) -> None:
    line = refusal(boot(checkpoint))
    assert "DS41_ENGRAM_STORE: expected the Engram store's folder, found none" in line
    assert "ds41ctl engram build" in line


def test_missing_engram_tensors_are_refused_though_the_store_is_good(stripped: Path, store: Path) -> None:
    line = refusal(boot(stripped, DS41_ENGRAM_STORE=str(store)))
    assert "missing 4: layers.1.engram.embed.scale, layers.1.engram.embed.weight, layers.4.engram.embed.scale" in line


def test_unfilled_switch_serves_the_stripped_checkpoint_loudly(stripped: Path) -> None:
    result = boot(stripped, DS41_ENGRAM_UNFILLED="1")
    assert result.returncode == 0, result.stderr[-2000:]
    assert "GENERATED 2" in result.stdout
    log = result.stdout + result.stderr
    assert "ds41: WARNING: DS41_ENGRAM_UNFILLED=1" in log
    assert "Built engram token map (129280 -> " in log
    assert "mapped read-only" not in log


def tokens(result: subprocess.CompletedProcess[str]) -> str:
    """What the engine generated from two longer prompts, one of them in chunks."""
    assert result.returncode == 0, result.stderr[-3000:]
    return next(line for line in result.stdout.splitlines() if line.startswith("TOKENS"))


@pytest.fixture(scope="module")
def alone(checkpoint: Path, store: Path) -> str:
    """What one process generates."""
    return tokens(boot(checkpoint, DS41_ENGRAM_STORE=str(store)))


def test_two_ranks_read_their_own_rows_say_so_and_generate_the_same(checkpoint: Path, store: Path, alone: str) -> None:
    result = boot(checkpoint, tensor_parallel=2, DS41_ENGRAM_STORE=str(store))
    assert tokens(result) == alone
    log = result.stdout + result.stderr
    for layer in (1, 4):
        for rank in (0, 1):
            assert f"ds41: Engram layer {layer}: rank {rank} of 2 reads rows [" in log
    assert "columns [0, 3), 6 rows proven" in log and "columns [3, 6), 6 rows proven" in log


def test_two_pipeline_stages_map_their_own_layers_and_generate_the_same(
    checkpoint: Path, store: Path, alone: str
) -> None:
    result = boot(checkpoint, stages=2, DS41_ENGRAM_STORE=str(store), VLLM_PP_LAYER_PARTITION="3,4")
    assert tokens(result) == alone
    lines = [line for line in (result.stdout + result.stderr).splitlines() if "rows proven" in line]
    assert len(lines) == 2 and all("rank 0 of 1 reads rows [0, " in line for line in lines)


def test_a_cut_inside_a_group_that_shares_keys_is_refused(checkpoint: Path, store: Path) -> None:
    result = boot(checkpoint, stages=2, DS41_ENGRAM_STORE=str(store), VLLM_PP_LAYER_PARTITION="2,5")
    assert result.returncode != 0
    assert "ds41: pipeline stage from layer 2: layer 2 shares keys with layer 1" in result.stdout + result.stderr


def test_two_ranks_with_a_split_vision_tower_are_refused(checkpoint: Path, store: Path) -> None:
    result = boot(checkpoint, tensor_parallel=2, vision="weights", DS41_ENGRAM_STORE=str(store))
    assert result.returncode != 0
    assert "ds41: --mm-encoder-tp-mode: expected data with --tensor-parallel-size 2" in result.stdout + result.stderr
