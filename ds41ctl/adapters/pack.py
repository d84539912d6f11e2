"""The pack folder: what is expected, what is there, and the sidecars that remember a verification."""

from __future__ import annotations

import importlib.resources
import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ds41ctl.adapters import files
from ds41ctl.adapters.safetensors import Tensor, read_header, read_index
from ds41ctl.core import packgen
from ds41ctl.core.errors import IntegrityError
from ds41ctl.core.facts import PackFacts, PackFileFacts, TensorFacts
from ds41ctl.core.profile import HubSource, Profile, RecipeSource

SIDECAR = ".sha256-ok"
INDEX = "model.safetensors.index.json"
_MARK = "# ds41ctl "
_TABLE = re.compile(r"\A(?:model\.)?layers\.\d+\.engram\.embed\.(?:weight|scale)\Z")


@dataclass(frozen=True)
class Expected:
    """One file the pack must have; `revision` is the commit (or recipe) that pins it."""

    name: str
    size: int
    sha256: str
    revision: str


def recipe_folder(name: str) -> Path:
    """Folder of a committed recipe (wheel and editable installs alike)."""
    return Path(str(importlib.resources.files("profiles").joinpath("packs", name)))


def recipe(profile: Profile) -> packgen.PackRecipe | None:
    """The recipe this profile's pack is generated from, None when it comes from elsewhere."""
    for source in profile.model.sources:
        if isinstance(source, RecipeSource):
            try:
                return packgen.load_recipe(recipe_folder(source.recipe))
            except (ValueError, OSError) as error:
                raise IntegrityError(f"recipe {source.recipe}: {error}", hints=("reinstall ds41ctl",)) from None
    return None


def expected(profile: Profile) -> tuple[Expected, ...]:
    """Pinned files of the pack; empty when nothing pins them (a local folder, or a hub tree not read yet)."""
    found = recipe(profile)
    if found is None:
        return ()
    return tuple(Expected(item.name, item.size, item.sha256, found.revision) for item in found.files)


def from_hub(profile: Profile) -> bool:
    """True when at least one source is a Hub repository."""
    return any(isinstance(source, HubSource) for source in profile.model.sources)


