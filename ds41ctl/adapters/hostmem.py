"""Host memory: the machine's levels, and what a family of processes holds that is no page cache."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

from ds41ctl.adapters import mounts
from ds41ctl.core.growth import Holding, Levels

_MAPPED = re.compile(r"^\S+ \S+ \S+ \S+ \d+ +(/.*)$", re.MULTILINE)
_FIELD = re.compile(r"^(\w+): +(\d+) kB$", re.MULTILINE)


def levels(root: Path = Path("/")) -> Levels:
    """Levels now; hugepages of all sizes together."""
    available = None
    with contextlib.suppress(OSError, KeyError, ValueError):
        fields = dict(_FIELD.findall((root / "proc/meminfo").read_text()))
        available = int(fields["MemAvailable"]) * 1024
    pool = in_use = 0
    for folder in (root / "sys/kernel/mm/hugepages").glob("hugepages-*kB"):
        with contextlib.suppress(OSError, ValueError):
            size = int(folder.name.removeprefix("hugepages-").removesuffix("kB")) * 1024
            total, free = (int((folder / name).read_text()) for name in ("nr_hugepages", "free_hugepages"))
            pool, in_use = pool + total * size, in_use + (total - free) * size
    return Levels(available=available, pool=pool, in_use=in_use)


def holding(pids: Iterable[int]) -> Holding | None:
    """What the processes hold; None when none of them may be looked into.

    Shared hugepages are counted of one process only: ranks that map the same ones would count them as often.
    """
    anonymous = shared = huge = 0
    kept: dict[tuple[int, int], int] = {}
    seen = False
    for pid in pids:
        where = Path("/proc") / str(pid)
        try:
            fields = {name: int(kib) * 1024 for name, kib in _FIELD.findall((where / "smaps_rollup").read_text())}
        except OSError:
            continue
        if "Pss_Anon" not in fields:  # Linux before 5.9
            continue
        seen = True
        anonymous += fields["Pss_Anon"] + fields.get("Private_Hugetlb", 0)
        shared += fields.get("Pss_Shmem", 0)
        huge = max(huge, fields.get("Shared_Hugetlb", 0))
        kept |= _kept(where)
    return Holding(anonymous=anonymous, shared=shared + huge, kept=sum(kept.values())) if seen else None


def _kept(where: Path) -> dict[tuple[int, int], int]:
    """(device, inode) -> allocated bytes of the files on memory filesystems that a process maps or has open."""
    names: set[str] = set()
    with contextlib.suppress(OSError):
        names |= set(_MAPPED.findall((where / "maps").read_text(errors="replace")))
        names |= {str(link.readlink()) for link in (where / "fd").iterdir()}
    memory = [str(item.point).rstrip("/") + "/" for item in mounts.mounts() if item.memory_backed]
    found = {}
    for name in names:
        if name.startswith(tuple(memory)):
            with contextlib.suppress(OSError):
                info = Path(name).stat()
                found[info.st_dev, info.st_ino] = info.st_blocks * 512
    return found
