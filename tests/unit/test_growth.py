"""Tables that an engine keeps itself: how much memory its start must have filled, and what does not count as filled."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds41ctl.adapters import hostmem, profiles
from ds41ctl.core.growth import Growth, Holding, Levels, needed_bytes

GIB = 1 << 30
TABLES = 189 * GIB


def growth(
    *, taken: int = 0, pool: int = 0, in_use: int = 0, held: Holding | None = None, needed: int = TABLES
) -> Growth:
    """A start that took `taken` GiB of available memory, grew the hugepage pool and put something into its pages."""
    before = Levels(available=400 * GIB, pool=10 * GIB, in_use=5 * GIB)
    ready = Levels(available=(400 - taken) * GIB, pool=(10 + pool) * GIB, in_use=(5 + in_use) * GIB)
    return Growth(before=before, ready=ready, held=held, needed=needed)


def test_the_v100_engine_is_asked_for_one_copy_of_its_tables_and_no_other_profile_for_any() -> None:
    assert needed_bytes(profiles.read(profiles.find("v100-pp2tp4"))) == 202_758_032_400
    for name in ("cmp170hx-tp4", "cpu-tiny", "gpu-tiny", "gpu-tiny-tp2", "gpu-tiny-pp2"):
        assert needed_bytes(profiles.read(profiles.find(name))) == 0


@pytest.mark.parametrize(
    ("found", "filled"),
    [
        (growth(taken=200), 200),  # anonymous or pinned memory
        (growth(in_use=189), 189),  # pages of a pool that was reserved at boot: MemAvailable does not move
        (growth(taken=189, pool=189, in_use=189), 189),  # a pool that the start itself reserved and filled
        (growth(taken=200, pool=189, in_use=189), 200),
        # the tables were in a file on hugetlbfs or tmpfs before the start, and are mapped again
        (growth(taken=12, held=Holding(anonymous=10 * GIB, shared=2 * GIB, kept=189 * GIB)), 199),
        # somebody else gave back 100 GiB meanwhile
        (growth(taken=90, held=Holding(anonymous=190 * GIB, shared=0, kept=0)), 190),
        # nobody may look into a container's processes
        (growth(taken=200, held=None), 200),
    ],
)
def test_tables_that_are_there_pass_in_whatever_memory_they_are(found: Growth, filled: int) -> None:
    assert found.filled == filled * GIB and found.fault == ""


@pytest.mark.parametrize(
    "found",
    [
        growth(taken=0),  # nothing was read, or read through the page cache, which is available memory
        growth(taken=40, held=Holding(anonymous=38 * GIB, shared=2 * GIB, kept=0)),  # an engine without its tables
        growth(taken=189, pool=189),  # a pool was reserved, and no page of it was touched
        growth(taken=229, pool=189, held=Holding(anonymous=38 * GIB, shared=0, kept=0)),
        growth(taken=100),  # one of two tables
        growth(taken=-30),
    ],
)
def test_tables_that_are_not_there_are_a_fault_with_both_figures(found: Growth) -> None:
    assert "its Engram tables take 189.0 GiB: they are not loaded" in found.fault
    assert f"only {(found.filled or 0) / GIB:.1f} GiB" in found.fault


def test_what_cannot_be_measured_is_unknown_and_says_so() -> None:
    found = Growth(before=Levels(available=None), ready=Levels(available=None), held=None, needed=TABLES)
    assert found.filled is None and found.fault == "" and str(found).startswith("unknown: ")
    half = found.model_copy(update={"held": Holding(anonymous=TABLES, shared=0, kept=0)})
    assert half.filled == TABLES


def test_levels_are_the_kernels_and_hugepages_of_all_sizes_count(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       10 kB\nMemAvailable:    7 kB\nHugePages_Total:  3\n")
    for size, total, free in ((2048, 10, 4), (1048576, 2, 1)):
        folder = tmp_path / f"sys/kernel/mm/hugepages/hugepages-{size}kB"
        folder.mkdir(parents=True)
        (folder / "nr_hugepages").write_text(f"{total}\n")
        (folder / "free_hugepages").write_text(f"{free}\n")
    assert hostmem.levels(tmp_path) == Levels(available=7168, pool=(10 << 21) + (2 << 30), in_use=(6 << 21) + (1 << 30))
    assert hostmem.levels(tmp_path / "nothing") == Levels(available=None)
    assert hostmem.levels().available
