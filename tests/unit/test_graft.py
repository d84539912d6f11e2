"""The hybrid of the CMP profile from three fetched packs in the real naming, and every broken variant of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds41ctl.adapters import pack, profiles
from ds41ctl.adapters.download import Limits
from ds41ctl.adapters.hub import Hub
from ds41ctl.core.errors import ConfigError, IntegrityError, NotFoundError, UnsupportedError
from ds41ctl.core.facts import HostFacts
from ds41ctl.core.layout import Layout
from ds41ctl.core.profile import Profile
from ds41ctl.core.tensors import contract
from ds41ctl.steps.fetch import Fetch
from ds41ctl.steps.gc import collect
from ds41ctl.steps.graft import GraftPack
from ds41ctl.steps.inspect import describe
from ds41ctl.steps.verify import VerifyPack
from preflight import pack as checks
from preflight.check import Stage, Verdict
from tests.fakes.hub import FakeHub
from tests.fakes.missions import DONOR, EXPERTS_REPO, GRAFTED, SETTINGS, TENSORS, small
from tests.fakes.missions import OFFICIAL as TRUNK
from tests.fakes.packs import flip, layout_for
from tests.fakes.v41 import ENGRAM_LAYERS, EXPERTS, LAYERS, REAL, ROWS, Stored, exl3, files_of, official

Shards = dict[str, Stored]


def silent(text: str, data: dict[str, Any]) -> None:
    """Nobody listens."""


def small_profile(**updates: Any) -> Profile:
    """The CMP profile with the counts of the small packs."""
    return small("cmp170hx-tp4", **updates)


@pytest.fixture(scope="module")
def packs() -> dict[str, Shards]:
    """The three packs of the recipe: the 2.9 bpw one has 2 bits in the layers to be grafted."""
    return {
        TRUNK: official(),
        EXPERTS_REPO: exl3(lambda layer: 2 if layer in GRAFTED else 3, 43),
        DONOR: exl3(lambda layer: 3 if layer in GRAFTED else 4, 44),
    }


def fetched(tmp_path: Path, packs: dict[str, Shards], profile: Profile) -> Layout:
    """All three packs through the real fetch from a loopback Hub."""
    layout = layout_for(profile, tmp_path, model=tmp_path / "data" / "models" / "hybrid")
    revisions = {source.repo: source.revision for source in profile.model.hub_sources}
    with FakeHub() as hub:
        for repo, shards in packs.items():
            settings = None if repo == TRUNK else SETTINGS
            hub.add(repo, files_of(shards, settings), revision=revisions[repo])
        Fetch(layout, hub=lambda: Hub(hub.url, None, False, False, Limits(stall_s=20))).do(silent)
    return layout


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory, packs: dict[str, Shards]) -> Layout:
    """Fetched and grafted once; tests that change something copy it."""
    layout = fetched(tmp_path_factory.mktemp("graft"), packs, small_profile())
    GraftPack(layout).do(silent)
    return layout


@pytest.fixture
def layout(tmp_path: Path, ready: Layout) -> Iterator[Layout]:
    """A copy of the fetched and grafted folders (links stay links)."""
    root = ready.dirs.data.parent
    shutil.copytree(root, tmp_path / "copy", symlinks=True, dirs_exist_ok=True)
    copied = layout_for(ready.profile, tmp_path / "copy", model=tmp_path / "copy" / "data" / "models" / "hybrid")
    Fetch(copied, hub=lambda: pytest.fail("nothing is missing")).do(silent)  # copies have inodes of their own
    yield copied


def test_three_repositories_come_into_three_folders_and_of_the_donor_five_shards_alone(ready: Layout) -> None:
    held = pack.holdings(ready)
    assert held is not None and len(held) == 3
    donor = next(h for h in held if h.folder.name.endswith("3.5bpw"))
    assert sorted(item.name for item in donor.items) == [f"model-000{n}-of-00044.safetensors" for n in range(20, 25)]


def test_the_hybrid_names_the_recipes_tensors_by_links_and_copies_no_weight(ready: Layout) -> None:
    folder = ready.model_dir
    assert GraftPack(ready).check().reached
    index = json.loads((folder / pack.INDEX).read_text())["weight_map"]
    assert len(index) == TENSORS and not any("engram.embed" in name for name in index)
    shards = list(folder.glob("*.safetensors"))
    assert shards and all(path.is_symlink() and not path.readlink().is_absolute() for path in shards)
    assert all(path.exists() for path in shards)
    regular = {path.name for path in folder.iterdir() if path.is_file() and not path.is_symlink()}
    made = {"config.json", "quantization_config.json", pack.INDEX}
    assert regular == made | {name + pack.SIDECAR for name in made} | {pack.GRAFT}
    for name, shard in index.items():
        if ".ffn.experts." in name and name.startswith("layers."):
            layer = int(name.split(".")[1])
            assert shard == f"model-{layer + 2:05}-of-{44 if layer in GRAFTED else 43:05}.safetensors"
        else:
            assert shard.endswith("-of-00048.safetensors")
    assert (folder / "encoding" / "notes.json").resolve().is_file() and (folder / "tokenizer.json").is_symlink()


def test_bits_are_written_from_the_shapes_and_not_from_what_a_config_claimed(ready: Layout) -> None:
    settings = json.loads((ready.model_dir / "config.json").read_text())["quantization_config"]
    assert settings == json.loads((ready.model_dir / "quantization_config.json").read_text())
    assert settings["bits"] == 3 and settings["layer_bits"] == {str(layer): 3 for layer in range(LAYERS)}
    storage = settings["tensor_storage"]
    assert storage["kept"] == {"x": 1} and len(storage) == 1 + len(GRAFTED) * EXPERTS * 3
    entry = storage["layers.18.ffn.experts.0.w1"]
    assert entry["bits_per_weight"] == 3 and len(entry["stored_tensors"]) == 4


def test_the_engram_tables_are_reachable_although_the_index_does_not_name_them(ready: Layout) -> None:
    for layer, rows in zip(ENGRAM_LAYERS, ROWS, strict=True):
        shard, weight, scale = pack.engram_tensors(ready.model_dir, layer)
        assert shard.name == f"model-000{47 if layer == 1 else 48}-of-00048.safetensors"
        assert weight.shape == (rows, 256) and scale.shape == (rows, 8)
    facts = pack.inspect(ready)
    assert len(facts.engram_tensors) == 4 and facts.problems == () and facts.bytes_missing == 0
    assert all(item.verified for item in facts.files)


def test_the_finished_hybrid_passes_verify_and_inspect(ready: Layout) -> None:
    for quick in (True, False):
        step = VerifyPack(ready, quick=quick)
        assert step.judge(lambda finding: None, silent).reached, step.findings
    found = describe(ready.model_dir)
    assert found.codebooks == {"mul1": LAYERS * EXPERTS * 3} and set(found.layer_bits.values()) == {"3"}
    assert found.outside == 4 and found.tensors == TENSORS and found.links == found.shards
    assert ("bits", "layers 0-39: 3 bits a weight") in found.lines() and ("roles", "all complete") in found.lines()
    before = describe(pack.holdings(ready)[1].folder)  # type: ignore[index]
    assert before.layer_bits[18] == "2" and any(item.failed() for item in before.findings), "no trunk in that one"


def test_grafting_again_changes_nothing(layout: Layout) -> None:
    GraftPack(layout).do(silent)  # the copy lies elsewhere: made anew, by links into the copied folders
    before = {path: path.lstat().st_mtime_ns for path in layout.model_dir.rglob("*")}
    assert GraftPack(layout).check().reached
    assert {path: path.lstat().st_mtime_ns for path in layout.model_dir.rglob("*")} == before


def test_the_models_folder_may_move_as_a_whole(layout: Layout, tmp_path: Path) -> None:
    GraftPack(layout).do(silent)
    (layout.dirs.data / "models").rename(tmp_path / "elsewhere")
    assert all(path.exists() for path in (tmp_path / "elsewhere" / "hybrid").glob("*.safetensors"))


LINK = "model-00020-of-00044.safetensors"


def relink(folder: Path, to: str) -> None:
    (folder / LINK).unlink()
    (folder / LINK).symlink_to(to)


def copied(folder: Path, name: str) -> None:
    source = (folder / name).resolve()
    (folder / LINK).unlink()
    shutil.copy(source, folder / LINK)


def other_codebook(shards: Shards) -> None:
    of(shards, EXPERT + ".suh")[EXPERT + ".mcg"] = of(shards, EXPERT + ".mul1").pop(EXPERT + ".mul1")


HARM: dict[str, tuple[Callable[[Path], None], str]] = {
    "a link is gone": (lambda p: (p / LINK).unlink(), "missing"),
    "a link dangles": (lambda p: relink(p, "nowhere"), "dangling link"),
    "a link leads elsewhere": (
        lambda p: relink(p, "model-00021-of-00044.safetensors"),
        "not the link to",
    ),
    "a link became a file": (
        lambda p: copied(p, LINK),
        "not the link to",
    ),
    "the shard behind it changed": (
        lambda p: (p / LINK).resolve().write_bytes(bytes((p / LINK).stat().st_size)) and None,
        "changed since it was verified",
    ),
    "the index was edited": (lambda p: (p / pack.INDEX).write_bytes(b"{}") and None, "bytes, expected"),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARM)
def test_a_hybrid_that_was_touched_is_noticed(layout: Layout, harm: str) -> None:
    GraftPack(layout).do(silent)
    change, text = HARM[harm]
    change(layout.model_dir)
    goal = GraftPack(layout).check()
    assert not goal.reached and text in goal.text
    assert not VerifyPack(layout, quick=True).judge(lambda finding: None, silent).reached


# ---- broken sources: refused, the tensor named

EXPERT = "layers.20.ffn.experts.1.w2"


def of(shards: Shards, name: str) -> Stored:
    """The shard that holds a tensor."""
    return next(tensors for tensors in shards.values() if name in tensors)


def drop(name: str) -> Callable[[Shards], None]:
    return lambda shards: of(shards, name).pop(name) and None


def put(name: str, dtype: str, shape: list[int], beside: str = "") -> Callable[[Shards], None]:
    import math

    from ds41ctl.core.tensors import DTYPE_BITS

    data = bytes(math.prod(shape) * DTYPE_BITS[dtype] // 8)
    return lambda shards: of(shards, beside or name).update({name: (dtype, shape, data)})


def rate(name: str, bits: float) -> Callable[[Shards], None]:
    return put(name, "I16", [8, 8, int(16 * bits)])


def move(name: str, to: str) -> Callable[[Shards], None]:
    return lambda shards: shards[to].update({name: of(shards, name).pop(name)})


WQ = "layers.7.attn.wq_a.weight"
TABLE = "layers.14.engram.embed"
BROKEN: dict[str, tuple[str, Callable[[Shards], None], str]] = {
    "a grafted trellis is missing": (DONOR, drop(EXPERT + ".trellis"), rf"{EXPERT}\.trellis .* is missing"),
    "a grafted suh is missing": (DONOR, drop(EXPERT + ".suh"), rf"{EXPERT}\.suh .* is missing"),
    "one grafted matrix has 2 bits": (DONOR, rate(EXPERT + ".trellis", 2), rf"{EXPERT}\.trellis has 2 bits"),
    "one grafted matrix has 3.5 bits": (DONOR, rate(EXPERT + ".trellis", 3.5), rf"{EXPERT}\.trellis has 3\.5 bits"),
    "a trellis of impossible rate": (DONOR, put(EXPERT + ".trellis", "I16", [8, 8, 50]), "no trellis of 1 to 8 bits"),
    "a trellis of another matrix": (DONOR, put(EXPERT + ".trellis", "I16", [8, 9, 48]), r"w2\.trellis has shape"),
    "a trellis of another dtype": (DONOR, put(EXPERT + ".trellis", "U16", [8, 8, 48]), rf"{EXPERT}\.trellis is U16"),
    "a short suh": (DONOR, put(EXPERT + ".suh", "F16", [64]), rf"{EXPERT}\.suh has shape \[64\]"),
    "a svh in F32": (DONOR, put(EXPERT + ".svh", "F32", [128]), rf"{EXPERT}\.svh is F32"),
    "a matrix of another codebook": (
        DONOR,
        other_codebook,
        f"{EXPERT} has codebook mcg",
    ),
    "a matrix without a marker": (DONOR, drop(EXPERT + ".mul1"), f"{EXPERT} has codebook 3inst"),
    "a matrix with two markers": (DONOR, put(EXPERT + ".mcg", "I32", [], EXPERT + ".suh"), "two codebook markers"),
    "a marker that is no scalar": (DONOR, put(EXPERT + ".mul1", "I32", [2]), rf"{EXPERT}\.mul1 is I32 \[2\]"),
    "a bias nobody reads": (DONOR, put(EXPERT + ".bias", "F16", [128], EXPERT + ".suh"), r"\.bias is in no V4\.1 pack"),
    "an expert of another layer is missing": (
        EXPERTS_REPO,
        drop("layers.3.ffn.experts.0.w1.svh"),
        r"layers\.3\.ffn\.experts\.0\.w1\.svh .* is missing",
    ),
    "a trunk tensor is missing": (TRUNK, drop(WQ), rf"{WQ} \(attention\) is missing"),
    "a trunk tensor has another dtype": (TRUNK, put(WQ, "BF16", [32, 128]), f"{WQ} is BF16, expected F8_E4M3"),
    "a trunk tensor has another shape": (TRUNK, put(WQ, "F8_E4M3", [128, 32]), f"{WQ} has shape"),
    "a tensor nobody knows": (TRUNK, put("layers.7.attn.extra", "BF16", [4], WQ), r"attn\.extra is in no V4\.1"),
    "a drafter tensor is missing": (TRUNK, drop("mtp.0.main_norm.weight"), r"mtp\.0\.main_norm\.weight"),
    "an Engram table is missing": (TRUNK, drop(TABLE + ".weight"), rf"{TABLE}\.weight is in no shard"),
    "an Engram scale in another shard": (
        TRUNK,
        move(TABLE + ".scale", "model-00047-of-00048.safetensors"),
        rf"{TABLE}\.scale is in model-00047",
    ),
    "an Engram table with a row too few": (
        TRUNK,
        put(TABLE + ".weight", "F8_E4M3", [ROWS[1] - 1, 256]),
        rf"{TABLE}\.weight has shape",
    ),
    "an Engram scale of another dtype": (TRUNK, put(TABLE + ".scale", "U8", [ROWS[1], 8]), rf"{TABLE}\.scale is U8"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_source_is_refused_with_the_tensor_named(
    tmp_path: Path, packs: dict[str, Shards], ready: Layout, fault: str
) -> None:
    repo, change, text = BROKEN[fault]
    for folder in (ready.dirs.data / "models").glob("DeepSeek-*"):  # the two good ones are there already
        if folder.name != repo.rpartition("/")[2]:
            shutil.copytree(folder, tmp_path / "data" / "models" / folder.name, copy_function=os.link)
    broken = {name: {shard: dict(tensors) for shard, tensors in shards.items()} for name, shards in packs.items()}
    change(broken[repo])
    layout = fetched(tmp_path, broken, small_profile())
    with pytest.raises(IntegrityError, match=text):
        GraftPack(layout).do(silent)
    assert not layout.model_dir.exists()


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({"tensors": TENSORS + 1}, f"has {TENSORS} tensors, expected {TENSORS + 1}"),
        ({"grafted": 121}, "120 tensors of layers 18-22 are grafted, expected 121"),
        ({"bits": 4}, r"has 3 bits a weight, expected 4"),
    ],
)
def test_counts_that_are_not_the_profiles_are_refused(layout: Layout, counts: dict[str, Any], text: str) -> None:
    other = layout_for(small_profile(**counts), layout.dirs.data.parent, model=layout.model_dir)
    with pytest.raises(IntegrityError, match=text):
        GraftPack(other).do(silent)


def test_a_folder_that_somebody_else_made_is_left_alone(layout: Layout) -> None:
    (layout.model_dir / pack.GRAFT).unlink()
    with pytest.raises(IntegrityError, match="is nothing that pack graft made"):
        GraftPack(layout).do(silent)


def test_without_its_sources_there_is_nothing_to_graft(tmp_path: Path) -> None:
    layout = layout_for(small_profile(), tmp_path)
    assert not GraftPack(layout).check().reached
    with pytest.raises(NotFoundError, match="not fetched yet"):
        GraftPack(layout).do(silent)
    plain = layout_for(profiles.read(profiles.find("cpu-tiny")), tmp_path)
    with pytest.raises(UnsupportedError, match="has no graft"):
        GraftPack(plain).check()


def test_an_unverified_source_is_refused_and_the_fetch_named(layout: Layout) -> None:
    shard = next(iter(layout.dirs.data.rglob("model-00003-of-00043.safetensors")))
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(IntegrityError, match="model-00003-of-00043") as caught:
        GraftPack(layout).do(silent)
    assert "ds41ctl fetch" in caught.value.hints[0]


def test_a_graft_that_was_killed_is_made_again(layout: Layout) -> None:
    new = layout.model_dir.with_name("hybrid.new")
    layout.model_dir.rename(layout.model_dir.with_name("hybrid.old"))
    new.mkdir()
    (new / "half").write_bytes(b"x")
    GraftPack(layout).do(silent)
    assert GraftPack(layout).check().reached
    assert sorted(path.name for path in layout.model_dir.parent.glob("hybrid*")) == ["hybrid", "hybrid.graft.lock"]


def test_the_real_profile_asks_for_what_the_contract_gives() -> None:
    """188,241 tensors and 23,040 grafted ones follow from the tensor inventory of the real checkpoint."""
    graft = profiles.read(profiles.find("cmp170hx-tp4")).model.graft
    assert graft is not None
    assert graft.grafted == len(graft.layers) * 384 * 3 * 4
    assert graft.tensors == len(contract(REAL, routed="exl3")) + 40 * 384 * 3 - 4


# ---- a hybrid that the user built


@pytest.fixture
def mine(tmp_path: Path, ready: Layout) -> Layout:
    """The same hybrid as another tool leaves it: absolute links, nothing of ours; folders that know nothing yet."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for path in ready.model_dir.iterdir():
        if path.name == pack.GRAFT or path.name.endswith(pack.SIDECAR) or path.is_dir():
            continue
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path.resolve())
        else:
            shutil.copyfile(path, folder / path.name)
    return layout_for(ready.profile, tmp_path / "fresh", model=folder)


