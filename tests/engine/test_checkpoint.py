"""Loading: quantised tensors are decoded, and what is missing or does not fit is named in one line."""

from __future__ import annotations

import itertools

import pytest
import torch
from ds41_engine.checkpoint import CheckpointError, decode_tensors, load
from ds41_engine.quant import fake_fp8_blocks, fake_mxfp4
from ds41_engine.shape import BackboneShape
from tiny_checkpoint import encode, random_backbone, text_config
from torch import Tensor, nn

TABLES = ["layers.1.engram.embed.weight", "layers.1.engram.embed.scale"]


def tensors() -> dict[str, Tensor]:
    """A small checkpoint's tensors: FP8, MXFP4, F32, BF16 and Engram rows."""
    torch.manual_seed(0)
    out: dict[str, Tensor] = {}
    for name, size in (
        ("layers.0.attn.wq_a.weight", (64, 32)),
        ("layers.0.ffn.experts.0.w1.weight", (32, 64)),
        ("layers.0.hc_attn_scale", (3,)),
        ("norm.weight", (32,)),
        ("layers.1.engram.embed.weight", (5, 256)),
    ):
        out |= encode(name, torch.randn(size))
    return out


def parameters() -> dict[str, nn.Parameter]:
    sizes = {
        "layers.0.attn.wq_a.weight": (64, 32),
        "layers.0.ffn.experts.0.w1.weight": (32, 64),
        "layers.0.hc_attn_scale": (3,),
        "norm.weight": (32,),
    }
    return {name: nn.Parameter(torch.full(size, torch.nan)) for name, size in sizes.items()}


def test_everything_is_decoded_in_any_order() -> None:
    stored = tensors()
    torch.manual_seed(0)
    original = {"fp8": torch.randn(64, 32), "fp4": torch.randn(32, 64)}
    for order in itertools.islice(itertools.permutations(stored.items()), 0, 5040, 500):
        targets = parameters()
        assert load(targets, TABLES, order) == set(targets)
        assert torch.equal(targets["layers.0.attn.wq_a.weight"], fake_fp8_blocks(original["fp8"]))
        assert torch.equal(targets["layers.0.ffn.experts.0.w1.weight"], fake_mxfp4(original["fp4"]))
        assert not any(p.isnan().any() for p in targets.values())


def test_drafter_is_ignored_and_extra_tensors_do_no_harm() -> None:
    extra = {"mtp.0.attn.wq_a.weight": torch.zeros(1).to(torch.float8_e4m3fn), "new.thing": torch.zeros(1)}
    targets = parameters()
    assert load(targets, TABLES, (tensors() | extra).items()) == set(targets)


@pytest.mark.parametrize("name", ["norm.weight", "layers.1.engram.embed.weight", "layers.1.engram.embed.scale"])
def test_missing_tensor_is_named(name: str) -> None:
    stored = tensors()
    del stored[name]
    with pytest.raises(CheckpointError, match=rf"missing 1: {name}") as caught:
        load(parameters(), TABLES, stored.items())
    assert "\n" not in str(caught.value)
    assert "ds41ctl fetch" in str(caught.value)


@pytest.mark.parametrize("half", ["weight", "scale"])
def test_half_of_a_pair_is_named(half: str) -> None:
    stored = tensors()
    del stored[f"layers.0.attn.wq_a.{half}"]
    with pytest.raises(CheckpointError, match=r"one half of layers\.0\.attn\.wq_a"):
        load(parameters(), TABLES, stored.items())


def test_many_missing_tensors_are_counted_not_listed() -> None:
    backbone = random_backbone(BackboneShape.from_config(text_config()), 8, 0)
    with pytest.raises(CheckpointError, match=r"and \d+ more") as caught:
        load(dict(backbone.named_parameters()), [], [])
    assert len(str(caught.value)) < 600


def test_wrong_shapes_are_named() -> None:
    stored = tensors() | {"norm.weight": torch.zeros(31)}
    with pytest.raises(CheckpointError, match=r"norm.weight: expected shape \[32\], found \[31\]"):
        load(parameters(), TABLES, stored.items())
    stored = tensors() | {"layers.0.attn.wq_a.scale": torch.zeros(3, 1, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match=r"layers.0.attn.wq_a: .*expected scales"):
        load(parameters(), TABLES, stored.items())


def test_nan_scale_is_refused() -> None:
    stored = tensors() | {"layers.0.attn.wq_a.scale": torch.full((2, 1), 255, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match="255"):
        list(decode_tensors(stored.items()))
