"""Which tensors a V4.1 checkpoint must have, from its config.json alone (no torch, no vLLM).

The drafter's (``mtp.*``) are left out: an engine without a drafter does not read them. Routed experts are listed for
the formats FP8 and MXFP4 of the official checkpoint; a pack in another format (EXL3) names them otherwise, and what its
experts need is that format's own loader to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_FP8_ATTENTION = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")


def expected(config: Mapping[str, Any]) -> set[str]:
    """Names of all tensors; 93,684 for the official checkpoint. Raises KeyError when the config lacks a number."""
    text: Mapping[str, Any] = config.get("text_config", config)
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    official = (config.get("quantization_config") or {}).get("quant_method") == "fp8"
    names = {"embed.weight", "head.weight", "norm.weight"}
    for layer in range(int(text["num_hidden_layers"])):
        names.update(_layer(layer, text))
        if official:
            names.update(
                f"layers.{layer}.ffn.experts.{expert}.{part}.{kind}"
                for expert in range(int(text["n_routed_experts"]))
                for part in ("w1", "w2", "w3")
                for kind in ("weight", "scale")
            )
    if vision:
        names.update(_vision(vision))
    return names


def _pair(name: str) -> Iterator[str]:
    yield f"{name}.weight"
    yield f"{name}.scale"


def _layer(layer: int, text: Mapping[str, Any]) -> Iterator[str]:
    prefix = f"layers.{layer}"
    attn = f"{prefix}.attn"
    for part in _FP8_ATTENTION:
        yield from _pair(f"{attn}.{part}")
    yield from (f"{attn}.q_norm.weight", f"{attn}.kv_norm.weight", f"{attn}.attn_sink")
    yield from (f"{prefix}.attn_norm.weight", f"{prefix}.ffn_norm.weight")
    for side in ("attn", "ffn"):
        yield from (f"{prefix}.hc_{side}_{part}" for part in ("fn", "base", "scale"))
    yield from (f"{prefix}.ffn.gate.{part}" for part in ("weight", "bias", "bias_vl"))
    for part in ("w1", "w2", "w3"):
        yield from _pair(f"{prefix}.ffn.shared_experts.{part}")
    if layer in text["kv_source_layer_ids"]:
        yield from (f"{attn}.compressor.wkv.weight", f"{attn}.compressor.norm.weight")
        if int(text["compress_ratios"][layer]) > 1:
            yield f"{attn}.compressor.wgate.weight"
        yield from (f"{attn}.indexer.wk.weight", f"{attn}.indexer.k_norm.weight")
    if layer in text["index_source_layer_ids"]:
        yield from _pair(f"{attn}.indexer.wq_b")
        yield f"{attn}.indexer.weights_proj.weight"
    if layer in text["engram_layer_ids"]:
        engram = f"{prefix}.engram"
        yield from _pair(f"{engram}.embed")
        yield from _pair(f"{engram}.wkv")
        yield from (f"{engram}.q_weight", f"{engram}.k_weight")


def _vision(vision: Mapping[str, Any]) -> Iterator[str]:
    yield from ("vision.patch_embed.proj.weight", "vision.patch_embed.proj.bias", "vision.norm.weight")
    for block in range(int(vision["num_hidden_layers"])):
        prefix = f"vision.blocks.{block}"
        for part in ("wqkv", "wo"):
            yield from (f"{prefix}.attn.{part}.weight", f"{prefix}.attn.{part}.bias")
        yield from (f"{prefix}.mlp.w1.weight", f"{prefix}.mlp.w2.weight")
        yield from (f"{prefix}.norm1.weight", f"{prefix}.norm2.weight")
    for part in ("w1", "w2"):
        yield from (f"aligner.{part}.weight", f"aligner.{part}.bias")
    yield from ("image_start", "image_end", "image_newline")
