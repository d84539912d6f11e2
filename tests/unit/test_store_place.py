"""Where a store goes: NUMA nodes, hugepage pools, the order of falling back, who reads which rows."""

from __future__ import annotations

import os
import threading
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds41ctl.adapters import host, hugepages, numa, profiles, store, storebuild, storeplace
from ds41ctl.core.engram import (
    Geometry,
    Part,
    RankRange,
    node_pages,
    pages,
    parallel_sizes,
    placement,
    planned_placement,
    rank_ranges,
    sub_tables,
    unproven_rank,
)
from ds41ctl.core.errors import DeniedError, Ds41Error, NoSpaceError
from ds41ctl.core.layout import Dirs, Layout, layout
from ds41ctl.core.settings import Settings
from tests.fakes.packs import layout_for, local_profile, write_pack

MIB, GIB = 1 << 20, 1 << 30
# the real model's first Engram layer: 24 sub-tables, 384,006,168 rows
SIZES = tuple(sub_tables(1, 16_000_000, 4, 8)[0])


def bounds(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    return Geometry((1,), (sum(sizes),), (sizes,)).boundaries(0)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 8))
def test_a_table_is_split_at_sub_tables_without_gap_or_overlap(sizes: list[int], nodes: int) -> None:
    parts = placement(bounds(tuple(sizes)), list(range(nodes)))
    starts = {first for first, _ in bounds(tuple(sizes))}
    reached = 0
    for part in parts:
        assert part.first_row == reached and part.first_row in starts and part.rows > 0
        reached += part.rows
    assert reached == sum(sizes) and len(parts) == min(nodes, len(sizes))
    assert len({part.node for part in parts}) == len(parts)


def test_two_nodes_hold_half_of_each_table_and_the_published_page_counts_come_out() -> None:
    first, second = placement(bounds(SIZES), (0, 1))
    assert (first.node, second.node) == (0, 1) and abs(first.rows - second.rows) < 5000
    assert pages(384006168 * 264, 2 << 20) == 48_341 and pages(384016682 * 264, 2 << 20) == 48_342
    assert pages(384006168 * 264, 1 << 30) == 95
    wanted = storeplace.node_pages([(1, (first, second))], 2 << 20)
    assert wanted[0] + wanted[1] in (48_341, 48_342)


def tree(root: Path, pools: dict[int, tuple[int, int]], resv: int = 0, page_kib: int = 2048) -> Path:
    """A /sys of nodes whose pools have (total, free) pages."""
    (root / "sys/devices/system/node").mkdir(parents=True, exist_ok=True)
    (root / "sys/devices/system/node/has_memory").write_text(",".join(map(str, pools)) + "\n")
    whole = root / f"sys/kernel/mm/hugepages/hugepages-{page_kib}kB"
    whole.mkdir(parents=True, exist_ok=True)
    (whole / "resv_hugepages").write_text(f"{resv}\n")
    for node, (total, free) in pools.items():
        folder = root / f"sys/devices/system/node/node{node}/hugepages/hugepages-{page_kib}kB"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "nr_hugepages").write_text(f"{total}\n")
        (folder / "free_hugepages").write_text(f"{free}\n")
    return root


def granting(root: Path, most: dict[int, int]) -> hugepages.Write:
    """A kernel that grows each node's pool up to `most` pages."""

    def write(path: Path, text: str) -> None:
        if path.name != "nr_hugepages":
            return
        node = int(path.parts[-4].removeprefix("node"))
        free = path.with_name("free_hugepages")
        before = int(path.read_text())
        now = min(int(text), most[node])
        path.write_text(f"{now}\n")
        free.write_text(f"{int(free.read_text()) + now - before}\n")

    return write


@pytest.mark.parametrize(("text", "nodes"), [("0\n", (0,)), ("0-1\n", (0, 1)), ("0,2-3\n", (0, 2, 3)), ("\n", (0,))])
def test_nodes_with_memory_are_read_as_the_kernel_writes_them(
    tmp_path: Path, text: str, nodes: tuple[int, ...]
) -> None:
    tree(tmp_path, {0: (0, 0)})
    (tmp_path / "sys/devices/system/node/has_memory").write_text(text)
    assert numa.memory_nodes(tmp_path) == nodes
    assert numa.memory_nodes(tmp_path / "nothing") == (0,)