def own_copy(layout: Layout, shard: str) -> Path:
    """A shard of the user's hybrid as a file of its own instead of a link."""
    path = layout.model_dir / shard
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    return path


def nobody() -> Hub:
    pytest.fail("nothing is to be fetched for a hybrid of one's own")


def test_the_recipes_88_links_are_48_official_shards_and_one_a_layer_of_the_expert_packs(ready: Layout) -> None:
    goal = GraftPack(ready).check()
    assert goal.data["shards"] == 88 == 48 + LAYERS and "88 linked shards" in goal.text


def test_a_hybrid_of_ones_own_is_looked_through_hashed_and_said_to_be_pinned_by_nothing(mine: Layout) -> None:
    before = {path: path.lstat().st_mtime_ns for path in [mine.model_dir, *mine.model_dir.rglob("*")]}
    assert pack.inspect(mine).own and not pack.inspect(mine).recorded_at
    step = Fetch(mine, hub=nobody)
    assert not step.check().reached
    step.do(silent)
    goal = step.check()
    assert goal.reached and "your own, nothing pins them" in goal.text and goal.data["files"] == len(before) - 1
    assert GraftPack(mine).check().reached and collect(mine) == []
    assert {path: path.lstat().st_mtime_ns for path in [mine.model_dir, *mine.model_dir.rglob("*")]} == before
    for quick in (True, False):
        verify = VerifyPack(mine, quick=quick)
        assert verify.judge(lambda finding: None, silent).reached, verify.findings
        assert [item.status for item in verify.findings if item.id == "pack.pins"] == ["warn"]
    shard, weight, _ = pack.engram_tensors(mine.model_dir, ENGRAM_LAYERS[1])
    assert shard.is_file() and weight.shape == (ROWS[1], 256)
    facts = pack.inspect(mine)
    assert facts.recorded_at and facts.bytes_missing == 0 and all(item.verified for item in facts.files)
    assert describe(mine.model_dir).findings[0].status == "ok"


