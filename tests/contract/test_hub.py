"""Fetching from a Hub: every fault of files, servers and networks ends in the pinned bytes or in one typed error.

The Hub is tests/fakes/hub.py on loopback sockets; the last tests let the real huggingface_hub client loose on it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds41ctl.adapters import files, mounts, pack, part, profiles, transfer
from ds41ctl.adapters.download import Limits, retry_after
from ds41ctl.adapters.hub import HUB, Hub
from ds41ctl.core.errors import (
    ConfigError,
    DeniedError,
    Ds41Error,
    IntegrityError,
    LockedError,
    NetworkError,
    NoSpaceError,
    NotFoundError,
    UnauthorisedError,
)
from ds41ctl.core.exits import Exit
from ds41ctl.core.layout import Layout
from ds41ctl.core.profile import HubSource
from ds41ctl.steps.fetch import Fetch
from ds41ctl.steps.gc import collect
from ds41ctl.steps.verify import VerifyPack
from tests.fakes.hub import REVISION, FakeHub, Fault
from tests.fakes.packs import layout_for

MIB = 1 << 20
SECOND = "fedcba9876543210fedcba9876543210fedcba98"
TOKEN = "hf_abcdefghijklmnop"
LIMITS = Limits(connect_s=2, stall_s=1, attempts=4, backoff_s=0.01, backoff_max_s=0.05)
CONTENT = {
    "config.json": b'{"model_type": "x"}',
    "empty.txt": b"",
    "encoding/rules.json": b"[1]",
    "model-00001-of-00002.safetensors": hashlib.shake_256(b"1").digest(3 * MIB + 5),
    "model-00002-of-00002.safetensors": hashlib.shake_256(b"2").digest(MIB),
}
BIG = "model-00001-of-00002.safetensors"
Told = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as made:
        made.add("owner/pack", CONTENT)
        yield made


def layout_of(tmp_path: Path, *sources: HubSource) -> Layout:
    base = profiles.read(profiles.find("cpu-tiny"))
    found = sources or (HubSource(repo="owner/pack", revision=REVISION),)
    model = base.model.model_copy(update={"sources": found})
    return layout_for(base.model_copy(update={"model": model, "name": "hubbed"}), tmp_path)


def fetch(layout: Layout, hub: FakeHub, *, told: Told | None = None, limits: Limits = LIMITS, **options: Any) -> Fetch:
    """Run the step to its end."""
    xet, token = options.pop("xet", False), options.pop("token", None)
    step = Fetch(layout, hub=lambda: Hub(hub.url, token, False, xet, limits), **options)
    step.do(lambda text, data: told.append((text, data)) if told is not None else None)
    return step


def whole(layout: Layout) -> bool:
    """Every file has the pinned bytes and a sidecar; nothing else is left."""
    names = {str(p.relative_to(layout.model_dir)) for p in layout.model_dir.rglob("*") if p.is_file()}
    wanted = set(CONTENT) | {name + pack.SIDECAR for name in CONTENT} | {pack.LOCK_FILE}
    same = all((layout.model_dir / name).read_bytes() == data for name, data in CONTENT.items())
    return same and names == wanted and Fetch(layout).check().reached


def no_wrong_final_name(layout: Layout) -> bool:
    return all(
        (layout.model_dir / name).read_bytes() == data
        for name, data in CONTENT.items()
        if (layout.model_dir / name).exists()
    )


# ---- the plain way


def test_everything_arrives_once_with_pins_sidecars_and_one_request_a_file(tmp_path: Path, hub: FakeHub) -> None:
    layout, told = layout_of(tmp_path), Told()
    step = fetch(layout, hub, told=told)
    assert whole(layout)
    assert hub.sent(BIG) == 0 and sum(e.sent for e in hub.requests("cdn", BIG)) == len(CONTENT[BIG])
    assert [len(hub.requests("resolve", name)) for name in CONTENT] == [1, 0, 1, 1, 1]
    assert "MiB by http" in step.check().text
    lock = json.loads(layout.pins_path.read_text())
    pinned = {item["path"]: item for item in lock["trees"][0]["files"]}
    assert pinned[BIG]["sha256"] == hashlib.sha256(CONTENT[BIG]).hexdigest() and pinned["config.json"]["sha256"] == ""
    assert any("owner" not in text and "plain HTTP" in text for text, _ in told), "it says which way the bytes come"


def test_a_second_run_asks_nothing(tmp_path: Path, hub: FakeHub) -> None:
    layout = layout_of(tmp_path)
    fetch(layout, hub)
    hub.log.clear()
    assert Fetch(layout, hub=lambda: pytest.fail("the hub was asked")).check().reached
    fetch(layout, hub)
    assert hub.log == []


def test_two_repositories_go_into_one_folder(tmp_path: Path, hub: FakeHub) -> None:
    hub.add("official/model", {"config.json": b"{}", "e47.safetensors": b"t" * 5000, "other.safetensors": b"o" * 5000},
            revision=SECOND)  # fmt: skip
    second = HubSource(repo="official/model", revision=SECOND, patterns=("e4?.safetensors",))
    layout = layout_of(tmp_path, HubSource(repo="owner/pack", revision=REVISION), second)
    fetch(layout, hub)
    assert (layout.model_dir / "e47.safetensors").read_bytes() == b"t" * 5000
    assert not (layout.model_dir / "other.safetensors").exists()
    binding = (layout.model_dir / ("e47.safetensors" + pack.SIDECAR)).read_text()
    assert SECOND in binding and REVISION not in binding, "each file is bound to the commit of its own repository"
    clash = layout_of(tmp_path, HubSource(repo="owner/pack", revision=REVISION),
                      HubSource(repo="official/model", revision=SECOND))  # fmt: skip
    with pytest.raises(ConfigError, match=r"config\.json comes from owner/pack and from official/model"):
        fetch(clash, hub)


def test_a_pattern_that_matches_nothing_is_refused_and_pickles_are_never_fetched(tmp_path: Path, hub: FakeHub) -> None:
    hub.add("owner/pack", {"pytorch_model.bin": b"pickle" * 1000})
    layout = layout_of(tmp_path, HubSource(repo="owner/pack", revision=REVISION, patterns=("*.jsno",)))
    with pytest.raises(ConfigError, match=r"'\*\.jsno' matches no file"):
        fetch(layout, hub)
    fetch(layout_of(tmp_path), hub)
    assert hub.requests("resolve", "pytorch_model.bin") == []


def test_several_ranges_of_one_file_are_fetched_at_once(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "SPAN", MIB)
    together = threading.Barrier(4)
    hub.faults += [Fault("cdn", BIG, times=4, hold=lambda: together.wait(30))]
    patient = Limits(connect_s=2, stall_s=60, attempts=4, backoff_s=0.01, backoff_max_s=0.05)
    only = HubSource(repo="owner/pack", revision=REVISION, patterns=(BIG,))
    fetch(layout_of(tmp_path, only), hub, limits=patient)
    ranges = {entry.range for entry in hub.requests("cdn", BIG)}
    assert len(ranges) == 4 and not together.broken, "none of the four was answered before all were asked"


# ---- credentials


def test_the_token_goes_to_the_hub_and_not_to_the_store_it_redirects_to(tmp_path: Path, hub: FakeHub) -> None:
    hub.token = TOKEN
    fetch(layout_of(tmp_path), hub, token=TOKEN)
    assert all(e.headers["authorization"] == f"Bearer {TOKEN}" for e in hub.log if e.stage != "cdn")
    stores = hub.requests("cdn")
    assert stores and all("authorization" not in entry.headers for entry in stores)


def test_without_a_token_it_says_who_wants_one_and_how_to_give_it(tmp_path: Path, hub: FakeHub) -> None:
    hub.token = TOKEN
    with pytest.raises(UnauthorisedError, match="accept its terms") as caught:
        fetch(layout_of(tmp_path), hub)
    assert "HF_TOKEN" in caught.value.hints[0] and TOKEN not in str(caught.value)
    assert TOKEN not in repr(Hub(hub.url, TOKEN, False, False))


def test_the_conventions_of_the_environment_are_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = Hub.of_environment()
    assert (plain.endpoint, plain.token, plain.offline, plain.xet) == (HUB, None, False, True)
    assert os.environ["HF_HUB_DOWNLOAD_TIMEOUT"] == "120", "set before the hub library reads it"
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/hf/")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    mirror = Hub.of_environment()
    assert (mirror.endpoint, mirror.token, mirror.offline) == ("https://mirror.example/hf", TOKEN, True)
    assert mirror.xet is False and Hub.of_environment(xet=True).xet is True
    monkeypatch.delenv("HF_ENDPOINT")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    assert Hub.of_environment().xet is False


def test_offline_says_so_and_asks_nobody(tmp_path: Path, hub: FakeHub) -> None:
    step = Fetch(layout_of(tmp_path), hub=lambda: Hub(hub.url, None, True, False, LIMITS))
    with pytest.raises(NetworkError, match="HF_HUB_OFFLINE is set"):
        step.do(lambda text, data: None)
    assert hub.log == []


# ---- faults of servers and networks

OK: dict[str, list[Fault]] = {
    "500, 502 and 503 in a row": [Fault("cdn", BIG, status=code) for code in (500, 502, 503)],
    "the file list fails twice": [Fault("tree", times=2, status=503)],
    "429 with Retry-After": [Fault("resolve", BIG, status=429, headers={"Retry-After": "1"})],
    "reset after one byte": [Fault("cdn", BIG, cut=1)],
    "reset in the middle, three times": [Fault("cdn", BIG, times=3, cut=500_000)],
    "reset at the last byte": [Fault("cdn", BIG, cut=len(CONTENT[BIG]) - 1)],
    "stall without a byte": [Fault("cdn", BIG, cut=0, stall=8)],
    "stall in the middle": [Fault("cdn", BIG, cut=MIB, stall=8)],
    "a drip of 10 bytes a second": [Fault("cdn", BIG, drip=10)],
    "slow start": [Fault("cdn", BIG, delay=0.5)],
    "200 to a Range request": [Fault("cdn", BIG, times=99, no_ranges=True)],
    "200 to the Range of a resume": [Fault("cdn", BIG, cut=MIB), Fault("cdn", BIG, times=99, no_ranges=True)],
    "another ETag in the middle": [Fault("cdn", BIG, cut=MIB), Fault("cdn", BIG, headers={"ETag": '"other"'})],
    "another range than asked": [Fault("cdn", BIG, headers={"Content-Range": f"bytes 7-8/{len(CONTENT[BIG])}"})],
    "a signed address that expired": [Fault("cdn", BIG, cut=MIB), Fault("cdn", BIG, status=403)],
}


@pytest.mark.parametrize("fault", OK)
def test_a_fault_that_passes_ends_in_the_pinned_bytes(tmp_path: Path, hub: FakeHub, fault: str) -> None:
    import copy

    hub.faults += copy.deepcopy(OK[fault])
    layout, began = layout_of(tmp_path), time.monotonic()
    fetch(layout, hub)
    assert whole(layout)
    assert time.monotonic() - began < 10
    if "Retry-After" in fault:
        assert time.monotonic() - began >= 1.0


def test_what_arrived_before_a_reset_is_not_fetched_again(tmp_path: Path, hub: FakeHub) -> None:
    hub.faults.append(Fault("cdn", BIG, cut=2 * MIB))
    fetch(layout_of(tmp_path), hub)
    ranges = [entry.range for entry in hub.requests("cdn", BIG)]
    assert ranges[0] == f"bytes=0-{len(CONTENT[BIG]) - 1}"
    begin = int(ranges[1].removeprefix("bytes=").split("-")[0])
    # what the reset found in the socket's buffers is lost with it
    assert begin > MIB and hub.requests("cdn", BIG)[1].headers["if-range"] == f'"{sha(BIG)}"'


def sha(name: str) -> str:
    return hashlib.sha256(CONTENT[name]).hexdigest()


BAD: dict[str, tuple[list[Fault], type[Ds41Error], str]] = {
    "401": ([Fault("resolve", BIG, times=99, status=401)], UnauthorisedError, "wants a token"),
    "403 gated": (
        [Fault("api", times=99, status=403, headers={"X-Error-Code": "GatedRepo"})],
        UnauthorisedError,
        "accept its terms",
    ),
    "403 from the store for ever": ([Fault("cdn", BIG, times=99, status=403)], UnauthorisedError, "403"),
    "404 for the file": ([Fault("resolve", BIG, times=99, status=404)], NotFoundError, BIG),
    "416": ([Fault("cdn", BIG, times=99, status=416)], IntegrityError, "shorter file"),
    "416 on resume": (
        [Fault("cdn", BIG, cut=MIB), Fault("cdn", BIG, times=99, status=416)],
        IntegrityError,
        "shorter file",
    ),
    "429 for ever": ([Fault("cdn", BIG, times=99, status=429)], NetworkError, "HTTP 429 .4 times in a row"),
    "500 for ever": ([Fault("cdn", BIG, times=99, status=500)], NetworkError, "HTTP 500"),
    "the file list is never given": ([Fault("tree", times=99, status=500)], NetworkError, "HTTP 500"),
    "redirect loop": (
        [Fault("cdn", BIG, times=99, location="/owner/pack//" + BIG)],
        NetworkError,
        "redirects more than",
    ),
    "redirect to a file": (
        [Fault("resolve", BIG, times=9, location="file:///etc/passwd")],
        NetworkError,
        "redirects to file",
    ),
    "wrong Content-Length, longer": (
        [Fault("cdn", BIG, times=99, headers={"Content-Length": "9999999"}, no_ranges=True)],
        IntegrityError,
        "says 9999999 bytes",
    ),
    "another size in Content-Range": (
        [Fault("cdn", BIG, times=99, headers={"Content-Range": f"bytes 0-{len(CONTENT[BIG]) - 1}/77"})],
        IntegrityError,
        "says 77 bytes",
    ),
    "another digest in the Hub's answer": (
        [Fault("resolve", BIG, times=99, headers={"X-Linked-Etag": '"' + "0" * 64 + '"'})],
        IntegrityError,
        "says digest 0000",
    ),
    "another size in the Hub's answer": (
        [Fault("resolve", BIG, times=99, headers={"X-Linked-Size": "5"})],
        IntegrityError,
        "says 5 bytes",
    ),
    "a moved revision": (
        [Fault("resolve", BIG, times=99, headers={"X-Repo-Commit": SECOND})],
        IntegrityError,
        "commit fedcba987654",
    ),
    "a login page instead of a shard": ([Fault("cdn", BIG, times=99, html=True)], NetworkError, "web page"),
    "a login page instead of the file list": ([Fault("api", times=99, html=True)], NetworkError, "not answer as a Hub"),
    "a compressed answer": (
        [Fault("cdn", BIG, times=99, headers={"Content-Encoding": "gzip"})],
        NetworkError,
        "compresses",
    ),
    "one bit wrong, first byte": ([Fault("cdn", BIG, times=99, change=lambda b: bytes([b[0] ^ 1]) + b[1:])],
                                  IntegrityError, "nothing was published"),
    "one bit wrong, last byte": ([Fault("cdn", BIG, times=99, change=lambda b: b[:-1] + bytes([b[-1] ^ 1]))],
                                 IntegrityError, "nothing was published"),
    "zeros of the right length": ([Fault("cdn", BIG, times=99, change=lambda b: bytes(len(b)))],
                                  IntegrityError, "nothing was published"),
    "a file list that is no JSON": ([Fault("tree", times=99, change=lambda b: b[:-5])], NetworkError, "not answer"),
    "a file list of another shape": ([Fault("tree", times=99, change=lambda b: b'{"error": 1}')], NetworkError, "Hub"),
    "a path that leaves the folder": (
        [Fault("tree", times=99, change=lambda b: b.replace(b"config.json", b"../up.json"))],
        IntegrityError,
        "unsafe path",
    ),
    "an absolute path": (
        [Fault("tree", times=99, change=lambda b: b.replace(b"config.json", b"/etc/x.json"))],
        IntegrityError,
        "unsafe path",
    ),
    "two names that differ only in case": (
        [Fault("tree", times=99, change=lambda b: b.replace(b"empty.txt", b"CONFIG.json"))],
        IntegrityError,
        "differ only in case",
    ),
    "stalls for ever": ([Fault("cdn", BIG, times=99, cut=0, stall=8)], NetworkError, "times in a row"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_a_fault_that_stays_is_one_typed_error_and_no_wrong_file(tmp_path: Path, hub: FakeHub, fault: str) -> None:
    import copy

    faults, kind, text = BAD[fault]
    hub.faults += copy.deepcopy(faults)
    layout, began = layout_of(tmp_path), time.monotonic()
    with pytest.raises(kind, match=text) as caught:
        fetch(layout, hub)
    assert "\n" not in caught.value.message and caught.value.code != Exit.INTERNAL
    assert time.monotonic() - began < LIMITS.attempts * LIMITS.stall_s + 5
    assert no_wrong_final_name(layout)
    hub.faults.clear()
    fetch(layout, hub)  # nothing has to be cleaned up by hand
    assert whole(layout)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (HubSource(repo="owner/gone", revision=REVISION), "no such repository"),
        (HubSource(repo="owner/pack", revision=SECOND), "no such revision"),
    ],
)
def test_what_is_not_there_is_said_in_its_own_words(tmp_path: Path, hub: FakeHub, source: HubSource, text: str) -> None:
    with pytest.raises(NotFoundError, match=text):
        fetch(layout_of(tmp_path, source), hub)


def test_nobody_listening_is_one_line(tmp_path: Path, hub: FakeHub) -> None:
    layout = layout_of(tmp_path)
    dead = Hub("http://127.0.0.1:9", None, False, False, LIMITS)
    with pytest.raises(NetworkError, match=r"127\.0\.0\.1:9: cannot be reached"):
        Fetch(layout, hub=lambda: dead).do(lambda text, data: None)


def test_something_that_speaks_no_tls_is_one_line(tmp_path: Path, hub: FakeHub) -> None:
    tls = Hub(hub.url.replace("http:", "https:"), None, False, False, LIMITS)
    with pytest.raises(NetworkError, match=r"TLS|SSL"):
        Fetch(layout_of(tmp_path), hub=lambda: tls).do(lambda text, data: None)


def test_retry_after_is_read_in_both_forms_and_capped() -> None:
    assert retry_after("7") == 7 and retry_after("999999") == 300 and retry_after("soon") is None
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0


# ---- pins


def test_a_tree_that_changes_later_is_never_a_refresh(tmp_path: Path, hub: FakeHub) -> None:
    from ds41ctl.adapters import pins

    layout = layout_of(tmp_path)
    fetch(layout, hub)
    hub.add("owner/pack", {"config.json": b'{"model_type": "other"}'})
    before = layout.pins_path.read_bytes()
    with pytest.raises(IntegrityError, match=r"not what was pinned: config\.json"):
        pins.compare(layout, Hub(hub.url, None, False, False, LIMITS))
    (layout.model_dir / "config.json").unlink()
    with pytest.raises(IntegrityError, match=r"config\.json: the server says 23 bytes, 19 are pinned"):
        fetch(layout, hub)
    assert layout.pins_path.read_bytes() == before


def test_a_committed_lock_wins_and_needs_no_list_from_the_hub(tmp_path: Path, hub: FakeHub) -> None:
    from dataclasses import replace

    first = layout_of(tmp_path / "one")
    fetch(first, hub)
    committed = tmp_path / "hubbed.lock.json"
    committed.write_bytes(first.pins_path.read_bytes())
    second = replace(layout_of(tmp_path / "two"), committed_pins=committed)
    hub.log.clear()
    fetch(second, hub)
    assert hub.requests("api") == [] == hub.requests("tree") and whole(second)
    changed = committed.read_text().replace(sha(BIG), "0" * 64)
    third = replace(first, committed_pins=tmp_path / "changed.lock.json")
    (tmp_path / "changed.lock.json").write_text(changed)
    with pytest.raises(IntegrityError, match=f"differs from .*: {BIG}: sha256"):
        Fetch(third).check()


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2, "profile": "x", "trees": []}', '{"schema": 1}', "\xff"])
def test_a_damaged_lock_is_one_line(tmp_path: Path, text: str) -> None:
    layout = layout_of(tmp_path)
    layout.pins_path.parent.mkdir(parents=True)
    layout.pins_path.write_text(text, encoding="latin-1")
    with pytest.raises(IntegrityError, match=r"hubbed\.json: (not a lock file|lock schema 2)"):
        Fetch(layout).check()


# ---- resume


def stop_after(layout: Layout, hub: FakeHub, name: str, at: int) -> None:
    """A run that ends with `at` bytes of a file on disk: the server fails for ever from there on."""
    hub.faults += [Fault("cdn", name, cut=at), Fault("cdn", name, times=99, status=500)]
    with pytest.raises(NetworkError):
        fetch(layout, hub)
    hub.faults.clear()
    hub.log.clear()


def the_part(layout: Layout, name: str = BIG) -> Path:
    return next(layout.model_dir.glob(name + ".*" + part.SUFFIX))


def test_a_later_run_goes_on_where_the_first_one_stopped(tmp_path: Path, hub: FakeHub) -> None:
    layout = layout_of(tmp_path)
    stop_after(layout, hub, BIG, 2 * MIB)
    held = part.claimed(layout.model_dir / BIG, pack.expected(layout)[3].identity)
    assert held > MIB
    assert pack.inspect(layout).bytes_missing == len(CONTENT[BIG]) - held
    step = fetch(layout, hub)
    assert whole(layout)
    assert sum(entry.sent for entry in hub.requests("cdn", BIG)) == len(CONTENT[BIG]) - held
    assert "from an earlier run" in step.check().text


DAMAGE: dict[str, Callable[[Path], None]] = {
    "part emptied": lambda p: os.truncate(p, 0),
    "part cut": lambda p: os.truncate(p, MIB // 2),
    "part longer than the file": lambda p: p.open("ab").write(b"x" * 5 * MIB) and None,
    "part gone": lambda p: p.unlink(),
    "one bit of the part flipped": lambda p: (
        p.write_bytes(bytes([p.read_bytes()[0] ^ 1]) + p.read_bytes()[1:]) and None
    ),
    "journal gone": lambda p: p.with_name(p.name + part.JOURNAL_SUFFIX).unlink(),
    "journal empty": lambda p: p.with_name(p.name + part.JOURNAL_SUFFIX).write_bytes(b"") and None,
    "journal torn": lambda p: os.truncate(p.with_name(p.name + part.JOURNAL_SUFFIX), 130),
    "journal of nonsense": lambda p: p.with_name(p.name + part.JOURNAL_SUFFIX).write_bytes(b"\xff\n" * 9) and None,
    "journal that claims too much": lambda p: os.truncate(p, 10),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_part_costs_bytes_and_never_correctness(tmp_path: Path, hub: FakeHub, damage: str) -> None:
    layout = layout_of(tmp_path)
    stop_after(layout, hub, BIG, 2 * MIB)
    DAMAGE[damage](the_part(layout))
    fetch(layout, hub)
    assert whole(layout)


def test_a_part_that_is_a_symlink_is_not_written_through(tmp_path: Path, hub: FakeHub) -> None:
    layout = layout_of(tmp_path)
    stop_after(layout, hub, BIG, MIB)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    found = the_part(layout)
    found.unlink()
    found.symlink_to(victim)
    with pytest.raises(Ds41Error):
        fetch(layout, hub)
    assert victim.read_bytes() == b"precious"


def test_a_folder_that_is_a_symlink_out_of_the_pack_is_not_written_through(tmp_path: Path, hub: FakeHub) -> None:
    layout = layout_of(tmp_path)
    layout.model_dir.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (layout.model_dir / "encoding").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IntegrityError, match="symlink that leaves"):
        fetch(layout, hub)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_an_interrupted_run_keeps_what_it_received(tmp_path: Path, hub: FakeHub) -> None:
    layout = layout_of(tmp_path)
    hub.faults.append(Fault("cdn", BIG, cut=2 * MIB, stall=30))
    seen = threading.Event()

    def progress(text: str, data: dict[str, Any]) -> None:
        if data.get("files", {}).get(BIG, 0) >= 2 * MIB - 65536:
            seen.set()
            raise KeyboardInterrupt

    step = Fetch(layout, hub=lambda: Hub(hub.url, None, False, False, Limits(stall_s=60)))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        step.do(progress)
    assert seen.is_set() and time.monotonic() - began < 30, "the stream that stands still was not waited for"
    assert part.claimed(layout.model_dir / BIG, pack.expected(layout)[3].identity) >= 2 * MIB - 65536


# ---- space, locks, places


def test_no_space_is_refused_before_the_first_byte(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_of(tmp_path)
    total = sum(map(len, CONTENT.values()))
    monkeypatch.setattr(mounts, "free_bytes", lambda path: total)
    with pytest.raises(NoSpaceError, match=rf"needs {int(total * 1.02)} bytes .* {total} are free"):
        fetch(layout, hub)
    assert hub.requests("cdn") == [] == hub.requests("resolve")


def test_a_part_counts_as_space_already_taken(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(tmp_path)
    stop_after(layout, hub, BIG, 2 * MIB)
    missing = pack.inspect(layout).bytes_missing
    assert missing is not None
    monkeypatch.setattr(mounts, "free_bytes", lambda path: int(missing * 1.02) + 1)
    fetch(layout, hub)
    assert whole(layout)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_disk_that_fills_up_midway_keeps_the_part_and_ends_with_15(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_of(tmp_path)
    layout.model_dir.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(layout.model_dir)], check=False)
    if done.returncode:
        pytest.skip("this root may not mount")
    try:
        monkeypatch.setattr(mounts, "free_bytes", lambda path: 1 << 40)  # as when another process fills it meanwhile
        began = time.monotonic()
        with pytest.raises(NoSpaceError) as caught:
            fetch(layout, hub)
        assert caught.value.code == Exit.NO_SPACE and time.monotonic() - began < 5
        assert the_part(layout).stat().st_size > 0 and no_wrong_final_name(layout)
        subprocess.run(["mount", "-o", "remount,size=20m", str(layout.model_dir)], check=True)
        fetch(layout, hub)
        assert whole(layout)
    finally:
        subprocess.run(["umount", str(layout.model_dir)], check=True)


def test_a_second_fetch_of_the_folder_names_the_first_one(tmp_path: Path, hub: FakeHub) -> None:
    layout = layout_of(tmp_path)
    with files.locked(layout.model_dir / pack.LOCK_FILE, "fetching hubbed"):
        began = time.monotonic()
        with pytest.raises(LockedError, match=rf"fetching hubbed: pid {os.getpid()} \(.+\), .*since 20") as caught:
            fetch(layout, hub)
        assert time.monotonic() - began < 2 and caught.value.code == Exit.LOCKED
    fetch(layout, hub)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_said(tmp_path: Path, hub: FakeHub) -> None:
    layout = layout_of(tmp_path)
    layout.model_dir.mkdir(parents=True)
    layout.model_dir.chmod(0o555)
    with pytest.raises(DeniedError):
        fetch(layout, hub)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everywhere")
def test_a_pack_of_somebody_else_can_be_verified_and_a_file_that_may_not_be_read_is_not_fetched_again(
    tmp_path: Path, hub: FakeHub
) -> None:
    layout = only_bytes(tmp_path)
    fetch(layout, hub)
    sidecar = layout.model_dir / (BIG + pack.SIDECAR)
    sidecar.write_text("old")
    layout.model_dir.chmod(0o555)
    assert judge(layout) == {} and sidecar.read_text() == "old"
    with pytest.raises(DeniedError, match="sha256-ok: Permission denied"):
        fetch(layout, hub)
    layout.model_dir.chmod(0o755)
    (layout.model_dir / BIG).chmod(0)
    hub.log.clear()
    for repair in (False, True):
        with pytest.raises(DeniedError, match="may not be read by this user") as caught:
            fetch(layout, hub, repair=repair)
        assert caught.value.hints[0].startswith("chmod a+r")
    assert hub.log == [] and "may not be read" in judge(layout)["pack.bytes"][0]


def test_a_folder_in_the_way_of_a_file_is_said(tmp_path: Path, hub: FakeHub) -> None:
    layout = layout_of(tmp_path)
    (layout.model_dir / BIG).mkdir(parents=True)
    with pytest.raises(IntegrityError, match="not a regular file"):
        fetch(layout, hub)
    with pytest.raises(IntegrityError, match="is a folder"):
        fetch(layout, hub, repair=True)


# ---- verify, repair, gc


def judge(layout: Layout, *, quick: bool = False) -> dict[str, list[str]]:
    """Finding id -> statuses and summaries of what is not ok."""
    step = VerifyPack(layout, quick=quick)
    step.judge(lambda finding: None, lambda text, data: None)
    found: dict[str, list[str]] = {}
    for item in step.findings:
        if item.status not in ("ok", "skip"):
            found.setdefault(item.id, []).append(f"{item.status} {item.summary}")
    return found


def only_bytes(tmp_path: Path) -> Layout:
    """A pack whose pins hold no index: its bytes are judged, no contract is."""
    return layout_of(tmp_path, HubSource(repo="owner/pack", revision=REVISION, patterns=("*.safetensors", "e*")))


def test_verify_needs_no_network_and_finds_a_flipped_bit_with_the_old_times(tmp_path: Path, hub: FakeHub) -> None:
    layout = only_bytes(tmp_path)
    fetch(layout, hub)
    hub.log.clear()
    assert judge(layout) == {} == judge(layout, quick=True)
    path = layout.model_dir / BIG
    info = path.stat()
    with path.open("r+b") as out:
        out.seek(1_000_000)
        out.write(b"\0\0")
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert judge(layout, quick=True) == {}
    assert "sha256" in judge(layout)["pack.bytes"][0] and BIG in judge(layout)["pack.bytes"][0]
    assert hub.log == []


def test_repair_fetches_the_bad_shard_alone_and_keeps_the_old_one_aside(tmp_path: Path, hub: FakeHub) -> None:
    layout = only_bytes(tmp_path)
    fetch(layout, hub)
    (layout.model_dir / BIG).write_bytes(bytes(len(CONTENT[BIG])))
    hub.log.clear()
    with pytest.raises(IntegrityError, match="sha256") as caught:
        fetch(layout, hub)
    assert "--repair" in caught.value.hints[0]
    fetch(layout, hub, repair=True)
    assert {entry.path.split("/")[-1].split("?")[0] for entry in hub.log} == {BIG}
    assert (layout.model_dir / (BIG + pack.QUARANTINE)).read_bytes() == bytes(len(CONTENT[BIG]))
    assert judge(layout) == {}


def test_what_nothing_pins_is_a_finding_and_so_is_a_symlink_out(tmp_path: Path, hub: FakeHub) -> None:
    layout = only_bytes(tmp_path)
    fetch(layout, hub)
    (layout.model_dir / "notes.md").write_text("mine")
    (layout.model_dir / "extra.safetensors").write_bytes(b"x")
    (layout.model_dir / "evil.bin").write_bytes(b"x")
    (layout.model_dir / "out").symlink_to("/etc")
    found = judge(layout)["pack.foreign"]
    assert sorted(text.split(" in ")[0] for text in found) == [
        "fail evil.bin", "fail extra.safetensors", "fail out", "warn notes.md",
    ]  # fmt: skip


def test_gc_removes_parts_of_other_pins_and_old_orphans_and_keeps_what_helps(tmp_path: Path, hub: FakeHub) -> None:
    layout = layout_of(tmp_path)
    stop_after(layout, hub, BIG, 2 * MIB)
    useful = the_part(layout)
    stale = layout.model_dir / f"{BIG}.0123456789abcdef{part.SUFFIX}"
    hub_folder = layout.model_dir / ".cache" / "huggingface" / "download"
    hub_folder.mkdir(parents=True)
    old, young = hub_folder / "a.incomplete", hub_folder / "b.incomplete"
    for path in (stale, stale.with_name(stale.name + part.JOURNAL_SUFFIX), old, young):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    removed = {path.name for path, _ in collect(layout)}
    assert removed == {stale.name, stale.name + part.JOURNAL_SUFFIX, "a.incomplete"}
    assert useful.exists() and young.exists()
    with files.locked(layout.model_dir / pack.LOCK_FILE, "fetching"), pytest.raises(LockedError):
        collect(layout)
    fetch(layout, hub)
    assert collect(layout) == []


def test_preflight_is_told_what_is_missing(tmp_path: Path, hub: FakeHub) -> None:
    layout = layout_of(tmp_path)
    assert pack.inspect(layout).bytes_missing is None, "unknown before the file list was fetched"
    hub.faults.append(Fault("api", times=99, status=404))
    with pytest.raises(NotFoundError):
        fetch(layout, hub)
    hub.faults.clear()
    assert not pack.inspect(layout).exists, "a folder with our lock alone is no pack"
    stop_after(layout, hub, BIG, 2 * MIB)
    facts = pack.inspect(layout)
    assert facts.bytes_missing is not None and 0 < facts.bytes_missing < len(CONTENT[BIG])
    assert {item.name: item.size for item in facts.files}[BIG] is None
    fetch(layout, hub)
    assert pack.inspect(layout).bytes_missing == 0
    (layout.model_dir / BIG).unlink()
    assert pack.inspect(layout).bytes_missing == len(CONTENT[BIG])


# ---- Xet


@pytest.fixture
def xet(tmp_path: Path, hub: FakeHub) -> Path:
    """The big file in a Xet store of hf-xet's own on this disk."""
    store = tmp_path / "xet-store"
    hub.store_in_xet("owner/pack", store, [BIG])
    return store


