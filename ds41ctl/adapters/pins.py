"""Pins on disk: a profile's file lists, committed beside it or kept in the state folder since the first fetch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ds41ctl.adapters import files
from ds41ctl.core.errors import IntegrityError
from ds41ctl.core.layout import Layout
from ds41ctl.core.pins import LOCK_SCHEMA, PackLock, PinnedTree, drift, parse_lock

if TYPE_CHECKING:  # the hub adapter imports an HTTP library, reading a lock file must not
    from ds41ctl.adapters.hub import Hub

LOCK_SUFFIX = ".lock.json"


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


def compare(layout: Layout, hub: Hub) -> None:
    """Ask the Hub again. Raises IntegrityError when it lists anything else than what is pinned."""
    for key, tree in trees(layout).items():
        difference = drift(tree, hub.tree(*key))
        if difference:
            raise IntegrityError(
                f"{tree.repo}@{tree.revision[:12]} is not what was pinned: {difference}",
                hints=("the pin stays; ask the repository's owner why a commit has other files now",),
            )


def write(path: Path, layout: Layout, found: dict[tuple[str, str], PinnedTree]) -> None:
    """Publish the lock of a profile, ready to be committed beside it."""
    lock = PackLock(schema=LOCK_SCHEMA, profile=layout.name, trees=tuple(found[key] for key in sorted(found)))
    files.publish_json(path, lock.model_dump(mode="json", by_alias=True))
