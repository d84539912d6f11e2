"""gc: remove what downloads left behind and nobody needs: parts of other pins, orphans of the hub client."""

from __future__ import annotations

import time
from pathlib import Path

from filelock import FileLock, Timeout

from ds41ctl.adapters import pack, part
from ds41ctl.core.layout import Layout
from ds41ctl.steps.fetch import locked_folders

HUB_ORPHAN_S = 24 * 3600.0  # the hub client never removes an .incomplete file; a younger one may still be written


def collect(layout: Layout) -> list[tuple[Path, int]]:
    """Remove leftovers; returns (path, bytes freed) of each.

    A part that the pins still want is kept: the next fetch goes on from it. Raises LockedError while a fetch runs.
    """
    if pack.own_hybrid(layout):  # the user's own folder: nothing of ours lies there
        return []
    held = pack.holdings(layout) or ()
    folders = [holding.folder for holding in held if holding.folder.is_dir()]
    if layout.model_dir.is_dir() and layout.model_dir not in folders:
        folders.append(layout.model_dir)
    wanted = {
        part.part_path(holding.folder / item.name, item.identity)
        for holding in held
        for item in holding.items
        if pack.place_problem(holding.folder, item) == pack.MISSING
    }
    removed = []
    with locked_folders(folders, f"collecting garbage of {layout.name}"):
        for folder in folders:
            for path in sorted(folder.rglob("*")):
                if path.is_symlink() or not path.is_file() or not _leftover(path, folder, wanted):
                    continue
                size = path.stat().st_blocks * 512
                path.unlink()
                removed.append((path, size))
    return removed


def _leftover(path: Path, folder: Path, wanted: set[Path]) -> bool:
    if path.name.endswith(part.SUFFIX):
        return path not in wanted
    if path.name.endswith(part.SUFFIX + part.JOURNAL_SUFFIX):
        owner = path.with_name(path.name.removesuffix(part.JOURNAL_SUFFIX))
        return owner not in wanted or not owner.exists()
    hub = folder / ".cache" / "huggingface" / "download"
    if path.is_relative_to(hub) and path.suffix == ".incomplete":
        return time.time() - path.stat().st_mtime > HUB_ORPHAN_S and not _hub_is_busy(path.parent)
    return False


def _hub_is_busy(folder: Path) -> bool:
    """True when a hub client holds one of its locks in this folder."""
    for lock in folder.glob("*.lock"):
        try:
            with FileLock(lock, timeout=0):
                continue
        except Timeout:
            return True
    return False
