"""EXL3 experts in the engine's backbone: what they compute, what they refuse, and what the log says about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import ds41_kernels
import numpy as np
import pytest
import torch
from ds41_engine import exl3_experts
from ds41_engine.backbone import MoE
from ds41_engine.checkpoint import CheckpointError
from ds41_engine.exl3_config import Exl3Config
from ds41_engine.exl3_experts import Exl3Experts, Kernel, census, divert
from ds41_engine.shape import BackboneShape
from ds41_kernels import exl3
from tiny_checkpoint import text_config

HIDDEN, INNER, EXPERTS = 256, 128, 4
BITS = (2, 3, 5, 2)


@pytest.fixture(scope="module")
def shape() -> BackboneShape:
    base = BackboneShape.from_config(text_config())
    return replace(
        base, hidden_size=HIDDEN, moe_intermediate_size=INNER, n_routed_experts=EXPERTS, num_experts_per_tok=2
    )


def tensors(layer: int = 2) -> dict[str, torch.Tensor]:
    """Random experts of one layer under checkpoint names."""
    random, out = np.random.default_rng(3), {}
    for number, bits in enumerate(BITS):
        expert = exl3.random_expert(random, HIDDEN, INNER, (exl3.Rate.of(bits),) * 3)
        for name in ("w1", "w3", "w2"):
            out |= getattr(expert, name).tensors(f"layers.{layer}.ffn.experts.{number}.{name}")
    return {name: torch.from_numpy(np.array(value)) for name, value in out.items()}


def loaded(shape: BackboneShape, found: dict[str, torch.Tensor]) -> Exl3Experts:
    experts = Exl3Experts(shape, 2)
    assert list(divert({2: experts}, found.items())) == []
    experts.finish()
    return experts


def test_a_layer_with_exl3_experts_is_the_layer_with_their_reconstructed_weights(shape: BackboneShape) -> None:
    torch.manual_seed(0)
    plain, packed = MoE(shape), MoE(shape)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    packed.load_state_dict(plain.state_dict())
    experts = loaded(shape, tensors())
    experts.use(Kernel(1))
    packed.replace_experts(experts)
    w1, w3, w2 = experts.reconstructed()
    with torch.no_grad():
        for number, expert in enumerate(plain.experts):
            for name, values in (("w1", w1), ("w3", w3), ("w2", w2)):
                getattr(expert, name).weight.copy_(values[number])
        x, is_image = torch.randn(23, HIDDEN), torch.zeros(23, dtype=torch.bool)
        expected, found = plain(x, is_image), packed(x, is_image)
    assert not any("experts" in name and "shared" not in name for name, _ in packed.named_parameters())
    assert (found - expected).square().mean().sqrt() < 1e-5 * expected.square().mean().sqrt()


def test_what_belongs_to_no_exl3_expert_passes_through(shape: BackboneShape) -> None:
    experts = Exl3Experts(shape, 2)
    others = {
        "norm.weight": torch.ones(1),
        "layers.1.ffn.experts.0.w1.trellis": torch.ones(1),
        "layers.2.ffn.experts.0.w1.weight": torch.ones(1),
    }
    assert dict(divert({2: experts}, others.items())) == others


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"layers.2.ffn.experts.1.w3.trellis": None}, r"experts\.1\.w3: expected a trellis, found suh, svh, mul1"),
        ({"layers.2.ffn.experts.3.w2.svh": None}, r"experts\.3\.w2: expected svh"),
        ({"layers.2.ffn.experts.0.w1.mul1": None}, "expected one codebook for w1, w3 and w2"),
        ({"layers.2.ffn.experts.0.w1.suh": torch.full((HIDDEN,), torch.nan).half()}, "expected finite values"),
    ],
)
def test_experts_that_are_not_whole_are_refused_in_one_line(
    shape: BackboneShape, change: dict[str, torch.Tensor | None], line: str
) -> None:
    found = {**tensors(), **change}
    with pytest.raises(CheckpointError, match=line) as error:
        loaded(shape, {name: value for name, value in found.items() if value is not None})
    assert "\n" not in str(error.value) and "ds41ctl fetch --verify" in str(error.value)


def test_experts_of_another_size_than_the_configs_are_refused(shape: BackboneShape) -> None:
    with pytest.raises(CheckpointError, match=r"expected hidden and inner size \(256, 256\), found \(256, 128\)"):
        loaded(replace(shape, moe_intermediate_size=256), tensors())


def test_the_census_counts_matrices_by_their_bits(shape: BackboneShape) -> None:
    experts = loaded(shape, tensors())
    assert census([experts]) == "12 matrices in 1 layers: K2 x 6, K3 x 3, K5 x 3 (mul1)"


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def load(path: object = None) -> object:
        raise ds41_kernels.Unavailable("ds41_kernels was installed without a C++ compiler")

    monkeypatch.setattr(exl3_experts.ds41_kernels, "load", load)
    yield


def test_without_a_compiled_kernel_numpy_serves_and_says_why(shape: BackboneShape, no_library: None) -> None:
    experts = loaded(shape, tensors())
    kernel = Kernel(1)
    kernel.check(experts.kinds())
    experts.use(kernel)
    assert (kernel.how, kernel.problem) == ("numpy", "ds41_kernels was installed without a C++ compiler")
    x, chosen, weights = torch.randn(2, HIDDEN), torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)
    plain = experts(x, chosen, weights)
    w1, w3, w2 = experts.reconstructed()
    inner = torch.nn.functional.silu((x[0] @ w1[0].T).clamp(max=10)) * (x[0] @ w3[0].T).clamp(-10, 10)
    assert torch.allclose(plain[0], inner @ w2[0].T + experts(x, chosen, torch.tensor([[0.0, 1.0]] * 2))[0], atol=1e-4)


def test_a_kernel_that_fails_its_self_check_ends_the_start(
    shape: BackboneShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(1)
    monkeypatch.setattr(exl3_experts.cpu, "CHECK_TOLERANCE", 0.0)
    with pytest.raises(CheckpointError, match="EXL3 self-check: an expert of 2 bits, MUL1: expected a relative error"):
        kernel.check(loaded(shape, tensors()).kinds())


def test_only_routed_experts_may_be_exl3() -> None:
    rest = {"quant_method": "deepseek_v4_fp8", "weight_block_size": [32, 32]}
    Exl3Config.from_config({"quant_method": "exl3", "bits": 3, "non_routed_quantization": rest})
    for other in ({}, {"quant_method": "exl3"}, {**rest, "weight_block_size": [128, 128]}):
        with pytest.raises(ValueError, match="EXL3 is supported for routed experts only"):
            Exl3Config.from_config({"quant_method": "exl3", "non_routed_quantization": other})
