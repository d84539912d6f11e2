"""The pack folder: what is expected, what is there, and the sidecars that remember a verification."""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ds41ctl.adapters import files, part, pins
from ds41ctl.adapters.safetensors import Tensor, read_header, read_index
from ds41ctl.core import packgen
from ds41ctl.core.errors import DeniedError, IntegrityError
from ds41ctl.core.facts import PackFacts, PackFileFacts, TensorFacts
from ds41ctl.core.layout import Layout
from ds41ctl.core.pins import (
    LOCK_SCHEMA,
    PinnedFile,
    SeenFile,
    SeenPack,
    Subset,
    SubsetFile,
    SubsetKey,
    chosen,
    merged,
)
from ds41ctl.core.profile import HubSource, Profile, RecipeSource
from ds41ctl.core.tensors import TABLE

SIDECAR = ".sha256-ok"
QUARANTINE = ".bad"
MISSING = "missing"
SHARD = ".safetensors"
NO_ACCESS = "may not be read by this user"
LINK_OUT = "a symlink that leaves the pack folder"
INDEX = "model.safetensors.index.json"
GRAFT = "ds41-graft.json"
LOCK_FILE = ".ds41ctl.lock"
OWN_RECORD = "record.json"
SMALL = {".json", ".jinja", ".txt", ".model"}  # of a hybrid that nothing pins: configuration and tokenizer
_MARK = "# ds41ctl "
_OWN = re.compile(
    rf"{re.escape(LOCK_FILE)}(\.holder)?|{re.escape(GRAFT)}|.*{re.escape(QUARANTINE)}"
    rf"|.*{re.escape(part.SUFFIX)}({re.escape(part.JOURNAL_SUFFIX)})?"
)


@dataclass(frozen=True)
class Partial:
    """Of which file of the Hub a file of ours holds some tensors: `origin` is that file, `key` names the subset.

    `plan` is the digest of everything ours is made from, `head_sha256` that of the origin's header.
    """

    plan: str
    head_sha256: str
    key: SubsetKey
    origin: PinnedFile


@dataclass(frozen=True)
class Expected:
    """One file the pack must have; `revision` is the commit (or recipe) that pins it.

    Its bytes are pinned by `sha256`, or by `git_oid` (git's blob id) where the Hub states no sha256. `repo` and
    `xet` say where it is downloaded. `target`: the name is a link and the bytes lie there. `sidecar`: where it lies,
    when not beside the bytes. `partial`: it holds some tensors of a file of the Hub; its `sha256` is '' until it
    arrived once.
    """

    name: str
    size: int
    sha256: str
    revision: str
    git_oid: str = ""
    repo: str = ""
    xet: str = ""
    target: Path | None = None
    sidecar: Path | None = None
    partial: Partial | None = None

    @property
    def digest(self) -> str:
        """`sha256:HEX`, `git:HEX`, or `tensors:HEX` of the plan of a file that holds some tensors of another."""
        if self.partial is not None:
            return f"{part.TENSORS}:{self.partial.plan}"
        return f"sha256:{self.sha256}" if self.sha256 else f"git:{self.git_oid}"

    @property
    def identity(self) -> part.Identity:
        """What a part of this file must become."""
        return part.Identity(self.size, self.digest, self.sha256 if self.partial else "")


@dataclass(frozen=True)
class Holding:
    """One folder and every file it must have."""

    folder: Path
    items: tuple[Expected, ...]


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


