"""Graft: which tensor of a hybrid pack comes from which shard of which pack, and whether the result is right."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ds41ctl.core.errors import IntegrityError
from ds41ctl.core.profile import EngramTable, Graft
from ds41ctl.core.tensors import DTYPE_BITS, ROUTED, TABLE, Tensor, bits, trellises, violations

EXPERTS_FILES = "DSV41_EXPERTS_ONLY_FILES_RE"  # of the hybrid's engine: files of which it takes routed experts alone
Located = Mapping[str, tuple[str, Tensor]]  # tensor -> (file, header entry)


@dataclass(frozen=True)
class Hybrid:
    """A finished plan. `weight_map`: tensor -> (dir, file); `outside`: the Engram tables, which stay beside the index.

    `layer_bits`: K of every layer's routed experts as text; `tensors`: header entries of everything in it.
    """

    weight_map: dict[str, tuple[str, str]]
    outside: dict[str, tuple[str, str]]
    tensors: dict[str, Tensor]
    layer_bits: dict[int, str]
    codebook: str
    total_size: int


def combine(
    config: Mapping[str, Any],
    graft: Graft,
    tables: tuple[EngramTable, ...],
    *,
    trunk: Located,
    experts: Located,
    donor: Located,
) -> Hybrid:
    """Choose every tensor of the hybrid and prove the result.

    Raises IntegrityError naming the tensor: one that is missing, has another dtype, shape, K or codebook than the
    hybrid needs, an Engram table that is not there, or counts that are not the profile's.
    """
    chosen: dict[str, tuple[str, str, Tensor]] = {}
    for name, (file, tensor) in trunk.items():
        if not _routed(name) and not TABLE.fullmatch(name):
            chosen[name] = (graft.trunk, file, tensor)
    for name, (file, tensor) in experts.items():
        if _routed(name) and _layer(name) not in graft.layers:
            chosen[name] = (graft.experts, file, tensor)
    for name, (file, tensor) in donor.items():
        if _routed(name) and _layer(name) in graft.layers:
            chosen[name] = (graft.donor, file, tensor)
    tensors = {name: tensor for name, (_, _, tensor) in chosen.items()}
    outside = {name: (graft.trunk, file) for name, (file, _) in trunk.items() if TABLE.fullmatch(name)}
    beside = {name: trunk[name] for name in outside}
    prove(config, graft, tables, tensors, beside, drafter=True)
    found = trellises(tensors)
    return Hybrid(
        weight_map={name: (where, file) for name, (where, file, _) in sorted(chosen.items())},
        outside=outside,
        tensors=tensors,
        layer_bits={layer: found.text(layer) for layer in found.by_layer},
        codebook=next(iter(found.codebooks), ""),
        total_size=sum(tensor.end - tensor.begin for tensor in tensors.values()),
    )


def prove(
    config: Mapping[str, Any],
    graft: Graft,
    tables: tuple[EngramTable, ...],
    tensors: Mapping[str, Tensor],
    beside: Located,
    *,
    drafter: bool,
) -> None:
    """Prove a hybrid, whoever built it. `tensors`: what its index names; `beside`: its Engram tables.

    Raises IntegrityError as `combine` does.
    """
    _demand_tables(tables, beside)
    _demand_codebook(tensors)
    _demand_bits(graft, tensors)
    outside = {name: tensor for name, (_, tensor) in beside.items()}
    broken = list(_first(violations(config, tensors, outside=outside, drafter=drafter)))
    if broken:
        raise IntegrityError(f"the hybrid would break the V4.1 contract: {broken[0]}", detail=broken[1:])
    grafted = sum(_routed(name) and _layer(name) in graft.layers for name in tensors)
    if grafted != graft.grafted:
        raise IntegrityError(f"{grafted} tensors of layers {_span(graft.layers)} are grafted, expected {graft.grafted}")
    if len(tensors) != graft.tensors:
        raise IntegrityError(f"the hybrid has {len(tensors)} tensors, expected {graft.tensors}")


def _routed(name: str) -> bool:
    return ".ffn.experts." in name and name.startswith("layers.")


def _layer(name: str) -> int:
    number = name.split(".", 2)[1]
    return int(number) if number.isdecimal() else -1


def _demand_tables(tables: tuple[EngramTable, ...], trunk: Located) -> None:
    """The engine takes the tables from a store that is filled from these shards: without them it answers wrongly."""
    for table in tables:
        for part in ("weight", "scale"):
            name = f"layers.{table.layer}.engram.embed.{part}"
            if name not in trunk:
                raise IntegrityError(f"{name} is in no shard: layer {table.layer} would stay empty")
            file, tensor = trunk[name]
            if file != table.shard:
                raise IntegrityError(f"{name} is in {file}, expected in {table.shard}")
            if tensor.shape[:1] != (table.rows,):
                raise IntegrityError(f"{name} has shape {list(tensor.shape)}, expected {table.rows} rows")


def _demand_codebook(tensors: Mapping[str, Tensor]) -> None:
    problems = trellises(tensors).problems
    if problems:
        raise IntegrityError(problems[0], detail=problems[1:6])


def _demand_bits(graft: Graft, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        match = ROUTED.fullmatch(name)
        if match and match[5] == "trellis" and int(match[2]) in graft.layers and bits(tensor) != graft.bits:
            raise IntegrityError(f"{name} has {bits(tensor):g} bits a weight, expected {graft.bits:g}")


def _first(lines: Any, count: int = 10) -> list[str]:
    return [line for line, _ in zip(lines, range(count), strict=False)]


def _span(layers: tuple[int, ...]) -> str:
    return f"{min(layers)}-{max(layers)}" if len(layers) > 1 else str(layers[0])


def demand_pattern(pattern: str, graft: Graft, weight_map: Mapping[str, tuple[str, str]]) -> None:
    """The engine takes nothing but routed experts from the files that `pattern` finds: these must be the files of the
    experts' packs, all of them and no other. Raises IntegrityError naming the first file that is not so.
    """
    finds = re.compile(pattern).search
    for where, file in sorted(set(weight_map.values())):
        name = PurePosixPath(file).name
        if bool(finds(name)) == (where != graft.trunk):
            continue
        what = "holds the trunk's tensors: they would be left out" if where == graft.trunk else "holds routed experts"
        raise IntegrityError(
            f"{EXPERTS_FILES}={pattern} {'finds' if where == graft.trunk else 'does not find'} {name}, which {what}",
            hints=(f"correct {EXPERTS_FILES} in [serve] of the profile",),
        )


def quantization(base: Mapping[str, Any], hybrid: Hybrid, grafted: tuple[int, ...]) -> dict[str, Any]:
    """The EXL3 settings of the experts' pack with what the graft changed: bits a layer, and grafted storage entries.

    Everything is written from the trellis shapes, nothing from what a config claimed.
    """
    settings = {**base, "quant_method": "exl3"}
    shapes = [tensor for name, tensor in hybrid.tensors.items() if name.endswith(".trellis")]
    weights = [tensor.shape[0] * tensor.shape[1] * 256 for tensor in shapes]
    stored = sum(bits(tensor) * weight for tensor, weight in zip(shapes, weights, strict=True))
    settings["bits"] = round(stored / sum(weights), 3) if weights else 0
    settings["layer_bits"] = {
        str(layer): float(text) if text.replace(".", "", 1).isdecimal() else text
        for layer, text in hybrid.layer_bits.items()
    }
    storage = base.get("tensor_storage")
    if isinstance(storage, dict):
        settings["tensor_storage"] = {**storage, **_storage(hybrid, grafted)}
    return settings


def _storage(hybrid: Hybrid, layers: tuple[int, ...]) -> dict[str, Any]:
    """exllamav3's entry a matrix for the grafted layers: its tensors with shape, bytes and torch dtype."""
    torch = {"I16": "torch.int16", "F16": "torch.float16", "I32": "torch.int32"}
    found: dict[str, Any] = {}
    for name, tensor in hybrid.tensors.items():
        match = ROUTED.fullmatch(name)
        if match is None or int(match[2]) not in layers:
            continue
        entry = found.setdefault(match[1], {"stored_tensors": {}, "quant_format": "exl3"})
        size = tensor.end - tensor.begin
        entry["stored_tensors"][name] = {
            "shape": list(tensor.shape),
            "n_bytes": size,
            "dtype": torch.get(tensor.dtype, f"{DTYPE_BITS[tensor.dtype]} bits"),
        }
        if match[5] == "trellis":
            entry["bits_per_weight"] = bits(tensor)
    return found
