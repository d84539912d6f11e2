"""inspect: what a pack folder holds, from headers and index alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ds41ctl.adapters import pack
from ds41ctl.core.errors import NotFoundError
from ds41ctl.core.finding import Finding
from ds41ctl.core.tensors import QUANT_BLOCK, experts_kind, roles, trellises
from ds41ctl.steps.verify import contract_findings


@dataclass(frozen=True)
class Description:
    """Everything worth showing of one folder."""

    folder: Path
    model_type: str
    experts: str
    shards: int
    bytes: int
    tensors: int
    outside: int
    links: int
    layer_bits: dict[int, str]
    codebooks: dict[str, int]
    roles: dict[str, tuple[int, int]]
    findings: tuple[Finding, ...]

    def lines(self) -> list[tuple[str, str]]:
        """(label, text) a line."""
        beside = f", {self.outside} Engram tensors beside the index" if self.outside else ""
        linked = f", {self.links} of them links" if self.links else ""
        found = [
            ("model", f"{self.model_type}, routed experts {self.experts}"),
            ("files", f"{self.shards} shards{linked}, {self.bytes / 1e9:,.1f} GB ({self.bytes / 2**30:,.1f} GiB)"),
            ("tensors", f"{self.tensors} in the index{beside}"),
        ]
        for text, group in groupby(self.layer_bits.items(), key=lambda pair: pair[1]):
            layers = [layer for layer, _ in group]
            span = f"layers {layers[0]}-{layers[-1]}" if layers[1:] else f"layer {layers[0]}"
            found.append(("bits", f"{span}: {text} bits a weight"))
        if self.codebooks:
            found.append(("codebook", ", ".join(f"{name} x {count}" for name, count in self.codebooks.items())))
        drafter = {role for role in self.roles if role.startswith("drafter")}
        none = not any(self.roles[role][0] for role in drafter)
        judged = {role: pair for role, pair in self.roles.items() if not (none and role in drafter)}
        missing = [f"{role} {there} of {wanted}" for role, (there, wanted) in judged.items() if there != wanted]
        text = "all complete" if judged and not missing else ", ".join(missing) or "unknown"
        found.append(("roles", text + (", no drafter" if drafter and none else "")))
        return found

    def as_json(self) -> dict[str, Any]:
        """The same as a JSON document."""
        return {
            "folder": str(self.folder),
            "model_type": self.model_type,
            "experts": self.experts,
            "shards": self.shards,
            "bytes": self.bytes,
            "tensors": self.tensors,
            "outside_index": self.outside,
            "links": self.links,
            "layer_bits": {str(layer): text for layer, text in self.layer_bits.items()},
            "codebooks": self.codebooks,
            "roles": {role: {"found": there, "expected": wanted} for role, (there, wanted) in self.roles.items()},
            "findings": [item.model_dump(mode="json") for item in self.findings],
        }


def describe(folder: Path, *, drafter: bool = False) -> Description:
    """Read a pack's config, index and headers.

    Raises NotFoundError when there is no pack, IntegrityError when it has no config or no index.
    """
    if not any((folder / name).exists() for name in ("config.json", pack.INDEX)):
        raise NotFoundError(f"no pack in {folder}", hints=("ds41ctl fetch",))
    config = pack.config(folder)
    found = pack.contents(folder)
    tensors = found.indexed | found.outside
    exl3 = trellises(tensors)
    shards = [folder / name for name in sorted(set(found.shards.values()))]
    there = [path for path in shards if path.is_file()]
    kind = experts_kind(tensors, "layers.")
    layer_bits = {layer: exl3.text(layer) for layer in exl3.by_layer}
    if kind == "mxfp4":
        layers = int(config.get("text_config", config).get("num_hidden_layers", 0))
        # 4 bits and one 8-bit scale a block
        layer_bits = dict.fromkeys(range(layers), f"{4 + 8 / QUANT_BLOCK:g}")
    try:
        counts = roles(config, tensors)
    except ValueError:  # the finding about the contract says why
        counts = {}
    return Description(
        folder=folder,
        model_type=str(config.get("model_type", "unknown")),
        experts=kind,
        shards=len(shards),
        bytes=sum(path.stat().st_size for path in there),
        tensors=found.index_names,
        outside=len(found.outside),
        links=sum(path.is_symlink() for path in shards),
        layer_bits=layer_bits,
        codebooks=dict(exl3.codebooks),
        roles=counts,
        findings=tuple(contract_findings(folder, drafter=drafter)),
    )
