"""Tensors as a safetensors header states them, and the V4.1 contract: which ones a whole pack must have."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ds41ctl.core.engram import SCALE_BYTES, WEIGHT_BYTES, geometry

# bits of one element, as the safetensors format defines its dtypes
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip
QUANT_BLOCK = 32  # one scale for 32 x 32 FP8 weights, or for 32 FP4 weights of a row
TRELLIS_TILE = 16  # EXL3 packs 16 x 16 weights into one tile of 16 * K int16
HADAMARD = 128  # both sides of an EXL3 matrix are multiples of it
CODEBOOKS = ("mul1", "mcg")  # the tensor's presence selects it; neither means 3INST
TABLE = re.compile(r"(?:model\.)?layers\.\d+\.engram\.embed\.(?:weight|scale)")
ROUTED = re.compile(r"(layers\.(\d+)\.ffn\.experts\.(\d+)\.(w[123]))\.(\w+)")

Experts = Literal["mxfp4", "exl3"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a shard: `begin` and `end` are absolute file offsets in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Spec:
    """What a tensor must be: its role, the accepted dtypes, and its shape (-1: any positive extent)."""

    role: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]

    def problem(self, tensor: Tensor) -> str:
        """'' when the tensor fits, else what is wrong with it."""
        if tensor.dtype not in self.dtypes:
            return f"{tensor.name} is {tensor.dtype}, expected {' or '.join(self.dtypes)}"
        fits = len(tensor.shape) == len(self.shape) and all(
            found == wanted or (wanted == -1 and found > 0)
            for found, wanted in zip(tensor.shape, self.shape, strict=True)
        )
        return "" if fits else f"{tensor.name} has shape {list(tensor.shape)}, expected {list(self.shape)}"


_BF16, _F32, _EITHER = ("BF16",), ("F32",), ("F32", "BF16")


class _Contract:
    """Builds the expected tensors of one config (tensor inventory as vLLM 0.33 loads it)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.text: Mapping[str, Any] = config.get("text_config", config)
        self.vision: Mapping[str, Any] = config.get("vision_config") or {}
        self.hidden = int(self.text["hidden_size"])
        self.found: dict[str, Spec] = {}

    def plain(self, role: str, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = _BF16) -> None:
        self.found[name] = Spec(role, dtypes, shape)

    def fp8(self, role: str, name: str, out: int, inner: int) -> None:
        scale = (math.ceil(out / QUANT_BLOCK), math.ceil(inner / QUANT_BLOCK))
        self.found[f"{name}.weight"] = Spec(role, ("F8_E4M3",), (out, inner))
        self.found[f"{name}.scale"] = Spec(role, ("F8_E8M0",), scale)

    def experts(self, role: str, prefix: str, count: int, kind: Experts) -> None:
        inter = int(self.text["moe_intermediate_size"])
        for expert in range(count):
            for part in ("w1", "w3", "w2"):
                out, inner = (self.hidden, inter) if part == "w2" else (inter, self.hidden)
                name = f"{prefix}.experts.{expert}.{part}"
                if kind == "exl3":
                    tiles = (inner // TRELLIS_TILE, out // TRELLIS_TILE, -1)
                    self.found[f"{name}.trellis"] = Spec(role, ("I16",), tiles)
                    self.found[f"{name}.suh"] = Spec(role, ("F16",), (inner,))
                    self.found[f"{name}.svh"] = Spec(role, ("F16",), (out,))
                else:
                    self.found[f"{name}.weight"] = Spec(role, ("I8",), (out, inner // 2))
                    self.found[f"{name}.scale"] = Spec(role, ("F8_E8M0",), (out, inner // QUANT_BLOCK))

    def block(self, role: str, prefix: str, experts: int) -> None:
        """What a decoder layer and a drafter layer share: attention, gate, shared expert, hyper-connection, norms."""
        text, hidden = self.text, self.hidden
        heads, head_dim = int(text["num_attention_heads"]), int(text["head_dim"])
        q_rank, inter = int(text["q_lora_rank"]), int(text["moe_intermediate_size"])
        groups, o_rank = int(text["o_groups"]), int(text["o_lora_rank"])
        copies = int(text["hc_mult"])
        attn = f"{prefix}.attn"
        self.fp8(f"{role}attention", f"{attn}.wq_a", q_rank, hidden)
        self.plain(f"{role}attention", f"{attn}.q_norm.weight", (q_rank,))
        self.fp8(f"{role}attention", f"{attn}.wq_b", heads * head_dim, q_rank)
        self.fp8(f"{role}attention", f"{attn}.wkv", head_dim, hidden)
        self.plain(f"{role}attention", f"{attn}.kv_norm.weight", (head_dim,))
        self.fp8(f"{role}attention", f"{attn}.wo_a", groups * o_rank, heads * head_dim // groups)
        self.fp8(f"{role}attention", f"{attn}.wo_b", hidden, groups * o_rank)
        self.plain(f"{role}attention", f"{attn}.attn_sink", (heads,), _F32)
        for norm in ("attn_norm", "ffn_norm"):
            self.plain(f"{role}norm", f"{prefix}.{norm}.weight", (hidden,))
        mixes = (2 + copies) * copies
        for side in ("attn", "ffn"):
            self.plain(f"{role}hyper-connection", f"{prefix}.hc_{side}_fn", (mixes, copies * hidden), _F32)
            self.plain(f"{role}hyper-connection", f"{prefix}.hc_{side}_base", (mixes,), _F32)
            self.plain(f"{role}hyper-connection", f"{prefix}.hc_{side}_scale", (3,), _F32)
        self.plain(f"{role}gate", f"{prefix}.ffn.gate.weight", (experts, hidden))
        for bias in ("bias", "bias_vl"):
            self.plain(f"{role}gate", f"{prefix}.ffn.gate.{bias}", (experts,), _F32)
        shared = f"{prefix}.ffn.shared_experts"
        self.fp8(f"{role}shared expert", f"{shared}.w1", inter, hidden)
        self.fp8(f"{role}shared expert", f"{shared}.w3", inter, hidden)
        self.fp8(f"{role}shared expert", f"{shared}.w2", hidden, inter)

    def sparse(self, layer: int) -> None:
        """Compressor and indexer of a source layer."""
        text, hidden, head_dim = self.text, self.hidden, int(self.text["head_dim"])
        key_value, index = layer in text["kv_source_layer_ids"], layer in text["index_source_layer_ids"]
        heads, dim = int(text["index_n_heads"]), int(text["index_head_dim"])
        attn = f"layers.{layer}.attn"
        if key_value:
            self.plain("compressor", f"{attn}.compressor.wkv.weight", (head_dim, hidden))
            if int(text["compress_ratios"][layer]) > 1:
                self.plain("compressor", f"{attn}.compressor.wgate.weight", (head_dim, hidden))
            self.plain("compressor", f"{attn}.compressor.norm.weight", (head_dim,))
            self.plain("indexer", f"{attn}.indexer.wk.weight", (dim, head_dim))
            self.plain("indexer", f"{attn}.indexer.k_norm.weight", (dim,))
        if index:
            self.fp8("indexer", f"{attn}.indexer.wq_b", heads * dim, int(text["q_lora_rank"]))
            self.plain("indexer", f"{attn}.indexer.weights_proj.weight", (heads, hidden))

    def engram(self, config: Mapping[str, Any]) -> None:
        text, hidden, copies = self.text, self.hidden, int(self.text["hc_mult"])
        found = geometry(dict(config))
        ngrams = (int(text["engram_max_ngram_size"]) - 1) * int(text["engram_n_heads"])
        for layer, rows in zip(found.layers, found.rows, strict=True):
            prefix = f"layers.{layer}.engram"
            self.plain("engram table", f"{prefix}.embed.weight", (rows, WEIGHT_BYTES), ("F8_E4M3",))
            self.plain("engram table", f"{prefix}.embed.scale", (rows, SCALE_BYTES), ("F8_E8M0",))
            self.fp8("engram", f"{prefix}.wkv", (copies + 1) * hidden, ngrams * int(text["engram_head_dim"]))
            for side in ("q", "k"):
                self.plain("engram", f"{prefix}.{side}_weight", (copies, hidden))

    def drafter(self, kind: Experts) -> None:
        text, hidden = self.text, self.hidden
        layers, count = int(text["num_nextn_predict_layers"]), int(text["dspark_n_routed_experts"])
        vocab, rank = int(text["vocab_size"]), int(text["dspark_markov_rank"])
        for layer in range(layers):
            self.block("drafter ", f"mtp.{layer}", count)
            self.experts("drafter experts", f"mtp.{layer}.ffn", count, kind)
        if layers:
            self.fp8("drafter head", "mtp.0.main_proj", hidden, len(text["dspark_target_layer_ids"]) * hidden)
            self.plain("drafter head", "mtp.0.main_norm.weight", (hidden,))
            last = f"mtp.{layers - 1}"
            self.plain("drafter head", f"{last}.norm.weight", (hidden,))
            for side in ("embed", "head"):
                self.plain("drafter head", f"{last}.markov_head.{side}.weight", (vocab, rank))
            self.plain("drafter head", f"{last}.confidence_head.proj.weight", (1, hidden + rank), _EITHER)

    def pictures(self) -> None:
        vision, hidden = self.vision, self.hidden
        dim, inter = int(vision["hidden_size"]), int(vision["intermediate_size"])
        self.plain("vision", "vision.patch_embed.proj.weight", (dim, 3 * int(vision["patch_size"]) ** 2))
        self.plain("vision", "vision.patch_embed.proj.bias", (dim,))
        for block in range(int(vision["num_hidden_layers"])):
            prefix = f"vision.blocks.{block}"
            for name, out in (("wqkv", 3 * dim), ("wo", dim)):
                self.plain("vision", f"{prefix}.attn.{name}.weight", (out, dim))
                self.plain("vision", f"{prefix}.attn.{name}.bias", (out,))
            self.plain("vision", f"{prefix}.mlp.w1.weight", (2 * inter, dim))
            self.plain("vision", f"{prefix}.mlp.w2.weight", (dim, inter))
            for norm in ("norm1", "norm2"):
                self.plain("vision", f"{prefix}.{norm}.weight", (dim,), _EITHER)
        self.plain("vision", "vision.norm.weight", (dim,), _EITHER)
        for name, inner in (("w1", dim * int(vision["downsample_ratio"]) ** 2), ("w2", hidden)):
            self.plain("aligner", f"aligner.{name}.weight", (hidden, inner))
            self.plain("aligner", f"aligner.{name}.bias", (hidden,))
        for name in ("image_start", "image_end", "image_newline"):
            self.plain("aligner", name, (hidden,), _EITHER)


def contract(config: Mapping[str, Any], *, routed: Experts = "mxfp4", draft: Experts = "mxfp4") -> dict[str, Spec]:
    """Every tensor a pack of this config must have, codebook markers left out; 96,085 for the official checkpoint.

    Raises ValueError when the config lacks a number, or its Engram rows are not the sums of the hash primes.
    """
    try:
        made = _Contract(config)
        text = made.text
        vocab = int(text["vocab_size"])
        made.plain("embedding", "embed.weight", (vocab, made.hidden))
        made.plain("embedding", "head.weight", (vocab, made.hidden))
        made.plain("norm", "norm.weight", (made.hidden,))
        for layer in range(int(text["num_hidden_layers"])):
            made.block("", f"layers.{layer}", int(text["n_routed_experts"]))
            made.sparse(layer)
            made.experts("routed experts", f"layers.{layer}.ffn", int(text["n_routed_experts"]), routed)
        made.engram(config)
        made.drafter(draft)
        if made.vision:
            made.pictures()
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"config.json lacks {error}") from None
    return made.found


def experts_kind(tensors: Mapping[str, Tensor], prefix: str) -> Experts:
    """How the experts below `prefix` (`layers.` or `mtp.`) are stored."""
    return "exl3" if any(n.startswith(prefix) and n.endswith(".trellis") for n in tensors) else "mxfp4"


def bits(tensor: Tensor) -> float:
    """K, bits a weight, from a trellis' shape (never from a config). Raises ValueError for an impossible shape."""
    last = tensor.shape[-1] if len(tensor.shape) == 3 else 0
    found = last / TRELLIS_TILE
    if not 1 <= found <= 8 or (last % TRELLIS_TILE and last % (TRELLIS_TILE // 2)):
        raise ValueError(f"{tensor.name} has shape {list(tensor.shape)}, which is no trellis of 1 to 8 bits")
    return found


@dataclass(frozen=True)
class Trellises:
    """The EXL3 side of a pack: K of every layer's matrices, and how many matrices have which codebook."""

    by_layer: dict[int, Counter[float]]
    codebooks: Counter[str]
    problems: tuple[str, ...]

    def text(self, layer: int) -> str:
        """`3` or `2 x 96, 3 x 288` of one layer."""
        found = self.by_layer[layer]
        if len(found) == 1:
            return f"{next(iter(found)):g}"
        return ", ".join(f"{rate:g} x {count}" for rate, count in sorted(found.items()))


def trellises(tensors: Mapping[str, Tensor]) -> Trellises:
    """K, codebooks and what is wrong with the EXL3 matrices of the routed experts."""
    by_layer: dict[int, Counter[float]] = {}
    codebooks: Counter[str] = Counter()
    first: dict[str, str] = {}
    problems: list[str] = []
    for name, tensor in tensors.items():
        match = ROUTED.fullmatch(name)
        if match is None or match[5] != "trellis":
            continue
        try:
            by_layer.setdefault(int(match[2]), Counter())[bits(tensor)] += 1
        except ValueError as error:
            problems.append(str(error))
        markers = [book for book in CODEBOOKS if f"{match[1]}.{book}" in tensors]
        if len(markers) > 1:
            problems.append(f"{match[1]} has two codebook markers: {' and '.join(markers)}")
        book = markers[0] if markers else "3inst"
        codebooks[book] += 1
        first.setdefault(book, match[1])
    if len(codebooks) > 1:
        rare = min(codebooks, key=lambda book: codebooks[book])
        rest = ", ".join(f"{book} x {count}" for book, count in codebooks.most_common() if book != rare)
        problems.append(f"{first[rare]} has codebook {rare}, the rest of the pack {rest}: one codebook a pack")
    return Trellises(dict(sorted(by_layer.items())), codebooks, tuple(problems))


def violations(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    outside: Mapping[str, Tensor] | None = None,
    drafter: bool = False,
) -> Iterator[str]:
    """What breaks the V4.1 contract, one line a tensor, most telling first.

    `tensors`: what the index names; `outside`: Engram tables that lie in the folder beside it (an index without
    them is usual for packs whose engine takes the tables from a store). A pack without any tensor of the drafter
    is whole unless `drafter` asks for it.
    """
    try:
        routed, draft = experts_kind(tensors, "layers."), experts_kind(tensors, "mtp.")
        wanted = contract(config, routed=routed, draft=draft)
    except ValueError as error:
        yield str(error)
        return
    beside = outside or {}
    if not drafter and not any(name.startswith("mtp.") for name in tensors):
        wanted = {name: spec for name, spec in wanted.items() if not name.startswith("mtp.")}
    for name, spec in wanted.items():
        tensor = tensors.get(name) or (beside.get(name) if TABLE.fullmatch(name) else None)
        if tensor is None:
            yield f"{name} ({spec.role}) is missing"
        elif problem := spec.problem(tensor):
            yield problem
    yield from trellises(tensors).problems
    for name, tensor in tensors.items():
        if name in wanted:
            continue
        stem, _, last = name.rpartition(".")
        if last in CODEBOOKS and f"{stem}.trellis" in wanted:
            if tensor.dtype != "I32" or math.prod(tensor.shape) != 1:
                yield f"{name} is {tensor.dtype} {list(tensor.shape)}, expected one I32"
            continue
        yield f"{name} is in no V4.1 pack"


def roles(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Role -> (tensors there, tensors expected), codebook markers left out."""
    wanted = contract(config, routed=experts_kind(tensors, "layers."), draft=experts_kind(tensors, "mtp."))
    total: Counter[str] = Counter(spec.role for spec in wanted.values())
    there: Counter[str] = Counter(spec.role for name, spec in wanted.items() if name in tensors)
    return {role: (there[role], count) for role, count in total.items()}
