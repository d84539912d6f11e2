"""The compiled gather: the same bytes as plain indexing for every way to call it, and an error for every bad id."""

from __future__ import annotations

from pathlib import Path

import ds41_kernels as kernels
import numpy as np
import pytest
from ds41_engine.store import NumpyGather, node_cpus, place_threads

ROWS = 30_011


@pytest.fixture(scope="module")
def library() -> object:
    return kernels.load()


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (ROWS, 264), dtype=np.uint8)


@pytest.fixture(params=["portable", "avx2", "avx512"])
def loops(request: pytest.FixtureRequest, library: object) -> str:
    before = kernels.loops(library)
    try:
        kernels.loops(library, request.param)
    except kernels.Unavailable as error:
        pytest.skip(str(error))
    request.addfinalizer(lambda: kernels.loops(library, before))
    return str(request.param)


def unaligned(rows: np.ndarray, shift: int) -> np.ndarray:
    """The same rows at an address that is no multiple of 8."""
    space = np.empty(rows.size + shift, dtype=np.uint8)
    view = space[shift:].reshape(rows.shape)
    view[:] = rows
    return view


def some_ids(count: int, columns: int = 24) -> np.ndarray:
    """``count`` ids as ``[tokens, columns]`` where that divides, first and last row among them."""
    shape = (count // columns, columns) if count and count % columns == 0 else (1, count)
    ids = np.random.default_rng(count).integers(0, ROWS, shape)
    if count:
        ids[0, 0] = ROWS - 1
        ids[-1, -1] = 0 if count > 1 else ROWS - 1
    return ids


@pytest.mark.parametrize("threads", range(1, 9))
@pytest.mark.parametrize("count", [0, 1, 23, 24, 25, 1024, 1025, 49_152])
def test_every_row_is_the_tables(library: object, loops: str, rows: np.ndarray, threads: int, count: int) -> None:
    pool = kernels.Pool(library, [None] * threads)
    ids = some_ids(count)
    for shift in (0, 3):
        found = pool.gather(kernels.Table([kernels.Part(unaligned(rows, shift))]), ids)
        assert np.array_equal(found, rows[ids])
    assert pool.counters().rows == 2 * count


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("cuts", [(1,), (ROWS // 2,), (100, 101, 20_000)])
def test_tables_in_parts_on_several_nodes(
    library: object, loops: str, rows: np.ndarray, threads: int, cuts: tuple[int, ...]
) -> None:
    parts, begin = [], 0
    for node, end in enumerate((*cuts, ROWS)):
        parts.append(kernels.Part(rows[begin:end].copy(), begin, node))
        begin = end
    groups = [number % len(parts) for number in range(threads)] if threads >= len(parts) else None
    pool = kernels.Pool(library, [None] * threads, groups)
    for count in (1, 24, 49_152):
        ids = some_ids(count)
        assert np.array_equal(pool.gather(kernels.Table(parts), ids), rows[ids])
        assert np.array_equal(NumpyGather([(p.records, p.first_row, p.group) for p in parts])(ids), rows[ids])


@pytest.mark.parametrize("bad", [-1, ROWS, ROWS + 1, 2**62, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("count", [24, 49_152])
def test_an_id_outside_is_an_error_that_names_it_and_nothing_is_written(
    library: object, loops: str, rows: np.ndarray, bad: int, count: int
) -> None:
    for parts in (
        [kernels.Part(rows)],
        [kernels.Part(rows[:9].copy()), kernels.Part(rows[9:].copy(), 9)],
    ):
        ids = some_ids(count)
        ids[-1, 3] = bad
        out = np.full((*ids.shape, 264), 7, dtype=np.uint8)
        with pytest.raises(IndexError, match=f"found {bad}$"):
            kernels.Pool(library, [None, None]).gather(kernels.Table(parts), ids, out)
        assert (out == 7).all()


def test_a_table_that_starts_later_refuses_the_rows_before_it(library: object, rows: np.ndarray) -> None:
    """What a tensor-parallel rank reads is its own part of the table alone."""
    table = kernels.Table([kernels.Part(rows[1000:2000], 1000)])
    pool = kernels.Pool(library)
    assert np.array_equal(pool.gather(table, np.array([[1000, 1999]])), rows[None, [1000, 1999]])
    for bad in (999, 2000, 0):
        with pytest.raises(IndexError):
            pool.gather(table, np.array([[bad]]))


def test_a_node_without_workers_is_refused_not_left_out(library: object, rows: np.ndarray) -> None:
    table = kernels.Table([kernels.Part(rows[:9].copy(), 0, 0), kernels.Part(rows[9:].copy(), 9, 5)])
    with pytest.raises(ValueError, match="no worker"):
        kernels.Pool(library, [None, None], [0, 1]).gather(table, some_ids(49_152))


def test_a_pool_is_used_from_two_threads_at_once(library: object, rows: np.ndarray) -> None:
    from concurrent.futures import ThreadPoolExecutor

    pool, table = kernels.Pool(library, [None, None]), kernels.Table([kernels.Part(rows)])
    sets = [some_ids(24 * (100 + number)) for number in range(16)]
    with ThreadPoolExecutor(4) as callers:
        for ids, found in zip(sets, callers.map(lambda ids: pool.gather(table, ids), sets), strict=True):
            assert np.array_equal(found, rows[ids])


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("cut", [ROWS, 12_345])
def test_rows_read_from_disk(library: object, rows: np.ndarray, tmp_path: Path, ring: bool, cut: int) -> None:
    """Records that lie in one block, in two, and at the end of a file whose size is no multiple of a block."""
    rows[:cut].tofile(tmp_path / "a")
    rows[cut:].tofile(tmp_path / "b")
    files = [(tmp_path / "a", 0, cut)] + ([(tmp_path / "b", cut, ROWS - cut)] if cut < ROWS else [])
    disk = kernels.DiskTable(library, files, kernels.Pool(library, [None] * 4), ring=ring)
    for count in (0, 1, 23, 24, 4_800):
        ids = some_ids(count)
        assert np.array_equal(disk.gather(ids), rows[ids])
    every = np.arange(200)[None]
    assert np.array_equal(disk.gather(every), rows[every])
    with pytest.raises(IndexError, match=f"found {ROWS}$"):
        disk.gather(np.array([[0, ROWS]]))


@pytest.mark.parametrize("ring", [True, False])
def test_a_file_that_was_cut_off_is_an_error_not_old_bytes(
    library: object, rows: np.ndarray, tmp_path: Path, ring: bool
) -> None:
    rows.tofile(tmp_path / "a")
    disk = kernels.DiskTable(library, [(tmp_path / "a", 0, ROWS)], kernels.Pool(library, [None] * 2), ring=ring)
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(OSError, match="reading Engram rows"):
        disk.gather(some_ids(4_800))


def test_out_of_the_wrong_shape_and_tables_of_the_wrong_width_are_refused(library: object, rows: np.ndarray) -> None:
    pool, table = kernels.Pool(library), kernels.Table([kernels.Part(rows)])
    with pytest.raises(ValueError, match="out: expected contiguous uint8"):
        pool.gather(table, some_ids(24), np.empty((24, 264), dtype=np.uint8))
    with pytest.raises(ValueError, match="expected contiguous"):
        kernels.Table([kernels.Part(rows[:, :256])])


def test_a_missing_or_foreign_library_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(kernels.Unavailable, match="without a C\\+\\+ compiler"):
        kernels.load(tmp_path / "none.so")
    (tmp_path / "bad.so").write_bytes(b"not a library")
    with pytest.raises(kernels.Unavailable, match="cannot be loaded"):
        kernels.load(tmp_path / "bad.so")


def test_threads_are_dealt_out_to_nodes_and_processes_pin_theirs_elsewhere(tmp_path: Path) -> None:
    assert place_threads(1, [0, 1], 0) == ([0], [None])
    groups, cpus = place_threads(4, [0, 1], 0)
    assert groups == [0, 1, 0, 1] and all(cpu is not None for cpu in cpus)
    (tmp_path / "sys/devices/system/node/node1").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node/node1/cpulist").write_text("20-22,60\n")
    assert node_cpus(1, tmp_path) == {20, 21, 22, 60}
    assert node_cpus(0, tmp_path) == set()
