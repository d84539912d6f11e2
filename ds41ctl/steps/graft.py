"""graft: a hybrid pack of links into three verified packs, with a new index; no weight is copied."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

from ds41ctl.adapters import files, pack
from ds41ctl.adapters.pack import Expected, Holding
from ds41ctl.adapters.safetensors import read_header, read_index
from ds41ctl.core.errors import IntegrityError, NotFoundError, UnsupportedError
from ds41ctl.core.graft import EXPERTS_FILES, Hybrid, Located, combine, demand_pattern, quantization
from ds41ctl.core.launch import as_told, passed_on
from ds41ctl.core.layout import Layout
from ds41ctl.core.profile import Graft as GraftSpec
from ds41ctl.core.profile import Profile
from ds41ctl.core.tensors import Tensor
from ds41ctl.steps.runner import Goal, Progress

MANIFEST_SCHEMA = 1
NOT_OURS = "nothing that pack graft made"
QUANTIZATION = "quantization_config.json"
# made here or about one source only: not linked from it
OWN_NAMES = {"config.json", pack.INDEX, QUANTIZATION, "README.md", ".gitattributes", "LICENSE"}


class GraftPack:
    """Build the profile's hybrid folder, proven before it gets its name."""

    name = "graft"

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @property
    def spec(self) -> GraftSpec:
        """The profile's graft. Raises UnsupportedError for a profile without one."""
        spec = self.layout.profile.model.graft
        if spec is None:
            raise UnsupportedError(f"profile {self.layout.name} has no graft: its pack is used as it is")
        return spec

    def check(self) -> Goal:
        """The hybrid is there, made from these very pins, every link in place and vouched for."""
        spec, folder = self.spec, self.layout.model_dir
        if pack.own_hybrid(self.layout):
            seen = pack.own_record(self.layout) is not None
            return Goal(seen, f"{folder} is " + ("a hybrid of your own: nothing is built" if seen else NOT_OURS))
        held = pack.holdings(self.layout)
        if held is None:
            return Goal(False, "the sources were not fetched yet")
        manifest = pack.graft_manifest(folder)
        if manifest.get("id") != self._id(held):
            return Goal(False, "not built yet" if not manifest else "built from other pins")
        own = pack.expected(self.layout)
        if len(own) != len(manifest["links"]) + len(manifest["generated"]):
            return Goal(False, "a link leads to a file that is no longer pinned")
        bad = pack.quick([Holding(folder, own)])
        if bad:
            return Goal(False, f"{bad[0][1].name}: {bad[0][2]}")
        links = manifest["links"]
        shards = sum(name.endswith(".safetensors") for name in links)
        text = f"{spec.tensors} tensors, {spec.grafted} grafted at {spec.bits:g} bits, {shards} linked shards"
        return Goal(True, text, {"dir": str(folder), "links": len(links), "shards": shards})

    def do(self, progress: Progress) -> None:
        """Read the headers of all sources, choose, prove, build beside the target, rename."""
        spec, folder = self.spec, self.layout.model_dir
        if folder.exists() and not pack.graft_manifest(folder) and any(folder.iterdir()):
            raise IntegrityError(
                f"{folder} exists and is {NOT_OURS}",
                hints=(f"mv {folder} {folder}.aside", "ds41ctl fetch   # when it is a hybrid of your own"),
            )
        held = self._verified()
        with files.locked(folder.with_name(folder.name + ".graft.lock"), f"grafting {self.layout.name}"):
            located = {}
            for name in ("trunk", "experts", "donor"):
                progress(f"headers of {getattr(spec, name)}", {})
                located[name] = _located(held[getattr(spec, name)], self._left_out(getattr(spec, name)))
            config = self._config(held)
            hybrid = combine(config, spec, self.layout.profile.model.engram, **located)
            pattern = passed_on(self._told()).get(EXPERTS_FILES)
            if pattern is not None:
                demand_pattern(pattern, spec, hybrid.weight_map)
            progress(f"{len(hybrid.weight_map)} tensors chosen and proven", {})
            try:
                self._build(held, config, hybrid)
            except OSError as error:
                raise files.os_error(error, f"writing {error.filename or folder}") from error

    def _told(self) -> Profile:
        return as_told(self.layout.profile, self.layout.host, self.layout.port)

    def _verified(self) -> dict[str, Holding]:
        """dir -> its folder, complete and vouched for."""
        held = pack.holdings(self.layout)
        hints = (f"ds41ctl fetch --profile {self.layout.name}",)
        if held is None:
            raise NotFoundError("the sources of the graft were not fetched yet", hints=hints)
        bad = pack.quick(held)
        if bad:
            folder, item, reason = bad[0]
            raise IntegrityError(f"{folder / item.name}: {reason}", hints=hints)
        by_folder = {holding.folder: holding for holding in held}
        dirs = {source.dir for source in self.layout.profile.model.hub_sources}
        return {name: by_folder[self.layout.source_dir(name)] for name in dirs}

    def _left_out(self, folder: str) -> tuple[str, ...]:
        """Globs of the tensors that the sources of a folder do not fetch."""
        sources = self.layout.profile.model.hub_sources
        return tuple(glob for source in sources if source.dir == folder for glob in source.leave_out)

    def _id(self, held: tuple[Holding, ...]) -> str:
        """Digest of everything the hybrid is made from."""
        pins = [[[item.repo, item.revision, item.name, item.digest] for item in h.items] for h in held]
        tree = {"graft": self.spec.model_dump(mode="json"), "pins": pins, "schema": MANIFEST_SCHEMA}
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()

    def _config(self, held: dict[str, Holding]) -> dict[str, Any]:
        """config.json of the experts' pack (it states EXL3), or the trunk's."""
        for name in (self.spec.experts, self.spec.trunk):
            if (held[name].folder / "config.json").is_file():
                return pack.config(held[name].folder)
        raise IntegrityError(f"neither {self.spec.experts} nor {self.spec.trunk} has a config.json")

    def _build(self, held: dict[str, Holding], config: dict[str, Any], hybrid: Hybrid) -> None:
        folder = self.layout.model_dir
        new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
        for leftover in (new, old):
            if leftover.exists():
                shutil.rmtree(leftover)
        new.mkdir(parents=True)
        links = self._links(held, hybrid)
        for name, (where, file) in links.items():
            link = new / name
            link.parent.mkdir(parents=True, exist_ok=True)
            target = held[where].folder / file
            # relative, so that the whole models folder can be mounted elsewhere
            final = folder.parent.resolve() / folder.name / name
            link.symlink_to(os.path.relpath(target.resolve(), final.parent))
        generated = self._generate(new, config, hybrid)
        manifest = {
            "schema": MANIFEST_SCHEMA,
            "id": self._id(tuple(pack.holdings(self.layout) or ())),
            "links": {name: {"dir": where, "file": file} for name, (where, file) in links.items()},
            "generated": {name: {"size": item.size, "sha256": item.sha256} for name, item in generated.items()},
            "outside_index": {name: PurePosixPath(file).name for name, (_, file) in hybrid.outside.items()},
            "layer_bits": {str(layer): text for layer, text in hybrid.layer_bits.items()},
            "codebook": hybrid.codebook,
        }
        for name, item in generated.items():
            pack.write_sidecar(new / name, Expected(name, item.size, item.sha256, str(manifest["id"])))
        files.publish_json(new / pack.GRAFT, manifest)
        files.fsync_dir(new)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        files.fsync_dir(folder.parent)
        if old.exists():
            shutil.rmtree(old)
        for name in links:
            if not (folder / name).exists():
                raise IntegrityError(f"{folder / name} is a dangling link", hints=(f"rm -r {folder}",))

    def _links(self, held: dict[str, Holding], hybrid: Hybrid) -> dict[str, tuple[str, str]]:
        """Link name -> (dir, file). Raises IntegrityError when two packs need the same name."""
        wanted = {*hybrid.weight_map.values(), *hybrid.outside.values()}
        for where in (self.spec.trunk, self.spec.experts):
            for item in held[where].items:
                plain = PurePosixPath(item.name)
                small = plain.suffix != ".safetensors" and item.name not in OWN_NAMES
                if small and not any(file == item.name for _, file in wanted):
                    wanted.add((where, item.name))
        links: dict[str, tuple[str, str]] = {}
        for where, file in sorted(wanted):
            name = PurePosixPath(file).name if file.endswith(".safetensors") else file
            if name in links:
                raise IntegrityError(f"{name} is needed from {links[name][0]} and from {where}: one folder, one name")
            links[name] = (where, file)
        return links

    def _generate(self, new: Path, config: dict[str, Any], hybrid: Hybrid) -> dict[str, Expected]:
        base = config.get("quantization_config")
        settings = quantization(base if isinstance(base, dict) else {}, hybrid, self.spec.layers)
        weight_map = {name: PurePosixPath(file).name for name, (_, file) in hybrid.weight_map.items()}
        trees = {
            "config.json": {**config, "quantization_config": settings},
            QUANTIZATION: settings,
            pack.INDEX: {"metadata": {"total_size": hybrid.total_size}, "weight_map": weight_map},
        }
        made = {}
        for name, tree in trees.items():
            sha256 = files.publish_json(new / name, tree)
            made[name] = Expected(name, (new / name).stat().st_size, sha256, "")
        return made


def _located(holding: Holding, left_out: tuple[str, ...]) -> Located:
    """Every tensor of a source that counts: what its index names, or all headers when it was fetched without one.

    The index is the Hub's: it names the tensors that were left out, too.
    """
    folder = holding.folder
    shards = [item.name for item in holding.items if item.name.endswith(".safetensors")]
    index = read_index(folder / pack.INDEX) if (folder / pack.INDEX).is_file() else None
    found: dict[str, tuple[str, Tensor]] = {}
    for file in shards:
        for name, tensor in read_header(folder / file).items():
            if index is not None and name in index and index[name] != file:
                continue
            if name in found:
                raise IntegrityError(f"{folder.name}: {name} is in {found[name][0]} and in {file}")
            found[name] = (file, tensor)
    absent = [name for name, file in (index or {}).items() if file in shards and name not in found]
    lost = next((name for name in absent if not any(fnmatch.fnmatchcase(name, glob) for glob in left_out)), None)
    if lost is not None and index is not None:
        raise IntegrityError(f"{folder.name}: {index[lost]} lacks {lost}, which the index places there")
    return found
