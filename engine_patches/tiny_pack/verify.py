"""Check a generated pack without an engine: decode its shards, run the backbone over whole sequences (greedy choice).

    python -m engine_patches.tiny_pack.verify --work build/tiny_pack --build PACK_FOLDER [--limit 40] [--against PACK]

Uses the engine's own packed attention (not the trainer's), fp32, and experts reconstructed from whatever format they
are in. Prints, per group, how many examples have every target token on top, and the smallest and median probability of
a target; against another pack also the divergence KL(other || this) per target token, in nats.
"""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import data, images, spec
from .mathematics import backbone, engram_hash, exl3, quant, shape
from .vision import Vision, patches

from ds41_engine.packed import PackedBatch  # isort: skip  (mathematics.py puts it on the path)

_TORCH = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def read_shards(folder: Path) -> dict[str, Tensor]:
    """All tensors of the three shards."""
    out = {}
    for shard in spec.SHARDS:
        raw = bytearray((folder / shard).read_bytes())
        (length,) = struct.unpack_from("<Q", raw)
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, item in header.items():
            start, end = (8 + length + o for o in item["data_offsets"])
            flat = torch.frombuffer(raw, dtype=torch.uint8, count=end - start, offset=start).clone()
            out[name] = flat.view(_TORCH[item["dtype"]]).view(item["shape"])
    return out


def reconstructed(tensors: dict[str, Tensor], stem: str) -> Tensor:
    """An EXL3 matrix as fp32 ``[out, in]``; ``stem`` ends with a dot."""
    key = stem.removesuffix(".")
    found = {name: value.numpy() for name, value in tensors.items() if name.startswith(stem)}
    return torch.from_numpy(exl3.Exl3Linear.from_tensors(key, found).reconstruct().T.copy()).float()


class Served:
    """A decoded pack."""

    def __init__(self, dataset: data.Dataset, folder: Path) -> None:
        tensors = read_shards(folder)
        config = json.loads((folder / "config.json").read_text())
        self.dataset = dataset
        self.shape = shape.BackboneShape.from_config(config["text_config"])
        self.net = backbone.Backbone(self.shape, 2048)
        self.sight = Vision(dataset.config["vision_config"], self.shape.hidden_size)
        for module in (self.net, self.sight):
            state = {}
            for name in module.state_dict():
                stem = name.removesuffix("weight")
                if f"{stem}trellis" in tensors:
                    state[name] = reconstructed(tensors, stem)
                    continue
                value = tensors[name]
                kind = quant.tensor_format(name)
                scale = tensors.get(f"{stem}scale")
                if kind is quant.TensorFormat.FP8_BLOCK:
                    assert scale is not None
                    value = quant.decode_fp8_blocks(value, scale.view(torch.uint8))
                elif kind is quant.TensorFormat.MXFP4:
                    assert scale is not None
                    value = quant.decode_mxfp4(value, scale.view(torch.uint8))
                state[name] = value.float()
            module.load_state_dict(state)
        for layer in dataset.shape.engram_layer_ids:
            stem = f"layers.{layer}.engram.embed."
            rows = quant.decode_engram_rows(tensors[stem + "weight"], tensors[stem + "scale"].view(torch.uint8))
            block: Any = self.net.layers[layer]
            block.engram.lookup = backbone.EngramTable(rows)
        self.embed, self.head = tensors["embed.weight"].float(), tensors["head.weight"].float()

    @torch.no_grad()
    def hidden(self, examples: list[dict[str, Any]]) -> list[Tensor]:
        """Final hidden states at the places that predict the target tokens of each example."""
        seqs = [e["p"] + e["a"] for e in examples]
        batch = PackedBatch(self.shape, [len(s) for s in seqs], self.net.rope)
        ids = torch.tensor([t for s in seqs for t in s])
        is_image = ids == spec.IMAGE_TOKEN_ID
        x = self.embed[ids]
        start = 0
        for example, seq in zip(examples, seqs, strict=True):
            if "image" in example:
                patch = self.dataset.config["vision_config"]["patch_size"]
                pixels = patches(images.pixels(*example["image"]), patch)
                here = start + is_image[start : start + len(seq)].nonzero()[:, 0]
                x[here] = self.sight(pixels[None])[0]
            start += len(seq)
        compressed = torch.where(is_image, engram_hash.DEAD, torch.from_numpy(self.dataset.token_map)[ids])
        rows = torch.from_numpy(self.dataset.hash.row_ids(compressed.numpy(), batch.positions.numpy()))
        on = torch.tensor([bool(e["on"]) for e, s in zip(examples, seqs, strict=True) for _ in s])
        hidden = self.net(x, batch.positions, batch, rows, on & ~is_image, is_image)
        out, start = [], 0
        for example, seq in zip(examples, seqs, strict=True):
            out.append(hidden[start + len(example["p"]) - 1 : start + len(seq) - 1])
            start += len(seq)
        return out

    def chances(self, hidden: Tensor) -> Tensor:
        """Log-probabilities over the vocabulary, in double precision."""
        return (hidden @ self.head.t()).double().log_softmax(-1)


@torch.no_grad()
def judge(
    served: Served, other: Served | None, examples: list[dict[str, Any]]
) -> list[tuple[bool, float, list[float]]]:
    """(every target on top, smallest target probability, divergence per target) of each example."""
    out = []
    against = other.hidden(examples) if other else [None] * len(examples)
    for example, mine, theirs in zip(examples, served.hidden(examples), against, strict=True):
        found, target = served.chances(mine), torch.tensor(example["a"])
        chance = found[torch.arange(len(target)), target].exp()
        divergence: list[float] = []
        if other and theirs is not None:
            wanted = other.chances(theirs)
            divergence = (wanted.exp() * (wanted - found)).sum(-1).tolist()
        out.append((bool((found.argmax(-1) == target).all()), float(chance.min()), divergence))
    return out


def batches(examples: list[dict[str, Any]], tokens: int = 1500) -> list[list[dict[str, Any]]]:
    """Examples in order, in batches of about so many tokens."""
    out: list[list[dict[str, Any]]] = []
    left = examples
    while left:
        count = max(1, tokens // max(len(e["p"]) + len(e["a"]) for e in left[:20]))
        out.append(left[:count])
        left = left[count:]
    return out


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--groups", nargs="*")
    parser.add_argument("--against", type=Path, help="another pack's folder")
    args = parser.parse_args()
    torch.set_num_threads(2)
    dataset = data.Dataset(args.work, torch.device("cpu"))
    served = Served(dataset, args.build)
    other = Served(dataset, args.against) if args.against else None
    for name, group in dataset.groups.items():
        if args.groups and name not in args.groups:
            continue
        chosen = group[: args.limit if "fixed" not in name else None]
        results = [
            (*found, example)
            for part in batches(chosen)
            for found, example in zip(judge(served, other, part), part, strict=True)
        ]
        chances = sorted(p for _, p, _, _ in results)
        right = sum(r for r, _, _, _ in results)
        print(
            f"{name}: {right}/{len(results)} right, least p {chances[0]:.4f}, median {chances[len(chances) // 2]:.4f}"
        )
        if other:
            every = [value for _, _, divergence, _ in results for value in divergence]
            print(f"  KL over {len(every)} targets: mean {sum(every) / len(every):.2e}, largest {max(every):.2e}")
        for on in (1, 0):
            mine = [r for r, _, _, e in results if e["on"] == on]
            print(f"  Engram {'on' if on else 'off'}: {sum(mine)}/{len(mine)}", flush=True)


if __name__ == "__main__":
    main()