def test_xet_brings_the_big_files_in_ranges_and_says_so(
    tmp_path: Path, hub: FakeHub, xet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "SPAN", MIB)
    layout = layout_of(tmp_path)
    step = fetch(layout, hub, xet=True)
    assert whole(layout) and hub.requests("cdn", BIG) == []
    assert step.check().data["received"]["xet"] == len(CONTENT[BIG])
    assert len(hub.requests("token")) == 1, "one token for all ranges"


def test_xet_goes_on_from_a_part_that_http_began(tmp_path: Path, hub: FakeHub, xet: Path) -> None:
    layout = layout_of(tmp_path)
    stop_after(layout, hub, BIG, 2 * MIB)
    step = fetch(layout, hub, xet=True)
    assert whole(layout)
    received = step.check().data
    assert received["received"]["xet"] == len(CONTENT[BIG]) - received["resumed"] < 3 * MIB


@pytest.mark.parametrize("harm", ["flipped", "cut", "gone", "no token"])
def test_a_sick_xet_store_ends_in_plain_http(tmp_path: Path, hub: FakeHub, xet: Path, harm: str) -> None:
    layout, told = layout_of(tmp_path), Told()
    xorbs = [path for path in xet.rglob("default.*") if path.is_file()]
    assert xorbs
    for path in xorbs:
        data = bytearray(path.read_bytes())
        if harm == "flipped":
            data[len(data) // 2] ^= 1
            path.chmod(0o644)
            path.write_bytes(data)
        elif harm == "cut":
            path.chmod(0o644)
            os.truncate(path, 1000)
        elif harm == "gone":
            path.unlink()
    if harm == "no token":
        hub.faults.append(Fault("token", times=99, status=500))
    fetch(layout, hub, xet=True, told=told)
    assert whole(layout)
    assert any(data.get("note") for _, data in told), "the change of the way is said"


class Still:
    """A Xet stream that gives some bytes and then stands still until somebody cancels it."""

    label = "xet"

    def __init__(self, data: bytes) -> None:
        self.data, self.opened, self.cancelled = data, 0, threading.Event()

    @contextlib.contextmanager
    def open(self, begin: int, end: int) -> Iterator[Still]:
        self.opened, self.cancelled = self.opened + 1, threading.Event()
        self.begin = begin
        yield self

    def __iter__(self) -> Iterator[bytes]:
        if self.begin == 0:
            yield self.data[:1000]
        assert self.cancelled.wait(20), "nobody cancelled it"
        raise transfer.Fault("Xet: the stream ended early")

    def cancel(self) -> None:
        self.cancelled.set()


class Stuck(Still):
    """One that does not even end when it is cancelled, as a library call that hangs."""

    def __init__(self, data: bytes, until: threading.Event) -> None:
        super().__init__(data)
        self.until = until

    def __iter__(self) -> Iterator[bytes]:
        self.until.wait(60)
        yield self.data[self.begin :]


class Plain:
    """A source that always works."""

    label = "http"

    def __init__(self, data: bytes) -> None:
        self.data, self.begins = data, list[int]()

    @contextlib.contextmanager
    def open(self, begin: int, end: int) -> Iterator[Any]:
        self.begins.append(begin)
        yield Whole(self.data[begin:end])


class Whole(list[bytes]):
    def __init__(self, data: bytes) -> None:
        super().__init__([data])

    def cancel(self) -> None:
        """Nothing to cancel."""


def test_xet_that_stands_still_is_dropped_and_after_three_times_plain_http_goes_on(tmp_path: Path) -> None:
    data, notes, arrived = CONTENT[BIG], list[str](), list[str]()
    still, plain = Still(data), Plain(data)
    order = transfer.Order(tmp_path / BIG, len(data), "sha256:" + sha(BIG), (still, plain), arrived.append)
    limits = Limits(stall_s=0.3, attempts=9, backoff_s=0.01)
    began = time.monotonic()
    run = transfer.Transfer([order], connections=1, limits=limits, progress=lambda state: None, note=notes.append)
    summary = run.run()
    assert (tmp_path / BIG).read_bytes() == data and arrived == [sha(BIG)]
    assert still.opened == 3 and plain.begins == [1000] and time.monotonic() - began < 5
    assert "going on over plain HTTP" in notes[-1] and summary.received == {"xet": 1000, "http": len(data) - 1000}


def test_a_library_call_that_never_comes_back_is_left_behind(tmp_path: Path) -> None:
    data, notes, end = CONTENT[BIG], list[str](), threading.Event()
    stuck, plain = Stuck(data, end), Plain(data)
    order = transfer.Order(tmp_path / BIG, len(data), "sha256:" + sha(BIG), (stuck, plain), lambda sha256: None)
    limits = Limits(stall_s=0.2, attempts=9, backoff_s=0.01)
    began = time.monotonic()
    transfer.Transfer([order], connections=1, limits=limits, progress=lambda s: None, note=notes.append).run()
    end.set()
    assert (tmp_path / BIG).read_bytes() == data and stuck.opened == 3 and time.monotonic() - began < 5
    assert "does not end" in notes[-1]


@pytest.mark.parametrize("step", [1, 4, 7])
def test_pieces_larger_than_a_claim_do_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Xet hands out many MiB at once: a writer that waits makes a claim due, however large its piece."""
    monkeypatch.setattr(part, "CLAIM_AT", 3 * MIB)
    monkeypatch.setattr(part, "UNCLAIMED_MAX", 6 * MIB)
    monkeypatch.setattr(part, "_WRITE_STEP", step * MIB)
    data = hashlib.shake_256(b"pieces").digest(23 * MIB)
    open_part = part.Part(tmp_path / "f", part.Identity(len(data), "sha256:" + hashlib.sha256(data).hexdigest()))
    spans = [(at, min(at + 5 * MIB, len(data))) for at in range(0, len(data), 5 * MIB)]
    writers = [threading.Thread(target=open_part.write, args=(a, data[a:b]), daemon=True) for a, b in spans]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(10)
    assert not any(writer.is_alive() for writer in writers)
    assert open_part.finish() == hashlib.sha256(data).hexdigest() and (tmp_path / "f").read_bytes() == data


def test_a_published_file_is_one_fsync_one_rename_and_one_fsync_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(
        os, "fsync", lambda fd: (calls.append(f"fsync {Path(f'/proc/self/fd/{fd}').readlink()}"), fsync(fd))
    )

    def renamed(self: Path, target: Path) -> Path:
        calls.append(f"rename {target}")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renamed)
    data, target = CONTENT[BIG], tmp_path / BIG
    order = transfer.Order(target, len(data), "sha256:" + sha(BIG), (Plain(data),), lambda sha256: None)
    transfer.Transfer([order], connections=2, limits=LIMITS, progress=lambda s: None, note=lambda t: None).run()
    found = part.part_path(target, part.Identity(len(data), "sha256:" + sha(BIG)))
    assert calls[-3:] == [f"fsync {found}", f"rename {target}", f"fsync {tmp_path}"]
    assert calls.count(f"rename {target}") == 1


def test_a_disk_that_cannot_read_is_a_finding_and_not_a_crash(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = only_bytes(tmp_path)
    fetch(layout, hub)

    def broken(path: Path, **options: Any) -> files.Digest:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(files, "file_digest", broken)
    assert "not readable: Input/output error" in judge(layout)["pack.bytes"][0]


def test_a_pack_of_links_into_a_hub_cache_is_not_downloaded_again_by_advice(tmp_path: Path, hub: FakeHub) -> None:
    layout = layout_of(tmp_path)
    blob = tmp_path / "blobs" / "b"
    blob.parent.mkdir()
    blob.write_bytes(CONTENT[BIG])
    layout.model_dir.mkdir(parents=True)
    (layout.model_dir / BIG).symlink_to(blob)
    with pytest.raises(IntegrityError, match="a symlink that leaves") as caught:
        fetch(layout, hub)
    assert "--local-dir" in caught.value.hints[0] and "--repair" not in str(caught.value.hints)


# ---- the real client on the same fake: the fake is faithful


@pytest.mark.parametrize("way", ["http", "xet"])
def test_the_real_hub_client_downloads_the_same_tree_from_it(tmp_path: Path, hub: FakeHub, xet: Path, way: str) -> None:
    hub.token = TOKEN
    program = (
        "import sys; from huggingface_hub import snapshot_download, HfApi;"
        "print(HfApi().model_info('owner/pack', revision=sys.argv[1]).sha);"
        "print(snapshot_download('owner/pack', revision=sys.argv[1], local_dir=sys.argv[2]))"
    )
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "01"[way == "http"],
           "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program, REVISION, str(tmp_path / "theirs")],
        env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[0] == REVISION
    for name, data in CONTENT.items():
        assert (tmp_path / "theirs" / name).read_bytes() == data
    assert bool(hub.requests("cdn", BIG)) == (way == "http")
    # and what it downloaded is accepted by ours after one hash, without a byte from the network
    layout = layout_of(tmp_path)
    shutil.copytree(tmp_path / "theirs", layout.model_dir)
    hub.log.clear()
    fetch(layout, hub, token=TOKEN)
    assert hub.requests("cdn") == [] == hub.requests("resolve") and Fetch(layout).check().reached