def holdings(layout: Layout) -> tuple[Holding, ...] | None:
    """Every folder that sources fill, with its pinned files; () for a local pack, None while pins are missing (of a
    source that leaves tensors out: or the headers of its shards).

    A hybrid of the user's own is one folder, pinned by what was first seen of it (None before that).
    Raises IntegrityError when the pins disagree, ConfigError when sources contradict each other.
    """
    if own_hybrid(layout):
        return _own(layout)
    found = recipe(layout.profile)
    if found is not None:
        items = tuple(Expected(item.name, item.size, item.sha256, found.revision) for item in found.files)
        return (Holding(layout.model_dir, items),)
    sources = layout.profile.model.hub_sources
    pinned = pins.trees(layout)
    if len(pinned) < len({(source.repo, source.revision) for source in sources}):
        return None
    parts = pins.subsets(layout)
    if any(source.leave_out and _key(source) not in parts for source in sources):
        return None
    folders: dict[str, list[Any]] = {}
    for source in sources:
        tree = pinned[source.repo, source.revision]
        folders.setdefault(source.dir, []).append((source, chosen(tree, source.patterns)))
    held = []
    for folder, found_in in folders.items():
        where = layout.source_dir(folder)
        wanted = [_pinned(where, source, item, parts.get(_key(source))) for source, item in merged(found_in)]
        held.append(Holding(where, tuple(item for item in wanted if item is not None)))
    return tuple(held)


def _key(source: HubSource) -> SubsetKey:
    return source.repo, source.revision, source.leave_out


def _pinned(folder: Path, source: HubSource, item: PinnedFile, subset: Subset | None) -> Expected | None:
    """The file as this source wants it; None when none of its tensors is wanted."""
    git_oid = "" if item.sha256 else item.oid
    whole = Expected(item.path, item.size, item.sha256, source.revision, git_oid, source.repo, item.xet)
    if subset is None or not item.path.endswith(SHARD):
        return whole
    entry = next((entry for entry in subset.files if entry.path == item.path), None)
    if entry is None:
        raise IntegrityError(f"{source.repo}: the pins of single tensors lack {item.path}")
    if entry.whole:
        return whole
    return _some_tensors(folder, source, item, entry) if entry.kept else None


def _some_tensors(folder: Path, source: HubSource, item: PinnedFile, entry: SubsetFile) -> Expected:
    partial = Partial(entry.plan, entry.head_sha256, _key(source), item)
    found = Expected(
        item.path, entry.size, entry.sha256, source.revision, repo=source.repo, xet=item.xet, partial=partial
    )
    path = folder / item.path
    if not entry.sha256 and place_problem(folder, found) == "" and sidecar_problem(path, found) == "":
        # the state folder is younger than the file: what its sidecar vouches for is what arrived first
        return replace(found, sha256=path.with_name(path.name + SIDECAR).read_text().split(" ", 1)[0])
    return found


def expected(layout: Layout) -> tuple[Expected, ...]:
    """Pinned files of the pack's own folder; empty when nothing pins them (a local folder, or not fetched yet)."""
    held = holdings(layout) or ()
    if layout.profile.model.graft is not None and not own_hybrid(layout):
        return _grafted(layout, held)
    return next((holding.items for holding in held if holding.folder == layout.model_dir), ())


def _grafted(layout: Layout, held: Sequence[Holding]) -> tuple[Expected, ...]:
    """Files of a hybrid: the links its manifest names, pinned by the source behind them, and what was generated."""
    manifest = graft_manifest(layout.model_dir)
    sources = {holding.folder: holding for holding in held}
    found = [
        Expected(name, entry["size"], entry["sha256"], manifest["id"])
        for name, entry in manifest.get("generated", {}).items()
    ]
    for name, entry in manifest.get("links", {}).items():
        holding = sources.get(layout.source_dir(entry["dir"]))
        item = next((item for item in holding.items if item.name == entry["file"]), None) if holding else None
        if holding is not None and item is not None:
            target = holding.folder / item.name
            found.append(replace(item, name=name, target=target))
    return tuple(found)


def graft_manifest(folder: Path) -> dict[str, Any]:
    """What `pack graft` wrote about a hybrid folder, {} for any other folder. Raises IntegrityError when unreadable."""
    try:
        tree = files.read_json(folder / GRAFT)
    except (ValueError, OSError) as error:
        raise IntegrityError(f"{GRAFT}: cannot be read: {error}", hints=("ds41ctl pack graft",)) from None
    return tree if isinstance(tree, dict) else {}


