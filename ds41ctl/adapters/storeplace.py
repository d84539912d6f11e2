"""Where a store's records go: mounts of our own, reserved hugepages, and the ledger that remembers both.

The ledger is written before anything is mounted or reserved, so that `drop` finds whatever a killed build left.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ds41ctl.adapters import files, host, hugepages, mounts, numa, proc, store
from ds41ctl.core.engram import RECORD_BYTES, Part, pages
from ds41ctl.core.engram import node_pages as core_node_pages
from ds41ctl.core.errors import DeniedError, Ds41Error, NoSpaceError, UnsupportedError
from ds41ctl.core.layout import Layout

MOUNT_SOURCE = "ds41ctl"  # how our own mounts are told from anybody else's
ROWS = "rows"  # folder of the records inside a store folder, where our own mount goes
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE_BYTES = {"4K": 4 * KIB, "2M": 2 * MIB, "1G": GIB}
Tables = Sequence[tuple[int, Sequence[Part]]]


@dataclass(frozen=True)
class Kind:
    """One way to keep the records; `mount`: on a filesystem of our own."""

    storage: Literal["tmpfs", "hugetlb", "disk"]
    page: Literal["4K", "2M", "1G"]
    mount: bool

    @property
    def page_bytes(self) -> int:
        """Page size, bytes."""
        return PAGE_BYTES[self.page]

    def __str__(self) -> str:
        where = {"tmpfs": "tmpfs", "hugetlb": "hugetlbfs", "disk": "disk"}[self.storage]
        return f"{where} with {self.page} pages" if self.storage != "disk" else "disk"


@dataclass(frozen=True)
class Place:
    """A place that is ready: the manifest goes to `home`, the records to `rows`."""

    home: Path
    rows: Path
    kind: Kind


@dataclass(frozen=True)
class Ledger:
    """What builds have taken from the system and not given back: mount points and hugepages; and where files are."""

    mounts: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    reservations: tuple[hugepages.Reservation, ...] = field(default=())


def ledger_path(layout: Layout) -> Path:
    """The ledger of a profile's store."""
    return layout.dirs.state / "engram" / f"{layout.name}.ledger.json"


