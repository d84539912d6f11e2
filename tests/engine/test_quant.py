"""Number formats: every code decodes to its definition, and decode(encode(x)) is as near as the format allows."""

from __future__ import annotations

import pytest
import torch
from ds41_engine import quant
from hypothesis import given, settings
from hypothesis import strategies as st

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**31), st.integers(-20, 20))


def draw(rows: int, columns: int, seed: int, exponent: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * 2.0**exponent


@given(SIZES)
@settings(max_examples=40, deadline=None)
def test_fp8_blocks_round_trip(size: tuple[int, int, int, int]) -> None:
    weight = draw(size[0] * 32, size[1] * 32, size[2], size[3])
    codes, scale = quant.encode_fp8_blocks(weight)
    assert codes.dtype == torch.float8_e4m3fn
    assert scale.shape == (size[0], size[1])
    decoded = quant.decode_fp8_blocks(codes, scale)
    largest = weight.unflatten(0, (-1, 32)).unflatten(-1, (-1, 32)).abs().amax((1, 3))
    largest = largest.repeat_interleave(32, 0).repeat_interleave(32, 1)
    # E4M3: 3 mantissa bits (relative error 2**-4); below 2**-6 of the scale the step is 2**-9, and scale < largest/224
    allowed = torch.maximum(weight.abs() * 2**-4, largest / 224 * 2**-10)
    assert bool(((decoded - weight).abs() <= allowed * 1.0001).all())
    assert torch.equal(quant.fake_fp8_blocks(weight), decoded)
    assert torch.equal(quant.decode_fp8_blocks(*quant.encode_fp8_blocks(decoded)), decoded)


@given(SIZES)
@settings(max_examples=40, deadline=None)
def test_mxfp4_round_trip(size: tuple[int, int, int, int]) -> None:
    weight = draw(size[0] * 3, size[1] * 32, size[2], size[3])
    packed, scale = quant.encode_mxfp4(weight)
    assert packed.dtype == torch.int8
    assert packed.shape == (weight.shape[0], weight.shape[1] // 2)
    decoded = quant.decode_mxfp4(packed, scale)
    largest = weight.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1)
    # the widest gap of the levels is 2 (between 4 and 6), and scale <= largest/3
    assert bool(((decoded - weight).abs() <= largest / 3 * 1.0001).all())
    assert torch.equal(quant.fake_mxfp4(weight), decoded)
    assert torch.equal(quant.fake_mxfp4(weight[None].repeat(2, 1, 1))[1], decoded)
    assert torch.equal(quant.decode_mxfp4(*quant.encode_mxfp4(decoded)), decoded)


@given(SIZES)
@settings(max_examples=20, deadline=None)
def test_engram_rows_round_trip(size: tuple[int, int, int, int]) -> None:
    values = draw(size[0], 256, size[2], size[3])
    codes, scale = quant.encode_engram_rows(values)
    decoded = quant.decode_engram_rows(codes, scale)
    assert bool(((decoded - values).abs() <= values.abs().amax() * 2**-4).all())
    records = torch.cat((codes.view(torch.uint8), scale), 1)
    assert records.shape[1] == quant.ENGRAM_RECORD_BYTES
    assert torch.equal(quant.decode_engram_records(records), decoded)
    assert torch.equal(quant.decode_engram_records(records[None, :, :])[0], decoded)


def test_every_fp4_code_has_its_value_low_nibble_first() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | (codes[1::2] << 4)).repeat(2)[None]
    scale = torch.tensor([[127]], dtype=torch.uint8)
    levels = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert quant.decode_mxfp4(packed.view(torch.int8), scale)[0, :16].tolist() == levels + [-v for v in levels]
    assert quant.decode_mxfp4(packed, scale + 3)[0, 1].item() == 4.0


def test_ue8m0_is_a_power_of_two_and_nan_is_refused() -> None:
    codes = torch.tensor([0, 1, 126, 127, 128, 254], dtype=torch.uint8)
    assert quant.decode_ue8m0(codes).tolist() == [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127]
    assert torch.equal(quant.decode_ue8m0(codes.view(torch.float8_e8m0fnu)), quant.decode_ue8m0(codes))
    with pytest.raises(ValueError, match="255"):
        quant.decode_ue8m0(torch.tensor([255], dtype=torch.uint8))


def test_zero_and_extreme_blocks() -> None:
    for value in (0.0, 1e-38, 448.0, 449.0, 1e30):
        weight = torch.full((32, 32), value)
        decoded = quant.fake_fp8_blocks(weight)
        assert bool(torch.isfinite(decoded).all())
        assert abs(decoded[0, 0].item() - value) <= max(value * 2**-4, 1e-37)


@pytest.mark.parametrize("encode", [quant.encode_fp8_blocks, quant.encode_mxfp4])
def test_odd_sizes_are_refused(encode: object) -> None:
    with pytest.raises(ValueError, match="multiples of 32"):
        encode(torch.zeros(32, 40))  # type: ignore[operator]


def test_scales_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="expected scales"):
        quant.decode_fp8_blocks(torch.zeros(64, 64).to(torch.float8_e4m3fn), torch.zeros(1, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match="expected scales"):
        quant.decode_mxfp4(torch.zeros(4, 32, dtype=torch.int8), torch.zeros(4, 1, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("layers.0.attn.wo_a.weight", quant.TensorFormat.FP8_BLOCK),
        ("layers.0.attn.wkv.weight", quant.TensorFormat.FP8_BLOCK),
        ("layers.2.attn.compressor.wkv.weight", quant.TensorFormat.BF16),
        ("layers.2.attn.indexer.wq_b.weight", quant.TensorFormat.FP8_BLOCK),
        ("layers.2.attn.indexer.wk.weight", quant.TensorFormat.BF16),
        ("layers.1.engram.wkv.weight", quant.TensorFormat.FP8_BLOCK),
        ("layers.1.engram.embed.weight", quant.TensorFormat.ENGRAM_ROWS),
        ("layers.1.engram.q_weight", quant.TensorFormat.BF16),
        ("layers.9.ffn.experts.12.w2.weight", quant.TensorFormat.MXFP4),
        ("layers.9.ffn.shared_experts.w2.weight", quant.TensorFormat.FP8_BLOCK),
        ("layers.9.ffn.gate.bias_vl", quant.TensorFormat.F32),
        ("layers.9.ffn.gate.weight", quant.TensorFormat.BF16),
        ("layers.9.hc_ffn_scale", quant.TensorFormat.F32),
        ("layers.9.attn.attn_sink", quant.TensorFormat.F32),
        ("embed.weight", quant.TensorFormat.BF16),
        ("vision.blocks.3.norm1.weight", quant.TensorFormat.F32),
        ("vision.blocks.3.attn.wqkv.weight", quant.TensorFormat.BF16),
        ("image_newline", quant.TensorFormat.F32),
    ],
)
def test_tensor_formats(name: str, kind: quant.TensorFormat) -> None:
    assert quant.tensor_format(name) is kind
