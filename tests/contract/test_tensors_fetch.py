"""Single tensors from a Hub: bytes counted by the server's log, every answer that is not the pinned file refused.

The Hub is tests/fakes/hub.py on loopback sockets; no digest of a part of a file is known before it arrived once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ds41ctl.adapters import pack, part, pins, profiles
from ds41ctl.adapters.download import Limits
from ds41ctl.adapters.hub import Hub
from ds41ctl.adapters.safetensors import WORD, read_header
from ds41ctl.core import subset
from ds41ctl.core.errors import ConfigError, Ds41Error, IntegrityError, NetworkError
from ds41ctl.core.layout import Layout
from ds41ctl.core.profile import HubSource
from ds41ctl.steps.fetch import Fetch
from ds41ctl.steps.gc import collect
from ds41ctl.steps.graft import GraftPack
from ds41ctl.steps.verify import VerifyPack
from tests.fakes.hub import REVISION, FakeHub, Fault
from tests.fakes.missions import OFFICIAL, mission_repos, serve, serve_true_sizes, small
from tests.fakes.packs import flip, layout_for, shard_bytes

KIB, MIB = 1 << 10, 1 << 20
LIMITS = Limits(connect_s=2, stall_s=5, attempts=3, backoff_s=0.01, backoff_max_s=0.05)
MIXED, WHOLE, EXPERTS = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))


def tensor(name: str, size: int) -> tuple[str, list[int], bytes]:
    return "U8", [size], hashlib.shake_256(name.encode()).digest(size)


def shards() -> dict[str, bytes]:
    """Of the first shard some tensors are wanted, of the second all, of the third none."""
    mixed = ["layers.0.attn.w", "layers.0.ffn.experts.0.w1", "layers.0.ffn.gate", "layers.0.ffn.experts.1.w1", "norm"]
    sizes = [700 * KIB, 2 * MIB, 5, 3 * MIB, 300 * KIB + 3]
    return {
        MIXED: shard_bytes({name: tensor(name, size) for name, size in zip(mixed, sizes, strict=True)}),
        WHOLE: shard_bytes({"layers.1.engram.embed.weight": tensor("t", 900 * KIB)}),
        EXPERTS: shard_bytes({"layers.2.ffn.experts.0.w1": tensor("e", MIB)}),
        "config.json": b'{"model_type": "x"}',
    }


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as made:
        made.add("owner/pack", shards())
        yield made


def layout_of(root: Path, *leave_out: str, committed: Path | None = None) -> Layout:
    base = profiles.read(profiles.find("cpu-tiny"))
    globs = leave_out or ("layers.*.ffn.experts.*",)
    source = HubSource(repo="owner/pack", revision=REVISION, leave_out=globs)
    model = base.model.model_copy(update={"sources": (source,)})
    made = layout_for(base.model_copy(update={"model": model, "name": "some"}), root)
    return made if committed is None else replace(made, committed_pins=committed)


def fetch(layout: Layout, hub: FakeHub, *, repair: bool = False, xet: bool = False) -> Fetch:
    step = Fetch(layout, hub=lambda: Hub(hub.url, None, False, xet, LIMITS), repair=repair)
    step.do(lambda text, data: None)
    return step


def asked(hub: FakeHub, name: str) -> int:
    """Bytes sent for a file, by both hosts."""
    return sum(entry.sent for entry in hub.requests("cdn", name))


def head_of(data: bytes) -> int:
    return WORD + int.from_bytes(data[:WORD], "little")


def data_of(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    raw = path.read_bytes()
    return {t.name: (t.dtype, t.shape, raw[t.begin : t.end]) for t in read_header(path).values()}


WANTED = ["layers.0.attn.w", "layers.0.ffn.gate", "norm"]
ARRIVED = 700 * KIB + 5 + 300 * KIB + 3


def test_only_the_wanted_tensors_move_with_the_headers_and_a_whole_file_is_the_hubs(
    tmp_path: Path, hub: FakeHub
) -> None:
    layout = layout_of(tmp_path)
    step = fetch(layout, hub)
    folder, theirs = layout.model_dir, shards()
    assert {path.name for path in folder.glob("*.safetensors")} == {MIXED, WHOLE}
    assert list(read_header(folder / MIXED)) == WANTED
    assert {name: data for name, (_, _, data) in data_of(folder / MIXED).items()} == {
        name: tensor(name, shape[0])[2] for name, (_, shape, _) in data_of(folder / MIXED).items()
    }
    assert (folder / WHOLE).read_bytes() == theirs[WHOLE]
    # more than a MiB lies between the three tensors: none of it is read
    assert asked(hub, MIXED) == head_of(theirs[MIXED]) + ARRIVED
    assert asked(hub, WHOLE) == head_of(theirs[WHOLE]) + len(theirs[WHOLE])
    assert asked(hub, EXPERTS) == head_of(theirs[EXPERTS])
    assert step.check().reached and pack.inspect(layout).bytes_missing == 0
    verify = VerifyPack(layout)
    verify.judge(lambda finding: None, lambda text, data: None)
    assert [f.status for f in verify.findings if f.id == "pack.bytes"] == ["ok"]
    assert not [f for f in verify.findings if f.id == "pack.foreign"] and collect(layout) == []
    hub.log.clear()
    again = Fetch(layout, hub=lambda: pytest.fail("nothing is missing"))
    assert again.check().reached and hub.log == []


def test_small_gaps_are_read_through_and_count_as_nothing_of_the_file(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subset, "GAP", 2 * MIB)
    layout, theirs = layout_of(tmp_path), shards()
    fetch(layout, hub)
    assert asked(hub, MIXED) == head_of(theirs[MIXED]) + ARRIVED + 2 * MIB, "the gap of 3 MiB is asked around"
    assert list(read_header(layout.model_dir / MIXED)) == WANTED
    assert len([e for e in hub.requests("cdn", MIXED) if e.sent > 1000 and e.status == 206]) == 2


def test_two_fetches_of_one_pin_give_the_same_bytes_and_another_machine_can_be_held_to_them(
    tmp_path: Path, hub: FakeHub
) -> None:
    first, second = layout_of(tmp_path / "a"), layout_of(tmp_path / "b")
    fetch(first, hub)
    fetch(second, hub)
    assert (first.model_dir / MIXED).read_bytes() == (second.model_dir / MIXED).read_bytes()
    lock = json.loads(first.pins_path.read_text())
    (entry,) = [item for item in lock["subsets"][0]["files"] if item["path"] == MIXED]
    assert entry["sha256"] == hashlib.sha256((first.model_dir / MIXED).read_bytes()).hexdigest()
    # a machine that was given the lock refuses other bytes, and takes the right ones
    third = layout_of(tmp_path / "c", committed=first.pins_path)
    hub.faults.append(Fault("cdn", MIXED, times=99, skip=2, change=lambda data: bytes(len(data))))
    with pytest.raises(IntegrityError, match=f"{MIXED}: sha256 .* is pinned; nothing was published"):
        fetch(third, hub)
    assert not (third.model_dir / MIXED).exists()
    hub.faults.clear()
    hub.log.clear()
    fetch(third, hub)
    assert (third.model_dir / MIXED).read_bytes() == (first.model_dir / MIXED).read_bytes()


def test_a_flipped_bit_is_found_and_repaired_without_another_header(tmp_path: Path, hub: FakeHub) -> None:
    layout = layout_of(tmp_path)
    fetch(layout, hub)
    path = layout.model_dir / MIXED
    before, info = path.read_bytes(), path.stat()
    flip(path, len(before) - 1)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    verify = VerifyPack(layout)
    assert not verify.judge(lambda finding: None, lambda text, data: None).reached
    with pytest.raises(IntegrityError, match=MIXED):
        os.utime(path)
        fetch(layout, hub)
    hub.log.clear()
    fetch(layout, hub, repair=True)
    assert path.read_bytes() == before and asked(hub, MIXED) == ARRIVED
    assert path.with_name(MIXED + pack.QUARANTINE).exists()


def test_a_lost_state_folder_costs_the_headers_and_no_tensor(tmp_path: Path, hub: FakeHub) -> None:
    layout = layout_of(tmp_path)
    fetch(layout, hub)
    shutil.rmtree(layout.dirs.state)
    hub.log.clear()
    step = fetch(layout, hub)
    assert step.check().reached and asked(hub, MIXED) == head_of(shards()[MIXED])
    verify = VerifyPack(layout)
    verify.judge(lambda finding: None, lambda text, data: None)
    assert [f.status for f in verify.findings if f.id == "pack.bytes"] == ["ok"]
    # without sidecar and pins nobody knows the digest of a part of a file: said, and only --repair gets it again
    shutil.rmtree(layout.dirs.state)
    (layout.model_dir / (MIXED + pack.SIDECAR)).unlink()
    with pytest.raises(IntegrityError, match="unknown digest") as caught:
        fetch(layout, hub)
    assert "--repair" in caught.value.hints[0]
    assert fetch(layout, hub, repair=True).check().reached


def test_what_arrived_before_a_reset_is_not_asked_for_again(tmp_path: Path, hub: FakeHub) -> None:
    """Two tensors come whole, the last one in two halves; the header was kept."""
    layout, theirs = layout_of(tmp_path), shards()
    hub.faults.append(Fault("cdn", MIXED, times=99, skip=4, status=503))  # two for the header, then two tensors
    with pytest.raises(NetworkError):
        fetch(layout, hub)
    hub.faults.clear()
    held = next(layout.model_dir.glob(f"{MIXED}.*{part.SUFFIX}"))
    assert pack.inspect(layout).bytes_missing is not None and held.stat().st_size > 700 * KIB
    hub.log.clear()
    assert fetch(layout, hub).check().reached
    assert asked(hub, MIXED) == 300 * KIB + 3
    assert asked(hub, MIXED) < head_of(theirs[MIXED]) + ARRIVED


def test_xet_streams_the_ranges_where_the_hub_has_them(tmp_path: Path, hub: FakeHub) -> None:
    hub.store_in_xet("owner/pack", tmp_path / "store", [MIXED, WHOLE])
    plain, xet = layout_of(tmp_path / "a"), layout_of(tmp_path / "b")
    fetch(plain, hub)
    hub.log.clear()
    step = fetch(xet, hub, xet=True)
    assert asked(hub, MIXED) == head_of(shards()[MIXED]), "the header alone came by plain HTTP"
    assert step.check().data["received"]["xet"] >= ARRIVED
    assert (plain.model_dir / MIXED).read_bytes() == (xet.model_dir / MIXED).read_bytes()


# ---- answers that are not the pinned file's


def wrong_head(change: Callable[[bytes], bytes]) -> Callable[[FakeHub], None]:
    def arrange(hub: FakeHub) -> None:
        data = shards()[MIXED]
        length = head_of(data)
        hub.add("owner/pack", {MIXED: change(data[:length]) + data[length:]})

    return arrange


def fault(**values: object) -> Callable[[FakeHub], None]:
    return lambda hub: hub.faults.append(Fault("cdn", MIXED, times=99, **values))  # type: ignore[arg-type]


def longer(head: bytes) -> bytes:
    return (200 << 20).to_bytes(WORD, "little") + head[WORD:]


def swapped(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    assert len(old) == len(new)
    return lambda head: head.replace(old, new)


FAULTS: dict[str, tuple[Callable[[FakeHub], None], type[Ds41Error], int, str]] = {
    "another ETag midway, ranges sent all the same": (
        fault(skip=3, headers={"ETag": '"other"'}, no_if_range=True),
        IntegrityError, 12, 'changed on localhost.*ETag "other"',
    ),
    "another ETag midway, the whole file sent": (
        fault(skip=3, headers={"ETag": '"other"'}),
        IntegrityError, 12, 'changed on localhost.*ETag "other"',
    ),
    "a server that ignores ranges": (fault(no_ranges=True), NetworkError, 13, "ignores ranges, single tensors"),
    "a server that begins to ignore ranges": (fault(skip=3, no_ranges=True), NetworkError, 13, "ignores ranges"),
    "neither ETag nor size": (
        fault(headers={"Content-Range": "bytes 0-7/*"}), NetworkError, 13, "does not state the file's size",
    ),
    "another size": (
        fault(skip=2, headers={"Content-Range": "bytes 0-7/9"}), Ds41Error, 13, "another range|9 bytes",
    ),
    "a header that is cut each time": (fault(skip=1, cut=10), NetworkError, 13, "3 times|early|broke"),
    "a length that no header may have": (
        wrong_head(longer), IntegrityError, 12, "header length 209715200 is impossible",
    ),
    "a header that is no JSON": (
        wrong_head(swapped(b'{"layers', b'#"layers')), IntegrityError, 12, "header cannot be read",
    ),
    "offsets out of the file": (
        wrong_head(swapped(b"2813957, 5959685", b"2813957, 9959685")),
        IntegrityError, 12, "tensor norm starts at 5959685, expected 9959685",
    ),
    "a login page": (fault(html=True), NetworkError, 13, "web page"),
    "another digest at the Hub": (
        lambda hub: hub.faults.append(Fault("resolve", MIXED, times=99, headers={"X-Linked-Etag": '"f00"'})),
        IntegrityError, 12, "digest f00",
    ),
    "another commit at the Hub": (
        lambda hub: hub.faults.append(Fault("resolve", MIXED, times=99, headers={"X-Repo-Commit": "9" * 40})),
        IntegrityError, 12, "commit 999999999999",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_bound_to_the_pin_is_one_line_and_no_file(tmp_path: Path, hub: FakeHub, name: str) -> None:
    arrange, kind, code, text = FAULTS[name]
    arrange(hub)
    layout = layout_of(tmp_path)
    with pytest.raises(kind, match=text) as caught:
        fetch(layout, hub)
    assert int(caught.value.code) == code and "\n" not in caught.value.message
    assert not (layout.model_dir / MIXED).exists()
    hub.faults.clear()
    hub.add("owner/pack", shards())
    if not name.startswith(("a length", "a header that is no", "offsets")):  # those were pinned so
        assert fetch(layout, hub).check().reached
        assert list(read_header(layout.model_dir / MIXED)) == WANTED


def test_bytes_of_before_a_changed_etag_are_thrown_away(tmp_path: Path, hub: FakeHub) -> None:
    """Which version they were of cannot be told: the file is begun anew, header and all."""
    layout = layout_of(tmp_path)
    hub.faults.append(Fault("cdn", MIXED, times=99, skip=3, headers={"ETag": '"other"'}, no_if_range=True))
    with pytest.raises(IntegrityError) as caught:
        fetch(layout, hub)
    assert "begun anew" in caught.value.hints[0]
    assert not list(layout.model_dir.glob(f"{MIXED}.*"))
    hub.faults.clear()
    hub.log.clear()
    fetch(layout, hub)
    assert asked(hub, MIXED) == head_of(shards()[MIXED]) + ARRIVED


def test_a_header_that_differs_from_the_committed_lock_is_refused(tmp_path: Path, hub: FakeHub) -> None:
    first = layout_of(tmp_path / "a")
    fetch(first, hub)
    tree = json.loads(first.pins_path.read_text())
    for item in tree["subsets"][0]["files"]:
        item["head_sha256"] = "0" * 64
    lock = tmp_path / "some.lock.json"
    lock.write_text(json.dumps(tree))
    with pytest.raises(IntegrityError, match="its header is not the one that was pinned"):
        fetch(layout_of(tmp_path / "b", committed=lock), hub)


def test_globs_that_leave_nothing_out_are_said(tmp_path: Path, hub: FakeHub) -> None:
    with pytest.raises(ConfigError, match=r"leave_out \['layer\.\*'\] leaves no tensor of owner/pack out"):
        fetch(layout_of(tmp_path, "layer.*"), hub)


# ---- the hybrid


@pytest.mark.timeout(600)
def test_the_hybrid_of_partial_shards_is_the_one_of_whole_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weight_map and the same bytes of every tensor; of the official repository nothing else moves."""
    monkeypatch.setattr(subset, "GAP", 0)
    partial = small("cmp170hx-tp4")
    sources = tuple(s.model_copy(update={"leave_out": ()}) for s in partial.model.hub_sources)
    whole = partial.model_copy(update={"model": partial.model.model_copy(update={"sources": sources})})
    built = {}
    with FakeHub() as hub:
        serve(hub, partial)
        for name, profile in (("partial", partial), ("whole", whole)):
            layout = layout_for(profile, tmp_path / name, model=tmp_path / name / "data" / "models" / "hybrid")
            hub.log.clear()
            fetch(layout, hub)
            GraftPack(layout).do(lambda text, data: None)
            assert GraftPack(layout).check().data["shards"] == 88
            assert VerifyPack(layout).judge(lambda finding: None, lambda text, data: None).reached
            built[name] = (layout, sum(entry.sent for entry in hub.requests("cdn", OFFICIAL)))
    theirs = mission_repos(partial)[OFFICIAL]
    (ours, moved), (other, all_of_it) = built["partial"], built["whole"]
    routed = tensors = heads = 0
    for file, raw in theirs.items():
        if not file.endswith(".safetensors"):
            continue
        header = json.loads(raw[WORD : head_of(raw)])
        heads += head_of(raw)
        for tensor_name, entry in header.items():
            size = entry["data_offsets"][1] - entry["data_offsets"][0]
            if tensor_name.startswith("layers.") and ".ffn.experts." in tensor_name:
                routed += size
            else:
                tensors += size
    others = [raw for file, raw in theirs.items() if not file.endswith(".safetensors")]
    small_files = sum(len(raw) for raw in others if len(raw) >= 1000)  # smaller ones are no LFS files
    fully = sum(head_of(raw) for file, raw in theirs.items() if file in _without_experts(theirs))
    assert moved == tensors + heads + fully + small_files
    assert all_of_it == tensors + routed + heads + small_files and routed > 0
    index = [json.loads((made.model_dir / pack.INDEX).read_text()) for made in (ours, other)]
    assert index[0] == index[1]
    for file in set(index[0]["weight_map"].values()):
        first, second = data_of(ours.model_dir / file), data_of(other.model_dir / file)
        assert all(first[tensor_name] == second[tensor_name] for tensor_name in first)
    names = {n for n, f in index[0]["weight_map"].items() if f.endswith("-of-00048.safetensors")}
    here = {n for f in set(index[0]["weight_map"].values()) for n in read_header(ours.model_dir / f)}
    assert names <= here
    assert pack.graft_manifest(ours.model_dir)["id"] != pack.graft_manifest(other.model_dir)["id"]


