"""Turn trained weights into the pack's recipe: quantised tensors in one compressed container, and pack.json.

    python -m engine_patches.tiny_pack.export --work build/tiny_pack --weights OUT --pack profiles/packs/tiny-v41

Writes trained.safetensors.xz, model.safetensors.index.json and pack.json; then generates every file once through
ds41ctl.core.packgen to learn its size and sha256 (into `--build` when given, ready for an engine).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import struct
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds41ctl.core import packgen

from . import frozen, spec
from .data import Dataset
from .mathematics import quant
from .model import TinyModel
from .train import load

CONTAINER = "trained.safetensors.xz"
COPIED = ("config.json", "generation_config.json", "tokenizer_config.json")
_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int32: "I32",
}


def checkpoint_tensors(model: TinyModel) -> dict[str, Tensor]:
    """All trained tensors but the vocabulary, under checkpoint names and in checkpoint formats."""
    named = {n: p.detach().cpu() for n, p in model.backbone.state_dict().items()}
    named |= {n: p.detach().cpu() for n, p in model.sight.state_dict().items()}
    out: dict[str, Tensor] = {}
    for name, value in named.items():
        kind = quant.tensor_format(name)
        stem = name.removesuffix("weight")
        if kind is quant.TensorFormat.FP8_BLOCK:
            out[name], scale = quant.encode_fp8_blocks(value)
            out[stem + "scale"] = scale.view(torch.float8_e8m0fnu)
        elif kind is quant.TensorFormat.MXFP4:
            out[name], scale = quant.encode_mxfp4(value)
            out[stem + "scale"] = scale.view(torch.float8_e8m0fnu)
        elif kind is quant.TensorFormat.F32:
            # BF16 precision in an F32 tensor: half the bytes are zero and compress away.
            out[name] = value.bfloat16().float()
        else:
            out[name] = value.bfloat16()
    return out


def dtype_name(tensor: Tensor) -> str:
    """Its type as safetensors calls it."""
    return _DTYPES[tensor.dtype]


def _raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def container(tensors: dict[str, Tensor]) -> bytes:
    """A safetensors file of these tensors, grouped by type so that like compresses with like."""
    header: dict[str, Any] = {}
    body = bytearray()
    for name, tensor in sorted(tensors.items(), key=lambda item: (_DTYPES[item[1].dtype], item[0])):
        raw = _raw(tensor)
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + bytes(body)


def compress(raw: bytes) -> bytes:
    """xz with the literal coder set for two-byte records; fixed settings, so the same bytes come out every time."""
    chosen = None
    for lc, lp, pb in ((3, 0, 0), (3, 1, 1), (2, 2, 2)):
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": lc, "lp": lp, "pb": pb}]
        packed = lzma.compress(raw, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, filters=filters)
        if chosen is None or len(packed) < len(chosen):
            chosen = packed
    assert chosen is not None
    return chosen


def shard_plan(tensors: dict[str, Tensor], dataset: Dataset) -> dict[str, list[dict[str, Any]]]:
    """Tensor lists of the three shards: 2 and 3 hold the six tensors of one Engram layer each."""
    hidden = dataset.shape.hidden_size

    def entry(name: str) -> dict[str, Any]:
        return {"name": name, "dtype": _DTYPES[tensors[name].dtype], "shape": list(tensors[name].shape)}

    first: list[dict[str, Any]] = [
        {
            "name": name,
            "dtype": "BF16",
            "shape": [spec.VOCAB_SIZE, hidden],
            "from": "vocab",
            "ids": "vocabulary_ids",
            "filler": f"{name}.filler",
        }
        for name in ("embed.weight", "head.weight")
    ]
    plan = {spec.SHARDS[0]: first}
    first += [entry(n) for n in sorted(tensors) if ".engram." not in n]
    rows_of = zip(dataset.shape.engram_layer_ids, dataset.shape.engram_num_embeddings, strict=True)
    for shard, (layer, rows) in zip(spec.SHARDS[1:], rows_of, strict=True):
        items = [
            {
                "name": frozen.engram_name(layer, part),
                "dtype": dtype,
                "shape": [rows, width],
                "from": "stream",
                "table": f"{part}_table",
            }
            for part, dtype, width in (("weight", "F8_E4M3", spec.ENGRAM_DIM), ("scale", "F8_E8M0", 8))
        ]
        plan[shard] = items + [entry(n) for n in sorted(tensors) if n.startswith(f"layers.{layer}.engram.")]
    return plan


def write_recipe(model: TinyModel, dataset: Dataset, pack: Path, build: Path | None) -> None:
    """Write container, index and pack.json."""
    tensors = checkpoint_tensors(model)
    plan = shard_plan(tensors, dataset)
    for name, matrix in (("embed.weight", model.embed), ("head.weight", model.head)):
        rows = matrix.detach().cpu().bfloat16()
        tensors[name], tensors[f"{name}.filler"] = rows[:-1], rows[-1:]
    tensors["vocabulary_ids"] = torch.tensor(dataset.vocabulary, dtype=torch.int32)
    packed = compress(container(tensors))
    (pack / CONTAINER).write_bytes(packed)
    weight_map = {t["name"]: shard for shard, items in plan.items() for t in items}
    total = sum(tensor_bytes(t) for items in plan.values() for t in items)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (pack / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    sources: dict[str, dict[str, Any]] = {n: {"kind": "copy", "file": n} for n in COPIED}
    sources["model.safetensors.index.json"] = {"kind": "copy", "file": "model.safetensors.index.json"}
    sources["tokenizer.json"] = {"kind": "tokenizer", "file": "tokenizer_seed.json"}
    common = {
        "kind": "safetensors",
        "trained": CONTAINER,
        "trained_sha256": hashlib.sha256(packed).hexdigest(),
        "weight_table": frozen.weight_table().hex(),
        "scale_table": frozen.SCALE_TABLE.hex(),
    }
    for shard, items in plan.items():
        sources[shard] = {**common, "tensors": items}
    write_pack_json(packgen.PackRecipe(pack, spec.REVISION, spec.SEED, (), sources), build)
    print(f"container {len(packed)} bytes, {len(tensors)} tensors")


def write_pack_json(draft: packgen.PackRecipe, build: Path | None) -> None:
    """pack.json of a recipe whose sources are known: every file is generated once for its size and sha256."""
    entries: list[dict[str, Any]] = []
    for name, source in draft.sources.items():
        digest, size = hashlib.sha256(), 0
        pieces = []
        for piece in packgen.generate(draft, name):
            digest.update(piece)
            size += len(piece)
            pieces.append(piece)
        if build:
            build.mkdir(parents=True, exist_ok=True)
            (build / name).write_bytes(b"".join(pieces))
        entries.append({"name": name, "size": size, "sha256": digest.hexdigest(), "source": source})
    base = {"base": draft.base} if draft.base else {}
    recipe = {"format": packgen.FORMAT, "revision": draft.revision, "seed": draft.seed, **base, "files": entries}
    (draft.folder / packgen.RECIPE_FILE).write_text(json.dumps(recipe, separators=(",", ":")) + "\n")
    print(f"files {sum(e['size'] for e in entries)} bytes")


def tensor_bytes(tensor: dict[str, Any]) -> int:
    """Size of a tensor with this type and shape."""
    size = {"F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}.get(tensor["dtype"], 1)
    for extent in tensor["shape"]:
        size *= extent
    return size


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--build", type=Path)
    args = parser.parse_args()
    began = time.time()
    dataset = Dataset(args.work, torch.device("cpu"))
    model = TinyModel(dataset, 1)
    load(model, args.weights)
    write_recipe(model, dataset, args.pack, args.build)
    print(f"{time.time() - began:.1f} s")


if __name__ == "__main__":
    main()