def test_preflight_says_that_nothing_pins_a_hybrid_of_ones_own(mine: Layout) -> None:
    def verdict(stage: Stage) -> Verdict:
        return checks.files(mine.profile, HostFacts.model_construct(pack=pack.inspect(mine)), stage)

    assert verdict("up").status == "skip" and verdict("serve").status == "fail"
    Fetch(mine, hub=nobody).do(silent)
    found = verdict("serve")
    assert found.status == "warn" and "nothing pins" in found.summary and "DS41_MODEL" in found.fix[0]


def test_what_changed_since_it_was_first_hashed_is_named_and_only_the_user_can_say_that_it_is_right(
    mine: Layout,
) -> None:
    Fetch(mine, hub=nobody).do(silent)
    path = own_copy(mine, "model-00003-of-00043.safetensors")
    assert not Fetch(mine, hub=nobody).check().reached
    Fetch(mine, hub=nobody).do(silent)  # another inode, the same bytes: hashed once, and vouched for
    assert Fetch(mine, hub=nobody).check().reached
    flip(path, path.stat().st_size - 1)
    for repair in (False, True):
        with pytest.raises(
            IntegrityError, match=r"model-00003-of-00043\.safetensors: sha256 .* first hashed 20"
        ) as caught:
            Fetch(mine, hub=nobody, repair=repair).do(silent)
        assert "rm " in caught.value.hints[1]
    verify = VerifyPack(mine)
    assert not verify.judge(lambda finding: None, silent).reached
    assert [item.id for item in verify.findings if item.failed()] == ["pack.bytes"]
    (mine.own_pins_dir / pack.OWN_RECORD).unlink()
    Fetch(mine, hub=nobody).do(silent)
    assert Fetch(mine, hub=nobody).check().reached