def test_pages_are_reserved_on_the_node_that_lacks_them_and_given_back_exactly(tmp_path: Path) -> None:
    root = tree(tmp_path, {0: (10, 4), 1: (0, 0)})
    write = granting(root, {0: 100, 1: 100})
    assert hugepages.plan(0, 2048, 4, root) is None  # enough are free
    wanted = hugepages.plan(1, 2048, 50, root)
    assert wanted == hugepages.Reservation(1, 2048, 0, 50)
    more = hugepages.plan(0, 2048, 9, root)
    assert more == hugepages.Reservation(0, 2048, 10, 5)
    for item in (wanted, more):
        hugepages.reserve(item, root, write)
    assert hugepages.count(1, 2048, root) == (50, 50) and hugepages.count(0, 2048, root) == (15, 9)
    assert [hugepages.give_back(item, root, write) for item in (wanted, more)] == [50, 5]
    assert hugepages.count(1, 2048, root) == (0, 0) and hugepages.count(0, 2048, root) == (10, 4)


def test_pages_promised_to_others_do_not_count_as_free(tmp_path: Path) -> None:
    assert hugepages.count(0, 2048, tree(tmp_path, {0: (10, 8)}, resv=3)) == (10, 5)
    assert hugepages.count(0, 1 << 20, tmp_path) == (0, 0)


def test_a_kernel_that_gives_fewer_pages_is_an_error_with_both_numbers_and_the_pool_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hugepages.time, "sleep", lambda seconds: None)
    root = tree(tmp_path, {0: (2, 0)})
    wanted = hugepages.plan(0, 2048, 48_342, root)
    assert wanted is not None
    with pytest.raises(NoSpaceError, match=r"gave 13565 of 48342 hugepages of 2M on NUMA node 0") as caught:
        hugepages.reserve(wanted, root, granting(root, {0: 13_567}))
    assert "hugepagesz=2M hugepages=48344" in caught.value.hints[0]
    assert hugepages.count(0, 2048, root)[0] == 2


def test_of_a_reservation_nobody_saw_the_end_of_only_what_the_pool_gained_is_taken(tmp_path: Path) -> None:
    root = tree(tmp_path, {0: (10, 10)})
    write = granting(root, {0: 100})
    killed_before = hugepages.Reservation(0, 2048, 10, 5)
    assert hugepages.give_back(killed_before, root, write) == 0
    killed_half_way = hugepages.Reservation(0, 2048, 7, 5)
    assert hugepages.give_back(killed_half_way, root, write) == 3
    assert hugepages.count(0, 2048, root)[0] == 7


def test_two_stores_give_back_their_own_pages_in_any_order(tmp_path: Path) -> None:
    root = tree(tmp_path, {0: (0, 0)})
    write = granting(root, {0: 100})
    taken = []
    for need in (3, 5):
        wanted = hugepages.Reservation(0, 2048, hugepages.count(0, 2048, root)[0], need)
        hugepages.reserve(wanted, root, write)
        taken.append(hugepages.Reservation(0, 2048, wanted.before, need, granted=True))
    for item in taken:
        hugepages.give_back(item, root, write)
    assert hugepages.count(0, 2048, root)[0] == 0


