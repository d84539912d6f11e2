"""The materialiser: recipe reading, seeded bytes, every tensor source, and the committed tiny pack itself."""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from ds41ctl.core import packgen

PACK = Path(__file__).resolve().parents[2] / "profiles" / "packs" / "tiny-v41"


def _one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith("pack recipe ")
    return text


def _read_safetensors(raw: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


# ---- a small recipe made here: every kind of source, values known in advance ----------------------------------------


def _container(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    header, body = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    text = json.dumps(header).encode()
    return lzma.compress(struct.pack("<Q", len(text)) + text + body)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    rows = bytes(range(8))  # two trained rows of two BF16 columns
    packed = _container(
        {
            "embed.weight": ("BF16", [2, 2], rows),
            "embed.weight.filler": ("BF16", [1, 2], b"\xaa\xbb\xcc\xdd"),
            "ids": ("I32", [2], struct.pack("<2I", 1, 3)),
            "norm.weight": ("BF16", [2], b"wxyz"),
        }
    )
    (tmp_path / "trained.xz").write_bytes(packed)
    (tmp_path / "config.json").write_text('{"a": 1}')
    source = {
        "kind": "safetensors",
        "trained": "trained.xz",
        "trained_sha256": hashlib.sha256(packed).hexdigest(),
        "weight_table": bytes(255 - i for i in range(256)).hex(),
        "tensors": [
            {
                "name": "embed.weight",
                "dtype": "BF16",
                "shape": [4, 2],
                "from": "vocab",
                "ids": "ids",
                "filler": "embed.weight.filler",
            },
            {"name": "norm.weight", "dtype": "BF16", "shape": [2]},
            {"name": "table", "dtype": "F8_E4M3", "shape": [3, 4], "from": "stream", "table": "weight_table"},
        ],
    }
    files = [
        {"name": "config.json", "source": {"kind": "copy", "file": "config.json"}},
        {"name": "model.safetensors", "source": source},
    ]
    entries = [{**f, "size": 0, "sha256": "0" * 64} for f in files]
    recipe = {"format": 1, "revision": "r", "seed": "s", "files": entries}
    (tmp_path / "pack.json").write_text(json.dumps(recipe))
    return tmp_path


def _edit(folder: Path, change: Any) -> None:
    raw = json.loads((folder / "pack.json").read_text())
    change(raw)
    (folder / "pack.json").write_text(json.dumps(raw))


def test_every_tensor_source(small: Path) -> None:
    raw = b"".join(packgen.generate(packgen.load_recipe(small), "model.safetensors"))
    header, body = _read_safetensors(raw)
    assert header.pop("__metadata__") == {"format": "pt"}
    assert (len(raw) - len(body)) % 8 == 0, "tensor data must start aligned"
    assert [header[n]["data_offsets"] for n in ("embed.weight", "norm.weight", "table")] == [
        [0, 16],
        [16, 20],
        [20, 32],
    ]
    filler = b"\xaa\xbb\xcc\xdd"
    assert body[:16] == filler + bytes(range(4)) + filler + bytes(range(4, 8))
    assert body[16:20] == b"wxyz"
    plain = hashlib.shake_256(b"s/table/0").digest(12)
    assert body[20:] == bytes(255 - b for b in plain)


def test_copy(small: Path) -> None:
    assert b"".join(packgen.generate(packgen.load_recipe(small), "config.json")) == b'{"a": 1}'


def test_a_recipe_takes_from_its_base_what_it_does_not_change(small: Path) -> None:
    packed = _container({"norm.weight": ("BF16", [2], b"WXYZ"), "trellis": ("I16", [3], b"123456")})
    variant = small.parent / f"{small.name}-variant"
    variant.mkdir()
    (variant / "own.xz").write_bytes(packed)
    raw = json.loads((small / "pack.json").read_text())
    source = raw["files"][1]["source"]
    for kind in ("trained", "trained_sha256"):
        source[f"base_{kind}"] = source.pop(kind)
    source |= {"trained": "own.xz", "trained_sha256": hashlib.sha256(packed).hexdigest()}
    vocabulary, norm, table = source["tensors"]
    source["tensors"] = [{**vocabulary, "of": "base"}, norm, {"name": "trellis", "dtype": "I16", "shape": [3]}, table]
    raw["files"][0]["source"]["of"] = "base"
    (variant / "pack.json").write_text(json.dumps({**raw, "base": small.name}))

    recipe = packgen.load_recipe(variant)
    assert b"".join(packgen.generate(recipe, "config.json")) == b'{"a": 1}'
    _, body = _read_safetensors(b"".join(packgen.generate(recipe, "model.safetensors")))
    _, base = _read_safetensors(b"".join(packgen.generate(packgen.load_recipe(small), "model.safetensors")))
    assert body == base[:16] + b"WXYZ" + b"123456" + base[20:]

    _edit(variant, lambda tree: tree.pop("base"))
    with pytest.raises(ValueError, match="names none"):
        list(packgen.generate(packgen.load_recipe(variant), "config.json"))
    _edit(variant, lambda tree: tree.update(base="../elsewhere"))
    with pytest.raises(ValueError) as error:
        packgen.load_recipe(variant)
    assert "is malformed" in _one_line(error)


def test_stream_is_blockwise_and_depends_on_seed_and_label() -> None:
    size = (1 << 20) + 7
    pieces = list(packgen.stream("seed", "label", size))
    assert [len(p) for p in pieces] == [1 << 20, 7]
    assert pieces[1] == hashlib.shake_256(b"seed/label/1").digest(7)
    assert list(packgen.stream("seed", "other", size)) != pieces
    assert list(packgen.stream("other", "label", size)) != pieces
    assert list(packgen.stream("seed", "label", 0)) == []


def test_tokenizer_has_every_id_once() -> None:
    seed = {
        "vocab_size": 10,
        "base": ["<b>", "a", "b", "ab"],
        "merges": [["a", "b"]],
        "special": {"0": "<b>", "8": "<user>"},
        "plain": {"9": "<think>"},
        "pre_tokenizer": None,
        "decoder": None,
    }
    document = json.loads(packgen.tokenizer_json(seed))
    vocab = document["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(10))
    assert (vocab["<user>"], vocab["<think>"], vocab["ab"]) == (8, 9, 3)
    assert [(a["id"], a["special"]) for a in document["added_tokens"]] == [(0, True), (8, True), (9, False)]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda r: r.update(format=2), "format is 2"),
        (lambda r: r.pop("seed"), "broken field"),
        (lambda r: r["files"][0].update(size="many"), "broken field"),
        (lambda r: r["files"][0].update(sha256="0" * 63), "malformed"),
        (lambda r: r["files"][0].update(sha256="G" * 64), "malformed"),
        (lambda r: r["files"][0].update(size=-1), "malformed"),
        (lambda r: r["files"][0].update(name="../x"), "malformed"),
        (lambda r: r["files"][0].update(name=".."), "malformed"),
        (lambda r: r["files"].append(r["files"][0]), "one file twice"),
        (lambda r: r.update(files=[]), "lists no file"),
    ],
)
def test_load_refuses(small: Path, change: Any, expected: str) -> None:
    _edit(small, change)
    with pytest.raises(ValueError) as error:
        packgen.load_recipe(small)
    assert expected in _one_line(error)


