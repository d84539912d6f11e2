"""The Hub repositories of the two mission profiles: small ones that can be fetched, and sparse ones of the true size.

The names of repositories, files and tensors are the real ones as far as they are known; the layer a shard holds is
known for the donor alone (layers 18 to 22 in shards 20 to 24), for the others it is an assumption.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds41ctl.adapters import profiles
from ds41ctl.core.profile import EngramTable, Profile
from ds41ctl.core.tensors import DTYPE_BITS, ROUTED, TABLE, Spec, contract
from tests.fakes.hub import FakeHub
from tests.fakes.v41 import (
    ENGRAM_LAYERS,
    EXPERTS,
    LAYERS,
    MUL1,
    REAL,
    ROWS,
    Stored,
    config,
    exl3,
    exl3_layout,
    files_of,
    official,
    official_layout,
    stored,
)

OFFICIAL = "deepseek-ai/DeepSeek-V4.1-Flash-1017"
EXPERTS_REPO = "LibertAIDAI/DeepSeek-V4.1-Flash-1017-EXL3-2.9bpw"
DONOR = "LibertAIDAI/DeepSeek-V4.1-Flash-1017-EXL3-3.5bpw"
FRANKEN = "philbert440/DeepSeek-V4.1-Flash-1017-EXL3-franken-v100"
GRAFTED = (18, 19, 20, 21, 22)
TENSORS = len(contract(config(), routed="exl3")) + LAYERS * EXPERTS * 3 - 4  # a marker a matrix; tables stay outside
SETTINGS = {"quant_method": "exl3", "bits": 2.9, "layer_bits": {"18": 2}, "tensor_storage": {"kept": {"x": 1}}}


def small(name: str, **graft: Any) -> Profile:
    """A shipped mission profile with the counts of the small packs; `graft` replaces fields of its graft."""
    base = profiles.read(profiles.find(name))
    tables = tuple(
        EngramTable(layer=layer, rows=rows, shard=f"model-000{47 + number}-of-00048.safetensors")
        for number, (layer, rows) in enumerate(zip(ENGRAM_LAYERS, ROWS, strict=True))
    )
    updates: dict[str, Any] = {"engram": tables}
    if base.model.graft is not None:
        counts = {"tensors": TENSORS, "grafted": len(GRAFTED) * EXPERTS * 3 * 4, **graft}
        updates["graft"] = base.model.graft.model_copy(update=counts)
    return base.model_copy(update={"model": base.model.model_copy(update=updates)})


def filled(shards: Mapping[str, Stored]) -> dict[str, Stored]:
    """The same tensors with bytes that depend on their name, codebook markers aside."""
    return {
        shard: {
            name: (dtype, shape, data if data == MUL1 else hashlib.shake_256(f"{name}".encode()).digest(len(data)))
            for name, (dtype, shape, data) in tensors.items()
        }
        for shard, tensors in shards.items()
    }


def franken() -> dict[str, Stored]:
    """The V100 pack: EXL3 experts of 2 to 5 bits by expert and every official tensor but the Engram tables, a layer a
    shard, the rest in the last ones."""
    shards: dict[str, Stored] = {}
    for name, spec in contract(config(), routed="exl3").items():
        if TABLE.fullmatch(name):
            continue
        layer = int(name.split(".")[1]) if name.startswith("layers.") else LAYERS
        shard = shards.setdefault(f"model-{layer + 1:05}-of-00048.safetensors", {})
        match = ROUTED.fullmatch(name)
        shard[name] = stored(spec, 2 + int(match[3]) % 4 if match else 3)
        if match and match[5] == "trellis":
            shard[f"{match[1]}.mul1"] = ("I32", [], MUL1)
    return shards


def mission_repos(profile: Profile) -> dict[str, dict[str, bytes]]:
    """Repository -> its files, at small width, of every Hub source of a mission profile."""
    whole = filled(official())
    found = {OFFICIAL: files_of(whole)}
    repos = {source.repo for source in profile.model.hub_sources}
    if EXPERTS_REPO in repos:
        found[EXPERTS_REPO] = files_of(filled(exl3(lambda layer: 2 if layer in GRAFTED else 3, 43)), SETTINGS)
        found[DONOR] = files_of(filled(exl3(lambda layer: 3 if layer in GRAFTED else 4, 44)), SETTINGS)
    if FRANKEN in repos:
        tables = {
            shard: {name: tensor for name, tensor in tensors.items() if TABLE.fullmatch(name)}
            for shard, tensors in whole.items()
            if shard.startswith(("model-00047", "model-00048"))
        }
        files = files_of({**filled(franken()), **tables}, {"quant_method": "exl3"})
        found[FRANKEN] = {name: data for name, data in files.items() if name not in tables}
    return found


def serve(hub: FakeHub, profile: Profile) -> None:
    """Put the small repositories on a loopback Hub, at the profile's commits."""
    revisions = {source.repo: source.revision for source in profile.model.hub_sources}
    for repo, files in mission_repos(profile).items():
        hub.add(repo, files, revision=revisions[repo])


# ---- true sizes


def sparse(path: Path, specs: Mapping[str, Spec], rate: float = 3) -> Path:
    """A safetensors file with a true header whose data are a hole."""
    header: dict[str, Any] = {}
    at = 0
    for name, spec in specs.items():
        shape = [int(16 * rate) if extent == -1 else extent for extent in spec.shape]
        size = math.prod(shape) * DTYPE_BITS[spec.dtypes[0]] // 8
        header[name] = {"dtype": spec.dtypes[0], "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(raw)) + raw)
        out.truncate(8 + len(raw) + at)
    return path


def serve_true_sizes(hub: FakeHub, profile: Profile, folder: Path) -> None:
    """The repositories of the CMP profile at the real shapes, as files full of holes: 750 GB that take some MB."""
    revisions = {source.repo: source.revision for source in profile.model.hub_sources}
    layouts = {
        OFFICIAL: (official_layout(REAL), lambda layer: 0.0),
        EXPERTS_REPO: (exl3_layout(REAL, 43, range(LAYERS)), lambda layer: 2 if layer in GRAFTED else 3),
        DONOR: (exl3_layout(REAL, 44, GRAFTED), lambda layer: 3),
    }
    for number, (repo, (layout, rate)) in enumerate(layouts.items()):
        here = folder / str(number)
        here.mkdir(parents=True)
        files = {shard: sparse(here / shard, specs, rate(int(shard[6:11]) - 2)) for shard, specs in layout.items()}
        hub.add_sparse(repo, files, revision=revisions[repo])
        if repo != DONOR:
            weight_map = {name: shard for shard, specs in layout.items() for name in specs}
            index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
            hub.add(repo, {"model.safetensors.index.json": index, "config.json": b"{}"}, revision=revisions[repo])