def test_each_part_is_allocated_under_the_policy_of_its_node_and_the_policy_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[int, list[object]] = {}  # of each thread: the policy is a thread's

    def note(call: object) -> None:
        calls.setdefault(threading.get_ident(), []).append(call)

    monkeypatch.setattr(numa, "memory_nodes", lambda: (0, 1))
    monkeypatch.setattr(numa, "_set_mempolicy", lambda mode, nodes: note((mode, nodes)))
    monkeypatch.setattr(storebuild, "ALLOCATE_BYTES", 1 * MIB)
    allocate = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, at, size: (note("pages"), allocate(fd, at, size))[1])
    found = write_pack(tmp_path / "pack")
    it = layout_for(local_profile(profiles.read(profiles.find("cpu-tiny")), found), tmp_path, storage="tmpfs")
    it = it.__class__(**{**it.__dict__, "store_dirs": (Path(f"/dev/shm/ds41ctl-test-{os.getpid()}"),)})
    try:
        storebuild.build(it, found, lambda text, data: None)
        names = sorted(path.name for path in it.store_dirs[0].glob("layer-*"))
        assert names == [f"layer-00{layer}-node{node}.engram" for layer in (1, 3) for node in (0, 1)]
        bind, default = 2, 0
        everything = [call for made in calls.values() for call in made]
        assert threading.get_ident() not in calls
        triples = [tuple(everything[at : at + 3]) for at in range(0, len(everything), 3)]
        assert set(triples) == {((bind, mask), "pages", (default, 0)) for mask in (1, 2)}
        assert triples.count(triples[0]) == len(triples) / 2 >= 2, "both nodes, both layers"
        assert store.problem(it, it.store_dirs[0]) == ""
        assert store.compare_all(it, it.store_dirs[0]) == (sum(found.rows), "")
        assert store.compare_sample(it, it.store_dirs[0], found, 3)[1] == ""
    finally:
        storeplace.release(it)
        it.store_dirs[0].rmdir()


@pytest.mark.skipif(numa.memory_nodes() != (0,), reason="this machine has more than one NUMA node")
def test_this_kernel_takes_the_binding_call_and_refuses_a_node_that_is_not_there() -> None:
    with numa.pages_on(0):
        assert "bind:0" in Path("/proc/thread-self/numa_maps").read_text()
    assert "bind:0" not in Path("/proc/thread-self/numa_maps").read_text()
    with pytest.raises(OSError, match="set_mempolicy"), numa.pages_on(1):
        pass
    with pytest.raises(OSError, match="not one of 0 to 63"), numa.pages_on(64):
        pass


SMAPS = """7f0000000000-7f0000400000 r--s 00000000 00:2a 5   /x/rows/layer-001.engram
Size:               4096 kB
KernelPageSize:        {page} kB
Rss:                {rss} kB
ShmemPmdMapped:     {pmd} kB
Shared_Hugetlb:     {huge} kB
Private_Hugetlb:       0 kB
VmFlags: rd sh
7f0000400000-7f0000800000 r--s 00000000 00:2a 6   /x/rows/layer-001.engram.other
Rss:                 999 kB
ShmemPmdMapped:      999 kB
"""
NUMA_MAPS = """7f0000000000 bind:0 file=/x/rows/layer-001.engram huge dirty=2 N0=1 N1=1 kernelpagesize_kB=2048
7f0000400000 default file=/x/rows/layer-001.engram.other N0=9 kernelpagesize_kB=4
"""


@pytest.mark.parametrize(
    ("page", "rss", "pmd", "huge", "share"),
    [(2048, 0, 0, 4096, 1.0), (4, 4096, 4096, 0, 1.0), (4, 4096, 2048, 0, 0.5), (4, 4096, 0, 0, 0.0)],
)
def test_page_backing_is_what_smaps_and_numa_maps_say_of_this_very_file(
    tmp_path: Path, page: int, rss: int, pmd: int, huge: int, share: float
) -> None:
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    (proc / "smaps").write_text(SMAPS.format(page=page, rss=rss, pmd=pmd, huge=huge))
    (proc / "numa_maps").write_text(NUMA_MAPS)
    found = numa.backing(Path("/x/rows/layer-001.engram"), tmp_path)
    assert found.bytes == 4 << 20 and found.huge_share == share
    assert found.node_bytes == {0: 2 << 20, 1: 2 << 20}


def plain(tmp_path: Path, storage: str = "tmpfs", page: str = "", may_mount: bool = True) -> Layout:
    profile = profiles.read(profiles.find("cpu-tiny"))
    profile = profile.model_copy(
        update={"engram": profile.engram.model_copy(update={"storage": storage, "page": page})}
    )
    dirs = Dirs(tmp_path / "data", tmp_path / "state", tmp_path / "cache", tmp_path / "run", os.getuid())
    return layout(profile, Settings(), dirs, may_mount=may_mount)


