"""Where a store goes: one decision, that the checks and the build share; memory storage never becomes a disk store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import preflight
from ds41ctl.adapters import mounts, proc, profiles, store, storebuild, storeplace
from ds41ctl.core.errors import ConfigError, DeniedError, NoSpaceError
from ds41ctl.core.facts import HostFacts, StoreFacts
from ds41ctl.core.finding import Status
from ds41ctl.core.layout import Dirs, Layout, layout
from ds41ctl.core.place import Ground, decide, mount_line
from ds41ctl.core.profile import Engram, Profile
from ds41ctl.core.settings import Settings
from tests.facts.replay import changed, disk_changed, machine
from tests.fakes.packs import layout_for, local_profile, write_pack

CMP = profiles.read(profiles.find("cmp170hx-tp4"))
FOLDER = "/opt/engram-ram/DeepSeek-V4.1-Flash-1017-engram"


def quiet(text: str, data: dict[str, object]) -> None:
    """Progress nobody looks at."""


def on(fstype: str, may: bool | None, foreign: str = "", *, own: bool = False) -> Ground:
    return Ground(FOLDER, True, fstype, own, may, foreign)


@pytest.mark.parametrize(
    ("storage", "form", "ground", "way"),
    [
        ("tmpfs", "shards", on("ext4", True), "mount"),
        ("tmpfs", "shards", on("ext4", False), "refused"),
        ("tmpfs", "shards", on("ext4", None), "unknown"),
        ("tmpfs", "shards", on("ext4", True, "model-00047"), "refused"),  # it would be hidden
        ("tmpfs", "shards", on("tmpfs", None), "there"),
        ("tmpfs", "shards", on("tmpfs", None, "model-00047"), "refused"),  # it would be written over
        ("tmpfs", "records", on("tmpfs", None, "notes.txt"), "there"),
        ("tmpfs", "shards", on("hugetlbfs", None), "refused"),
        ("tmpfs", "records", on("hugetlbfs", None), "there"),
        ("tmpfs", "records", on("tmpfs", True, own=True), "mount"),  # ours is given back first
        ("tmpfs", "records", on("tmpfs", False, own=True), "refused"),
        ("hugetlb", "records", on("xfs", True), "mount"),
        ("hugetlb", "records", on("xfs", False), "refused"),
        ("disk", "records", on("ext4", False), "disk"),
        ("disk", "shards", on("ext4", False, "model-00047"), "refused"),
        ("tmpfs", "records", Ground("/s", False, "ext4", False, True), "mount"),
        ("tmpfs", "records", Ground("/s", False, "ext4", False, False), "shm"),
    ],
)
def test_the_way_of_a_store(storage: str, form: str, ground: Ground, way: str) -> None:
    engram = Engram.model_validate({"storage": storage, "format": form})
    assert decide(engram, ground).way == way


@given(
    st.sampled_from(["tmpfs", "hugetlb"]),
    st.sampled_from(["records", "shards"]),
    st.builds(
        Ground,
        st.just("/x"), st.booleans(), st.sampled_from(["ext4", "xfs", "zfs", "overlay", "nfs4", ""]), st.just(False),
        st.sampled_from([True, False, None]), st.sampled_from(["", "a file"]),
    ),
)  # fmt: skip
def test_memory_storage_is_never_put_on_a_disk(storage: str, form: str, ground: Ground) -> None:
    way = decide(Engram.model_validate({"storage": storage, "format": form}), ground).way
    assert way in ("mount", "shm", "refused", "unknown")  # shm: a tmpfs; no "disk", no "there"


def test_the_line_that_prepares_a_folder_is_one_and_its_mount_is_the_users() -> None:
    line = mount_line(CMP.engram, FOLDER, 5, 1000)
    assert line == (
        f"sudo mkdir -p {FOLDER} && sudo mount -t tmpfs -o size=200G,huge=always,uid=1000,mode=0755 tmpfs {FOLDER}"
    )
    odd = CMP.engram.model_copy(update={"size_gib": 0.5})
    assert "size=512M," in mount_line(odd, FOLDER, 5, 0)
    none = CMP.engram.model_copy(update={"size_gib": 0})
    assert "size=1M," in mount_line(none, FOLDER, 5, 0)  # bytes of the files, rounded up
    huge = CMP.engram.model_copy(update={"storage": "hugetlb", "format": "records", "page": "1G"})
    assert "-t hugetlbfs -o pagesize=1G,size=3G," in mount_line(huge, FOLDER, 3 << 30, 0)


# ---- the checks say what the build does


def bare(fstype: str, *, sudo: bool | None, **told: object) -> HostFacts:
    """The recorded machine of the recipe before its store is there."""
    facts = machine("cmp170hx-4x-ready")
    facts = disk_changed(facts, "store", path=FOLDER, mount="/", fstype=fstype, free=1 << 40, total=1 << 41)
    facts = changed(facts, "system", sudo_passwordless=sudo, root=False)
    found = StoreFacts.model_validate({"dir": FOLDER, "bytes_needed": 203_000_000_000, "chosen": True, **told})
    return facts.model_copy(update={"store": found})


def judged(facts: HostFacts, check: str) -> tuple[Status, str]:
    found = next(item for item in preflight.run(CMP, facts, stage="up") if item.id == check)
    return found.status, found.summary


def test_a_machine_that_can_have_the_recipes_tmpfs_is_told_where_and_how_large() -> None:
    facts = bare("ext4", sudo=True)
    assert judged(facts, "host.tmpfs") == (Status.OK, f"a tmpfs of 200 GiB will be mounted at {FOLDER}")
    assert judged(facts, "host.tmpfs-size") == (Status.OK, f"will be mounted at {FOLDER} with 200 GiB")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (bare("ext4", sudo=False), "this user may not mount a tmpfs there"),
        (bare("ext4", sudo=True, foreign="model-00047"), "holds model-00047, which ds41ctl did not put there"),
        (bare("hugetlbfs", sudo=True), "whose files are whole pages"),
        (bare("tmpfs", sudo=True, foreign="x"), "which ds41ctl did not put there"),
    ],
)
def test_one_that_cannot_is_not_told_that_it_will_be_mounted(facts: HostFacts, message: str) -> None:
    status, summary = judged(facts, "host.tmpfs")
    assert status is Status.FAIL and message in summary
    if facts.disk("store").fstype != "tmpfs":  # type: ignore[union-attr]
        status, summary = judged(facts, "host.tmpfs-size")
        assert status is Status.SKIP and "no tmpfs will be mounted" in summary


def test_rights_nobody_could_ask_for_are_unknown() -> None:
    facts = bare("ext4", sudo=None)
    assert judged(facts, "host.tmpfs")[0] is Status.UNKNOWN and judged(facts, "host.tmpfs-size")[0] is Status.UNKNOWN


def chosen(root: Path, *, form: str = "records", **told: object) -> tuple[Layout, Profile]:
    """A layout whose profile names a folder below `root`, which is on a disk."""
    found = write_pack(root / "pack")
    base = local_profile(profiles.read(profiles.find("cpu-tiny")), found)
    named = {"dir": str(root / "deep" / "er"), "format": form, **told}
    base = base.model_copy(update={"engram": base.engram.model_copy(update=named)})
    dirs = Dirs(root / "data", root / "state", root / "cache", root / "run", os.getuid())
    return layout(base, Settings(model=root / "pack"), dirs, may_mount=True), base


@pytest.mark.parametrize("form", ["records", "shards"])
@pytest.mark.parametrize("storage", ["tmpfs", "hugetlb"])
def test_without_the_rights_the_build_ends_before_it_has_touched_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, storage: str
) -> None:
    monkeypatch.setattr(proc, "may_mount", lambda: False)
    it, _ = chosen(tmp_path, form=form, storage=storage)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(DeniedError, match=r"may not mount a (tmpfs|hugetlbfs) there") as failed:
        storebuild.build(it, write_pack(tmp_path / "pack"), quiet)
    assert len(failed.value.hints) == 1 and failed.value.hints[0].endswith(str(it.store_dirs[0]))
    assert int(failed.value.code) == 77
    assert set(tmp_path.rglob("*")) == before
    assert storeplace.planned_commands(it) == ()


def test_a_folder_of_the_users_own_on_a_disk_is_no_store_in_memory_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DS41_ENGRAM_DIR, which once was filled silently."""
    monkeypatch.setattr(proc, "may_mount", lambda: False)
    found = write_pack(tmp_path / "pack")
    it = layout_for(local_profile(profiles.read(profiles.find("cpu-tiny")), found), tmp_path, storage="tmpfs")
    with pytest.raises(DeniedError, match=f"{tmp_path / 'store'} is on "):
        storebuild.build(it, found, quiet)
    assert not (tmp_path / "store").exists()


