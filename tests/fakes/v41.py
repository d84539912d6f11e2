"""Whole V4.1 packs at small width: 40 layers, 2 experts, the real names, dtypes, shards and EXL3 tensor layout."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ds41ctl.core.engram import sub_tables
from ds41ctl.core.tensors import DTYPE_BITS, ROUTED, TABLE, Spec, contract
from tests.fakes.packs import shard_bytes

LAYERS, EXPERTS, WIDTH = 40, 2, 128
ENGRAM_LAYERS = (1, 14)
MUL1 = (0x83DCD12D).to_bytes(4, "little")
ROWS = [sum(rows) for rows in sub_tables(2, 40, 3, 2)]
Stored = dict[str, tuple[str, list[int], bytes]]
Edit = Callable[[Stored], None]


def config() -> dict[str, Any]:
    """config.json of a small V4.1 model with the real layer structure."""
    text = {
        "vocab_size": 64, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "head_dim": 64,
        "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 32, "n_routed_experts": EXPERTS,
        "moe_intermediate_size": WIDTH, "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 2, "index_head_dim": 32, "hc_mult": 4, "engram_layer_ids": list(ENGRAM_LAYERS),
        "engram_num_embeddings": ROWS, "engram_vocab_size": 40, "engram_max_ngram_size": 3, "engram_n_heads": 2,
        "engram_head_dim": 256, "num_nextn_predict_layers": 3, "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 8, "dspark_n_routed_experts": 2,
    }  # fmt: skip
    vision = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "patch_size": 2,
        "downsample_ratio": 3,
    }
    return {"model_type": "deepseek_v41", "text_config": text, "vision_config": vision}


# the numbers of the real checkpoint's config.json that its tensor inventory depends on
REAL: dict[str, Any] = {
    "text_config": {
        "vocab_size": 129280, "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 64, "head_dim": 512,
        "q_lora_rank": 1280, "o_groups": 8, "o_lora_rank": 1024, "n_routed_experts": 384,
        "moe_intermediate_size": 2304, "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32, "index_head_dim": 128, "hc_mult": 4, "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682], "engram_vocab_size": 16000000, "engram_max_ngram_size": 4,
        "engram_n_heads": 8, "engram_head_dim": 256, "num_nextn_predict_layers": 3,
        "dspark_target_layer_ids": [37, 38, 39], "dspark_markov_rank": 256, "dspark_n_routed_experts": 128,
    },
    "vision_config": {
        "num_hidden_layers": 32, "hidden_size": 1024, "intermediate_size": 2816, "patch_size": 14,
        "downsample_ratio": 3,
    },
}  # fmt: skip


def stored(spec: Spec, rate: float = 3) -> tuple[str, list[int], bytes]:
    """A tensor of zeros that fits a spec; a free extent becomes a trellis of `rate` bits."""
    shape = [int(16 * rate) if extent == -1 else extent for extent in spec.shape]
    dtype = spec.dtypes[0]
    return dtype, shape, bytes(math.prod(shape) * DTYPE_BITS[dtype] // 8)


def official_layout(tree: Mapping[str, Any]) -> dict[str, dict[str, Spec]]:
    """The official checkpoint's 48 shards for a config: a layer each, then the rest, then the two Engram shards."""
    shards: dict[str, dict[str, Spec]] = {}
    for name, spec in contract(tree).items():
        match = re.match(r"layers\.(\d+)\.", name)
        number = int(match[1]) + 1 if match else 41
        if match and ".engram." in name:
            number = 47 if int(match[1]) == ENGRAM_LAYERS[0] else 48
        elif name.startswith("mtp."):
            number = 42 + int(name[4])
        elif name.startswith("vision."):
            number = 45 + int("norm" in name)
        shards.setdefault(f"model-{number:05}-of-00048.safetensors", {})[name] = spec
    return shards


def official() -> dict[str, Stored]:
    """The official checkpoint at small width."""
    layout = official_layout(config())
    return {shard: {name: stored(spec) for name, spec in specs.items()} for shard, specs in layout.items()}


def exl3_layout(tree: Mapping[str, Any], total: int, layers: Iterable[int]) -> dict[str, dict[str, Spec]]:
    """Shards with the routed experts alone for a config: layer L in shard L + 2 of `total`, codebook mul1."""
    shards: dict[str, dict[str, Spec]] = {}
    wanted = set(layers)
    for name, spec in contract(tree, routed="exl3").items():
        match = ROUTED.fullmatch(name)
        if match is None or int(match[2]) not in wanted:
            continue
        shard = shards.setdefault(f"model-{int(match[2]) + 2:05}-of-{total:05}.safetensors", {})
        shard[name] = spec
        if match[5] == "trellis":
            shard[f"{match[1]}.mul1"] = Spec("codebook", ("I32",), ())
    return shards


def exl3(rates: Callable[[int], float], total: int, layers: Iterable[int] = range(LAYERS)) -> dict[str, Stored]:
    """The same at small width, K as `rates` says."""
    return {
        shard: {
            name: ("I32", [], MUL1) if name.endswith(".mul1") else stored(spec, rates(int(name.split(".")[1])))
            for name, spec in specs.items()
        }
        for shard, specs in exl3_layout(config(), total, layers).items()
    }


def files_of(shards: Mapping[str, Stored], settings: Mapping[str, Any] | None = None) -> dict[str, bytes]:
    """What a repository holds: shards, index, config.json with these quantisation settings, tokenizer."""
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    tree = config() | ({"quantization_config": dict(settings)} if settings else {})
    return {
        **{shard: shard_bytes(tensors) for shard, tensors in shards.items()},
        "model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": weight_map}).encode(),
        "config.json": json.dumps(tree).encode(),
        "tokenizer.json": b'{"version": "1.0"}',
        "encoding/notes.json": b"{}",
        "README.md": b"about",
    }


def is_table(name: str) -> bool:
    """True for the tensors of an Engram table."""
    return TABLE.fullmatch(name) is not None