# ---- a hybrid of the user's own


def own_hybrid(layout: Layout) -> bool:
    """DS41_MODEL names a folder that holds something else than `pack graft` of this profile made there."""
    if not layout.own_model or layout.profile.model.graft is None or not _has_anything(layout.model_dir):
        return False
    return not (layout.model_dir / GRAFT).exists()


def own_record(layout: Layout) -> SeenPack | None:
    """What was first seen of the user's hybrid, None when it was not looked through or lay elsewhere then."""
    path = layout.own_pins_dir / OWN_RECORD
    try:
        seen = SeenPack.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise IntegrityError(f"{path}: cannot be read: {first}", hints=(f"rm {path}",)) from None
    return seen if seen.folder == str(layout.model_dir.resolve()) else None


def write_own_record(layout: Layout, found: dict[str, SeenFile]) -> None:
    """Keep what was found of the user's hybrid, and the sidecars that bind the digests to these very bytes."""
    seen = SeenPack(
        schema=LOCK_SCHEMA,
        folder=str(layout.model_dir.resolve()),
        recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
        files=dict(sorted(found.items())),
    )
    for item in _own_items(layout, seen):
        write_sidecar(item.target or layout.model_dir / item.name, item)
    files.publish_json(layout.own_pins_dir / OWN_RECORD, seen.model_dump(mode="json", by_alias=True))


def _own(layout: Layout) -> tuple[Holding, ...] | None:
    seen = own_record(layout)
    return None if seen is None else (Holding(layout.model_dir, _own_items(layout, seen)),)


def _own_items(layout: Layout, seen: SeenPack) -> tuple[Expected, ...]:
    return tuple(_own_item(layout, name, item.size, item.sha256) for name, item in seen.files.items())


def _own_item(layout: Layout, name: str, size: int, sha256: str) -> Expected:
    path = layout.model_dir / name
    target = path.resolve() if path.is_symlink() else None  # hybrids are made of links, wherever they lead
    return Expected(name, size, sha256, "own", target=target, sidecar=layout.own_pins_dir / (name + SIDECAR))


def own_names(folder: Path) -> list[str]:
    """Files of a hybrid that count: the shards its index and its tables need, and what is no weight and runs no code.

    Raises IntegrityError when there is no index.
    """
    index, outside = weight_map(folder)
    small = [
        path.name
        for path in folder.iterdir()
        if path.is_file() and path.suffix.lower() in SMALL and not _OWN.fullmatch(path.name)
    ]
    return sorted({*index.values(), *outside.values(), *small})


# ---- one file


def write_sidecar(path: Path, item: Expected, sha256: str = "") -> None:
    """Remember that `path` was hashed and matched: `sha256sum -c` format, then what binds it to these very bytes.

    `sha256`: what was found, for a file that is pinned by its git id.
    """
    info = path.stat()
    digest = item.sha256 or sha256
    binding = {
        "device": info.st_dev,
        "inode": info.st_ino,
        "mtime_ns": info.st_mtime_ns,
        "revision": item.revision,
        "sha256": digest,
        "size": info.st_size,
        "verified_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if item.git_oid:
        binding["git_oid"] = item.git_oid
    if item.partial:
        binding["plan"] = item.partial.plan
    text = f"{digest}  {path.name}\n{_MARK}{json.dumps(binding, sort_keys=True)}\n"
    files.publish(item.sidecar or path.with_name(path.name + SIDECAR), [text.encode()])


def sidecar_problem(path: Path, item: Expected) -> str:
    """'' when the sidecar vouches for the file as it is now, else what is wrong with it."""
    sidecar = item.sidecar or path.with_name(path.name + SIDECAR)
    try:
        lines = sidecar.read_text(encoding="utf-8").splitlines()
        binding: dict[str, Any] = json.loads(lines[1].removeprefix(_MARK))
        digest, named = lines[0].split("  ", 1)
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
        "sha256": item.sha256 or digest,
        "size": info.st_size,
    }
    if item.git_oid:
        now["git_oid"] = item.git_oid
    if item.partial:
        now["plan"] = item.partial.plan
    changed = [key for key, value in now.items() if binding.get(key) != value]
    if named != path.name:
        changed.append("name")
    return f"changed since it was verified ({', '.join(changed)})" if changed else ""


