"""The V4.1 contract gives the real checkpoint's inventory, and every way to break a pack names its tensor."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from ds41ctl.adapters import pack, profiles
from ds41ctl.adapters.safetensors import read_header
from ds41ctl.core.errors import IntegrityError
from ds41ctl.core.tensors import DTYPE_BITS, Tensor, bits, contract, roles, trellises, violations
from tests.fakes.packs import shard_bytes
from tests.fakes.v41 import REAL, config, is_table, official

TINY = profiles.builtin_folder() / "packs" / "tiny-v41"


def headers(tree: dict[str, object], shape: dict[str, tuple[int, ...]] | None = None) -> dict[str, Tensor]:
    """A header entry for every tensor of a config's contract."""
    found = {}
    for name, spec in contract(tree).items():
        extent = (shape or {}).get(name, spec.shape)
        found[name] = Tensor(name, spec.dtypes[0], extent, 0, math.prod(extent) * DTYPE_BITS[spec.dtypes[0]] // 8)
    return found


def test_the_contract_of_the_real_config_is_the_published_inventory() -> None:
    """96,085 tensors, 475.3 GiB, 2 tables of 94.4 GiB; the hybrid of the recipe has 188,241."""
    wanted = contract(REAL)
    size = sum(math.prod(spec.shape) * DTYPE_BITS[spec.dtypes[0]] // 8 for spec in wanted.values())
    assert len(wanted) == 96_085 and round(size / 2**30, 1) == 475.2
    counts = Counter(spec.role for spec in wanted.values())
    assert counts["routed experts"] == 40 * 384 * 3 * 2 and counts["drafter experts"] == 3 * 128 * 3 * 2
    assert counts["attention"] == 40 * 13 and counts["engram table"] == 4 and counts["vision"] == 3 + 32 * 8
    table = sum(math.prod(spec.shape) for name, spec in wanted.items() if is_table(name))
    assert table == 202_758_032_400
    tables = profiles.read(profiles.find("v100-pp2tp4")).model.engram
    assert [wanted[f"layers.{t.layer}.engram.embed.weight"].shape[0] for t in tables] == [t.rows for t in tables]


def test_the_committed_tiny_recipe_keeps_the_contract() -> None:
    """Names, dtypes and shapes of the generated pack, from its recipe; it has no drafter."""
    recipe = json.loads((TINY / "pack.json").read_text())
    tensors = {}
    for file in recipe["files"]:
        for item in file["source"].get("tensors", ()):
            shape = tuple(item["shape"])
            size = math.prod(shape) * DTYPE_BITS[item["dtype"]] // 8
            tensors[item["name"]] = Tensor(item["name"], item["dtype"], shape, 0, size)
    tree = json.loads((TINY / "config.json").read_text())
    assert list(violations(tree, tensors)) == []
    assert any("mtp." in line for line in violations(tree, tensors, drafter=True))


def test_a_whole_pack_has_no_violation_and_every_missing_tensor_is_named() -> None:
    tree = config()
    whole = headers(tree)
    assert list(violations(tree, whole)) == []
    assert all(there == wanted for there, wanted in roles(tree, whole).values())
    for name in list(whole)[::9]:
        lines = list(violations(tree, {key: value for key, value in whole.items() if key != name}, drafter=True))
        assert len(lines) == 1 and lines[0].startswith(name + " (") and lines[0].endswith("is missing")


def test_a_table_beside_the_index_counts_as_there_and_no_other_tensor_does() -> None:
    tree, whole = config(), headers(config())
    tables = {name: tensor for name, tensor in whole.items() if is_table(name)}
    rest = {name: tensor for name, tensor in whole.items() if name not in tables}
    assert list(violations(tree, rest, outside=tables)) == [] and len(list(violations(tree, rest))) == 4
    del rest["norm.weight"]
    assert list(violations(tree, rest, outside={**tables, "norm.weight": whole["norm.weight"]})) == [
        "norm.weight (norm) is missing"
    ]


def test_rows_that_are_not_the_sum_of_the_hash_primes_are_refused() -> None:
    tree = config()
    tree["text_config"]["engram_num_embeddings"] = [7, 8]
    assert "differs from the sums of the hash primes" in next(violations(tree, {}))
    assert "lacks 'hidden_size'" in next(violations({"text_config": {}}, {}))


@pytest.mark.parametrize("rate", [1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 8])
def test_bits_come_from_the_trellis_shape(rate: float) -> None:
    assert bits(Tensor("x.trellis", "I16", (8, 8, int(16 * rate)), 0, 0)) == rate


@pytest.mark.parametrize("shape", [(8, 8, 0), (8, 8, 8), (8, 8, 50), (8, 8, 144), (8, 48), ()])
def test_a_shape_that_is_no_trellis_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="is no trellis"):
        bits(Tensor("x.trellis", "I16", shape, 0, 0))


def test_bits_of_a_layer_are_said_as_they_are() -> None:
    name = "layers.4.ffn.experts.{}.w1.trellis"
    tensors = {name.format(n): Tensor(name.format(n), "I16", (8, 8, 32 + 16 * (n > 0)), 0, 0) for n in range(3)}
    found = trellises(tensors)
    assert found.text(4) == "2 x 1, 3 x 2" and found.codebooks == {"3inst": 3} and found.problems == ()


def test_a_header_that_lies_about_a_tensors_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(shard_bytes({"x": ("F32", [3], b"12345678")}))
    with pytest.raises(IntegrityError, match=r"tensor x has 8 bytes, F32 \[3\] takes 12"):
        read_header(path)
    raw = b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"1")
    with pytest.raises(IntegrityError, match="a name stands twice"):
        read_header(path)


def test_an_index_that_leads_out_of_the_folder_is_a_problem(tmp_path: Path) -> None:
    shards = official()
    tree = {"weight_map": {name: "../" + shard for shard, tensors in shards.items() for name in tensors}}
    (tmp_path / pack.INDEX).write_text(json.dumps(tree))
    assert all("lies outside the folder" in text for text in pack.contents(tmp_path).problems)