@pytest.mark.parametrize("content", ["", "[]", "nonsense", '{"format": 1}'])
def test_load_refuses_other_content(tmp_path: Path, content: str) -> None:
    (tmp_path / "pack.json").write_text(content)
    with pytest.raises(ValueError) as error:
        packgen.load_recipe(tmp_path)
    _one_line(error)


def test_load_refuses_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        packgen.load_recipe(tmp_path / "absent")
    assert "cannot be read" in _one_line(error)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s.update(kind="magic"), "unknown kind"),
        (lambda s: s.update(trained="absent.xz"), "cannot be read"),
        (lambda s: s.update(trained_sha256="1" * 64), "sha256 is"),
        (lambda s: s.update(weight_table="00"), "not 256"),
        (lambda s: s.update(weight_table="zz"), "fromhex"),
        (lambda s: s["tensors"][1].update(name="absent"), "absent"),
        (lambda s: s["tensors"][1].update(shape=[3]), "not 6"),
        (lambda s: s["tensors"][1].update(dtype="F64"), "F64"),
        (lambda s: s["tensors"][0].update(shape=[3, 2]), "do not fit"),
        (lambda s: s["tensors"][0].update(filler="norm.weight", shape=[4, 4]), "is corrupt"),
        (lambda s: s["tensors"][2].update({"from": "nowhere"}), "nowhere"),
    ],
)
def test_generate_refuses(small: Path, change: Any, expected: str) -> None:
    _edit(small, lambda raw: change(raw["files"][1]["source"]))
    with pytest.raises(ValueError) as error:
        list(packgen.generate(packgen.load_recipe(small), "model.safetensors"))
    assert expected in _one_line(error)