def place_problem(folder: Path, item: Expected) -> str:
    """'' when something of the right kind and size lies where the item belongs."""
    path = folder / item.name
    if not path.is_file():
        if item.target is not None and path.is_symlink():
            return "a dangling link"
        return MISSING if not path.exists() and not path.is_symlink() else "not a regular file"
    real = path.resolve()
    if item.target is not None:
        if not path.is_symlink() or real != item.target.resolve():
            return f"not the link to {item.target} that it was made as"
    elif not real.is_relative_to(folder.resolve()):
        return LINK_OUT
    size = path.stat().st_size
    if size != item.size:
        return f"{size} bytes, expected {item.size}"
    return "" if os.access(path, os.R_OK) else NO_ACCESS


def file_problem(folder: Path, item: Expected, *, hash_it: bool) -> str:
    """'' when the file is the pinned one. Quick: size and sidecar. `hash_it`: every byte."""
    reason = place_problem(folder, item)
    if reason:
        return reason
    if not hash_it:
        return sidecar_problem(item.target or folder / item.name, item)
    return bytes_problem(folder, item)[0]


def bytes_problem(folder: Path, item: Expected, on_bytes: Callable[[int], None] | None = None) -> tuple[str, str]:
    """(what is wrong with the bytes, '' when they are the pinned ones; their sha256)."""
    reason = place_problem(folder, item)
    if not reason and item.partial and not item.sha256:
        reason = "of unknown digest: the pins that recorded it are gone, and so is what vouched for it"
    if reason:
        return reason, ""
    try:
        digest = files.file_digest(folder / item.name, git=not item.sha256, on_bytes=on_bytes)
    except OSError as error:
        return f"not readable: {error.strerror}", ""
    kind, wanted = ("sha256", item.sha256) if item.sha256 else ("git", item.git_oid)
    found = digest.sha256 if item.sha256 else digest.git_oid
    return ("" if found == wanted else f"{kind} {found[:12]}..., expected {wanted[:12]}..."), digest.sha256


# ---- many files

Checked = tuple[Path, Expected, str]


def quick(held: Iterable[Holding]) -> list[Checked]:
    """Files their sidecars do not vouch for, with the reason: no byte is read."""
    found = []
    for holding in held:
        for item in holding.items:
            reason = file_problem(holding.folder, item, hash_it=False)
            if reason:
                found.append((holding.folder, item, reason))
    return found


def hash_all(
    wanted: Sequence[tuple[Path, Expected]], on_bytes: Callable[[int, Expected], None], *, lenient: bool = False
) -> Iterator[tuple[Path, Expected, str]]:
    """Hash files on all cores, the big ones first; good ones get a fresh sidecar. Yields each with its problem.

    `on_bytes` is told from several threads how many bytes of a file were just read. `lenient`: a pack that belongs to
    somebody else is hashed all the same, its sidecars stay as they are.
    """
    stop = threading.Event()

    def work(folder: Path, item: Expected) -> tuple[Path, Expected, str]:
        def count(number: int) -> None:
            if stop.is_set():
                raise InterruptedError
            on_bytes(number, item)

        reason, sha256 = bytes_problem(folder, item, count)
        path = item.target or folder / item.name
        if not reason and sidecar_problem(path, item):
            with contextlib.suppress(*((DeniedError,) if lenient else ())):
                write_sidecar(path, item, sha256)
        return folder, item, reason

    ordered = sorted(wanted, key=lambda pair: -pair[1].size)
    pool = ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)))
    try:
        yield from pool.map(work, *zip(*ordered, strict=True)) if ordered else ()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def is_own(name: str) -> bool:
    """True for a file that this tool keeps beside a pack: locks, parts, what was quarantined."""
    return _OWN.fullmatch(name) is not None