def test_files_of_somebody_else_are_not_hidden_below_a_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "may_mount", lambda: True)
    it, _ = chosen(tmp_path)
    it.store_dirs[0].mkdir(parents=True)
    (it.store_dirs[0] / "letters").write_text("dear")
    with pytest.raises(ConfigError, match="holds letters, which a tmpfs mounted there would hide"):
        storebuild.build(it, write_pack(tmp_path / "pack"), quiet)
    told = storeplace.look(it)
    assert told.chosen and told.foreign == "letters" and not told.own_mount
    assert (it.store_dirs[0] / "letters").read_text() == "dear"


def test_a_store_that_an_older_version_left_on_the_disk_is_none(tmp_path: Path) -> None:
    found = write_pack(tmp_path / "pack")
    it = layout_for(local_profile(profiles.read(profiles.find("cpu-tiny")), found), tmp_path)
    storebuild.build(it, found, quiet)
    wanted = it.profile.model_copy(update={"engram": it.profile.engram.model_copy(update={"storage": "tmpfs"})})
    assert "it lies on a disk" in store.inspect(Layout(**{**it.__dict__, "profile": wanted})).problem


def test_the_users_own_tmpfs_is_used_as_it_is_and_refused_when_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(f"/dev/shm/ds41ctl-test-{os.getpid()}")
    it, _ = chosen(tmp_path, dir=str(folder), size_gib=200.0)
    try:
        place = storeplace.find(it, storeplace.whole_tables(it), lambda text: None)
        assert place.rows == folder and not place.kind.mount and not mounts.is_mount_point(folder)
        monkeypatch.setattr(mounts, "free_bytes", lambda path: 1000)
        with pytest.raises(NoSpaceError, match="1000 are free"):
            storeplace.find(it, storeplace.whole_tables(it), lambda text: None)
    finally:
        folder.rmdir()


