"""engram: the tables are in memory, proven against the shards they came from."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from ds41ctl.adapters import files, pack, running, store, storebuild, storeplace
from ds41ctl.core.engram import Geometry, geometry
from ds41ctl.core.errors import AlreadyRunningError, IntegrityError, NotFoundError
from ds41ctl.core.layout import Layout
from ds41ctl.steps.runner import Goal, Progress

QUICK_ROWS = 3  # random rows a sub-table, besides its first and last


def pack_geometry(layout: Layout) -> Geometry:
    """Geometry of the pack's tables, compared with the profile's. Raises IntegrityError when they disagree."""
    try:
        found = geometry(pack.config(layout.model_dir))
    except ValueError as error:
        raise IntegrityError(str(error)) from None
    wanted = tuple((table.layer, table.rows) for table in layout.profile.model.engram)
    if tuple(zip(found.layers, found.rows, strict=True)) != wanted:
        raise IntegrityError(
            f"config.json describes Engram layers {dict(zip(found.layers, found.rows, strict=True))}, "
            f"the profile {dict(wanted)}"
        )
    return found


class EngramBuild:
    """Build the store unless a proven one is there."""

    name = "engram"

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def check(self) -> Goal:
        """Valid for this boot, canary records right, and a sample of rows equal to the shards."""
        facts = store.inspect(self.layout)
        if not facts.exists:
            return Goal(False, "not built")
        if facts.problem:
            return Goal(False, facts.problem)
        rows, difference = verify(self.layout, full=False)
        if difference:
            return Goal(False, difference)
        return Goal(
            True,
            f"{len(facts.layers)} tables, {facts.bytes_present / 2**20:.1f} MiB, {facts.page_kind}, "
            f"{rows} rows checked" + "".join(f"; {note}" for note in facts.notes),
            {"dir": facts.dir, "data_dir": facts.data_dir, "rows_checked": rows, "page_kind": facts.page_kind},
        )

    def do(self, progress: Progress) -> None:
        """Build it; a store that is no longer valid is replaced, saying why."""
        found = pack_geometry(self.layout)
        facts = store.inspect(self.layout)
        _refuse_read(self.layout)
        if facts.exists:
            progress(f"building again: {facts.problem or 'rows differ from the shards'}", {})
        with files.locked(_lock(self.layout), "building the store"):
            storebuild.build(self.layout, found, progress)


def _refuse_read(layout: Layout) -> None:
    """Shards are read by pread, perhaps in a container: no mapping says so, the record of the running engine does."""
    record = running.read(layout.record_path)
    if layout.profile.engram.own_store and store.of_shards(layout) and record is not None and record.alive():
        raise AlreadyRunningError(
            f"the engine of {layout.name} (pid {record.pid}) reads the Engram store", hints=("ds41ctl stop",)
        )


def _lock(layout: Layout) -> Path:
    return layout.dirs.state / "locks" / f"engram-{layout.name}.lock"


def drop(layout: Layout) -> list[str]:
    """Remove the store, its mount and its reserved hugepages; returns what was removed."""
    _refuse_read(layout)
    with files.locked(_lock(layout), "removing the store"):
        return storeplace.release(layout)


def verify(layout: Layout, *, full: bool) -> tuple[int, str]:
    """Compare the store with the shards: (rows compared, '' or the first difference)."""
    folder = store.locate(layout)
    if not (folder / store.MANIFEST).is_file():
        raise NotFoundError(f"no Engram store in {folder}", hints=("ds41ctl engram build",))
    fault = store.problem(layout, folder)
    if fault:
        return 0, fault
    if full:
        return store.compare_all(layout, folder)
    return store.compare_sample(layout, folder, pack_geometry(layout), QUICK_ROWS)


_COUNTERS = re.compile(r"ds41: Engram counters: (rank (\d+), .*)")


def counters(log: Path) -> list[str]:
    """What each rank of the running engine last said about its gather (once a minute while it is busy)."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError), log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            match = _COUNTERS.search(line)
            if match:
                found[int(match.group(2))] = match.group(1)
    return [found[rank] for rank in sorted(found)]
