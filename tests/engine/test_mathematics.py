"""The backbone's mathematics against upstream's own code and against slow, obvious forms of itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from ds41_engine import backbone as bb
from ds41_engine.engram_hash import DEAD, EngramHash, hash_multipliers, is_prime, sub_table_primes
from ds41_engine.packed import PackedBatch
from ds41_engine.rope import RotaryTables
from ds41_engine.shape import BackboneShape
from tiny_checkpoint import random_backbone, text_config

REAL_ENGRAM = {
    "engram_layer_ids": (1, 14),
    "engram_num_embeddings": (384006168, 384016682),
    "engram_vocab_size": 16000000,
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
}


class Attributes:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def real_shape() -> BackboneShape:
    """Sizes of DeepSeek-V4.1-Flash-1017 that the public config.json gives."""
    text = text_config() | {
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "head_dim": 512,
        "q_lora_rank": 1280,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "n_routed_experts": 384,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 2304,
        "sliding_window": 128,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        **REAL_ENGRAM,
    }
    return BackboneShape.from_config(text)


def test_real_shape_has_the_published_tensors() -> None:
    shape = real_shape()
    with torch.device("meta"):
        layers = {index: bb.Block(shape, index) for index in (0, 2, 14, 20, 39)}
    sizes = {
        f"{index}.{name}": tuple(parameter.shape)
        for index, block in layers.items()
        for name, parameter in block.named_parameters()
    }
    expected = {
        "0.attn.wq_a.weight": (1280, 5120),
        "0.attn.wq_b.weight": (32768, 1280),
        "0.attn.wkv.weight": (512, 5120),
        "0.attn.wo_a.weight": (8192, 4096),
        "0.attn.wo_b.weight": (5120, 8192),
        "0.attn.attn_sink": (64,),
        "2.attn.compressor.wkv.weight": (512, 5120),
        "2.attn.compressor.wgate.weight": (512, 5120),
        "2.attn.indexer.wq_b.weight": (4096, 1280),
        "2.attn.indexer.weights_proj.weight": (32, 5120),
        "2.attn.indexer.wk.weight": (128, 512),
        "0.hc_attn_fn": (24, 20480),
        "0.ffn.gate.weight": (384, 5120),
        "0.ffn.experts.383.w1.weight": (2304, 5120),
        "0.ffn.experts.0.w2.weight": (5120, 2304),
        "0.ffn.shared_experts.w3.weight": (2304, 5120),
        "14.engram.wkv.weight": (25600, 6144),
        "14.engram.q_weight": (4, 5120),
    }
    assert {name: sizes[name] for name in expected} == expected
    assert "20.attn.compressor.wgate.weight" not in sizes
    assert "20.attn.indexer.wk.weight" in sizes
    assert not any(name.startswith("39.attn.indexer") for name in sizes)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"engram_num_embeddings": [1]}, "engram_num_embeddings"),
        ({"compress_ratios": [0, 2]}, "compress_ratios"),
        ({"kv_source_layer_ids": []}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [1]}, "compress_ratios"),
        ({"num_experts_per_tok": 99}, "num_experts_per_tok"),
    ],
)
def test_contradicting_config_is_named_in_one_line(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word) as caught:
        BackboneShape.from_config(text_config() | changes)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------- Engram hash


def test_real_primes_and_multipliers_are_upstreams() -> None:
    from vllm.models.deepseek_v41.common.engram import EngramLayout, compute_hash_multipliers

    upstream = EngramLayout(Attributes(**REAL_ENGRAM))
    primes = sub_table_primes(2, 3, 8, 16000000)
    assert primes.tolist() == [[list(sizes) for sizes in layer] for layer in upstream.primes]
    ours = EngramHash.build(real_shape(), 7)
    assert torch.equal(torch.from_numpy(ours.offsets), upstream.offsets)
    theirs = compute_hash_multipliers((1, 14), 4, 99092)
    assert torch.equal(torch.from_numpy(hash_multipliers((1, 14), 4, 99092)), theirs)
    # vllm_v41 inventory: rows of the published tables
    assert primes.reshape(2, -1).sum(1).tolist() == [384006168, 384016682]


def test_is_prime_agrees_with_trial_division() -> None:
    slow = [n for n in range(3000) if n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))]
    assert [n for n in range(3000) if is_prime(n)] == slow
    assert not is_prime(3215031751)  # strong pseudoprime to 2, 3, 5 and 7


def slow_row_ids(hashing: EngramHash, compressed: list[int]) -> np.ndarray:
    """The hash as the definition says it, one position and column at a time, of one sequence."""
    layers, sizes, heads = hashing.primes.shape
    out = np.zeros((len(compressed), layers, sizes * heads), dtype=np.int64)
    for position in range(len(compressed)):
        values = []
        for shift in range(sizes + 1):
            before = position - shift
            broken = before < 0 or compressed[before] == DEAD or (shift and values[-1] is None)
            values.append(None if broken else compressed[before])
        for layer in range(layers):
            for size in range(sizes):
                rolling = 0
                for shift in range(size + 2):
                    value = hashing.pad if values[shift] is None else values[shift]
                    rolling ^= value * int(hashing.multipliers[layer, shift])
                for head in range(heads):
                    column = size * heads + head
                    offset = int(hashing.offsets[layer, column])
                    out[position, layer, column] = rolling % int(hashing.primes[layer, size, head]) + offset
    return out


def test_row_ids_follow_the_definition_with_dead_tokens_packing_and_chunks() -> None:
    hashing = EngramHash.build(real_shape(), 7)
    draw = np.random.default_rng(0)
    sequences = [draw.integers(0, 99092, size=length) for length in (40, 1, 3, 25)]
    sequences[0][17:20] = DEAD
    sequences[3][0] = DEAD
    expected = np.concatenate([slow_row_ids(hashing, list(map(int, s))) for s in sequences])
    packed = np.concatenate(sequences)
    positions = np.concatenate([np.arange(len(s)) for s in sequences])
    assert np.array_equal(hashing.row_ids(packed, positions), expected)
    chunk = hashing.row_ids(sequences[0][17:], np.arange(17, 40))[3:]
    assert np.array_equal(chunk, expected[20:40])
    rows = expected.reshape(len(packed), 2, -1)
    assert (rows >= 0).all()
    assert (rows.max(axis=(0, 2)) < np.array(REAL_ENGRAM["engram_num_embeddings"])).all()


def test_wrong_table_size_is_refused() -> None:
    shape = BackboneShape.from_config(text_config() | {"engram_num_embeddings": [10, 20]})
    with pytest.raises(ValueError, match="engram_num_embeddings"):
        EngramHash.build(shape, 0)


# ------------------------------------------------------------------------------------- RoPE, mHC, MoE, Engram


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_rope_tables_are_upstreams(ratio: int) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.models.deepseek_v41.common.rope import build_deepseek_v4_rope

    text = text_config()
    scaling = text["rope_scaling"]
    config = Attributes(
        rope_parameters=dict(scaling),
        rope_scaling=scaling,
        rope_theta=10000,
        compress_rope_theta=160000,
        qk_rope_head_dim=64,
    )
    with set_current_vllm_config(VllmConfig()):
        upstream = build_deepseek_v4_rope(
            config, head_dim=512, rope_head_dim=64, max_position_embeddings=4096, compress_ratio=ratio
        )
    table = RotaryTables(BackboneShape.from_config(text), 4096).for_ratio(ratio)
    theirs = upstream.cos_sin_cache.float()[:4096]
    # Upstream writes plain RoPE as YaRN with factor 1, which rounds the frequencies once more: 8e-6 at position 4095.
    tolerance = 0.0 if ratio else 2e-5
    assert torch.allclose(theirs[:, :32], table.cos, rtol=0, atol=tolerance)
    assert torch.allclose(theirs[:, 32:], table.sin, rtol=0, atol=tolerance)


def test_rotation_is_undone_by_its_inverse_and_leaves_the_first_channels() -> None:
    table = RotaryTables(BackboneShape.from_config(text_config()), 64).compressed
    x, positions = torch.randn(9, 3, 128), torch.arange(9) * 7
    turned = table.rotate(x, positions)
    assert torch.equal(turned[..., :64], x[..., :64])
    assert not torch.allclose(turned[1:, ..., 64:], x[1:, ..., 64:])
    assert torch.allclose(table.rotate(turned, positions, inverse=True), x, atol=1e-5)


@pytest.mark.parametrize("first", [True, False])
def test_hyper_connections_are_upstreams_reference(first: bool) -> None:
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch, mhc_pre_delayed_torch

    shape = BackboneShape.from_config(text_config())
    torch.manual_seed(0)
    tokens, copies, hidden = 5, shape.hc_mult, shape.hidden_size
    stream = torch.randn(tokens, copies, hidden)
    fn, scale, base = torch.randn(24, copies * hidden) * 0.05, torch.rand(3), torch.randn(24)
    previous = None if first else torch.rand(tokens, copies)
    post, comb, layer_input, pre = mhc_pre_delayed_torch(
        stream, fn, scale, base, shape.rms_norm_eps, shape.hc_eps, shape.hc_eps, 2.0, 20, pre_mix=previous
    )
    our_pre, our_post, our_comb = bb.hyper_connection_mix(stream, fn, scale, base, shape)
    assert torch.allclose(our_pre, pre, atol=1e-6)
    assert torch.allclose(our_post, post.squeeze(-1), atol=1e-6)
    assert torch.allclose(our_comb, comb, atol=1e-6)
    assert torch.allclose(bb.collapse(stream, previous), layer_input, atol=1e-5)
    out = torch.randn(tokens, hidden)
    assert torch.allclose(
        bb.expand(out, stream, our_post, our_comb), mhc_post_torch(out, stream, post, comb), atol=1e-5
    )


def test_moe_forms_agree_and_the_image_bias_steers() -> None:
    shape = BackboneShape.from_config(text_config())
    moe = random_backbone(shape, 8, 3).layers[0].ffn
    x, text = torch.randn(37, shape.hidden_size), torch.zeros(37, dtype=torch.bool)
    with torch.no_grad():
        moe.gate.bias_vl.copy_(torch.randn(shape.n_routed_experts) * 3)
        dense = moe(x, text)
        image = moe(x, ~text)
        moe.dense = False
        assert torch.allclose(moe(x, text), dense, atol=1e-5)
        moe.dense = True
        moe.freeze()
        assert torch.equal(moe(x, text), dense)
        chosen, weights = moe.route(x, text)
    assert not torch.allclose(image, dense, atol=1e-3)
    assert torch.allclose(weights.sum(-1), torch.full((37,), shape.routed_scaling_factor))
    scores = torch.nn.functional.softplus(x @ moe.gate.weight.t()).sqrt() + moe.gate.bias
    assert torch.equal(chosen.sort(-1).values, scores.topk(2, -1).indices.sort(-1).values)


def test_engram_gate_is_shut_where_keep_is_false_and_zero_rows_change_nothing() -> None:
    shape = BackboneShape.from_config(text_config())
    engram = random_backbone(shape, 8, 4).layers[1].engram
    stream, ids = torch.randn(6, 4, shape.hidden_size), torch.zeros(6, shape.engram_columns, dtype=torch.int64)
    keep = torch.tensor([True, True, False, True, False, True])
    engram.lookup = bb.EngramTable(torch.randn(1, 256))
    with torch.no_grad():
        out = engram(stream, ids, keep)
        assert torch.equal(out[~keep], stream[~keep])
        assert not torch.allclose(out[keep], stream[keep])
        engram.lookup = bb.EngramTable(torch.zeros(1, 256))
        assert torch.equal(engram(stream, ids, keep), stream)
        engram.lookup = None
        with pytest.raises(RuntimeError, match="lookup"):
            engram(stream, ids, keep)


# ----------------------------------------------------------------------------------------- attention, selection


def test_top_k_mask_breaks_ties_low_and_ignores_masked_columns() -> None:
    scores = torch.tensor([[1.0, 0.0, 0.0, 0.0, 2.0], [0.0, -math.inf, 3.0, -math.inf, -math.inf]])
    expected = torch.tensor([[True, True, False, False, True], [True, False, True, False, False]])
    assert torch.equal(bb.top_k_mask(scores, 3), expected)
    wide = torch.nn.functional.pad(scores, (0, 70), value=-math.inf)
    assert torch.equal(bb.top_k_mask(wide, 3), torch.nn.functional.pad(expected, (0, 70)))


def test_candidates_keep_the_best_blocks_and_always_the_newest() -> None:
    scores = torch.tensor([[9.0, 0, 0, 0, 5.0, 0, 1.0, 2.0], [9.0, 0, 3.0, 0, *[-math.inf] * 4]])
    block = torch.arange(8) // 2
    mask = bb.candidate_mask(scores, block, torch.tensor([3, 1]), 4, 2)
    assert mask.tolist() == [[True, True, *[False] * 4, True, True], [True] * 4 + [False] * 4]
    none = bb.candidate_mask(torch.full((1, 8), -math.inf), block, torch.tensor([-1]), 4, 2)
    assert not none.any()


def test_tiled_attention_equals_one_softmax_and_does_not_depend_on_company() -> None:
    torch.manual_seed(1)
    query, keys, sink = torch.randn(150, 4, 64), torch.randn(512, 64), torch.randn(4)
    mask = torch.rand(150, 512) < 0.2
    mask[:, 256:384] = False
    segments = [(keys[:128], mask[:, :128]), (keys[128:], mask[:, 128:])]
    one = bb.masked_attention(query, keys, mask, sink, 0.125)
    tiled = bb.tiled_attention(query, segments, sink, 0.125)
    assert torch.allclose(one, tiled, atol=1e-5)
    for rows in (slice(0, 1), slice(5, 22), slice(130, 150)):
        longer = (
            torch.nn.functional.pad(keys[128:], (0, 0, 0, 256)),
            torch.nn.functional.pad(mask[rows, 128:], (0, 256)),
        )
        alone = bb.tiled_attention(query[rows], [(keys[:128], mask[rows, :128]), longer], sink, 0.125)
        assert torch.equal(alone, tiled[rows])


def test_query_that_sees_nothing_gets_zero_not_nan() -> None:
    query, keys, sink = torch.randn(1, 4, 64), torch.randn(128, 64), torch.zeros(4)
    nothing = torch.zeros(1, 128, dtype=torch.bool)
    assert torch.equal(bb.tiled_attention(query, [(keys, nothing)], sink, 1.0), torch.zeros(1, 4, 64))


def run_packed(backbone: bb.Backbone, lengths: list[int], x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    batch = PackedBatch(backbone.shape, lengths, backbone.rope)
    text = torch.zeros(sum(lengths), dtype=torch.bool)
    return backbone(x, batch.positions, batch, rows, ~text, text)


def packed_case() -> tuple[bb.Backbone, torch.Tensor, torch.Tensor, list[int]]:
    shape = BackboneShape.from_config(text_config())
    backbone = random_backbone(shape, 256, 5)
    for layer, size in zip(shape.engram_layer_ids, shape.engram_num_embeddings, strict=True):
        backbone.layers[layer].engram.lookup = bb.EngramTable(torch.randn(size, shape.engram_head_dim))
    lengths = [90, 3, 157, 1]
    torch.manual_seed(2)
    x = torch.randn(sum(lengths), shape.hidden_size)
    rows = torch.randint(0, min(shape.engram_num_embeddings), (sum(lengths), 2, shape.engram_columns))
    return backbone, x, rows, lengths


def test_packing_and_causality() -> None:
    """A sequence's result depends neither on its neighbours in the pack nor on its own later tokens."""
    backbone, x, rows, lengths = packed_case()
    with torch.no_grad():
        together = run_packed(backbone, lengths, x, rows)
        begin = 0
        for length in lengths:
            part = slice(begin, begin + length)
            assert torch.allclose(run_packed(backbone, [length], x[part], rows[part]), together[part], atol=2e-4)
            begin += length
        shorter = run_packed(backbone, [61], x[:61], rows[:61])
    assert torch.allclose(shorter, together[:61], atol=2e-4)


