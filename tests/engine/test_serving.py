"""The model inside the real vLLM engine: same bits however a request is scheduled, and the oracle's numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ds41_engine import register
from ds41_engine.backbone import Backbone, EngramTable
from ds41_engine.checkpoint import decode_tensors
from ds41_engine.engram_hash import EngramHash
from ds41_engine.packed import PackedBatch
from ds41_engine.quant import decode_engram_rows
from ds41_engine.shape import IMAGE_TOKEN_ID, BackboneShape

CHUNK = 112
BLOCK = 16
"""Tokens of a block of the prefix cache; the tests below share prefixes of one block and of many."""
GENERATED = 6


@pytest.fixture(scope="module")
def engine(checkpoint: Path, store: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS41_ENGRAM_STORE", str(store))
        register()
        from vllm import LLM

        yield LLM(
            model=str(checkpoint),
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=4,
            max_num_batched_tokens=CHUNK,
            enable_prefix_caching=True,
            max_logprobs=20,
        )


def prompt(length: int, seed: int) -> list[int]:
    """Random byte tokens with repeats, so that n-grams recur."""
    draw = random.Random(seed)
    return [draw.randrange(3, 40) for _ in range(length)]


Logprobs = list[dict[int, float]]


def run(engine: Any, prompts: list[Any], generated: int = GENERATED, fresh: bool = True) -> list[Logprobs]:
    """Exact logprobs of the top tokens at every generated position, per prompt."""
    from vllm import SamplingParams

    if fresh:
        assert engine.reset_prefix_cache()
    sampling = SamplingParams(temperature=0, max_tokens=generated, logprobs=20, ignore_eos=True, detokenize=False)
    inputs = [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts]
    outputs = engine.generate(inputs, sampling, use_tqdm=False)
    cached = [output.num_cached_tokens for output in outputs]
    assert not any(cached) if fresh else all(cached), f"tokens taken from the prefix cache, by prompt: {cached}"
    return [
        [{token: entry.logprob for token, entry in position.items()} for position in output.outputs[0].logprobs]
        for output in outputs
    ]


def test_chunks_and_prefix_cache_are_really_on(engine: Any) -> None:
    """Upstream turns both off for what it takes to be MLA on a CPU without AMX; the tests below would prove nothing."""
    config = engine.llm_engine.vllm_config
    assert config.scheduler_config.enable_chunked_prefill
    assert config.scheduler_config.max_num_batched_tokens == CHUNK
    assert config.cache_config.enable_prefix_caching
    assert config.cache_config.block_size == BLOCK


@pytest.mark.parametrize("amx", [True, False], ids=["AMX", "no AMX"])
def test_every_cpu_serves_in_the_same_chunks_and_blocks(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, amx: bool
) -> None:
    """Upstream takes blocks of 128 tokens on a CPU with AMX and of 16 on others, where it forbids chunks as well."""
    from vllm.engine.arg_utils import EngineArgs

    register()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    for asked, expected in ((None, BLOCK), (64, 64)):
        config = EngineArgs(
            model=str(checkpoint),
            enforce_eager=True,
            max_model_len=1024,
            max_num_batched_tokens=CHUNK,
            enable_prefix_caching=True,
            block_size=asked,
        ).create_engine_config()
        assert config.cache_config.block_size == expected
        assert config.cache_config.enable_prefix_caching
        assert config.scheduler_config.enable_chunked_prefill
        assert config.scheduler_config.max_num_batched_tokens == CHUNK


def test_solo_batched_and_chunked_are_identical(engine: Any) -> None:
    prompts = [prompt(201, 1), prompt(333, 2), prompt(1, 3), prompt(150, 4)]
    solo = [run(engine, [p])[0] for p in prompts]
    assert run(engine, prompts) == solo
    assert run(engine, prompts[::-1]) == solo[::-1]


def test_later_chunks_of_a_prompt_are_hashed_ahead(engine: Any) -> None:
    ahead = engine.llm_engine.model_executor.driver_worker.worker.model_runner.model.language_model.ahead
    before, hits = ahead.tokens, ahead.hits
    run(engine, [prompt(3 * CHUNK, 13)], generated=1)
    assert ahead.hits - hits == 2 * (CHUNK + 3), "the second and third chunk, each with three predecessors"
    assert ahead.tokens - before == 3 * CHUNK + 6


def test_decode_after_chunks_equals_one_longer_prompt(engine: Any) -> None:
    tokens = prompt(290, 5)
    whole = run(engine, [tokens])[0]
    best = [max(position, key=lambda token: position[token]) for position in whole]
    continued = run(engine, [tokens + best[:3]], generated=GENERATED - 3)[0]
    assert continued == whole[3:]


@pytest.mark.parametrize("shared", [17, 128, 301])
def test_prefix_hit_is_identical(engine: Any, shared: int) -> None:
    first, second = prompt(340, 6), prompt(340, 7)
    second[:shared] = first[:shared]
    cold = run(engine, [second])[0]
    run(engine, [first])
    assert run(engine, [second], fresh=False)[0] == cold
    assert run(engine, [second], fresh=False)[0] == cold


def image(colour: str, size: int = 150) -> Any:
    from PIL import Image

    return Image.new("RGB", (size, size), colour)


def image_prompt(tail: int, picture: Any) -> dict[str, Any]:
    return {
        "prompt_token_ids": [0, *prompt(30, 8), IMAGE_TOKEN_ID, *prompt(tail, 9)],
        "multi_modal_data": {"image": picture},
    }


def test_image_is_seen_and_schedule_does_not_matter(engine: Any) -> None:
    red, green = image_prompt(120, image("red")), image_prompt(120, image("green"))
    cold = run(engine, [red])[0]
    assert run(engine, [prompt(160, 10), red])[1] == cold
    assert run(engine, [red], fresh=False)[0] == cold
    assert run(engine, [green])[0] != cold


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def oracle(folder: Path, tokens: list[int], *, zero_tables: bool = False) -> torch.Tensor:
    """Logprobs ``[T, vocab]`` of one sequence from the packed fp32 form of the same mathematics."""
    from transformers import AutoTokenizer
    from vllm.models.deepseek_v41.common.engram import build_compressed_token_map

    raw = read_checkpoint(folder)
    shape = BackboneShape.from_config(json.loads((folder / "config.json").read_text())["text_config"])
    values = {name: value.float() for name, value in decode_tensors(raw.items()) if ".engram.embed." not in name}
    backbone = Backbone(shape, len(tokens) + 1)
    expected = backbone.state_dict().keys()
    backbone.load_state_dict({name: values[name] for name in expected})
    for layer in shape.engram_layer_ids:
        name = f"layers.{layer}.engram.embed"
        table = decode_engram_rows(raw[f"{name}.weight"], raw[f"{name}.scale"])
        backbone.layers[layer].engram.lookup = EngramTable(table * (0.0 if zero_tables else 1.0))
    token_map = np.array(build_compressed_token_map(AutoTokenizer.from_pretrained(folder))[0])
    batch = PackedBatch(shape, [len(tokens)], backbone.rope)
    hashing = EngramHash.build(shape, int(token_map[shape.engram_pad_token_id]))
    rows = torch.from_numpy(hashing.row_ids(token_map[tokens], batch.positions.numpy()))
    nobody = torch.zeros(len(tokens), dtype=torch.bool)
    with torch.no_grad():
        hidden = backbone(values["embed.weight"][tokens], batch.positions, batch, rows, ~nobody, nobody)
        return (hidden @ values["head.weight"].t()).log_softmax(-1)


def test_engine_agrees_with_the_packed_oracle(engine: Any, checkpoint: Path) -> None:
    tokens = prompt(300, 11)
    found = run(engine, [tokens])[0]
    best = [max(position, key=lambda token: position[token]) for position in found]
    expected = oracle(checkpoint, tokens + best)
    for step, position in enumerate(found):
        row = expected[len(tokens) - 1 + step]
        assert int(row.argmax()) == best[step]
        for token, logprob in position.items():
            # fp32 in another order of summation, seven layers: measured below 1e-4
            assert abs(float(row[token]) - logprob) < 1e-3


def test_engram_rows_matter(engine: Any, checkpoint: Path) -> None:
    tokens = prompt(60, 12)
    found = run(engine, [tokens], generated=1)[0][0]
    without = oracle(checkpoint, tokens, zero_tables=True)[-1]
    assert max(abs(float(without[token]) - logprob) for token, logprob in found.items()) > 0.05
