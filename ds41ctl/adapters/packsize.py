"""How many bytes a pack takes, by repository and filesystem: by its pins, or by the profile while there are none."""

from __future__ import annotations

import contextlib
import fnmatch
from dataclasses import dataclass
from pathlib import Path

from ds41ctl.adapters import mounts, pack, part
from ds41ctl.core.errors import IntegrityError
from ds41ctl.core.facts import PackFacts, PackSourceFacts
from ds41ctl.core.layout import Layout
from ds41ctl.core.profile import HubSource

SPACE_MARGIN = 1.02  # filesystem metadata and blocks only partly used


@dataclass(frozen=True)
class SourceSize:
    """One source: `total` bytes it takes in `folder`, of which `there` need not come again; None: not known.

    `pinned`: the file list says so; else the profile's `size_bytes`, and `there` is what lies in the folder unproven.
    """

    name: str
    folder: Path
    total: int | None
    there: int
    pinned: bool

    @property
    def to_come(self) -> int | None:
        """Bytes still to be written."""
        return None if self.total is None else max(0, self.total - self.there)


@dataclass(frozen=True)
class DiskSize:
    """One filesystem: what is to come there with SPACE_MARGIN, and what is free."""

    mount: Path
    needed: int
    free: int

    @property
    def fits(self) -> bool:
        """There is room."""
        return self.needed <= self.free


def sources(layout: Layout) -> tuple[SourceSize, ...]:
    """Every source of the pack that fetch fills; () for a hybrid of the user's own or a local folder.

    Raises IntegrityError when pins disagree.
    """
    if pack.own_hybrid(layout):
        return ()
    held = pack.holdings(layout)
    return _stated(layout) if held is None else _pinned(layout, held)


def _pinned(layout: Layout, held: tuple[pack.Holding, ...]) -> tuple[SourceSize, ...]:
    found = []
    for holding in held:
        for repo in dict.fromkeys(item.repo for item in holding.items):
            some = pack.Holding(holding.folder, tuple(item for item in holding.items if item.repo == repo))
            total = sum(item.size for item in some.items)
            name = repo or f"recipe {holding.items[0].revision[:12]}"
            found.append(SourceSize(name, holding.folder, total, total - pack.bytes_missing(some), True))
    return tuple(found)


def _stated(layout: Layout) -> tuple[SourceSize, ...]:
    found: dict[tuple[str, str], SourceSize] = {}
    counted: set[Path] = set()
    # a source that names its files goes first: another one's `*` in the same folder means the rest
    for source in sorted(layout.profile.model.hub_sources, key=lambda s: "*" in s.patterns):
        folder, key = layout.source_dir(source.dir), (source.repo, source.dir)
        there, total = _lying(folder, source, counted), source.size_bytes or None
        if key in found:
            before = found[key]
            there += before.there
            total = None if total is None or before.total is None else total + before.total
        found[key] = SourceSize(source.repo, folder, total, there, False)
    return tuple(found[key] for key in dict.fromkeys((s.repo, s.dir) for s in layout.profile.model.hub_sources))


def _lying(folder: Path, source: HubSource, counted: set[Path]) -> int:
    """Bytes of the files in a folder that a source's patterns name and no other source took."""
    total = 0
    with contextlib.suppress(OSError):
        for path in folder.rglob("*"):
            name = str(path.relative_to(folder))
            ours = name.endswith((pack.SIDECAR, part.SUFFIX, part.JOURNAL_SUFFIX)) or pack.is_own(path.name)
            wanted = any(fnmatch.fnmatchcase(name, pattern) for pattern in source.patterns)
            if wanted and not ours and path not in counted and path.is_file():
                counted.add(path)
                total += path.stat().st_size
    return total


def disks(found: tuple[SourceSize, ...]) -> tuple[DiskSize, ...]:
    """The filesystems that something known is to come to."""
    needs: dict[int, tuple[Path, int]] = {}
    for size in found:
        if size.to_come:
            where = mounts.existing_parent(size.folder)
            first, need = needs.get(where.stat().st_dev, (where, 0))
            needs[where.stat().st_dev] = (first, need + size.to_come)
    return tuple(
        DiskSize(mounts.mount_of(where).point, int(need * SPACE_MARGIN), mounts.free_bytes(where))
        for where, need in needs.values()
    )


def inspect(layout: Layout) -> PackFacts:
    """`pack.inspect`, with the bytes of every source: what its pins say, or what lies there before there are any."""
    facts = pack.inspect(layout)
    try:
        found = sources(layout)
    except IntegrityError:  # pack.inspect says it
        return facts
    unpinned = [size for size in found if not size.pinned]
    return facts.model_copy(
        update={
            "bytes_there": sum(min(size.there, size.total or 0) for size in unpinned) if unpinned else None,
            "sources": tuple(
                PackSourceFacts(repo=size.name, dir=str(size.folder), bytes=size.total)
                for size in found
                if size.pinned and size.total is not None
            ),
        }
    )
