"""The committed EXL3 tiny pack against the MXFP4 one it was made from: the same answers, within 1e-3 nats a token."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from ds41_engine.exl3_experts import Exl3Experts, Kernel, census, divert

pytest.importorskip("engine_patches.tiny_pack.prepare", reason="runs from the repository root")

from ds41ctl.core import packgen
from engine_patches.tiny_pack import data, prepare, verify

PACKS = Path(__file__).resolve().parents[2] / "profiles" / "packs"
LIMIT = 1e-3
"""Largest mean divergence KL(MXFP4 || EXL3) per target token, in nats: the acceptance of the variant."""


def generated(name: str, folder: Path) -> Path:
    recipe = packgen.load_recipe(PACKS / name)
    folder.mkdir()
    for file in recipe.files:
        if file.name.endswith(".safetensors") or file.name == "config.json":
            with (folder / file.name).open("wb") as out:
                out.writelines(packgen.generate(recipe, file.name))
    return folder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> data.Dataset:
    """The prompts of the smoke tests with their answers, tokenised as the server does it."""
    work, pack = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("pack")
    shutil.copy(PACKS / "tiny-v41" / "tokenizer_seed.json", pack)
    prepare.write_pack_data(work, pack, keep_seed=True)
    groups = prepare.build_examples(prepare.Encoder(work), prepare.canaries(), 0)
    (work / "examples.json").write_text(prepare.json.dumps(groups))
    return data.Dataset(work, torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated("tiny-v41-exl3", tmp_path_factory.mktemp("exl3") / "pack")


@pytest.fixture(scope="module")
def variant(dataset: data.Dataset, folder: Path) -> verify.Served:
    """The EXL3 pack with its experts reconstructed into plain matrices."""
    return verify.Served(dataset, folder)


def examples(dataset: data.Dataset, *names: str) -> list[dict[str, Any]]:
    return [example for name in names for example in dataset.groups[name]]


def judged(served: verify.Served, other: verify.Served, chosen: list[dict[str, Any]]) -> tuple[int, list[float]]:
    """Examples answered right, and every target's divergence."""
    found = [item for part in verify.batches(chosen) for item in verify.judge(served, other, part)]
    return sum(right for right, _, _ in found), [value for _, _, many in found for value in many]


def test_it_answers_every_short_prompt_within_the_limit(
    dataset: data.Dataset, variant: verify.Served, tmp_path: Path
) -> None:
    original = verify.Served(dataset, generated("tiny-v41", tmp_path / "pack"))
    chosen = [*examples(dataset, "fixed_short", "fixed_image"), *dataset.groups["held_out"][:20]]
    right, divergence = judged(variant, original, chosen)
    mean = sum(divergence) / len(divergence)
    print(f"KL over {len(divergence)} targets: mean {mean:.2e}, largest {max(divergence):.2e}")
    assert right == len(chosen)
    assert 0 < mean < LIMIT


def test_the_kernel_serves_what_the_reconstruction_says(
    dataset: data.Dataset, variant: verify.Served, folder: Path
) -> None:
    served = verify.Served(dataset, folder)
    layers = {n: Exl3Experts(served.shape, n) for n in range(served.shape.num_hidden_layers)}
    for _ in divert(layers, verify.read_shards(folder).items()):
        pass
    kernel = Kernel(1)
    assert not kernel.problem
    for number, experts in layers.items():
        experts.finish()
        experts.use(kernel)
        served.net.block(number).ffn.replace_experts(experts)
    assert census(layers.values()) == "144 matrices in 6 layers: K2 x 54, K3 x 54, K5 x 36 (mul1)"
    right, divergence = judged(served, variant, examples(dataset, "fixed_short"))
    assert right == len(dataset.groups["fixed_short"])
    assert sum(abs(value) for value in divergence) / len(divergence) < 1e-7


def test_every_layer_mixes_two_three_and_five_bits_and_the_padding_adds_nothing(folder: Path) -> None:
    tensors = {name: value.numpy() for name, value in verify.read_shards(folder).items() if ".ffn.experts." in name}
    for layer in range(6):
        bits: Counter[float] = Counter()
        for number in range(8):
            expert = verify.exl3.Exl3Expert.from_tensors(f"layers.{layer}.ffn.experts.{number}", tensors)
            bits[expert.w1.rate.bits] += 1
            assert not expert.w1.svh[64:].any() and not expert.w3.svh[64:].any()
        assert bits == {2: 3, 3: 3, 5: 2}
