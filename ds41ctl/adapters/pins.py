"""Pins on disk: a profile's file lists, committed beside it or kept in the state folder since the first fetch."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ds41ctl.adapters import files
from ds41ctl.core.errors import IntegrityError
from ds41ctl.core.layout import Layout
from ds41ctl.core.pins import LOCK_SCHEMA, PackLock, PinnedTree, Subset, SubsetKey, drift, parse_lock, united

if TYPE_CHECKING:  # the hub adapter imports an HTTP library, reading a lock file must not
    from ds41ctl.adapters.hub import Hub

LOCK_SUFFIX = ".lock.json"
_RECORDING = threading.Lock()  # files of one fetch arrive in several threads


def _read(path: Path | None) -> PackLock | None:
    if path is None:
        return None
    try:
        return parse_lock(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise IntegrityError(f"{path}: not a lock file: not UTF-8") from None
    except OSError as error:
        raise files.os_error(error, f"reading {path}") from None


def trees(layout: Layout) -> dict[tuple[str, str], PinnedTree]:
    """(repo, revision) -> the pinned tree, for the sources of this profile that are pinned.

    Raises IntegrityError when the committed lock and the one of the first fetch disagree: one of them was changed,
    or a server answered differently for the same commit.
    """
    committed, kept = _read(layout.committed_pins), _read(layout.pins_path)
    found = {}
    for source in layout.profile.model.hub_sources:
        key = (source.repo, source.revision)
        first = committed.tree(*key) if committed else None
        second = kept.tree(*key) if kept else None
        if first and second and (difference := drift(first, second)):
            raise IntegrityError(
                f"{source.repo}: {layout.pins_path} differs from {layout.committed_pins}: {difference}",
                hints=(f"rm {layout.pins_path}   # when the committed one is right",),
            )
        tree = first or second
        if tree is not None:
            found[key] = tree
    return found


def ensure(layout: Layout, hub: Hub) -> dict[tuple[str, str], PinnedTree]:
    """The trees of all sources; those that are not pinned yet are fetched once and kept."""
    found = trees(layout)
    fresh = False
    for source in layout.profile.model.hub_sources:
        key = (source.repo, source.revision)
        if key not in found:
            found[key], fresh = hub.tree(*key), True
    if fresh:
        write(layout.pins_path, layout, found)
    return found


def subsets(layout: Layout) -> dict[SubsetKey, Subset]:
    """What is known of the sources that leave tensors out; a digest that one of the two locks knows counts.

    Raises IntegrityError when the locks disagree.
    """
    committed, kept = _read(layout.committed_pins), _read(layout.pins_path)
    found = {}
    for source in layout.profile.model.hub_sources:
        key = (source.repo, source.revision, source.leave_out)
        known = [item for lock in (committed, kept) if lock and (item := lock.subset(key))]
        if source.leave_out and known:
            found[key] = known[0] if len(known) == 1 else united(known[0], known[1])
    return found


def keep(layout: Layout, found: Iterable[Subset]) -> None:
    """Remember subsets beside what is known already."""
    known = subsets(layout) | {item.key: item for item in found}
    write(layout.pins_path, layout, trees(layout), known)


def record(layout: Layout, key: SubsetKey, path: str, sha256: str) -> None:
    """Remember the digest of a file that is made of some tensors: nothing but its first arrival tells it."""
    with _RECORDING:
        subset = subsets(layout)[key]
        files_ = [f.model_copy(update={"sha256": sha256}) if f.path == path else f for f in subset.files]
        keep(layout, [subset.model_copy(update={"files": tuple(files_)})])


def compare(layout: Layout, hub: Hub) -> None:
    """Ask the Hub again. Raises IntegrityError when it lists anything else than what is pinned."""
    for key, tree in trees(layout).items():
        difference = drift(tree, hub.tree(*key))
        if difference:
            raise IntegrityError(
                f"{tree.repo}@{tree.revision[:12]} is not what was pinned: {difference}",
                hints=("the pin stays; ask the repository's owner why a commit has other files now",),
            )


def write(
    path: Path,
    layout: Layout,
    found: dict[tuple[str, str], PinnedTree],
    parts: dict[SubsetKey, Subset] | None = None,
) -> None:
    """Publish the lock of a profile, ready to be committed beside it; `parts` None: the subsets as they are known."""
    parts = subsets(layout) if parts is None else parts
    lock = PackLock(
        schema=LOCK_SCHEMA,
        profile=layout.name,
        trees=tuple(found[key] for key in sorted(found)),
        subsets=tuple(parts[key] for key in sorted(parts)),
    )
    files.publish_json(path, lock.model_dump(mode="json", by_alias=True))