def without(name: str) -> Callable[[Layout], None]:
    def edit(layout: Layout) -> None:
        path = layout.model_dir / pack.INDEX
        tree = json.loads(path.read_text())
        del tree["weight_map"][name]
        path.write_text(json.dumps(tree))

    return edit


def cut(layout: Layout) -> None:
    path = own_copy(layout, "model-00020-of-00044.safetensors")
    path.write_bytes(path.read_bytes()[:-1])


def weaker(layout: Layout) -> None:
    """Layer 18 from the pack with 2 bits, as before the graft."""
    path, name = layout.model_dir / pack.INDEX, "model-00020-of-00043.safetensors"
    source = next(layout.model_dir.glob("model-00003-of-00043.safetensors")).resolve().with_name(name)
    (layout.model_dir / name).symlink_to(source)
    path.write_text(path.read_text().replace("model-00020-of-00044.safetensors", name))


def dangling(layout: Layout) -> None:
    path = layout.model_dir / "model-00009-of-00048.safetensors"
    path.unlink()
    path.symlink_to("/nowhere/at-all")


BROKEN_OWN: dict[str, tuple[Callable[[Layout], None], str]] = {
    "a tensor the index does not name": (
        without("layers.7.ffn.experts.1.w2.suh"),
        r"layers\.7\.ffn\.experts\.1\.w2\.suh",
    ),
    "an Engram shard that is not there": (
        lambda layout: (layout.model_dir / "model-00048-of-00048.safetensors").unlink(),
        r"model-00048-of-00048\.safetensors is named by the index and missing",
    ),
    "a cut shard": (cut, r"model-00020-of-00044\.safetensors"),
    "bits of before the graft": (
        weaker,
        r"layers\.18\.ffn\.experts\.\d+\.w\d\.trellis has 2 bits a weight, expected 3",
    ),
    "a dangling link": (dangling, r"model-00009-of-00048\.safetensors is named by the index and missing"),
    "no index": (lambda layout: (layout.model_dir / pack.INDEX).unlink(), r"model\.safetensors\.index\.json"),
    "no config": (lambda layout: (layout.model_dir / "config.json").unlink(), r"config\.json is missing"),
}