@pytest.mark.parametrize(
    ("storage", "page", "order"),
    [
        ("hugetlb", "1G", ["hugetlbfs with 1G pages", "hugetlbfs with 2M pages", "tmpfs with 2M pages",
                           "tmpfs with 4K pages", "tmpfs with 2M pages"]),
        ("hugetlb", "", ["hugetlbfs with 2M pages", "tmpfs with 2M pages", "tmpfs with 4K pages",
                         "tmpfs with 2M pages"]),
        ("tmpfs", "", ["tmpfs with 2M pages", "tmpfs with 4K pages", "tmpfs with 2M pages"]),
        ("tmpfs", "4K", ["tmpfs with 4K pages", "tmpfs with 4K pages"]),
        ("disk", "", ["disk"]),
    ],
)  # fmt: skip
def test_the_order_of_falling_back(tmp_path: Path, storage: str, page: str, order: list[str]) -> None:
    kinds = storeplace.kinds(plain(tmp_path, storage, page))
    assert [str(kind) for kind in kinds] == order
    assert not kinds[-1].mount and all(kind.mount for kind in kinds[:-1])


def test_falling_back_is_said_with_its_reason_and_nothing_of_the_better_place_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = plain(tmp_path, "hugetlb")

    def refuse(layout: Layout, kind: storeplace.Kind, tables: storeplace.Tables) -> storeplace.Place:
        storeplace.write_ledger(layout, storeplace.Ledger(mounts=(str(tmp_path / "x"),)))
        raise DeniedError("mounting is not allowed here")

    monkeypatch.setattr(storeplace, "_mounted", refuse)
    said: list[str] = []
    place = storeplace.find(it, storeplace.whole_tables(it), said.append)
    assert place.rows == it.store_dirs[-1] and len(said) == 3
    assert said[0].startswith(
        "no hugetlbfs with 2M pages of our own: mounting is not allowed here; next: tmpfs with 2M"
    )
    assert storeplace.read_ledger(it).mounts == ()
    storeplace.release(it)


@pytest.mark.parametrize("storage", ["tmpfs", "hugetlb"])
def test_too_little_memory_is_refused_before_anything_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    memory = host.memory().model_copy(update={"available": 1 << 20})
    monkeypatch.setattr(host, "memory", lambda: memory)
    it = plain(tmp_path, storage)
    with pytest.raises(NoSpaceError, match=r"need \d+ bytes of memory, 1048576 are available"):
        storeplace.find(it, storeplace.whole_tables(it), lambda text: None)
    assert not (tmp_path / "state" / "engram").exists() or not list((tmp_path / "state" / "engram").rglob("*"))


def test_a_cgroup_that_is_too_small_is_refused_with_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = host.memory().model_copy(update={"cgroup_limit": 5 << 20, "cgroup_used": 4 << 20})
    monkeypatch.setattr(host, "memory", lambda: memory)
    it = plain(tmp_path)
    with pytest.raises(NoSpaceError, match="the cgroup has 1048576 left of its limit of 5242880"):
        storeplace.find(it, storeplace.whole_tables(it), lambda text: None)


def test_a_damaged_ledger_is_refused_with_what_to_look_at(tmp_path: Path) -> None:
    it = plain(tmp_path)
    storeplace.ledger_path(it).parent.mkdir(parents=True)
    for text in ("{", "[]", '{"mounts": []}', '{"mounts": [], "folders": [], "reservations": [{"x": 1}]}'):
        storeplace.ledger_path(it).write_text(text)
        with pytest.raises(Ds41Error, match="is damaged"):
            storeplace.release(it)


