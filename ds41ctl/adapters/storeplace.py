"""Where a store's files go: mounts of our own, reserved hugepages, and the ledger that remembers both.

The ledger is written before anything is mounted or reserved, so that `drop` finds whatever a killed build left.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from ds41ctl.adapters import files, host, hugepages, mounts, numa, proc, store
from ds41ctl.core.engram import Part, pages
from ds41ctl.core.engram import node_pages as core_node_pages
from ds41ctl.core.errors import ConfigError, DeniedError, Ds41Error, NoSpaceError, UnsupportedError
from ds41ctl.core.facts import StoreFacts
from ds41ctl.core.layout import Layout
from ds41ctl.core.place import MEMORY_FILESYSTEMS, Decision, Ground, decide, mount_line, mounted_bytes

MOUNT_SOURCE = mounts.OWN_SOURCE
ROWS = store.ROWS
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE_BYTES = {"4K": 4 * KIB, "2M": 2 * MIB, "1G": GIB}
Tables = Sequence[tuple[int, Sequence[Part]]]


@dataclass(frozen=True)
class Kind:
    """One way to keep the files; `mount`: on a filesystem of our own."""

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
    """A place that is ready: the manifest goes to `home`, the files to `rows`."""

    home: Path
    rows: Path
    kind: Kind


@dataclass(frozen=True)
class Ledger:
    """What builds have taken from the system and not given back: mount points and hugepages; and where files are.

    `files`: those whose name alone does not say that they are ours (shards). `made`: folders that a mount needed,
    outermost first.
    """

    mounts: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    reservations: tuple[hugepages.Reservation, ...] = field(default=())
    files: tuple[str, ...] = ()
    made: tuple[str, ...] = ()


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
            tuple(str(path) for path in tree.get("files", ())),
            tuple(str(folder) for folder in tree.get("made", ())),
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
    if layout.own_store_dir:  # nowhere else
        return tuple(found)
    shared = Kind("tmpfs", "2M" if engram.page != "4K" else "4K", False)
    return (*found, shared) if len(layout.store_dirs) > 1 else (shared,)  # one: no rights to mount


def padded(part: Part, page_bytes: int) -> int:
    """Bytes of a part's file: whole pages, so that the last one can be a huge page too."""
    return pages(part.bytes, page_bytes) * page_bytes


def total_bytes(tables: Tables, page_bytes: int) -> int:
    """Bytes of all files of a store."""
    return sum(padded(part, page_bytes) for _, parts in tables for part in parts)


def node_pages(tables: Tables, page_bytes: int) -> dict[int, int]:
    """Pages wanted on each NUMA node."""
    return core_node_pages((parts for _, parts in tables), page_bytes)


def folder_mode(layout: Layout) -> int:
    """Mode of the folder of the files. Shards are public bytes, and a container's user may be anybody."""
    return 0o755 if store.of_shards(layout) else 0o700


def mount_options(kind: Kind, size: int, uid: int, mode: int = 0o700) -> tuple[str, ...]:
    """Mount options to try, best first. tmpfs: no swapping where the kernel can do without."""
    owner = f"mode={mode:04o},uid={uid}"
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
    size = total_bytes(tables, kind.page_bytes) + (2 * MIB if kind.storage == "tmpfs" else 0)
    return mounted_bytes(layout.profile.engram, size) if kind.storage == "tmpfs" else size


def whole_tables(layout: Layout) -> Tables:
    """The profile's tables unsplit: for sums where NUMA nodes do not matter."""
    shards = store.of_shards(layout)
    return [
        (table.layer, (Part(0, 0, table.rows, store.file_bytes(layout, table) if shards else 0),))
        for table in layout.profile.model.engram
    ]


def survey(layout: Layout) -> Ground:
    """What the place of this profile's store depends on, as it is now. Touches nothing."""
    folder = layout.store_dirs[0]
    own = mounts.is_own(folder)
    fstype = mounts.mount_of(folder).fstype
    if not layout.own_store_dir:
        return Ground(str(folder), False, fstype, own, len(layout.store_dirs) > 1)
    may_mount = proc.may_mount() if own or fstype not in MEMORY_FILESYSTEMS else None  # else it is not asked for
    return Ground(str(folder), True, fstype, own, may_mount, "" if own else _foreign(layout, folder))


