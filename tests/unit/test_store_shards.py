"""A store of shards: what an engine that reads safetensors finds in the folder, and what is never taken for one."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds41ctl.adapters import files, pack, profiles, store, storebuild, storeplace
from ds41ctl.core.engram import Geometry
from ds41ctl.core.errors import AlreadyRunningError, ConfigError, IntegrityError
from ds41ctl.core.layout import Dirs, Layout, layout
from ds41ctl.core.settings import Settings
from ds41ctl.steps import engram
from tests.fakes.packs import flip, layout_for, local_profile, shard_bytes, table, write_pack
from tests.fakes.shardreader import Table

NAMES = ("model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors")
INDEX = "model.safetensors.index.json"


def quiet(text: str, data: dict[str, object]) -> None:
    """Progress nobody looks at."""


def shards(root: Path, found: Geometry, *, storage: str = "tmpfs", folder: Path | None = None) -> Layout:
    """The layout of a store of shards in a folder of the user's, on a memory filesystem."""
    base = local_profile(profiles.read(profiles.find("cpu-tiny")), found)
    base = base.model_copy(update={"engram": base.engram.model_copy(update={"format": "shards"})})
    return layout_for(base, root, storage=storage, engram_dir=folder or root / "store")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[Layout, Geometry]]:
    """A pack, and a folder in memory for its store."""
    found = write_pack(tmp_path / "pack")
    folder = Path(f"/dev/shm/ds41ctl-test-{os.getpid()}-{tmp_path.name}")
    yield shards(tmp_path, found, folder=folder), found
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def built(made: tuple[Layout, Geometry]) -> Layout:
    storebuild.build(*made, quiet)
    return made[0]


def test_the_folder_holds_the_shards_byte_by_byte_an_index_of_their_tables_and_nothing_else(built: Layout) -> None:
    folder = built.store_dirs[0]
    assert sorted(path.name for path in folder.iterdir()) == [*NAMES, INDEX]
    for name in NAMES:
        assert (folder / name).read_bytes() == (built.model_dir / name).read_bytes()
    packed = json.loads((built.model_dir / INDEX).read_text())["weight_map"]
    told = json.loads((folder / INDEX).read_text())["weight_map"]
    assert told == {name: file for name, file in packed.items() if ".engram.embed." in name} and len(told) == 4
    # public rows: a container's user may be anybody
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    assert store.locate(built) == store.own_home(built) and store.served(built) == folder
    assert engram.EngramBuild(built).check().reached


def test_an_umask_does_not_hide_the_files(made: tuple[Layout, Geometry]) -> None:
    before = os.umask(0o077)
    try:
        storebuild.build(*made, quiet)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in made[0].store_dirs[0].iterdir()} == {0o644}


@settings(max_examples=25)
@given(st.randoms(use_true_random=False), st.integers(0, 65), st.booleans(), st.integers(100, 5000))
def test_rows_that_an_independent_reader_finds_are_the_packs_rows(
    tmp_path_factory: pytest.TempPathFactory, chooser: random.Random, padding: int, turned: bool, piece: int
) -> None:
    root = tmp_path_factory.mktemp("pack")
    found = write_pack(root / "pack")
    layer, rows = found.layers[0], found.rows[0]
    tensors = dict(sorted(table(layer, rows).items(), reverse=turned))
    before = {f"layers.{layer}.engram.wkv.weight": ("U8", [padding], bytes(padding))} if padding else {}
    (root / "pack" / NAMES[0]).write_bytes(shard_bytes({**before, **tensors, "last": ("U8", [3], b"abc")}))
    it = shards(root, found, storage="disk")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "READ_BYTES", piece * 264)
        storebuild.build(it, found, quiet)
    weight, scale = (tensors[f"layers.{layer}.engram.embed.{side}"][2] for side in ("weight", "scale"))
    read = Table(store.served(it), layer)
    try:
        for row in (0, rows - 1, *(chooser.randrange(rows) for _ in range(20))):
            assert read.row(row) == weight[row * 256 : row * 256 + 256] + scale[row * 8 : row * 8 + 8]
    finally:
        read.close()


