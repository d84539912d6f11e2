"""Generations of an engine: each install is a folder of its own, and one link says which of them is used.

    <engine>/generations/<id>/{venv,manifest.json}
    <engine>/current -> generations/<id>         replaced by one rename
    <engine>/venv -> current/venv, <engine>/manifest.json -> current/manifest.json

An engine of before has `venv` and `manifest.json` themselves in its folder; the first install moves them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ds41ctl.adapters import files
from ds41ctl.core.errors import NotFoundError

KEPT = 2  # generations: the one in use and the one before
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Generation:
    """One installed engine. `current`: it is the one that is used."""

    name: str
    folder: Path
    installed_at: str
    current: bool


def all_of(engine: Path) -> list[Generation]:
    """Complete generations, newest first; an engine of before counts as one, named `first`."""
    found = []
    current = _current_name(engine)
    for folder in (engine / "generations").glob("*"):
        tree = _manifest(folder)
        if tree is not None:
            found.append(Generation(folder.name, folder, str(tree.get("installed_at", "")), folder.name == current))
    if not current:
        tree = _manifest(engine)
        if tree is not None:
            found.append(Generation("first", engine, str(tree.get("installed_at", "")), True))
    return sorted(found, key=lambda item: item.installed_at, reverse=True)


def _manifest(folder: Path) -> dict[str, object] | None:
    try:
        tree = files.read_json(folder / MANIFEST)
    except (ValueError, OSError):
        return None
    return tree if isinstance(tree, dict) else None


def _current_name(engine: Path) -> str:
    try:
        return (engine / "current").readlink().name
    except OSError:
        return ""


def new(engine: Path, made_from: str) -> Path:
    """An empty folder for a generation, named by the time and the first digits of `made_from` (a digest).

    Never one that exists: two installs within a second would else take each other's, the one in use included. What an
    interrupted install left is not taken up (pip does not notice a package that was cut off) and goes with `prune`;
    pip's download cache makes the second time cheap.
    """
    stem = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{made_from[:8]}"
    name, number = stem, 1
    while True:
        folder = engine / "generations" / name
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            name = f"{stem}-{number}"


def clone(engine: Path, folder: Path) -> None:
    """The engine in use once more, by hard links: bytes are shared until a file is replaced."""
    source = engine / "venv"
    shutil.copytree(source.resolve(), folder / "venv", symlinks=True, copy_function=os.link)


def use(engine: Path, name: str) -> None:
    """Make a complete generation the one in use: one rename."""
    _adopt(engine)
    link = engine / f".current.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        link.unlink()
    link.symlink_to(Path("generations") / name)
    link.replace(engine / "current")
    for entry in ("venv", MANIFEST):
        if not (engine / entry).is_symlink():
            (engine / entry).symlink_to(Path("current") / entry)
    files.fsync_dir(engine)


def _adopt(engine: Path) -> None:
    """Move an engine of before into a generation of its own."""
    if (engine / "venv").is_symlink() or not (engine / "venv").exists():
        with contextlib.suppress(FileNotFoundError):
            if not (engine / MANIFEST).is_symlink():
                (engine / MANIFEST).unlink()
        return
    folder = engine / "generations" / "first"
    if not (engine / MANIFEST).is_file():
        shutil.rmtree(engine / "venv")  # half an install of before
        return
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    # the manifest last: without it the folder is no generation
    (engine / "venv").rename(folder / "venv")
    (engine / MANIFEST).rename(folder / MANIFEST)


def prune(engine: Path) -> list[str]:
    """Remove all but the newest KEPT generations; the one in use always stays. Returns the names removed."""
    found = all_of(engine)
    keep = {item.name for item in found if item.current} | {item.name for item in found[:KEPT]}
    gone = []
    folder = engine / "generations"
    for path in folder.glob("*") if folder.is_dir() else []:
        if path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)
            gone.append(path.name)
    return sorted(gone)


def back(engine: Path) -> Generation:
    """Use the newest generation that is not in use. Raises NotFoundError when there is none."""
    found = [item for item in all_of(engine) if not item.current]
    if not found:
        raise NotFoundError(f"{engine} has no earlier engine to go back to", hints=("ds41ctl engine list",))
    use(engine, found[0].name)
    return found[0]