@pytest.mark.parametrize("variant", BROKEN_OWN)
def test_a_broken_hybrid_of_ones_own_is_refused_with_the_tensor_or_file_named(mine: Layout, variant: str) -> None:
    edit, text = BROKEN_OWN[variant]
    edit(mine)
    with pytest.raises(IntegrityError, match=text):
        Fetch(mine, hub=nobody).do(silent)
    assert pack.own_record(mine) is None


def test_a_damaged_record_of_ones_own_hybrid_is_one_line(mine: Layout) -> None:
    mine.own_pins_dir.mkdir(parents=True)
    (mine.own_pins_dir / pack.OWN_RECORD).write_text('{"files": {}}')
    with pytest.raises(IntegrityError, match=r"record\.json: cannot be read") as caught:
        Fetch(mine, hub=nobody).check()
    assert "\n" not in caught.value.message


def test_an_empty_folder_of_ones_own_is_where_ours_is_built(mine: Layout, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    layout = layout_for(mine.profile, tmp_path / "fresh", model=tmp_path / "empty")
    assert not pack.own_hybrid(layout) and not pack.own_hybrid(layout_for(mine.profile, tmp_path / "fresh"))


def test_a_model_that_is_no_folder_or_holds_no_pack_is_said_before_anything_is_fetched(
    mine: Layout, tmp_path: Path
) -> None:
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "notes").write_text("x")

    def run(name: str) -> None:
        step = Fetch(layout_for(mine.profile, tmp_path / "fresh", model=tmp_path / name), hub=nobody)
        step.check()
        step.do(silent)

    with pytest.raises(NotFoundError, match="holds no pack"):
        run("junk")
    with pytest.raises(ConfigError, match="is a file"):
        run("junk/notes")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("(43|44|39)", "(43|39)", "does not find model-00020-of-00044.safetensors, which holds routed experts"),
        ("(43|44|39)", "(43|44|48)", "finds model-00001-of-00048.safetensors, which holds the trunk's tensors"),
    ],
)
def test_the_engines_own_pattern_finds_the_experts_files_and_no_other(
    ready: Layout, old: str, new: str, words: str
) -> None:
    serve = ready.profile.serve
    argv = tuple(word.replace(old, new) for word in serve.argv)
    assert argv != serve.argv
    profile = ready.profile.model_copy(update={"serve": serve.model_copy(update={"argv": argv})})
    with pytest.raises(IntegrityError) as caught:
        GraftPack(replace(ready, profile=profile)).do(silent)
    assert words in caught.value.message and caught.value.hints