def test_gradients_reach_every_trainable_parameter() -> None:
    backbone, x, rows, lengths = packed_case()
    batch = PackedBatch(backbone.shape, lengths, backbone.rope, record_index_scores=True)
    text = torch.zeros(sum(lengths), dtype=torch.bool)
    out = backbone(x, batch.positions, batch, rows, ~text, text)
    loss = out.square().mean()
    for _, scores, visible in batch.index_record:
        loss = loss + scores[visible].square().mean()
    loss.backward()
    assert [layer for layer, _, _ in batch.index_record] == list(backbone.shape.index_source_layer_ids)
    without = {name for name, p in backbone.named_parameters() if p.grad is None or not p.grad.abs().sum()}
    # the router's biases only select, which passes no gradient; an expert nobody chose gets none either
    unused = {name for name in without if ".experts." in name}
    assert {name.rsplit(".", 1)[1] for name in without - unused} <= {"bias", "bias_vl"}
    assert len(unused) < sum(".experts." in name for name, _ in backbone.named_parameters()) / 4


def test_effective_weight_hook_is_used_everywhere() -> None:
    backbone, x, rows, lengths = packed_case()
    for module in backbone.modules():
        if isinstance(module, bb.Linear):
            module.effective_weight = lambda weight=module.weight: weight * 0  # type: ignore[method-assign]
    with torch.no_grad():
        out = run_packed(backbone, lengths, x, rows)
        for parameter in backbone.parameters():
            if parameter.dim() == 2 and parameter.shape[0] != 24:
                parameter.zero_()
        assert torch.equal(run_packed(backbone, lengths, x, rows), out)
