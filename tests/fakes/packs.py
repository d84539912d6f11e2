"""Small packs in the real checkpoint layout, written by the tests with nothing but the standard library."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

from ds41ctl.core.engram import Geometry, geometry
from ds41ctl.core.layout import Dirs, Layout, layout
from ds41ctl.core.profile import EngramTable, LocalSource, Profile
from ds41ctl.core.settings import Settings

TEXT_CONFIG = {
    "engram_layer_ids": [1, 3],
    "engram_vocab_size": 40,
    "engram_max_ngram_size": 3,
    "engram_n_heads": 2,
    "engram_num_embeddings": [41 + 43 + 47 + 53, 59 + 61 + 67 + 71],
}


def shard_bytes(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """A safetensors file: name -> (dtype, shape, bytes)."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + b"".join(data for _, _, data in tensors.values())


def table(layer: int, rows: int) -> dict[str, tuple[str, list[int], bytes]]:
    """The two tensors of one Engram table, every row different."""
    weight = hashlib.shake_256(b"w%d" % layer).digest(rows * 256)
    scale = hashlib.shake_256(b"s%d" % layer).digest(rows * 8)
    return {
        f"layers.{layer}.engram.embed.weight": ("F8_E4M3", [rows, 256], weight),
        f"layers.{layer}.engram.embed.scale": ("F8_E8M0", [rows, 8], scale),
    }


def write_pack(folder: Path, *, engram: bool = True) -> Geometry:
    """config.json, three shards and their index; without `engram` the tables are in neither shard nor index."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "deepseek_v41", "text_config": TEXT_CONFIG}
    (folder / "config.json").write_text(json.dumps(config))
    found = geometry(config)
    weight_map = {}
    shards = {"model-00001-of-00003.safetensors": {"norm.weight": ("BF16", [4], b"\1" * 8)}}
    for number, (layer, rows) in enumerate(zip(found.layers, found.rows, strict=True), start=2):
        tensors = {f"layers.{layer}.engram.q_weight": ("BF16", [2, 2], b"\2" * 8)}
        if engram:
            tensors |= table(layer, rows)
        shards[f"model-0000{number}-of-00003.safetensors"] = tensors
    for name, tensors in shards.items():
        (folder / name).write_bytes(shard_bytes(tensors))
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return found


def local_profile(base: Profile, found: Geometry, **updates: object) -> Profile:
    """`base` with a local pack of this geometry."""
    tables = tuple(
        EngramTable(layer=layer, rows=rows, shard=f"model-0000{number}-of-00003.safetensors")
        for number, (layer, rows) in enumerate(zip(found.layers, found.rows, strict=True), start=2)
    )
    model = base.model.model_copy(update={"sources": (LocalSource(),), "engram": tables})
    return base.model_copy(update={"model": model, **updates})


def layout_for(profile: Profile, root: Path, *, storage: str = "disk", **settings: object) -> Layout:
    """A layout whose every folder lies below `root`, its store too: on a disk unless `storage` says otherwise."""
    import os

    if profile.engram.own_store:
        profile = profile.model_copy(update={"engram": profile.engram.model_copy(update={"storage": storage})})

    dirs = Dirs(data=root / "data", state=root / "state", cache=root / "cache", runtime=root / "run", uid=os.getuid())
    chosen = {"engram_dir": root / "store", "model": root / "pack", **settings}
    return layout(profile, Settings.model_validate(chosen), dirs, may_mount=False)


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def strip(source: Path, target: Path) -> None:
    """Copy a shard without its `engram.embed` tensors."""
    raw = source.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, body, data = json.loads(raw[8 : 8 + length]), {}, b""
    for name, item in sorted(header.items()):
        if name == "__metadata__" or "engram.embed" in name:
            continue
        begin, end = item["data_offsets"]
        body[name] = {**item, "data_offsets": [len(data), len(data) + end - begin]}
        data += raw[8 + length + begin : 8 + length + end]
    head = json.dumps(body).encode()
    target.write_bytes(len(head).to_bytes(8, "little") + head + data)