def edit(it: Layout, change: Callable[[dict[str, Any]], object]) -> None:
    path = store.own_home(it) / store.MANIFEST
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def zero(it: Layout) -> None:
    """The table of layer 1 as it would be, had nothing been written into it."""
    shard, weight, scale = pack.engram_tensors(it.model_dir, 1)
    with (it.store_dirs[0] / shard.name).open("r+b") as file:
        for tensor in (weight, scale):
            file.seek(tensor.begin)
            file.write(bytes(tensor.end - tensor.begin))


FAULTS: dict[str, tuple[Callable[[Layout], object], str]] = {
    "a shard gone": (lambda it: (it.store_dirs[0] / NAMES[0]).unlink(), "is missing or has not the"),
    "cut off": (lambda it: os.truncate(it.store_dirs[0] / NAMES[1], 5000), "is missing or has not the"),
    "padded": (lambda it: os.truncate(it.store_dirs[0] / NAMES[1], 4 << 20), "is missing or has not the"),
    "never filled": (zero, "layer 1 holds only zero rows: its table was never filled"),
    "index gone": (lambda it: (it.store_dirs[0] / INDEX).unlink(), f"{INDEX} is missing"),
    "index changed": (lambda it: (it.store_dirs[0] / INDEX).write_text("{}"), f"{INDEX} differs"),
    "another boot": (lambda it: edit(it, lambda t: t.update(boot_id="0")), "built before the last reboot"),
    "records": (lambda it: edit(it, lambda t: t.update(kind="records")), "not a store of format 2"),
    "read from a disk": (lambda it: edit(it, lambda t: t.update(storage="disk")), "it lies on a disk"),
    "shard of the pack changed": (lambda it: (it.model_dir / NAMES[0]).write_bytes(b"x"), "changed since the store"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_and_never_taken_for_a_store(built: Layout, fault: str) -> None:
    damage, message = FAULTS[fault]
    damage(built)
    assert message in store.problem(built, store.locate(built))
    assert store.inspect(built).problem and not engram.EngramBuild(built).check().reached


def test_a_changed_byte_is_found_by_the_full_comparison_wherever_it_is(built: Layout) -> None:
    shard, weight, _ = pack.engram_tensors(built.model_dir, 1)
    for at in (2, weight.begin + 5 * 256 + 17, weight.begin - 1):  # header, row 5, the tensor before
        flip(built.store_dirs[0] / shard.name, at)
        assert f"the store differs from {shard.name}" in engram.verify(built, full=True)[1]
        flip(built.store_dirs[0] / shard.name, at)
    assert engram.verify(built, full=True) == (442, "")


def test_a_shard_that_is_not_the_pinned_one_gives_no_store(
    made: tuple[Layout, Geometry], monkeypatch: pytest.MonkeyPatch
) -> None:
    it, found = made
    items = tuple(
        pack.Expected(name, (it.model_dir / name).stat().st_size, files.file_sha256(it.model_dir / name), "5" * 40)
        for name in NAMES
    )
    monkeypatch.setattr(pack, "expected", lambda layout: items)
    assert store.needed_bytes(it) == sum(item.size for item in items)
    flip(it.model_dir / NAMES[1], 9000)
    with pytest.raises(IntegrityError, match=rf"{NAMES[1]}: sha256 .* read, .* pinned"):
        storebuild.build(it, found, quiet)
    assert not list(it.store_dirs[0].iterdir()) and not store.inspect(it).exists


def test_the_space_asked_for_is_that_of_whole_shards(made: tuple[Layout, Geometry]) -> None:
    it, _ = made
    assert store.needed_bytes(it) == sum((it.model_dir / name).stat().st_size for name in NAMES)
    for name in NAMES:
        (it.model_dir / name).unlink()
    assert store.needed_bytes(it) == 442 * 264  # neither pinned nor there: the rows are a lower bound


def test_files_that_are_somebody_elses_are_neither_written_over_nor_dropped(made: tuple[Layout, Geometry]) -> None:
    """A folder of the user's with the very names: it may be the pack itself."""
    it, found = made
    it.store_dirs[0].mkdir()
    for name in NAMES:
        (it.store_dirs[0] / name).write_bytes(b"mine")
    with pytest.raises(ConfigError, match="which ds41ctl did not put there"):
        storebuild.build(it, found, quiet)
    assert engram.drop(it) == []
    assert [(it.store_dirs[0] / name).read_bytes() for name in NAMES] == [b"mine", b"mine"]


@pytest.mark.parametrize("storage", ["tmpfs", "disk"])
def test_the_packs_own_folder_is_refused_as_the_stores(tmp_path: Path, storage: str) -> None:
    found = write_pack(tmp_path / "pack")
    before = {path.name: path.read_bytes() for path in (tmp_path / "pack").iterdir()}
    with pytest.raises(ConfigError):
        storebuild.build(shards(tmp_path, found, storage=storage, folder=tmp_path / "pack"), found, quiet)
    assert {path.name: path.read_bytes() for path in (tmp_path / "pack").iterdir()} == before


def test_what_was_built_is_dropped_again_and_refused_while_somebody_has_it_open(built: Layout) -> None:
    with (built.store_dirs[0] / NAMES[0]).open("rb"):
        assert store.used_by(store.locate(built)) == [os.getpid()]
        with pytest.raises(AlreadyRunningError, match=f"is used by pid {os.getpid()}"):
            engram.drop(built)
        assert store.inspect(built).problem == ""
    removed = engram.drop(built)
    assert len(removed) == 4 and not list(built.store_dirs[0].iterdir())
    assert engram.drop(built) == []


def test_changing_the_form_replaces_the_store_and_leaves_nothing_of_the_other(built: Layout) -> None:
    """The next build clears what the profile no longer wants; the manifest of the other kind is no store."""
    form = built.profile.engram.model_copy(update={"format": "records"})
    records = Layout(**{**built.__dict__, "profile": built.profile.model_copy(update={"engram": form})})
    assert not engram.EngramBuild(records).check().reached
    engram.EngramBuild(records).do(quiet)
    assert sorted(path.name for path in built.store_dirs[0].iterdir()) == [
        "layer-001.engram", "layer-003.engram", "manifest.json",
    ]  # fmt: skip
    assert not store.inspect(built).exists
    engram.EngramBuild(built).do(quiet)
    assert sorted(path.name for path in built.store_dirs[0].iterdir()) == [*NAMES, INDEX]


def test_a_lost_ledger_does_not_keep_a_folder_of_our_own(tmp_path: Path) -> None:
    found = write_pack(tmp_path / "pack")
    chosen = shards(tmp_path, found, storage="disk")
    dirs = Dirs(tmp_path / "data", tmp_path / "state", tmp_path / "cache", tmp_path / "run", os.getuid())
    it = layout(chosen.profile, Settings(model=tmp_path / "pack"), dirs, may_mount=False)
    storebuild.build(it, found, quiet)
    storeplace.ledger_path(it).unlink()
    storebuild.build(it, found, quiet)
    engram.drop(it)
    assert not list((tmp_path / "data").rglob("model*"))


def test_shards_in_hugepages_are_refused_by_the_profile() -> None:
    text = (profiles.builtin_folder() / "cmp170hx-tp4.toml").read_text()
    with pytest.raises(ConfigError, match=r"engram\.storage: files of a hugetlbfs are whole pages"):
        profiles.parse_profile(text.replace('storage = "tmpfs"', 'storage = "hugetlb"'), "x.toml")