GEOMETRY = Geometry((1, 14), (20, 24), ((3, 5, 5, 7), (4, 5, 6, 9)))
LINES = [
    "(Worker_TP0) INFO [model.py:1] ds41: Engram layer 1: rank 0 of 2 reads rows [0, 8) columns [0, 2), 4 rows proven",
    "ds41: Engram layer 14: rank 0 of 2 reads rows [0, 9) columns [0, 2), 4 rows proven",
    "ds41: Engram layer 1: rank 1 of 2 reads rows [8, 20) columns [2, 4), 4 rows proven",
    "ds41: Engram layer 14: rank 1 of 2 reads rows [9, 24) columns [2, 4), 4 rows proven",
]  # fmt: skip


def test_every_rank_reads_whole_sub_tables_and_together_all_rows() -> None:
    assert rank_ranges(GEOMETRY, 2)[1] == RankRange(1, 1, 2, (8, 20), (2, 4))
    # published: tensor parallel 3 of the real model, rank 1 of layer 1 reads rows 128000880 to 256002934
    real = Geometry((1,), (384006168,), (SIZES,))
    assert sum(SIZES) == 384006168
    assert rank_ranges(real, 3)[1].rows == (128000880, 256002934)


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (LINES, ""),
        (LINES[:3], "rank 1 of 2 has not proven that it reads the table of layer 14"),
        ([LINES[0], LINES[1], LINES[2].replace("[8, 20)", "[0, 8)"), LINES[3]],
         "rank 1 reads rows [0, 8] of layer 1 as one of 2 ranks, its own are [8, 20] of 2"),
        ([line.replace("of 2", "of 4") for line in LINES], "as one of 4 ranks, its own are [0, 8] of 2"),
        ([LINES[0].replace("4 rows proven", "0 rows proven"), *LINES[1:]], "rank 0 of 2 has not proven"),
        (["Built engram token map (129280 -> 99092 ids) for layers (1, 14)"], "rank 0 of 2 has not proven"),
        ([], "has not proven"),
    ],
)  # fmt: skip
def test_the_rank_offset_fault_and_every_missing_proof_is_named(lines: list[str], fault: str) -> None:
    found = unproven_rank(lines, rank_ranges(GEOMETRY, 2))
    assert (fault in found) if fault else found == ""


@pytest.mark.parametrize(
    ("argv", "sizes"),
    [
        ([], (1, 1)),
        (["--tensor-parallel-size", "4", "--pipeline-parallel-size=2"], (4, 2)),
        (["-tp", "2"], (2, 1)),
        (["--tensor-parallel-size"], (1, 1)),
        (["--tensor-parallel-size", "many"], (1, 1)),
    ],
)
def test_sizes_of_a_command_line(argv: list[str], sizes: tuple[int, int]) -> None:
    assert parallel_sizes(argv) == sizes


def test_a_part_is_padded_to_whole_pages() -> None:
    assert storeplace.padded(Part(0, 0, 1), 4096) == 4096
    assert storeplace.padded(Part(0, 0, 7943), 2 << 20) == 2 << 20  # 2,096,952 bytes
    assert storeplace.padded(Part(0, 0, 7944), 2 << 20) == 4 << 20  # 64 bytes more than a page


# ---- what preflight asks for before config.json is there


@pytest.mark.parametrize("page_bytes", [2 * MIB, GIB])
@pytest.mark.parametrize("nodes", [(), (0,), (0, 1), (0, 1, 2, 3)])
def test_planned_pages_hold_the_models_tables_and_hardly_more(nodes: tuple[int, ...], page_bytes: int) -> None:
    real, planned = [], []
    for table in sub_tables(2, 16_000_000, 4, 8):  # DeepSeek-V4.1's: 384,006,168 and 384,016,682 rows
        ends = list(accumulate(table))
        real.append(placement([(end - rows, end - 1) for end, rows in zip(ends, table, strict=True)], nodes))
        planned.append(planned_placement(ends[-1], nodes))
    assert sum(part.rows for part in real[0]) == 384_006_168
    exact, asked = node_pages(real, page_bytes), node_pages(planned, page_bytes)
    assert set(exact) == set(asked)
    for node, count in exact.items():
        assert count <= asked[node] <= count + 2
    if len(nodes) < 2:
        assert asked == exact
