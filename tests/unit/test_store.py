"""The Engram store: records are the shards' rows, and a store that is not proven is named, whatever is wrong."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds41ctl.adapters import files, kernels, mounts, pack, profiles, store, storebuild
from ds41ctl.core.engram import RECORD_BYTES, Geometry, geometry, is_prime, sub_tables
from ds41ctl.core.errors import AlreadyRunningError, IntegrityError, NoSpaceError, NotFoundError
from ds41ctl.core.layout import Layout
from ds41ctl.steps import engram
from tests.fakes.packs import flip, layout_for, local_profile, shard_bytes, table, write_pack


def quiet(text: str, data: dict[str, object]) -> None:
    """Progress nobody looks at."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the compiled loops: compiling them takes longer than any test here."""
    cache = tmp_path_factory.mktemp("cache")
    kernels.loops(cache)
    return cache


@pytest.fixture
def made(tmp_path: Path, compiled: Path) -> tuple[Layout, Geometry]:
    """A pack and a layout for it; the store is not built yet."""
    found = write_pack(tmp_path / "pack")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(compiled / "kernels")
    return layout_for(local_profile(profiles.read(profiles.find("cpu-tiny")), found), tmp_path), found


@pytest.fixture
def built(made: tuple[Layout, Geometry]) -> Layout:
    """The same with a built store."""
    storebuild.build(*made, lambda text, data: None)
    return made[0]


def row(layout: Layout, layer: int, index: int) -> bytes:
    """The row's 264 bytes as the shard has them."""
    shard, weight, scale = pack.engram_tensors(layout.model_dir, layer)
    data = shard.read_bytes()
    return (
        data[weight.begin + index * 256 : weight.begin + index * 256 + 256]
        + data[scale.begin + index * 8 : scale.begin + index * 8 + 8]
    )


def test_every_record_is_its_row_of_the_shard(built: Layout) -> None:
    for tables in built.profile.model.engram:
        records = (built.store_dirs[0] / store.record_file(tables.layer)).read_bytes()
        assert len(records) >= tables.rows * RECORD_BYTES
        for index in range(tables.rows):
            assert records[index * RECORD_BYTES : (index + 1) * RECORD_BYTES] == row(built, tables.layer, index)
    assert store.problem(built, built.store_dirs[0]) == ""
    assert engram.verify(built, full=True) == (sum(t.rows for t in built.profile.model.engram), "")


@pytest.fixture(params=["compiled", "plain Python"])
def loops(request: pytest.FixtureRequest, compiled: Path) -> kernels.Loops:
    """Both ways to lay rows out."""
    if request.param == "plain Python":
        return kernels.Loops(None, "asked for")
    found = kernels.loops(compiled)
    if found.note:
        pytest.skip(found.note)
    return found


