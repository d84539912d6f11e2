"""Writes a randomly initialised DeepSeek-V4.1 checkpoint in the real layout, small enough to boot in seconds.

Used by the tests in this folder only; the trained pack is another thing. Sizes differ from that pack on purpose.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from ds41_engine.backbone import Backbone
from ds41_engine.engram_hash import sub_table_primes
from ds41_engine.quant import (
    TensorFormat,
    encode_engram_rows,
    encode_fp8_blocks,
    encode_mxfp4,
    tensor_format,
)
from ds41_engine.shape import BackboneShape
from safetensors.torch import save_file
from torch import Tensor

VOCAB_SIZE = 129280
SPECIAL = {
    0: "<｜begin▁of▁sentence｜>",
    1: "<｜end▁of▁sentence｜>",
    2: "<｜▁pad▁｜>",
    128799: "<｜noise｜>",
    128803: "<｜User｜>",
    128804: "<｜Assistant｜>",
    128805: "<｜System｜>",
    129264: "<｜deepseek_image｜>",
}
PLAIN = {128797: "<think>", 128798: "</think>", 128816: "｜DSML｜"}

TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 48,
    "compress_ratios": [0, 2, 2, 1, 1, 1, 1, 0],
    "compress_rope_theta": 160000,
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 32,
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 6,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 4],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 50,
    "engram_n_heads": 2,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
VISION: dict[str, Any] = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "patch_size": 14,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 18496,
    "max_wh_ratio": None,
}


def write_tokenizer(folder: Path) -> int:
    """A byte-level tokenizer of exactly ``VOCAB_SIZE`` ids; returns its compressed size."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import AutoTokenizer
    from vllm.models.deepseek_v41.common.engram import build_compressed_token_map

    vocab: dict[str, int] = {}
    letters = iter(sorted(ByteLevel.alphabet()))
    for token in range(VOCAB_SIZE):
        text = SPECIAL.get(token) or PLAIN.get(token) or next(letters, f"<filler {token}>")
        vocab[text] = token
    added = [
        {
            "id": token,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token in SPECIAL,
        }
        for token, text in sorted({**SPECIAL, **PLAIN}.items())
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2],
        "model_max_length": 1048576,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")
    return build_compressed_token_map(AutoTokenizer.from_pretrained(folder))[1]


def text_config(compressed_size: int = 1000, **changes: Any) -> dict[str, Any]:
    """``TEXT`` with the Engram sizes that follow from it."""
    text = {**TEXT, "engram_compressed_vocab_size": compressed_size, **changes}
    primes = sub_table_primes(
        len(text["engram_layer_ids"]),
        text["engram_max_ngram_size"] - 1,
        text["engram_n_heads"],
        text["engram_vocab_size"],
    )
    text["engram_num_embeddings"] = [int(total) for total in primes.reshape(len(primes), -1).sum(1)]
    return text


def random_backbone(shape: BackboneShape, max_positions: int, seed: int) -> Backbone:
    """A backbone with random parameters (no Engram lookup set)."""
    generator = torch.Generator().manual_seed(seed)
    backbone = Backbone(shape, max_positions)
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if parameter.dim() == 2:
                spread = 1.0 if ".engram." in name and "wkv" not in name else parameter.shape[1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
            elif "norm" in name:
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return backbone


def encode(name: str, value: Tensor) -> dict[str, Tensor]:
    """A tensor as the checkpoint stores it: one or two entries."""
    kind = tensor_format(name)
    stem = name.removesuffix(".weight")
    if kind is TensorFormat.F32:
        return {name: value.float().contiguous()}
    if kind is TensorFormat.BF16:
        return {name: value.bfloat16().contiguous()}
    encoders = {
        TensorFormat.FP8_BLOCK: encode_fp8_blocks,
        TensorFormat.MXFP4: encode_mxfp4,
        TensorFormat.ENGRAM_ROWS: encode_engram_rows,
    }
    codes, scale = encoders[kind](value)
    return {name: codes.contiguous(), f"{stem}.scale": scale.contiguous().view(torch.float8_e8m0fnu)}


def _vision_tensors(generator: torch.Generator, hidden: int) -> dict[str, Tensor]:
    width, inner = VISION["hidden_size"], VISION["intermediate_size"]
    patch = 3 * VISION["patch_size"] ** 2
    merged = width * VISION["downsample_ratio"] ** 2

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator) * 0.1

    tensors = {
        "vision.patch_embed.proj.weight": draw(width, patch),
        "vision.patch_embed.proj.bias": draw(width),
        "vision.norm.weight": torch.ones(width),
        "aligner.w1.weight": draw(hidden, merged),
        "aligner.w1.bias": draw(hidden),
        "aligner.w2.weight": draw(hidden, hidden),
        "aligner.w2.bias": draw(hidden),
        "image_start": draw(hidden),
        "image_end": draw(hidden),
        "image_newline": draw(hidden),
    }
    for block in range(VISION["num_hidden_layers"]):
        prefix = f"vision.blocks.{block}."
        tensors |= {
            prefix + "attn.wqkv.weight": draw(3 * width, width),
            prefix + "attn.wqkv.bias": draw(3 * width),
            prefix + "attn.wo.weight": draw(width, width),
            prefix + "attn.wo.bias": draw(width),
            prefix + "mlp.w1.weight": draw(2 * inner, width),
            prefix + "mlp.w2.weight": draw(width, inner),
            prefix + "norm1.weight": torch.ones(width),
            prefix + "norm2.weight": torch.ones(width),
        }
    return tensors


