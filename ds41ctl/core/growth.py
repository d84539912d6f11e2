"""Growth: how much host memory a start has filled, and whether tables that an engine keeps itself can be in it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from ds41ctl.core.engram import RECORD_BYTES
from ds41ctl.core.profile import Profile

# choice: the rest is what others give back meanwhile, and what the kernel's own estimate of MemAvailable wavers by
SHARE_MIN = 0.95
GIB = 1 << 30


class Levels(BaseModel):
    """Host memory at one moment, bytes. `available`: MemAvailable, None when the kernel does not say; `pool`: all
    hugepages of all sizes; `in_use`: those of them that hold something."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    available: int | None
    pool: int = 0
    in_use: int = 0


class Holding(BaseModel):
    """Memory of some processes that is no page cache, bytes. `anonymous`: their share of anonymous and private
    hugepage memory; `shared`: of shared memory; `kept`: files on memory filesystems that they map or have open."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    anonymous: int
    shared: int
    kept: int

    @property
    def total(self) -> int:
        """What they hold; a file that is mapped is in `shared` as far as its pages were touched, so not twice."""
        return self.anonymous + max(self.shared, self.kept)


class Growth(BaseModel):
    """The levels before a start and when it was ready, and what the engine's processes then held (None: not known)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    before: Levels
    ready: Levels
    held: Holding | None
    needed: int

    @property
    def machine(self) -> int | None:
        """Bytes of memory that the start has filled on this machine.

        Page cache is available memory, so shards that were read and not kept do not count. Hugepages count when
        something is in them: a pool that grew took its pages from what was available, and is taken off again, so that
        one that is reserved and never touched counts nothing.
        """
        if self.before.available is None or self.ready.available is None:
            return None
        ordinary = self.before.available - self.ready.available - (self.ready.pool - self.before.pool)
        return ordinary + self.ready.in_use - self.before.in_use

    @property
    def filled(self) -> int | None:
        """The larger of the two measures: either alone misses tables that are there.

        The machine's misses tables that were in memory before the start (a file on a memory filesystem that the engine
        finds again) and memory that somebody else gave back meanwhile; the processes' misses pages that a driver has
        pinned, and everything where this user may not look.
        """
        found = [item for item in (self.machine, self.held.total if self.held else None) if item is not None]
        return max(found, default=None)

    @property
    def fault(self) -> str:
        """'' when the tables can be in what was filled, or nothing could be measured; else one line with figures.

        Memory that is resident may still hold zeros: pinned pages that were reserved and never written (seen: 2 x
        23.6 GiB a rank) pass here. The log's markers and the copies of smoke.copy see those.
        """
        if self.filled is None or self.filled >= SHARE_MIN * self.needed:
            return ""
        return (
            f"only {self.filled / GIB:.1f} GiB of host memory were filled by its start, its Engram tables take "
            f"{self.needed / GIB:.1f} GiB: they are not loaded"
        )

    def __str__(self) -> str:
        if self.filled is None:
            return f"unknown: memory could not be measured ({self.needed / GIB:.1f} GiB of tables wanted)"
        return f"{self.filled / GIB:.1f} GiB of host memory filled, tables take {self.needed / GIB:.1f} GiB"


def needed_bytes(profile: Profile) -> int:
    """Bytes of host memory that the profile's engine fills with tables; 0 when that is not judged."""
    engram = profile.engram
    if engram.storage != "engine":
        return 0
    return sum(table.rows for table in profile.model.engram) * RECORD_BYTES * engram.host_copies