def test_a_size_that_does_not_hold_the_tables_is_refused_before_anything_is_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proc, "may_mount", lambda: True)
    it, _ = chosen(tmp_path, size_gib=0.0001)
    with pytest.raises(NoSpaceError, match=r"engram\.size_gib is 0\.0001, the Engram tables need 116688 bytes"):
        storebuild.build(it, write_pack(tmp_path / "pack"), quiet)
    assert not it.store_dirs[0].parent.exists()


def test_the_plan_shows_folder_and_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "may_mount", lambda: True)
    dirs = Dirs(tmp_path / "data", tmp_path / "state", tmp_path / "cache", tmp_path / "run", 1000)
    engram = CMP.engram.model_copy(update={"dir": str(tmp_path / "engram")})
    it = layout(CMP.model_copy(update={"engram": engram}), Settings(), dirs, may_mount=True)
    assert storeplace.planned_commands(it) == (
        ("sudo", "-n", "mkdir", "-p", str(tmp_path / "engram")),
        ("sudo", "-n", "mount", "-t", "tmpfs", "-o", "size=214748364800,mode=0755,uid=1000,huge=always,noswap",
         "ds41ctl", str(tmp_path / "engram")),
    )  # fmt: skip
    assert store.served(it) == tmp_path / "engram"
