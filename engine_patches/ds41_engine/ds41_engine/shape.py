"""The shape of a DeepSeek-V4.1 text backbone, read from a checkpoint's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

IMAGE_TOKEN_ID = 129264
"""Token id at every position of an image span (vLLM: IMAGE_SENTINEL_BASE_ID)."""


@dataclass(frozen=True)
class YarnScaling:
    """YaRN parameters of the compressed layers' RoPE."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class BackboneShape:
    """Sizes and constants of the text backbone, named as in ``text_config``.

    Only ``compress_ratios`` may be longer than ``num_hidden_layers``: the checkpoint also lists the drafter's layers.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnScaling
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_vocab_size: int
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int

    @property
    def engram_columns(self) -> int:
        """Table rows read per token and Engram layer: one per (n-gram size, head)."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def ratio(self, layer: int) -> int:
        """Compression ratio of a layer; 0 means sliding window only."""
        return self.compress_ratios[layer] if layer < len(self.compress_ratios) else 0

    def kv_source(self, layer: int) -> int:
        """Layer whose compressed rows ``layer`` attends to: the latest source at or before it."""
        return _latest(self.kv_source_layer_ids, layer, "kv_source_layer_ids")

    def index_source(self, layer: int) -> int:
        """Layer whose top-k selection ``layer`` uses: the latest index source at or before it."""
        return _latest(self.index_source_layer_ids, layer, "index_source_layer_ids")

    def check_stage(self, local: range) -> None:
        """Raise ValueError (one line) when a pipeline stage with these layers would need rows of an earlier stage."""
        first = local.start
        for layer in local if first else ():
            if self.ratio(layer) and min(self.kv_source(layer), self.index_source(layer)) < first:
                raise ValueError(
                    f"pipeline stage from layer {first}: layer {layer} shares keys with layer {self.kv_source(layer)} "
                    f"before it; cut before one of {list(self.kv_source_layer_ids)} with VLLM_PP_LAYER_PARTITION"
                )
        if first > self.candidate_source_layer_id >= 0 and self.candidate_topk_blocks and local:
            raise ValueError(
                f"pipeline stage from layer {first}: the candidates of layer {self.candidate_source_layer_id} are "
                "before it; cut at or before that layer with VLLM_PP_LAYER_PARTITION"
            )

    @classmethod
    def from_config(cls, config: Any) -> BackboneShape:
        """Read a shape from a ``text_config`` mapping or from vLLM's flattened ``DeepseekV41Config``.

        Raises:
            ValueError: a required field is missing or the fields contradict each other; one line naming the field.
        """
        get = config.get if isinstance(config, Mapping) else lambda name, default=None: getattr(config, name, default)

        def need(name: str) -> Any:
            value = get(name)
            if value is None:
                raise ValueError(f"config field {name}: expected a value, found none; use a DeepSeek-V4.1 config.json")
            return value

        def ids(name: str) -> tuple[int, ...]:
            return tuple(int(v) for v in (get(name) or ()))

        scaling = get("rope_scaling") or get("rope_parameters") or {}
        yarn = YarnScaling(
            factor=float(scaling.get("factor", 1.0)),
            original_max_position_embeddings=int(scaling.get("original_max_position_embeddings", 65536)),
            beta_fast=float(scaling.get("beta_fast", 32)),
            beta_slow=float(scaling.get("beta_slow", 1)),
        )
        candidate_source = get("candidate_source_layer_id")
        shape = cls(
            vocab_size=int(need("vocab_size")),
            hidden_size=int(need("hidden_size")),
            num_hidden_layers=int(need("num_hidden_layers")),
            num_attention_heads=int(need("num_attention_heads")),
            head_dim=int(need("head_dim")),
            qk_rope_head_dim=int(need("qk_rope_head_dim")),
            q_lora_rank=int(need("q_lora_rank")),
            o_lora_rank=int(need("o_lora_rank")),
            o_groups=int(need("o_groups")),
            sliding_window=int(need("sliding_window")),
            rms_norm_eps=float(need("rms_norm_eps")),
            rope_theta=float(need("rope_theta")),
            compress_rope_theta=float(need("compress_rope_theta")),
            yarn=yarn,
            compress_ratios=tuple(int(v) for v in need("compress_ratios")),
            kv_source_layer_ids=ids("kv_source_layer_ids"),
            index_source_layer_ids=ids("index_source_layer_ids"),
            index_n_heads=int(need("index_n_heads")),
            index_head_dim=int(need("index_head_dim")),
            index_topk=int(need("index_topk")),
            candidate_source_layer_id=-1 if candidate_source is None else int(candidate_source),
            candidate_topk_blocks=int(get("candidate_topk_blocks") or 0),
            candidate_block_size=int(get("candidate_block_size") or 0),
            n_routed_experts=int(need("n_routed_experts")),
            n_shared_experts=int(need("n_shared_experts")),
            num_experts_per_tok=int(need("num_experts_per_tok")),
            moe_intermediate_size=int(need("moe_intermediate_size")),
            norm_topk_prob=bool(get("norm_topk_prob", True)),
            routed_scaling_factor=float(get("routed_scaling_factor") or 1.0),
            swiglu_limit=float(get("swiglu_limit") or 0.0),
            hc_mult=int(need("hc_mult")),
            hc_sinkhorn_iters=int(need("hc_sinkhorn_iters")),
            hc_eps=float(need("hc_eps")),
            engram_layer_ids=ids("engram_layer_ids"),
            engram_num_embeddings=ids("engram_num_embeddings"),
            engram_vocab_size=int(get("engram_vocab_size") or 0),
            engram_max_ngram_size=int(get("engram_max_ngram_size") or 2),
            engram_n_heads=int(get("engram_n_heads") or 1),
            engram_head_dim=int(get("engram_head_dim") or 256),
            engram_pad_token_id=int(get("engram_pad_token_id") or 0),
            engram_compressed_vocab_size=int(get("engram_compressed_vocab_size") or 0),
        )
        shape.check()
        return shape

    def check(self) -> None:
        """Raise ValueError (one line) when the fields contradict each other."""
        if len(self.engram_layer_ids) != len(self.engram_num_embeddings):
            raise ValueError(
                f"config field engram_num_embeddings: expected {len(self.engram_layer_ids)} entries (one per "
                f"engram_layer_ids), found {len(self.engram_num_embeddings)}"
            )
        if len(self.compress_ratios) < self.num_hidden_layers:
            raise ValueError(
                f"config field compress_ratios: expected at least {self.num_hidden_layers} entries, "
                f"found {len(self.compress_ratios)}"
            )
        if self.num_attention_heads * self.head_dim % self.o_groups:
            raise ValueError(f"config field o_groups: {self.o_groups} does not divide the attention output width")
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"config field num_experts_per_tok: expected at most n_routed_experts={self.n_routed_experts}, "
                f"found {self.num_experts_per_tok}"
            )
        for layer in range(self.num_hidden_layers):
            if not self.ratio(layer):
                continue
            source = self.kv_source(layer)
            self.index_source(layer)
            if self.ratio(source) != self.ratio(layer):
                raise ValueError(
                    f"config field compress_ratios: layer {layer} has ratio {self.ratio(layer)} but reads the rows of "
                    f"layer {source} with ratio {self.ratio(source)}"
                )


def _latest(sources: tuple[int, ...], layer: int, name: str) -> int:
    candidates = [source for source in sources if source <= layer]
    if not candidates:
        raise ValueError(f"config field {name}: no source layer at or before layer {layer}, found {list(sources)}")
    return max(candidates)