def _without_experts(theirs: dict[str, bytes]) -> set[str]:
    """Shards that are fetched whole: their header is read once to know it, and comes again with the file."""
    return {
        file
        for file, raw in theirs.items()
        if file.endswith(".safetensors")
        and not any(n.startswith("layers.") and ".ffn.experts." in n for n in json.loads(raw[WORD : head_of(raw)]))
    }


def test_the_v100_pack_of_two_repositories_is_whole(tmp_path: Path) -> None:
    profile = small("v100-pp2tp4")
    layout = layout_for(profile, tmp_path)
    with FakeHub() as hub:
        serve(hub, profile)
        fetch(layout, hub)
    verify = VerifyPack(layout)
    assert verify.judge(lambda finding: None, lambda text, data: None).reached, verify.findings


@pytest.mark.timeout(600)
def test_at_true_sizes_the_cmp_profile_takes_428_gib_and_the_headers_alone_say_so(tmp_path: Path) -> None:
    """748 GB on the Hub (holes), the plan of what a fetch would bring; what moved for it are lists and headers."""
    from ds41ctl.adapters import packsize, tensorfile

    profile = profiles.read(profiles.find("cmp170hx-tp4"))
    layout = layout_for(profile, tmp_path, model=tmp_path / "data" / "models" / "hybrid")
    with FakeHub() as fake:
        serve_true_sizes(fake, profile, tmp_path / "remote")
        on_hub = sum(item.size for files in fake.repos.values() for item in files.values())
        hub = Hub(fake.url, None, False, False, LIMITS)
        pins.ensure(layout, hub)
        tensorfile.ensure(layout, hub, lambda text: None)
        moved = sum(entry.sent for entry in fake.requests("cdn") + fake.requests("resolve"))
    assert on_hub > 730e9 and moved < 32 * MIB
    found = {size.name: size for size in packsize.sources(layout)}
    total = sum(size.total or 0 for size in found.values())
    assert all(size.pinned and size.there == 0 for size in found.values())
    assert total <= 428 * 2**30 * 1.05
    stated = next(s.size_bytes for s in profile.model.hub_sources if s.repo == OFFICIAL)
    assert abs((found[OFFICIAL].total or 0) - stated) < 0.001 * stated
    held = next(h for h in pack.holdings(layout) or () if h.folder.name == "DeepSeek-V4.1-Flash-1017")
    shards_there = [item for item in held.items if item.name.endswith(".safetensors")]
    assert len(shards_there) == 48
    assert [item.name for item in shards_there if item.partial is None and item.size > 100e9] == [
        "model-00047-of-00048.safetensors", "model-00048-of-00048.safetensors",
    ]  # fmt: skip