def _foreign(layout: Layout, folder: Path) -> str:
    """What lies in a folder and is neither in the ledger nor, by its name, a store's; '' when nothing does."""
    known = {Path(name).name for name in read_ledger(layout).files if Path(name).parent == folder} | {store.MANIFEST}
    known |= {name + files.PART_SUFFIX for name in known}
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError:
        return ""
    left = [name for name in names if name not in known and not fnmatch(name, store.RECORDS + "*")]
    return left[0] + (f" and {len(left) - 1} more" if left[1:] else "") if left else ""


def look(layout: Layout) -> StoreFacts:
    """Facts about the store as it lies there, and what the place of a new one depends on."""
    ground = survey(layout)
    told = {"chosen": ground.chosen, "own_mount": ground.own_mount, "foreign": ground.foreign}
    return store.inspect(layout).model_copy(update=told)


def planned_commands(layout: Layout) -> tuple[tuple[str, ...], ...]:
    """The first mount that a build would try, for the plan; touches nothing."""
    first = kinds(layout)[0]
    if decide(layout.profile.engram, survey(layout)).way != "mount":
        return ()
    options = mount_options(
        first, mount_size(layout, first, whole_tables(layout)), layout.dirs.uid, folder_mode(layout)
    )[0]
    folder, root = _mount_point(layout), layout.dirs.uid == 0
    made = [(*sudo(root), "mkdir", "-p", str(folder))] if layout.own_store_dir and not folder.is_dir() else []
    return (*made, tuple(mount_argv(first, options, folder, root=root)))


def refusal(layout: Layout) -> Ds41Error | None:
    """Why no place can be made for the store, with the line that helps; None when one can."""
    decision = decide(layout.profile.engram, survey(layout))
    return _refused(layout, decision) if decision.way == "refused" else None


def _refused(layout: Layout, decision: Decision) -> Ds41Error:
    if decision.rights:
        return DeniedError(decision.why, hints=(_mount_hint(layout),))
    return ConfigError(
        decision.why,
        hints=(f"ls -la {layout.store_dirs[0]}", "export DS41_ENGRAM_DIR=/a/folder/of/its/own"),
    )


def _mount_hint(layout: Layout) -> str:
    """The one line that prepares the chosen folder."""
    kind = kinds(layout)[0]
    size = total_bytes(whole_tables(layout), kind.page_bytes) + 2 * MIB
    return mount_line(layout.profile.engram, str(layout.store_dirs[0]), size, layout.dirs.uid)


def _mount_point(layout: Layout) -> Path:
    """Where a filesystem of our own goes: at the chosen folder itself, else below the store's own."""
    return layout.store_dirs[0] if layout.own_store_dir else layout.store_dirs[0] / ROWS