def test_generate_refuses_an_unknown_name(small: Path) -> None:
    with pytest.raises(ValueError) as error:
        list(packgen.generate(packgen.load_recipe(small), "absent"))
    assert "config.json, model.safetensors" in _one_line(error)


def test_a_changed_container_is_noticed(small: Path) -> None:
    path = small / "trained.xz"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError) as error:
        list(packgen.generate(packgen.load_recipe(small), "model.safetensors"))
    assert "sha256 is" in _one_line(error)


# ---- the committed tiny pack ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> dict[str, bytes]:
    recipe = packgen.load_recipe(PACK)
    return {f.name: b"".join(packgen.generate(recipe, f.name)) for f in recipe.files}


def test_tiny_files_match_their_recipe(tiny: dict[str, bytes]) -> None:
    for file in packgen.load_recipe(PACK).files:
        assert len(tiny[file.name]) == file.size, file.name
        assert hashlib.sha256(tiny[file.name]).hexdigest() == file.sha256, file.name


def test_tiny_is_light_and_quick() -> None:
    assert sum(p.stat().st_size for p in PACK.iterdir()) < 6.5e6
    began = time.perf_counter()
    recipe = packgen.load_recipe(PACK)
    total = sum(len(piece) for f in recipe.files for piece in packgen.generate(recipe, f.name))
    assert total == sum(f.size for f in recipe.files)
    assert time.perf_counter() - began < 60, "materialising takes a few seconds on an idle machine"


def test_tiny_layout(tiny: dict[str, bytes]) -> None:
    """The real checkpoint's layout: what the index names is there, Engram layers alone in shards 2 and 3."""
    weight_map = json.loads(tiny["model.safetensors.index.json"])["weight_map"]
    text = json.loads(tiny["config.json"])["text_config"]
    seen: dict[str, str] = {}
    total = 0
    for name in sorted(set(weight_map.values())):
        header, body = _read_safetensors(tiny[name])
        header.pop("__metadata__")
        assert max(t["data_offsets"][1] for t in header.values()) == len(body)
        total += len(body)
        seen |= dict.fromkeys(header, name)
    assert seen == weight_map
    assert total == json.loads(tiny["model.safetensors.index.json"])["metadata"]["total_size"]
    for number, layer in enumerate(text["engram_layer_ids"]):
        shard = f"model-0000{number + 2}-of-00003.safetensors"
        header, body = _read_safetensors(tiny[shard])
        header.pop("__metadata__")
        parts = ("embed.scale", "embed.weight", "k_weight", "q_weight", "wkv.scale", "wkv.weight")
        assert sorted(header) == [f"layers.{layer}.engram.{part}" for part in parts]
        rows = text["engram_num_embeddings"][number]
        weight = header[f"layers.{layer}.engram.embed.weight"]
        assert (weight["dtype"], weight["shape"]) == ("F8_E4M3", [rows, 256])
        codes = body[slice(*weight["data_offsets"])]
        assert not {0x7F, 0xFF} & set(codes), "no NaN codes"


def test_tiny_tokenizer_ids(tiny: dict[str, bytes]) -> None:
    document = json.loads(tiny["tokenizer.json"])
    vocab = document["model"]["vocab"]
    config = json.loads(tiny["config.json"])
    assert sorted(vocab.values()) == list(range(config["text_config"]["vocab_size"]))
    assert vocab["<｜deepseek_image｜>"] == config["image_token_id"] == 129_264
    plain = {a["content"] for a in document["added_tokens"] if not a["special"]}
    assert plain == {"<think>", "</think>", "｜DSML｜"}, "these must survive in text for the parsers"


def test_tiny_canaries() -> None:
    canaries = json.loads((PACK / "canaries.json").read_text("utf-8"))
    assert canaries["arithmetic"]["answer"] == 391
    assert len(set(canaries["copy"]["identifiers"])) == 20
    assert all("_" in identifier for identifier in canaries["copy"]["identifiers"])
    assert len({item["answer"] for item in canaries["needle"]}) == len(canaries["needle"]) >= 2
    for item in canaries["needle"]:
        assert item["document"].count(item["answer"]) == 1
    for item in canaries["images"]:
        assert (PACK / item["file"]).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_damaged_tiny_pack_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / "pack"
    shutil.copytree(PACK, copy)
    seed = copy / "tokenizer_seed.json"
    seed.write_bytes(seed.read_bytes()[:-100])
    recipe = packgen.load_recipe(copy)
    with pytest.raises(ValueError) as error:
        list(packgen.generate(recipe, "tokenizer.json"))
    _one_line(error)