def foreign(holding: Holding) -> list[tuple[str, str]]:
    """(relative path, what it is) of everything in the folder that nothing pins, sidecars and our own files aside."""
    known = {item.name for item in holding.items}
    links = {item.name for item in holding.items if item.target is not None}
    root = holding.folder.resolve()
    found = []
    for here, folders, names in os.walk(holding.folder):
        folders[:] = sorted(name for name in folders if Path(here) != holding.folder or name != ".cache")
        for name in sorted([*names, *(name for name in folders if (Path(here) / name).is_symlink())]):
            path = Path(here) / name
            relative = str(path.relative_to(holding.folder))
            if relative in links:
                continue
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                found.append((relative, "a symlink that leaves the folder"))
            elif relative not in known and relative.removesuffix(SIDECAR) not in known and not _OWN.fullmatch(name):
                found.append((relative, "pinned by nothing"))
    return found


# ---- tensors


def weight_map(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """(tensor -> shard as the index says, Engram table -> shard that a hybrid keeps outside its index)."""
    index, outside = read_index(folder / INDEX), graft_manifest(folder).get("outside_index")
    return index, _beside(folder, index) if outside is None else {
        str(name): str(file) for name, file in outside.items()
    }


def _beside(folder: Path, index: dict[str, str]) -> dict[str, str]:
    """Engram tables of a hybrid that somebody else built: no index names them, the shards of their layers hold them."""
    if not any(name.endswith(".trellis") for name in index) or any(TABLE.fullmatch(name) for name in index):
        return {}
    found: dict[str, str] = {}
    for file in sorted({file for name, file in index.items() if ".engram." in name}):
        path = folder / file
        if Path(file).name == file and path.is_file():
            with contextlib.suppress(IntegrityError):  # whoever reads the shard itself says what is wrong with it
                found |= {name: file for name in read_header(path) if TABLE.fullmatch(name)}
    return found


@dataclass(frozen=True)
class Contents:
    """Every tensor of a pack that will be read, and what does not fit together."""

    indexed: dict[str, Tensor]
    outside: dict[str, Tensor]
    shards: dict[str, str]
    index_names: int
    problems: tuple[str, ...]


def contents(folder: Path) -> Contents:
    """Read index and headers. Raises IntegrityError when there is no index."""
    index, outside = weight_map(folder)
    shards = {**outside, **index}
    by_file: dict[str, list[str]] = {}
    for name, file in shards.items():
        by_file.setdefault(file, []).append(name)
    problems: list[str] = []
    found: dict[str, Tensor] = {}
    for file, names in sorted(by_file.items()):
        path = folder / file
        if Path(file).is_absolute() or ".." in Path(file).parts:
            problems.append(f"{file} is named by the index and lies outside the folder")
            continue
        if not path.is_file():
            problems.append(f"{file} is named by the index and missing")
            continue
        try:
            header = read_header(path)
        except IntegrityError as error:
            problems.append(error.message)
            continue
        absent = [name for name in names if name not in header]
        if absent:
            problems.append(f"{file} lacks {absent[0]}" + (f" and {len(absent) - 1} more" if absent[1:] else ""))
        # only what the index names is read by the engine: a tensor that merely lies in the file does not count
        found |= {name: header[name] for name in names if name in header}
    return Contents(
        {name: tensor for name, tensor in found.items() if name in index},
        {name: tensor for name, tensor in found.items() if name not in index},
        shards,
        len(index),
        tuple(problems),
    )


def inspect(layout: Layout) -> PackFacts:
    """Facts about the pack as it lies there, in milliseconds (headers and sidecars only)."""
    folder = layout.model_dir
    problems: list[str] = []
    held: tuple[Holding, ...] | None = None
    wanted: tuple[Expected, ...] = ()
    try:
        held = holdings(layout)
        wanted = expected(layout)
    except IntegrityError as error:
        problems.append(error.message)
    missing = None if held is None else sum(bytes_missing(holding) for holding in held)
    own, recorded = own_hybrid(layout), ""
    if own:
        missing = 0  # nothing is downloaded for it
        with contextlib.suppress(IntegrityError):  # said above
            seen = own_record(layout)
            recorded = seen.recorded_at if seen else ""
    there = _has_anything(folder)
    if not held and not there:
        missing = None  # a local folder that is not there: nobody knows how much it should hold
    if not there:
        return PackFacts(
            dir=str(folder),
            exists=False,
            files=tuple(PackFileFacts(name=item.name, size_expected=item.size) for item in wanted),
            bytes_missing=missing,
            problems=tuple(problems),
        )
    file_facts = []
    for item in wanted:
        path = folder / item.name
        note = file_problem(folder, item, hash_it=False)
        size = path.stat().st_size if path.is_file() else None
        file_facts.append(
            PackFileFacts(name=item.name, size_expected=item.size, size=size, verified=not note, note=note)
        )
    names: int | None = None
    tables: list[TensorFacts] = []
    if (folder / INDEX).exists() or (folder / "config.json").exists():
        try:
            read = contents(folder)
            names = read.index_names
            problems += read.problems
            tables = [
                TensorFacts(name=t.name, file=read.shards[t.name], dtype=t.dtype, shape=t.shape)
                for t in (*read.indexed.values(), *read.outside.values())
                if TABLE.fullmatch(t.name)
            ]
        except IntegrityError as error:
            problems.append(error.message)
    return PackFacts(
        dir=str(folder),
        exists=True,
        files=tuple(file_facts),
        bytes_missing=missing,
        index_names=names,
        engram_tensors=tuple(tables),
        problems=tuple(problems),
        own=own,
        recorded_at=recorded,
    )


def _has_anything(folder: Path) -> bool:
    """False for a folder in which nothing but our own lock and arriving parts lies."""
    try:
        return any(not _OWN.fullmatch(path.name) for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False


def bytes_missing(holding: Holding) -> int:
    """Bytes that still have to be written into a folder: files missing or of another size, less what parts hold."""
    total = 0
    for item in holding.items:
        path = holding.folder / item.name
        size = path.stat().st_size if path.is_file() else None
        if size != item.size:
            total += item.size - part.claimed(path, item.identity)
    return total


def engram_tensors(folder: Path, layer: int) -> tuple[Path, Tensor, Tensor]:
    """(shard, weight tensor, scale tensor) of a layer's Engram table.

    Raises IntegrityError when the index does not name both, or they do not lie in one shard.
    """
    index, outside = weight_map(folder)
    shards = {**outside, **index}
    names = [f"layers.{layer}.engram.embed.{side}" for side in ("weight", "scale")]
    missing = [name for name in names if name not in shards]
    if missing:
        raise IntegrityError(
            f"the pack's index does not name {missing[0]}: the Engram table of layer {layer} is not in this pack",
            hints=("ds41ctl fetch --verify",),
        )
    if shards[names[0]] != shards[names[1]]:
        raise IntegrityError(
            f"{names[0]} is in {shards[names[0]]}, {names[1]} in {shards[names[1]]}: expected one shard"
        )
    path = folder / shards[names[0]]
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
        raise IntegrityError(f"{folder / 'config.json'}: not valid JSON: {error}") from None
    except OSError as error:
        raise IntegrityError(f"{folder / 'config.json'}: cannot be read: {error.strerror}") from None
    if not isinstance(tree, dict):
        raise IntegrityError(f"config.json is missing in {folder}", hints=("ds41ctl fetch",))
    return tree