def read_ledger(layout: Layout) -> Ledger:
    """The ledger; empty when there is none. Raises Ds41Error when it cannot be understood."""
    path = ledger_path(layout)
    try:
        tree = files.read_json(path)
        if tree is None:
            return Ledger()
        return Ledger(
            tuple(str(point) for point in tree["mounts"]),
            tuple(str(folder) for folder in tree["folders"]),
            tuple(hugepages.Reservation(**item) for item in tree["reservations"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Ds41Error(
            f"{path} is damaged ({error!r}): mounts and hugepages of the store must be given back by hand",
            hints=("findmnt -S ds41ctl", "grep Huge /proc/meminfo", f"rm {path}"),
        ) from None


def write_ledger(layout: Layout, ledger: Ledger) -> None:
    """Publish the ledger, or remove it when it is empty."""
    path = ledger_path(layout)
    if ledger == Ledger():
        path.unlink(missing_ok=True)
        path.with_name(path.name + files.PART_SUFFIX).unlink(missing_ok=True)
    else:
        files.publish_json(path, asdict(ledger), mode=0o600)


def kinds(layout: Layout) -> tuple[Kind, ...]:
    """What to try, best first: the profile's wish, then smaller pages, then what needs no rights."""
    engram = layout.profile.engram
    if engram.storage == "disk":
        return (Kind("disk", "4K", False),)
    found: list[Kind] = []
    if engram.storage == "hugetlb":
        if engram.page == "1G":
            found.append(Kind("hugetlb", "1G", True))
        found.append(Kind("hugetlb", "2M", True))
    if engram.page != "4K":
        found.append(Kind("tmpfs", "2M", True))
    found.append(Kind("tmpfs", "4K", True))
    if len(layout.store_dirs) < 2:  # no rights to mount: a folder that is there
        return tuple(Kind(kind.storage, kind.page, False) for kind in found if kind.storage == "tmpfs")
    return (*found, Kind("tmpfs", "2M" if engram.page != "4K" else "4K", False))


def padded(part: Part, page_bytes: int) -> int:
    """Bytes of a part's file: whole pages, so that the last one can be a huge page too."""
    return pages(part.rows * RECORD_BYTES, page_bytes) * page_bytes


def total_bytes(tables: Tables, page_bytes: int) -> int:
    """Bytes of all files of a store."""
    return sum(padded(part, page_bytes) for _, parts in tables for part in parts)


def node_pages(tables: Tables, page_bytes: int) -> dict[int, int]:
    """Pages wanted on each NUMA node."""
    return core_node_pages((parts for _, parts in tables), page_bytes)


def mount_options(kind: Kind, size: int, uid: int) -> tuple[str, ...]:
    """Mount options to try, best first. tmpfs: no swapping where the kernel can do without."""
    owner = f"mode=0700,uid={uid}"
    if kind.storage == "hugetlb":
        return (f"pagesize={kind.page},size={size},{owner}",)
    huge = "always" if kind.page != "4K" else "never"
    base = f"size={size},{owner}"
    return (f"{base},huge={huge},noswap", f"{base},huge={huge}", base)


def mount_argv(kind: Kind, options: str, folder: Path, *, root: bool) -> list[str]:
    """The fixed command that mounts a filesystem for the records."""
    fstype = "hugetlbfs" if kind.storage == "hugetlb" else "tmpfs"
    return [*sudo(root), "mount", "-t", fstype, "-o", options, MOUNT_SOURCE, str(folder)]


def sudo(root: bool) -> list[str]:
    """Prefix of a command that needs root."""
    return [] if root else ["sudo", "-n"]


def mount_size(layout: Layout, kind: Kind, tables: Tables) -> int:
    """Bytes of our own filesystem: the files, and for tmpfs 2 MiB for its own entries."""
    if layout.profile.engram.size_gib and kind.storage == "tmpfs":
        return int(layout.profile.engram.size_gib * GIB)
    return total_bytes(tables, kind.page_bytes) + (2 * MIB if kind.storage == "tmpfs" else 0)


def whole_tables(layout: Layout) -> Tables:
    """The profile's tables unsplit: for sums where NUMA nodes do not matter."""
    return [(table.layer, (Part(0, 0, table.rows),)) for table in layout.profile.model.engram]


def planned_commands(layout: Layout) -> tuple[tuple[str, ...], ...]:
    """The first mount that a build would try, for the plan; touches nothing."""
    first = kinds(layout)[0]
    if not first.mount:
        return ()
    options = mount_options(first, mount_size(layout, first, whole_tables(layout)), layout.dirs.uid)[0]
    return (tuple(mount_argv(first, options, layout.store_dirs[0] / ROWS, root=layout.dirs.uid == 0)),)


def find(layout: Layout, tables: Tables, say: Callable[[str], None]) -> Place:
    """Make a place for the records, in the stated order, saying why a better one is not used.

    Raises NoSpaceError when memory, cgroup or filesystem are too small for the tables, DeniedError when nothing may be
    written.
    """
    if len(layout.store_dirs) == 1:
        return _prepared(layout, tables)
    tried = kinds(layout)
    for number, kind in enumerate(tried):
        try:
            _refuse_small_memory(kind, tables)
            return _mounted(layout, kind, tables) if kind.mount else _shared_memory(layout, kind, tables)
        except (DeniedError, NoSpaceError, UnsupportedError) as error:
            release(layout)
            if number + 1 == len(tried):
                raise
            say(f"no {kind}{' of our own' if kind.mount else ''}: {error.message}; next: {tried[number + 1]}")
    raise AssertionError("kinds() is never empty")


def _refuse_small_memory(kind: Kind, tables: Tables) -> None:
    """What the kernel would answer by killing a process: MemAvailable and the cgroup, before anything is taken."""
    memory = host.memory()
    need = total_bytes(tables, kind.page_bytes)
    if kind.storage == "hugetlb":
        free = 0
        for node, wanted in node_pages(tables, kind.page_bytes).items():
            free += min(wanted, hugepages.count(node, kind.page_bytes // KIB)[1])
        need -= free * kind.page_bytes  # pages that are reserved already are not available memory
    elif memory.cgroup_limit and memory.cgroup_used is not None and memory.cgroup_limit - memory.cgroup_used < need:
        raise NoSpaceError(
            f"the Engram tables need {need} bytes, the cgroup has {memory.cgroup_limit - memory.cgroup_used} left of "
            f"its limit of {memory.cgroup_limit}",
            hints=("raise the container's or the unit's memory limit",),
        )
    if memory.available is not None and memory.available < need:
        raise NoSpaceError(
            f"the Engram tables need {need} bytes of memory, {memory.available} are available",
            hints=("free -h", 'storage = "disk" in [engram] of the profile reads rows from the drive, slowly'),
        )


def _mounted(layout: Layout, kind: Kind, tables: Tables) -> Place:
    """Mount (and reserve) a filesystem of our own."""
    home = layout.store_dirs[0]
    rows = home / ROWS
    is_root = os.getuid() == 0
    for folder in (home, rows):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise files.os_error(error, f"making {folder}") from error
    wanted = []
    if kind.storage == "hugetlb":
        for node, count in node_pages(tables, kind.page_bytes).items():
            if not hugepages.folder(node, kind.page_bytes // KIB).is_dir():
                raise UnsupportedError(f"this kernel has no hugepages of {kind.page}")
            reservation = hugepages.plan(node, kind.page_bytes // KIB, count)
            if reservation is not None:
                wanted.append(reservation)
    ledger = Ledger(mounts=(str(rows),), folders=(str(rows),), reservations=tuple(wanted))
    write_ledger(layout, ledger)
    for number, reservation in enumerate(wanted):
        hugepages.reserve(reservation)
        wanted[number] = replace(reservation, granted=True)
        ledger = replace(ledger, reservations=tuple(wanted))
        write_ledger(layout, ledger)
    reason = ""
    for options in mount_options(kind, mount_size(layout, kind, tables), layout.dirs.uid):
        done = proc.run(mount_argv(kind, options, rows, root=is_root), timeout=30)
        if done.ok:
            return Place(home, rows, kind)
        reason = (done.stderr.strip().splitlines() or ["mount failed"])[0]
    raise DeniedError(f"mounting {rows}: {reason}")


def _shared_memory(layout: Layout, kind: Kind, tables: Tables) -> Place:
    """A folder of this user in the tmpfs that everybody may write."""
    folder = layout.store_dirs[-1]
    _own_folder(folder)
    refuse_small_filesystem(folder, total_bytes(tables, PAGE_BYTES["4K"]))
    write_ledger(layout, Ledger(folders=(str(folder),)))
    return Place(folder, folder, kind)


def _prepared(layout: Layout, tables: Tables) -> Place:
    """The folder the user chose, on whatever filesystem it is."""
    folder = layout.store_dirs[0]
    _own_folder(folder)
    mount = mounts.mount_of(folder)
    if mount.fstype == "hugetlbfs":
        size = mounts.page_bytes(folder)
        if size not in (PAGE_BYTES["2M"], PAGE_BYTES["1G"]):
            raise UnsupportedError(f"{folder} has pages of {size} bytes; expected a hugetlbfs with 2M or 1G pages")
        kind = Kind("hugetlb", "1G" if size == PAGE_BYTES["1G"] else "2M", False)
        home = store.own_home(layout)
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    elif mount.memory_backed:
        kind, home = Kind("tmpfs", "4K" if layout.profile.engram.page == "4K" else "2M", False), folder
        _refuse_small_memory(kind, tables)
    else:
        kind, home = Kind("disk", "4K", False), folder
    refuse_small_filesystem(folder, total_bytes(tables, kind.page_bytes if kind.storage == "hugetlb" else 1))
    write_ledger(layout, Ledger(folders=(str(folder),)))
    return Place(home, folder, kind)


def _own_folder(folder: Path) -> None:
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        raise files.os_error(error, f"making {folder}") from error
    if owner != os.getuid() or not stat.S_ISDIR(folder.lstat().st_mode):
        raise DeniedError(f"{folder} belongs to user {owner}", hints=("set DS41_ENGRAM_DIR to a folder of yours",))


def refuse_small_filesystem(folder: Path, need: int) -> None:
    """Raise NoSpaceError when a filesystem (or this user's quota of it) has fewer free bytes than needed."""
    have = mounts.free_bytes(folder)
    if have < need:
        raise NoSpaceError(
            f"the Engram store needs {need} bytes in {folder}, {have} are free",
            hints=("ds41ctl engram drop", f"df -h {folder}"),
        )


def release(layout: Layout) -> list[str]:
    """Remove every record file, unmount our mount, give hugepages back; returns what was removed.

    Raises AlreadyRunningError while a process maps a record, DeniedError when the system refuses; what is left stays in
    the ledger.
    """
    ledger = read_ledger(layout)
    candidates = [*store.homes(layout), *(home / ROWS for home in store.homes(layout))]
    folders = tuple(dict.fromkeys((*candidates, *(Path(name) for name in (*ledger.folders, *ledger.mounts)))))
    store.refuse_mapped(*folders)
    removed: list[str] = []
    for home in store.homes(layout):  # first the manifest: without it there is no store, whatever happens next
        _unlink(home / store.MANIFEST, removed)
        for left in home.glob(store.MANIFEST + files.PART_SUFFIX):
            _unlink(left, removed)
    for folder in folders:
        if folder.is_dir():
            for path in (*folder.glob(store.RECORDS), *folder.glob(store.RECORDS + files.PART_SUFFIX)):
                _unlink(path, removed)
    for folder in folders:
        while ours(folder):
            done = proc.run([*sudo(os.getuid() == 0), "umount", str(folder)], timeout=30)
            if not done.ok:
                raise DeniedError(f"umount {folder}: {done.stderr.strip()}", hints=(f"sudo umount {folder}",))
            removed.append(f"mount {folder}")
    for reserved in ledger.reservations:
        given = hugepages.give_back(reserved)
        if given:
            removed.append(f"{given} hugepages of {reserved.page_kib} KiB on node {reserved.node}")
    write_ledger(layout, Ledger())
    made = [home for home in store.homes(layout) if len(layout.store_dirs) > 1 or home == store.own_home(layout)]
    for folder in (*(home / ROWS for home in made), *made):  # a folder that the user prepared stays
        if folder.is_dir() and not any(folder.iterdir()) and not mounts.is_mount_point(folder):
            folder.rmdir()
    return removed


def _unlink(path: Path, removed: list[str]) -> None:
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise files.os_error(error, f"removing {path}") from error
    removed.append(str(path))


def ours(folder: Path) -> bool:
    """True when a filesystem of our own is mounted exactly there."""
    mount = mounts.mount_of(folder)
    return mount.source == MOUNT_SOURCE and folder.exists() and mount.point == folder.resolve()


def leftovers(layout: Layout) -> dict[str, Any]:
    """What of the system is in use for this store: mounts, hugepages reserved, bytes of files. For `status`."""
    ledger = read_ledger(layout)
    folders = [Path(name) for name in dict.fromkeys((*ledger.folders, *ledger.mounts))]
    return {
        "mounts": [str(folder) for folder in folders if ours(folder)],
        "hugepages": [asdict(item) for item in ledger.reservations],
        "files": sum(1 for folder in folders if folder.is_dir() for _ in folder.glob(store.RECORDS + "*")),
    }


def nodes_for(kind_storage: str) -> tuple[int, ...]:
    """NUMA nodes over which memory is spread; a disk has none."""
    return (0,) if kind_storage == "disk" else numa.memory_nodes()