@pytest.mark.parametrize("rows", [0, 1, 23, 24, 1000])
@pytest.mark.parametrize("at", [0, 264, 2640])
def test_laying_rows_out_places_every_byte_and_comparing_finds_each_changed_one(
    loops: kernels.Loops, rows: int, at: int
) -> None:
    weights, scales = hashlib.shake_256(b"w").digest(rows * 256), hashlib.shake_256(b"s").digest(rows * 8)
    with mmap.mmap(-1, at + max(1, rows) * 264) as records:
        loops.scatter(records, at, memoryview(bytearray(weights)), 256)
        loops.scatter(records, at + 256, memoryview(bytearray(scales)), 8)
        expected = b"".join(weights[i * 256 : i * 256 + 256] + scales[i * 8 : i * 8 + 8] for i in range(rows))
        assert records[at : at + rows * 264] == expected
        assert records[:at] == bytes(at)
        assert loops.differs(records, at, memoryview(bytearray(weights)), 256) == -1
        assert loops.differs(records, at + 256, memoryview(bytearray(scales)), 8) == -1
        for row in {0, rows // 2, rows - 1} if rows else ():
            for byte, source, width, offset in ((255, weights, 256, 0), (256, scales, 8, 256), (263, scales, 8, 256)):
                records[at + row * 264 + byte] ^= 1
                assert loops.differs(records, at + offset, memoryview(bytearray(source)), width) == row
                records[at + row * 264 + byte] ^= 1
        with pytest.raises(ValueError, match="beyond the end"):
            loops.scatter(records, at + 264, memoryview(bytearray((rows + 1) * 256)), 256)


def test_a_chunk_boundary_inside_the_table_changes_nothing(
    made: tuple[Layout, Geometry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "READ_BYTES", 7 * 256)
    storebuild.build(*made, lambda text, data: None)
    assert engram.verify(made[0], full=True)[1] == ""


def edit(layout: Layout, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    """Change the manifest."""
    path = layout.store_dirs[0] / store.MANIFEST
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def first_file(layout: Layout) -> Path:
    return layout.store_dirs[0] / store.record_file(layout.profile.model.engram[0].layer)


FAULTS: dict[str, tuple[Callable[[Layout], None], str]] = {
    "no manifest": (lambda it: (it.store_dirs[0] / store.MANIFEST).unlink(), "no Engram store"),
    "empty manifest": (lambda it: (it.store_dirs[0] / store.MANIFEST).write_text(""), "cannot be read"),
    "manifest of another format": (lambda it: edit(it, lambda t: t.update(format=1)), "not a store of format 2"),
    "manifest without layers": (lambda it: edit(it, lambda t: t.pop("layers")), "manifest is damaged"),
    "another boot": (
        lambda it: edit(it, lambda t: t.update(memory_backed=True, boot_id="0")),
        "built before the last reboot",
    ),
    "store of another tensor parallel size": (
        lambda it: edit(it, lambda t: t.update(tensor_parallel=8)),
        "built for tensor parallel 8",
    ),
    "rows of another split": (
        lambda it: edit(it, lambda t: t["layers"][0]["parts"][0].update(first_row=1)),
        "layer 1 goes on at row 1, expected 0: built for another split",
    ),
    "rows that end early": (
        lambda it: edit(it, lambda t: t["layers"][0]["parts"][0].update(rows=100)),
        "layer 1 holds rows 0 to 99 of 184: built for another split",
    ),
    "no canaries": (lambda it: edit(it, lambda t: t["layers"][0].update(canaries=[])), "has no canary records"),
    "records somewhere else": (
        lambda it: edit(it, lambda t: t.update(data_dir="/dev/shm")),
        "its records are in /dev/shm, not in",
    ),
    "emptied by a logout": (
        lambda it: [path.unlink() for path in it.store_dirs[0].glob("layer-*")],
        "missing or shorter",
    ),
    "a layer missing": (lambda it: edit(it, lambda t: t["layers"].pop()), "layer 3 is missing"),
    "wrong rows": (lambda it: edit(it, lambda t: t["layers"][0].update(rows=1)), "layer 1 has 1 rows"),
    "truncated": (lambda it: os.truncate(first_file(it), 1000), "shorter than"),
    "file gone": (lambda it: first_file(it).unlink(), "missing or shorter"),
    "first record changed": (lambda it: flip(first_file(it), 0), "layer 1: record 0 differs"),
    "zeroed": (lambda it: first_file(it).write_bytes(bytes(first_file(it).stat().st_size)), "holds only zero rows"),
    "shard of another size": (
        lambda it: (it.model_dir / "model-00002-of-00003.safetensors").write_bytes(b"x"),
        "changed since the store was built",
    ),
    "shard replaced": (
        lambda it: (it.model_dir / "model-00002-of-00003.safetensors.sha256-ok").write_text("0" * 64 + "  x\n"),
        "was replaced since the store was built",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_store_is_named_and_never_taken_for_valid(built: Layout, fault: str) -> None:
    damage, message = FAULTS[fault]
    damage(built)
    assert message in store.problem(built, built.store_dirs[0])
    facts = store.inspect(built)
    assert facts.problem or not facts.exists


def test_a_changed_byte_that_no_canary_covers_is_found_by_the_full_comparison(built: Layout) -> None:
    flip(first_file(built), 5 * RECORD_BYTES + 17)  # row 5 is neither first nor last of a sub-table
    assert store.problem(built, built.store_dirs[0]) == ""
    rows, difference = engram.verify(built, full=True)
    assert "layer 1, row 5: the store differs" in difference and rows == 0


def test_the_second_half_repeating_the_first_is_found_by_the_sample(built: Layout) -> None:
    path = first_file(built)
    half = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(half + half)
    assert store.problem(built, built.store_dirs[0]) != ""


def test_a_killed_build_leaves_no_valid_store_and_the_next_one_completes(made: tuple[Layout, Geometry]) -> None:
    layout, found = made

    def die(text: str, data: dict[str, object]) -> None:
        if text.startswith("layer 3"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        storebuild.build(layout, found, die)
    assert not store.inspect(layout).exists
    storebuild.build(layout, found, lambda text, data: None)
    assert engram.verify(layout, full=True)[1] == ""


def test_rebuilding_over_a_valid_store_first_makes_it_invalid(built: Layout) -> None:
    found = geometry(json.loads((built.model_dir / "config.json").read_text()))

    def die(text: str, data: dict[str, object]) -> None:
        if data:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        storebuild.build(built, found, die)
    assert store.problem(built, built.store_dirs[0]) != ""


def test_no_room_is_refused_before_the_first_byte(
    made: tuple[Layout, Geometry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "free_bytes", lambda path: 1000)
    with pytest.raises(NoSpaceError, match=r"needs \d+ bytes .* 1000 are free"):
        storebuild.build(*made, lambda text, data: None)
    assert not list(made[0].store_dirs[0].glob("layer-*"))


def test_a_pack_without_the_tables_cannot_be_built_and_says_what_is_missing(tmp_path: Path) -> None:
    found = write_pack(tmp_path / "pack", engram=False)
    layout = layout_for(local_profile(profiles.read(profiles.find("cpu-tiny")), found), tmp_path)
    with pytest.raises(IntegrityError, match=r"does not name layers\.1\.engram\.embed\.weight"):
        storebuild.build(layout, found, lambda text, data: None)


def retype(layout: Layout, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    """Change the header of the second shard, data untouched."""
    path = layout.model_dir / "model-00002-of-00003.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + raw[8 + length :])


def reindex(layout: Layout, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    """Change the index."""
    path = layout.model_dir / "model.safetensors.index.json"
    tree = json.loads(path.read_text())
    change(tree["weight_map"])
    path.write_text(json.dumps(tree))


WEIGHT, SCALE = "layers.1.engram.embed.weight", "layers.1.engram.embed.scale"
SOURCES: dict[str, tuple[Callable[[Layout], object], str]] = {
    "table missing from the index": (lambda it: reindex(it, lambda m: m.pop(WEIGHT)), f"does not name {WEIGHT}"),
    "weight and scale in different shards": (
        lambda it: reindex(it, lambda m: m.update({SCALE: "model-00003-of-00003.safetensors"})),
        "expected one shard",
    ),
    "wrong scale dtype": (
        lambda it: retype(it, lambda h: h[SCALE].update(dtype="U8")),
        f"{SCALE} is U8 [184, 8], expected F8_E8M0 [184, 8]",
    ),
    "wrong weight dtype": (lambda it: retype(it, lambda h: h[WEIGHT].update(dtype="I8")), f"{WEIGHT} is I8"),
    "rows off by one": (
        lambda it: retype(it, lambda h: h[WEIGHT].update(shape=[183, 256])),
        f"tensor {WEIGHT} has 47104 bytes, F8_E4M3 [183, 256] takes 46848",
    ),
    "shape and bytes disagree": (
        lambda it: retype(
            it,
            lambda h: (
                h[WEIGHT].update(data_offsets=[h[WEIGHT]["data_offsets"][0], h[WEIGHT]["data_offsets"][1] - 8]),
                h[SCALE].update(data_offsets=[h[SCALE]["data_offsets"][0] - 8, h[SCALE]["data_offsets"][1]]),
            ),
        ),
        "takes 47104",
    ),
}


@pytest.mark.parametrize("fault", SOURCES)
def test_each_fault_of_the_pack_is_refused_with_its_own_line_before_anything_is_made(
    made: tuple[Layout, Geometry], fault: str
) -> None:
    damage, message = SOURCES[fault]
    damage(made[0])
    with pytest.raises(IntegrityError) as caught:
        storebuild.build(*made, quiet)
    assert message in caught.value.message
    assert not made[0].store_dirs[0].exists() or not list(made[0].store_dirs[0].iterdir())


def test_a_sub_table_of_zero_rows_is_refused_by_the_build(made: tuple[Layout, Geometry]) -> None:
    layout, found = made
    shard, weight, _ = pack.engram_tensors(layout.model_dir, 3)
    first, last = found.boundaries(1)[2]
    with shard.open("r+b") as file:
        file.seek(weight.begin + first * 256)
        file.write(bytes((last + 1 - first) * 256))
    with pytest.raises(IntegrityError, match="of sub-table 2 are all zero"):
        storebuild.build(layout, found, quiet)
    assert not list(layout.store_dirs[0].iterdir())


@pytest.mark.parametrize("first", ["weight", "scale"])
@pytest.mark.parametrize("padding", [0, 1, 7, 64])
def test_tensor_order_and_unaligned_offsets_do_not_matter(
    made: tuple[Layout, Geometry], first: str, padding: int
) -> None:
    layout, found = made
    tensors = table(1, 184)
    chosen = dict(sorted(tensors.items(), key=lambda item: first not in item[0]))
    path = layout.model_dir / "model-00002-of-00003.safetensors"
    before = {"layers.1.engram.q_weight": ("U8", [padding], bytes(padding))} if padding else {}
    path.write_bytes(shard_bytes({**before, **chosen, "last": ("U8", [3], b"abc")}))
    storebuild.build(layout, found, quiet)
    assert engram.verify(layout, full=True) == (442, "")
    records = first_file(layout).read_bytes()
    weight, scale = tensors[WEIGHT][2], tensors[SCALE][2]
    for index in (0, 1, 91, 183):
        expected = weight[index * 256 : index * 256 + 256] + scale[index * 8 : index * 8 + 8]
        assert records[index * 264 : index * 264 + 264] == expected


PINNED = "5" * 40


def pin(layout: Layout, monkeypatch: pytest.MonkeyPatch, revision: str = PINNED) -> None:
    """Pin the shards as they are now."""
    items = tuple(
        pack.Expected(path.name, path.stat().st_size, files.file_sha256(path), revision)
        for path in sorted(layout.model_dir.glob("*.safetensors"))
    )
    monkeypatch.setattr(pack, "expected", lambda profile: items)


def test_a_shard_that_is_not_the_pinned_one_gives_no_store(
    made: tuple[Layout, Geometry], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, found = made
    pin(layout, monkeypatch)
    flip(layout.model_dir / "model-00003-of-00003.safetensors", 9000)
    with pytest.raises(IntegrityError, match=r"model-00003-of-00003\.safetensors: sha256 .* read, .* pinned"):
        storebuild.build(layout, found, quiet)
    assert not list(layout.store_dirs[0].iterdir())


def test_a_store_of_another_revision_or_of_other_bytes_is_named(
    made: tuple[Layout, Geometry], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, found = made
    pin(layout, monkeypatch)
    storebuild.build(layout, found, quiet)
    folder = layout.store_dirs[0]
    assert store.problem(layout, folder) == ""
    pin(layout, monkeypatch, "6" * 40)
    assert store.problem(layout, folder) == "built from revision 555555555555, the profile pins 666666666666"
    flip(layout.model_dir / "model-00002-of-00003.safetensors", 9000)
    pin(layout, monkeypatch)
    assert "built from another model-00002-of-00003.safetensors than the profile pins" in store.problem(layout, folder)


def test_the_full_comparison_notices_that_the_shard_itself_is_another_one(built: Layout) -> None:
    shard, weight, _ = pack.engram_tensors(built.model_dir, 3)
    flip(shard, weight.begin - 3)  # no row: in the tensor before
    rows, difference = engram.verify(built, full=True)
    assert "is not the file that the store was built from (sha256)" in difference and rows == 184


def test_a_config_whose_rows_are_not_the_sum_of_the_primes_is_refused() -> None:
    text = {
        "engram_layer_ids": [1], "engram_vocab_size": 40, "engram_max_ngram_size": 3, "engram_n_heads": 2,
        "engram_num_embeddings": [185],
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"\(185,\) differs from the sums of the hash primes \(184,\)"):
        geometry(text)


def test_the_step_builds_once_then_says_already_and_rebuilds_what_is_stale(made: tuple[Layout, Geometry]) -> None:
    step = engram.EngramBuild(made[0])
    assert not step.check().reached
    step.do(lambda text, data: None)
    assert step.check().reached
    flip(first_file(made[0]), 0)
    assert "record 0 differs" in step.check().text
    step.do(lambda text, data: None)
    assert step.check().reached


def test_drop_removes_the_store_and_is_refused_while_somebody_maps_it(built: Layout) -> None:
    with first_file(built).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert store.mapped_by(built.store_dirs[0]) == [os.getpid()]
        assert store.file_users(built.store_dirs[0]) == {"layer-001.engram": {os.getpid()}, "layer-003.engram": set()}
        with pytest.raises(AlreadyRunningError, match=f"is mapped by pid {os.getpid()}"):
            engram.drop(built)
        with pytest.raises(AlreadyRunningError, match="is mapped by"):
            storebuild.build(built, geometry(json.loads((built.model_dir / "config.json").read_text())), quiet)
        replaced = first_file(built).with_suffix(".new")
        replaced.write_bytes(first_file(built).read_bytes())
        replaced.rename(first_file(built))
        assert store.mapped_by(built.store_dirs[0]) == []  # a replaced file is another store
    assert engram.drop(built)
    assert engram.drop(built) == []
    with pytest.raises(NotFoundError):
        engram.verify(built, full=False)


@given(st.integers(0, 3000))
def test_primes_are_primes(number: int) -> None:
    assert is_prime(number) == (number > 1 and all(number % d for d in range(2, number)))


@given(st.integers(1, 3), st.integers(2, 5000), st.integers(2, 5), st.integers(1, 8))
def test_no_two_sub_tables_share_a_prime(layers: int, vocab: int, ngram: int, heads: int) -> None:
    rows = [size for table in sub_tables(layers, vocab, ngram, heads) for size in table]
    assert len(set(rows)) == len(rows) == layers * (ngram - 1) * heads
    assert all(size >= vocab and is_prime(size) for size in rows)
