"""fetch: only verified bytes get a final name; a wrong file is named, kept aside and made again on request."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ds41ctl.adapters import files, mounts, pack, profiles
from ds41ctl.adapters.safetensors import read_header
from ds41ctl.core import packgen
from ds41ctl.core.errors import IntegrityError, NoSpaceError
from ds41ctl.core.layout import Layout
from ds41ctl.steps.fetch import Fetch
from ds41ctl.steps.runner import Goal, Progress
from ds41ctl.steps.verify import VerifyPack
from tests.fakes.packs import layout_for, local_profile, shard_bytes, write_pack

CONTENT = {"a.json": b"{}", "b.safetensors": hashlib.shake_256(b"b").digest(3_000_000)}
silent: Progress = lambda text, data: None  # noqa: E731


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """A profile whose pack is two small pinned files, generated as the real one is."""
    profile = profiles.read(profiles.find("cpu-tiny"))
    files = tuple(packgen.PackFile(n, len(data), hashlib.sha256(data).hexdigest()) for n, data in CONTENT.items())
    recipe = packgen.PackRecipe(tmp_path, "r1", "seed", files, {})
    monkeypatch.setattr(pack, "recipe", lambda profile: recipe)

    def generate(recipe: object, name: str) -> Iterator[bytes]:
        data = CONTENT[name]
        yield data[: len(data) // 2]
        yield data[len(data) // 2 :]

    monkeypatch.setattr(packgen, "generate", generate)
    return layout_for(profile, tmp_path)


@pytest.fixture
def fetched(made: Layout) -> Layout:
    Fetch(made).do(silent)
    return made


def verified(layout: Layout, *, quick: bool = False) -> Goal:
    return VerifyPack(layout, quick=quick).judge(lambda finding: None, silent)


def proven(layout: Layout) -> Goal:
    """What a run of the step says: sidecars that say too little cost a hash, nothing is written."""
    step = Fetch(layout)
    with contextlib.suppress(IntegrityError):
        step.do(silent)
    return step.check()


def test_everything_arrives_with_a_sidecar_that_sha256sum_understands(fetched: Layout) -> None:
    for name, data in CONTENT.items():
        assert (fetched.model_dir / name).read_bytes() == data
        line = (fetched.model_dir / (name + pack.SIDECAR)).read_text().splitlines()[0]
        assert line == f"{hashlib.sha256(data).hexdigest()}  {name}"
    assert Fetch(fetched).check().reached
    assert verified(fetched).reached and verified(fetched, quick=True).reached


def corrupt(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def keep_times(path: Path, change: Callable[[Path], None]) -> None:
    """Change a file and give it its old times back."""
    info = path.stat()
    change(path)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


BIG = "b.safetensors"
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "first byte flipped": (lambda p: corrupt(p, 0), "sha256"),
    "middle byte flipped": (lambda p: corrupt(p, 1_500_000), "sha256"),
    "last byte flipped": (lambda p: corrupt(p, 2_999_999), "sha256"),
    "one byte short": (lambda p: os.truncate(p, 2_999_999), "2999999 bytes, expected 3000000"),
    "one byte long": (lambda p: p.write_bytes(p.read_bytes() + b"x"), "3000001 bytes"),
    "empty": (lambda p: os.truncate(p, 0), "0 bytes"),
    "zeros of the right size": (lambda p: p.write_bytes(bytes(3_000_000)), "sha256"),
    "a sparse hole of the right size": (lambda p: (os.truncate(p, 0), os.truncate(p, 3_000_000)), "sha256"),  # type: ignore[func-returns-value]
    "gone": (lambda p: p.unlink(), "missing"),
    "replaced by a folder": (lambda p: (p.unlink(), p.mkdir()), "not a regular file"),  # type: ignore[func-returns-value]
    "truncated with the old times": (lambda p: keep_times(p, lambda q: os.truncate(q, 9)), "9 bytes"),
    "a link that leaves the folder": (
        lambda p: (p.rename(p.parent.parent / "out"), p.symlink_to(p.parent.parent / "out")),  # type: ignore[func-returns-value]
        "leaves the pack folder",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_without_being_asked_to_verify(fetched: Layout, fault: str) -> None:
    change, message = FAULTS[fault]
    change(fetched.model_dir / BIG)
    assert not Fetch(fetched).check().reached
    assert not verified(fetched, quick=True).reached
    goal = verified(fetched)
    assert not goal.reached and BIG in goal.text and message in goal.text
    if fault != "gone":
        with pytest.raises(IntegrityError, match=re.escape(message)):
            Fetch(fetched).do(silent)


def test_a_byte_flipped_with_old_times_on_the_same_inode_is_found_by_verify(fetched: Layout) -> None:
    def in_place(path: Path) -> None:
        with path.open("r+b") as file:
            file.write(b"\0")

    keep_times(fetched.model_dir / BIG, in_place)
    assert Fetch(fetched).check().reached  # a stat cannot see it
    assert "sha256" in verified(fetched).text
    Fetch(fetched, repair=True).do(silent)
    assert verified(fetched).reached


@pytest.mark.parametrize("sidecar", ["", "nonsense", "{}", "\n\n"])
def test_a_useless_sidecar_costs_one_hash_and_is_replaced(fetched: Layout, sidecar: str) -> None:
    path = fetched.model_dir / (BIG + pack.SIDECAR)
    path.write_text(sidecar)
    assert not Fetch(fetched).check().reached
    assert proven(fetched).reached
    assert path.read_text() != sidecar


def test_a_sidecar_of_another_file_or_revision_is_not_believed(fetched: Layout) -> None:
    expected = {item.name: item for item in pack.expected(fetched)}
    (fetched.model_dir / ("a.json" + pack.SIDECAR)).replace(fetched.model_dir / (BIG + pack.SIDECAR))
    assert "changed since" in pack.sidecar_problem(fetched.model_dir / BIG, expected[BIG])
    pack.write_sidecar(fetched.model_dir / BIG, expected[BIG])
    moved = pack.Expected(BIG, expected[BIG].size, expected[BIG].sha256, "another revision")
    assert "revision" in pack.sidecar_problem(fetched.model_dir / BIG, moved)


def test_touching_a_file_costs_a_hash_not_a_download(fetched: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(fetched.model_dir / BIG)
    monkeypatch.setattr(packgen, "generate", None)
    assert proven(fetched).reached


def test_a_corrupt_file_is_refused_with_the_command_that_repairs_it(fetched: Layout) -> None:
    corrupt(fetched.model_dir / BIG, 7)
    with pytest.raises(IntegrityError, match="sha256") as caught:
        Fetch(fetched).do(silent)
    assert "ds41ctl fetch --repair" in caught.value.hints[0]
    assert (fetched.model_dir / BIG).exists()


def test_repair_keeps_the_bad_file_aside_and_leaves_the_good_one_alone(fetched: Layout) -> None:
    good = (fetched.model_dir / "a.json").stat().st_mtime_ns
    corrupt(fetched.model_dir / BIG, 7)
    Fetch(fetched, repair=True).do(silent)
    assert verified(fetched).reached
    assert (fetched.model_dir / (BIG + ".bad")).exists()
    assert (fetched.model_dir / "a.json").stat().st_mtime_ns == good


def test_wrong_bytes_from_the_source_are_never_published(made: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packgen, "generate", lambda recipe, name: iter([b"\0" * len(CONTENT[name])]))
    with pytest.raises(IntegrityError, match="nothing was published"):
        Fetch(made).do(silent)
    assert not [path for path in made.model_dir.iterdir() if path.name in CONTENT]
    assert not list(made.model_dir.glob("*" + files.PART_SUFFIX))


def test_no_space_is_refused_before_the_first_byte(made: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "free_bytes", lambda path: 100)
    with pytest.raises(NoSpaceError, match=r"needs \d+ bytes .* 100 are free"):
        Fetch(made).do(silent)
    assert [path.name for path in made.model_dir.iterdir()] == [pack.LOCK_FILE]


def test_leftovers_of_a_killed_run_are_removed(made: Layout) -> None:
    made.model_dir.mkdir(parents=True)
    (made.model_dir / (BIG + files.PART_SUFFIX)).write_bytes(b"half")
    Fetch(made).do(silent)
    assert not list(made.model_dir.glob("*" + files.PART_SUFFIX))


# ---- packs that nothing pins


def local(tmp_path: Path, *, engram: bool = True) -> Layout:
    found = write_pack(tmp_path / "pack", engram=engram)
    return layout_for(local_profile(profiles.read(profiles.find("cpu-tiny")), found), tmp_path)


def test_a_local_pack_says_that_its_bytes_are_not_pinned(tmp_path: Path) -> None:
    goal = Fetch(local(tmp_path)).check()
    assert goal.reached and "not pinned" in goal.text


HEADERS: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"1234567",
    "huge header length": b"\xff" * 8 + b"{}",
    "header that is no JSON": (5).to_bytes(8, "little") + b"hello",
    "header that is a list": (2).to_bytes(8, "little") + b"[]",
    "gap between tensors": shard_bytes({"x": ("U8", [1], b"1")}).replace(b"[0, 1]", b"[1, 2]"),
    "one byte short": shard_bytes({"x": ("U8", [4], b"1234")})[:-1],
    "one byte long": shard_bytes({"x": ("U8", [4], b"1234")}) + b"5",
}


@pytest.mark.parametrize("fault", HEADERS)
def test_a_damaged_shard_is_one_line(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(HEADERS[fault])
    with pytest.raises(IntegrityError, match=r"^model\.safetensors: "):
        read_header(path)


def test_tensors_the_index_does_not_name_do_not_count_as_there(tmp_path: Path) -> None:
    layout = local(tmp_path)
    index = layout.model_dir / pack.INDEX
    tree = json.loads(index.read_text())
    assert len(pack.inspect(layout).engram_tensors) == 4
    tree["weight_map"] = {name: file for name, file in tree["weight_map"].items() if "embed" not in name}
    index.write_text(json.dumps(tree))
    assert pack.inspect(layout).engram_tensors == ()


def test_weight_and_scale_in_two_shards_are_refused(tmp_path: Path) -> None:
    layout = local(tmp_path)
    index = layout.model_dir / pack.INDEX
    tree = json.loads(index.read_text())
    tree["weight_map"]["layers.1.engram.embed.scale"] = "model-00003-of-00003.safetensors"
    index.write_text(json.dumps(tree))
    with pytest.raises(IntegrityError, match="expected one shard"):
        pack.engram_tensors(layout.model_dir, 1)


def test_a_shard_the_index_names_and_that_is_gone_is_a_problem(tmp_path: Path) -> None:
    layout = local(tmp_path)
    (layout.model_dir / "model-00003-of-00003.safetensors").unlink()
    assert any("missing" in text for text in pack.inspect(layout).problems)