def find(layout: Layout, tables: Tables, say: Callable[[str], None]) -> Place:
    """Make a place for the files, in the stated order, saying why a better one is not used.

    Raises NoSpaceError when memory, cgroup or filesystem are too small for the tables, DeniedError when nothing may be
    written or mounted, ConfigError when the chosen folder is not to be used. Memory storage never goes to a disk.
    """
    decision = decide(layout.profile.engram, survey(layout))
    if decision.way == "refused":
        raise _refused(layout, decision)
    if decision.way in ("disk", "there"):
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
    rows = _mount_point(layout)
    home = layout.store_dirs[0]
    if store.of_shards(layout) or (layout.own_store_dir and kind.storage == "hugetlb"):
        home = store.own_home(layout)  # see store; and hugetlbfs has no write(2)
    is_root = os.getuid() == 0
    size = mount_size(layout, kind, tables)
    if size < total_bytes(tables, 1):
        raise NoSpaceError(
            f"engram.size_gib is {layout.profile.engram.size_gib:g}, the Engram tables need {total_bytes(tables, 1)} "
            "bytes",
            hints=(f"a larger engram.size_gib in profile {layout.name}, or none: the tables' sizes are known",),
        )
    wanted = []
    if kind.storage == "hugetlb":
        for node, count in node_pages(tables, kind.page_bytes).items():
            if not hugepages.folder(node, kind.page_bytes // KIB).is_dir():
                raise UnsupportedError(f"this kernel has no hugepages of {kind.page}")
            reservation = hugepages.plan(node, kind.page_bytes // KIB, count)
            if reservation is not None:
                wanted.append(reservation)
    ledger = Ledger(
        mounts=(str(rows),),
        folders=(str(rows),),
        reservations=tuple(wanted),
        files=_shard_files(layout, rows),
        made=tuple(str(folder) for folder in _missing(rows)) if layout.own_store_dir else (),
    )
    write_ledger(layout, ledger)
    _make(home, 0o700)
    if layout.own_store_dir:
        _make_anywhere(layout, rows)
    else:
        _make(rows, 0o700)
    for number, reservation in enumerate(wanted):
        hugepages.reserve(reservation)
        wanted[number] = replace(reservation, granted=True)
        ledger = replace(ledger, reservations=tuple(wanted))
        write_ledger(layout, ledger)
    reason = ""
    for options in mount_options(kind, size, layout.dirs.uid, folder_mode(layout)):
        done = proc.run(mount_argv(kind, options, rows, root=is_root), timeout=30)
        if done.ok:
            return Place(home, rows, kind)
        reason = (done.stderr.strip().splitlines() or ["mount failed"])[0]
    raise DeniedError(f"mounting {rows}: {reason}", hints=(_mount_hint(layout),) if layout.own_store_dir else ())


def _shard_files(layout: Layout, rows: Path) -> tuple[str, ...]:
    return tuple(str(rows / name) for name in store.shard_names(layout))


def _missing(folder: Path) -> list[Path]:
    """The folder and its parents that are not there, outermost first."""
    there = mounts.existing_parent(folder)
    return [path for path in reversed((folder, *folder.parents)) if path != there and path.is_relative_to(there)]


def _make(folder: Path, mode: int) -> None:
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise files.os_error(error, f"making {folder}") from error


def _make_anywhere(layout: Layout, folder: Path) -> None:
    """A mount point, with root's help where this user may not write."""
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    except PermissionError:
        done = proc.run([*sudo(False), "mkdir", "-p", str(folder)], timeout=30)
        if not done.ok:
            raise DeniedError(f"making {folder} needs root", hints=(_mount_hint(layout),)) from None
    except OSError as error:
        raise files.os_error(error, f"making {folder}") from error


def _shared_memory(layout: Layout, kind: Kind, tables: Tables) -> Place:
    """A folder of this user in the tmpfs that everybody may write."""
    folder = layout.store_dirs[-1]
    _own_folder(folder, folder_mode(layout))
    refuse_small_filesystem(folder, total_bytes(tables, PAGE_BYTES["4K"]))
    write_ledger(layout, Ledger(folders=(str(folder),), files=_shard_files(layout, folder)))
    return Place(_home(layout, folder), folder, kind)


def _home(layout: Layout, folder: Path) -> Path:
    """Folder of the manifest of a store whose files lie in `folder`, which is no mount of ours."""
    if not store.of_shards(layout):
        return folder
    home = store.own_home(layout)
    _make(home, 0o700)
    return home


def _prepared(layout: Layout, tables: Tables) -> Place:
    """A folder on a memory filesystem that is there, or on a disk when the profile says so."""
    folder = layout.store_dirs[0]
    _own_folder(folder, folder_mode(layout))
    mount = mounts.mount_of(folder)
    home = _home(layout, folder)
    if mount.fstype == "hugetlbfs":
        size = mounts.page_bytes(folder)
        if size not in (PAGE_BYTES["2M"], PAGE_BYTES["1G"]):
            raise UnsupportedError(f"{folder} has pages of {size} bytes; expected a hugetlbfs with 2M or 1G pages")
        kind = Kind("hugetlb", "1G" if size == PAGE_BYTES["1G"] else "2M", False)
        home = store.own_home(layout)
        _make(home, 0o700)
    elif mount.memory_backed:
        kind = Kind("tmpfs", "4K" if layout.profile.engram.page == "4K" else "2M", False)
        _refuse_small_memory(kind, tables)
    else:
        kind = Kind("disk", "4K", False)
    refuse_small_filesystem(folder, total_bytes(tables, kind.page_bytes if kind.storage == "hugetlb" else 1))
    write_ledger(layout, Ledger(folders=(str(folder),), files=_shard_files(layout, folder)))
    return Place(home, folder, kind)


def _own_folder(folder: Path, mode: int) -> None:
    try:
        folder.parent.mkdir(mode=mode, parents=True, exist_ok=True)
        folder.mkdir(mode=mode, exist_ok=True)
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
    """Remove every file of the store, unmount our mount, give hugepages back; returns what was removed.

    Raises AlreadyRunningError while a process maps a file of it (of shards: or has one open), DeniedError when the
    system refuses; what is left stays in the ledger.
    """
    ledger = read_ledger(layout)
    homes = tuple(dict.fromkeys((*layout.store_dirs, store.own_home(layout))))  # of either kind: the profile may change
    candidates = [*homes, *(home / ROWS for home in homes)]
    folders = tuple(dict.fromkeys((*candidates, *(Path(name) for name in (*ledger.folders, *ledger.mounts)))))
    shards = list(ledger.files)
    if not layout.own_store_dir:  # folders of our own: what is in them is ours without a ledger, too
        shards += [str(folder / name) for folder in candidates for name in store.shard_names(layout)]
    store.refuse_mapped(*folders, opened=bool(shards))
    removed: list[str] = []
    for home in homes:  # first the manifest: without it there is no store, whatever happens next
        _unlink(home / store.MANIFEST, removed)
        for left in home.glob(store.MANIFEST + files.PART_SUFFIX):
            _unlink(left, removed)
    for name in dict.fromkeys(reversed(shards)):  # the index first: without it no engine takes the rest for tables
        _unlink(Path(name), removed)
        _unlink(Path(name + files.PART_SUFFIX), removed)
    for folder in folders:
        if folder.is_dir():
            for path in (*folder.glob(store.RECORDS), *folder.glob(store.RECORDS + files.PART_SUFFIX)):
                _unlink(path, removed)
    for folder in folders:
        while mounts.is_own(folder):
            done = proc.run([*sudo(os.getuid() == 0), "umount", str(folder)], timeout=30)
            if not done.ok:
                raise DeniedError(f"umount {folder}: {done.stderr.strip()}", hints=(f"sudo umount {folder}",))
            removed.append(f"mount {folder}")
    for reserved in ledger.reservations:
        given = hugepages.give_back(reserved)
        if given:
            removed.append(f"{given} hugepages of {reserved.page_kib} KiB on node {reserved.node}")
    for name in reversed(ledger.made):
        _remove_folder(Path(name))
    write_ledger(layout, Ledger())
    made = [home for home in homes if not layout.own_store_dir or home == store.own_home(layout)]
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


def _remove_folder(folder: Path) -> None:
    """Take away a folder that a mount needed, when nothing is in it."""
    try:
        folder.rmdir()
    except PermissionError:
        proc.run([*sudo(False), "rmdir", str(folder)], timeout=30)
    except OSError:  # gone, or somebody has put something there
        return


def leftovers(layout: Layout) -> dict[str, Any]:
    """What of the system is in use for this store: mounts, hugepages reserved, bytes of files. For `status`."""
    ledger = read_ledger(layout)
    folders = [Path(name) for name in dict.fromkeys((*ledger.folders, *ledger.mounts))]
    return {
        "mounts": [str(folder) for folder in folders if mounts.is_own(folder)],
        "hugepages": [asdict(item) for item in ledger.reservations],
        "files": sum(1 for folder in folders if folder.is_dir() for _ in folder.glob(store.RECORDS + "*"))
        + sum(Path(name + suffix).is_file() for name in ledger.files for suffix in ("", files.PART_SUFFIX)),
    }


def nodes_for(kind_storage: str) -> tuple[int, ...]:
    """NUMA nodes over which memory is spread; a disk has none."""
    return (0,) if kind_storage == "disk" else numa.memory_nodes()