def write_checkpoint(folder: Path, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Write config, tokenizer and three shards; returns the text config."""
    folder.mkdir(parents=True, exist_ok=True)
    text = text_config(write_tokenizer(folder), **changes)
    config = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "image_token_id": 129264,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "text_config": text,
        "vision_config": VISION,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shape = BackboneShape.from_config(text)
    generator = torch.Generator().manual_seed(seed + 1)
    main: dict[str, Tensor] = {}
    engram: dict[int, dict[str, Tensor]] = {layer: {} for layer in shape.engram_layer_ids}
    for name, value in random_backbone(shape, 8, seed).state_dict().items():
        target = engram[int(name.split(".")[1])] if ".engram." in name else main
        target |= encode(name, value)
    for layer, rows in zip(shape.engram_layer_ids, shape.engram_num_embeddings, strict=True):
        table = torch.randn(rows, shape.engram_head_dim, generator=generator)
        engram[layer] |= encode(f"layers.{layer}.engram.embed.weight", table)
    for name in ("embed.weight", "head.weight"):
        main |= encode(name, torch.randn(shape.vocab_size, shape.hidden_size, generator=generator))
    for name, value in _vision_tensors(generator, shape.hidden_size).items():
        main |= encode(name, value)
    shards = [main, *engram.values()]
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return text


def write_store(store: Path, checkpoint: Path, memory_backed: bool = True, nodes: int = 1) -> dict[str, Any]:
    """Build the Engram store of a checkpoint as the CLI does, split over ``nodes``; returns the manifest."""
    from safetensors import safe_open

    store.mkdir(parents=True, exist_ok=True)
    text = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["text_config"]
    weight_map = json.loads((checkpoint / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    layers = []
    for layer in text["engram_layer_ids"]:
        name = f"layers.{layer}.engram.embed"
        shard = checkpoint / weight_map[f"{name}.weight"]
        with safe_open(shard, "pt") as source:
            weight = source.get_tensor(f"{name}.weight").view(torch.uint8)
            scale = source.get_tensor(f"{name}.scale").view(torch.uint8)
        records = torch.cat((weight, scale), 1).numpy()
        parts = []
        for node in range(nodes):
            first, end = len(records) * node // nodes, len(records) * (node + 1) // nodes
            file = f"layer-{layer}-node{node}.rows"
            (store / file).write_bytes(records[first:end].tobytes())
            size = (end - first) * 264
            parts.append({"file": file, "node": node, "first_row": first, "rows": end - first, "bytes": size})
        canaries = [
            {"row": row, "sha256": hashlib.sha256(records[row].tobytes()).hexdigest()}
            for row in (0, len(records) // 2, len(records) - 1)
        ]
        layers.append(
            {
                "layer": layer,
                "parts": parts,
                "rows": len(records),
                "bytes": records.size,
                "source_file": shard.name,
                "source_sha256": hashlib.sha256(shard.read_bytes()).hexdigest(),
                "canaries": canaries,
            }
        )
    manifest = {
        "format": 2,
        "record_bytes": 264,
        "data_dir": "",
        "tensor_parallel": 1,
        "page_kind": "4k",
        "memory_backed": memory_backed,
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "layers": layers,
    }
    (store / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return manifest