def write_sidecar(path: Path, item: Expected) -> None:
    """Remember that `path` was hashed and matched: `sha256sum -c` format, then what binds it to these very bytes."""
    info = path.stat()
    binding = {
        "device": info.st_dev,
        "inode": info.st_ino,
        "mtime_ns": info.st_mtime_ns,
        "revision": item.revision,
        "sha256": item.sha256,
        "size": info.st_size,
        "verified_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    text = f"{item.sha256}  {path.name}\n{_MARK}{json.dumps(binding, sort_keys=True)}\n"
    files.publish(path.with_name(path.name + SIDECAR), [text.encode()])


def sidecar_problem(path: Path, item: Expected) -> str:
    """'' when the sidecar vouches for the file as it is now, else what is wrong with it."""
    sidecar = path.with_name(path.name + SIDECAR)
    try:
        lines = sidecar.read_text(encoding="utf-8").splitlines()
        binding: dict[str, Any] = json.loads(lines[1].removeprefix(_MARK))
        named = lines[0].split("  ", 1)[1]
    except FileNotFoundError:
        return "never verified"
    except (OSError, ValueError, IndexError):
        return "unreadable sidecar"
    info = path.stat()
    now = {
        "device": info.st_dev,
        "inode": info.st_ino,
        "mtime_ns": info.st_mtime_ns,
        "revision": item.revision,
        "sha256": item.sha256,
        "size": info.st_size,
    }
    changed = [key for key, value in now.items() if binding.get(key) != value]
    if named != path.name:
        changed.append("name")
    return f"changed since it was verified ({', '.join(changed)})" if changed else ""


def file_problem(folder: Path, item: Expected, *, hash_it: bool) -> str:
    """'' when the file is the pinned one. Quick: size and sidecar. `hash_it`: every byte."""
    path = folder / item.name
    if not path.is_file():
        return "missing" if not path.exists() else "not a regular file"
    if not path.resolve().is_relative_to(folder.resolve()):
        return "a symlink that leaves the pack folder"
    size = path.stat().st_size
    if size != item.size:
        return f"{size} bytes, expected {item.size}"
    if not hash_it:
        return sidecar_problem(path, item)
    found = files.file_sha256(path)
    return "" if found == item.sha256 else f"sha256 {found[:12]}..., expected {item.sha256[:12]}..."


def inspect(profile: Profile, folder: Path) -> PackFacts:
    """Facts about the pack as it lies there, in milliseconds (headers and sidecars only)."""
    wanted = expected(profile)
    if not folder.is_dir():
        return PackFacts(
            dir=str(folder),
            exists=False,
            files=tuple(PackFileFacts(name=item.name, size_expected=item.size) for item in wanted),
            bytes_missing=sum(item.size for item in wanted) if wanted else None,
        )
    file_facts = []
    missing = 0
    for item in wanted:
        path = folder / item.name
        note = file_problem(folder, item, hash_it=False)
        size = path.stat().st_size if path.is_file() else None
        file_facts.append(
            PackFileFacts(name=item.name, size_expected=item.size, size=size, verified=not note, note=note)
        )
        if note == "missing" or size != item.size:
            missing += item.size
    problems: list[str] = []
    names: int | None = None
    tables: list[TensorFacts] = []
    if (folder / INDEX).exists() or (folder / "config.json").exists():
        try:
            names, tables, problems = _tensors(folder)
        except IntegrityError as error:
            problems.append(error.message)
    return PackFacts(
        dir=str(folder),
        exists=True,
        files=tuple(file_facts),
        bytes_missing=missing if wanted or not from_hub(profile) else None,
        index_names=names,
        engram_tensors=tuple(tables),
        problems=tuple(problems),
    )


def _tensors(folder: Path) -> tuple[int, list[TensorFacts], list[str]]:
    index = read_index(folder / INDEX)
    problems: list[str] = []
    tables: list[TensorFacts] = []
    for file in sorted(set(index.values())):
        path = folder / file
        if not path.is_file():
            problems.append(f"{file} is named by the index and missing")
            continue
        try:
            header = read_header(path)
        except IntegrityError as error:
            problems.append(error.message)
            continue
        absent = [name for name, where in index.items() if where == file and name not in header]
        if absent:
            problems.append(f"{file} lacks {absent[0]}" + (f" and {len(absent) - 1} more" if absent[1:] else ""))
        # only what the index names is read by the engine: a tensor that merely lies in the file does not count
        tables += [
            TensorFacts(name=t.name, file=file, dtype=t.dtype, shape=t.shape)
            for t in header.values()
            if _TABLE.match(t.name) and index.get(t.name) == file
        ]
    return len(index), tables, problems


def engram_tensors(folder: Path, layer: int) -> tuple[Path, Tensor, Tensor]:
    """(shard, weight tensor, scale tensor) of a layer's Engram table.

    Raises IntegrityError when the index does not name both, or they do not lie in one shard.
    """
    index = read_index(folder / INDEX)
    names = [f"layers.{layer}.engram.embed.{part}" for part in ("weight", "scale")]
    missing = [name for name in names if name not in index]
    if missing:
        raise IntegrityError(
            f"the pack's index does not name {missing[0]}: the Engram table of layer {layer} is not in this pack",
            hints=("ds41ctl fetch --verify",),
        )
    if index[names[0]] != index[names[1]]:
        raise IntegrityError(f"{names[0]} is in {index[names[0]]}, {names[1]} in {index[names[1]]}: expected one shard")
    path = folder / index[names[0]]
    if not path.is_file():
        raise IntegrityError(f"{path.name} is missing", hints=("ds41ctl fetch",))
    header = read_header(path)
    lost = [name for name in names if name not in header]
    if lost:
        raise IntegrityError(f"{path.name} lacks {lost[0]}, which the index places there")
    return path, header[names[0]], header[names[1]]


def config(folder: Path) -> dict[str, Any]:
    """Parsed config.json. Raises IntegrityError when it is missing or not JSON."""
    try:
        tree = files.read_json(folder / "config.json")
    except ValueError as error:
        raise IntegrityError(f"config.json: not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise IntegrityError("config.json is missing", hints=("ds41ctl fetch",))
    return tree
