"""The clock lease: whether a locked clock was kept (samples under load decide), what is given back, what is void."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds41ctl.core.facts import GpuFacts
from ds41ctl.core.finding import Status
from ds41ctl.core.lease import (
    KEPT_SHARE,
    SAMPLES_MIN,
    TOLERANCE_MHZ,
    Lease,
    Process,
    Reading,
    judge_kept,
    judge_values,
    to_give_back,
)


def readings(*groups: tuple[int, int, int]) -> list[Reading]:
    """(how many, MHz, busy percent) of each group."""
    return [Reading(mhz, busy) for count, mhz, busy in groups for _ in range(count)]


@pytest.mark.parametrize(
    ("samples", "status"),
    [
        ([(100, 1530, 90)], "ok"),
        ([(100, 1515, 90)], "ok"),  # one step of the clock table below
        ([(100, 1514, 90)], "fail"),
        ([(99, 1530, 90), (1, 135, 90)], "ok"),
        ([(98, 1530, 90), (2, 135, 90)], "fail"),
        ([(100, 1530, 90), (500, 135, 0)], "ok"),  # at rest a card clocks down: that is no dip
        ([(19, 1530, 90), (500, 1530, 0)], "unknown"),
        ([(500, 1530, 0)], "unknown"),
        ([], "unknown"),
    ],
)
def test_the_share_of_samples_under_load(samples: list[tuple[int, int, int]], status: str) -> None:
    finding = judge_kept(1530, {"GPU-0": readings(*samples)})
    assert finding.status == status
    assert finding.status == Status.OK or (finding.fix and finding.why and finding.found)


def test_one_card_that_dips_is_named_and_outweighs_one_without_load() -> None:
    finding = judge_kept(
        1530,
        {"GPU-0": readings((50, 1530, 80)), "GPU-1": readings((50, 1380, 80)), "GPU-2": readings((50, 1530, 0))},
    )
    assert finding.status == Status.FAIL and "GPU-1" in finding.summary and "lowest 1380 MHz" in finding.summary


def test_no_card_at_all_proves_nothing() -> None:
    assert judge_kept(1530, {}).status == Status.UNKNOWN


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 100)), max_size=200))
def test_the_verdict_is_the_rule_itself(pairs: list[tuple[int, int]]) -> None:
    loaded = [mhz for mhz, busy in pairs if busy > 0]
    finding = judge_kept(1530, {"g": [Reading(mhz, busy) for mhz, busy in pairs]})
    if len(loaded) < SAMPLES_MIN:
        assert finding.status == Status.UNKNOWN
    else:
        kept = sum(mhz >= 1530 - TOLERANCE_MHZ for mhz in loaded) / len(loaded)
        assert (finding.status == Status.OK) == (kept >= KEPT_SHARE)


# ---- power limits and clock offsets


PROCESS = st.builds(Process, pid=st.integers(1, 1 << 22), start_ticks=st.integers(0, 1 << 40))
WATTS = st.integers(50_000, 2_000_000).map(lambda milliwatts: milliwatts / 1000)
UUIDS = st.sampled_from([f"GPU-{number}" for number in range(8)])
LEASES = st.builds(
    Lease,
    profile=st.text(max_size=20),
    boot_id=st.text(max_size=40),
    module=st.text(max_size=20),
    uuids=st.lists(UUIDS, unique=True).map(tuple),
    mhz=st.none() | st.integers(100, 5000),
    power_limit_w=st.none() | WATTS,
    power_before_w=st.dictionaries(UUIDS, WATTS),
    offset_mhz=st.none() | st.integers(-1000, 1000),
    offset_before_mhz=st.dictionaries(UUIDS, st.integers(-1000, 1000)),
    missed=st.lists(st.text(max_size=40), max_size=2).map(tuple),
    owner=st.none() | PROCESS,
    guardian=st.none() | PROCESS,
    locked=st.booleans(),
    created_at=st.text(max_size=30),
)


@given(LEASES)
def test_a_lease_is_read_as_it_was_written(lease: Lease) -> None:
    again = Lease.model_validate(json.loads(lease.model_dump_json()))
    assert again == lease
    assert {uuid: round(watts * 1000) for uuid, watts in again.power_before_w.items()} == {
        uuid: round(watts * 1000) for uuid, watts in lease.power_before_w.items()
    }, "to the milliwatt that NVML counts in"


def test_a_journal_of_a_version_that_only_locked_clocks_is_understood() -> None:
    old = {"profile": "p", "boot_id": "b", "mhz": 1530, "uuids": ["GPU-0"], "locked": True, "created_at": "now"}
    lease = Lease.model_validate(old)
    assert lease.text == "1530 MHz" and not lease.void("b", "inode 5")


@pytest.mark.parametrize(
    ("boot", "module", "now", "words"),
    [
        ("b", "inode 5", "inode 5", ""),
        ("a", "inode 5", "inode 5", "earlier boot"),
        ("b", "inode 5", "inode 6", "loaded again"),
        ("b", "inode 5", "not loaded", "loaded again"),
        ("b", "", "inode 6", ""),  # what is not known voids nothing
        ("b", "inode 5", "", ""),
    ],
)
def test_a_reboot_or_a_new_load_of_the_module_voids_a_lease(boot: str, module: str, now: str, words: str) -> None:
    lease = Lease(profile="p", boot_id=boot, module=module, uuids=(), created_at="now")
    found = lease.void("b", now)
    assert words in found and bool(found) == bool(words)


READ = st.none() | st.sampled_from([200.0, 250.0, 180.0])


@given(st.dictionaries(UUIDS, st.sampled_from([250.0, 180.0, 300.0])), st.dictionaries(UUIDS, READ), st.booleans())
def test_what_is_given_back_is_ours_and_never_somebody_elses(
    before: dict[str, float], now: dict[str, float | None], ours: bool
) -> None:
    back, foreign = to_give_back(200.0, before, now, ours=ours)
    for uuid, value in before.items():
        found = now.get(uuid)
        if found == value:
            assert uuid not in back and uuid not in foreign, "it is back already"
        elif found in (None, 200.0) or ours:
            assert back[uuid] == value and uuid not in foreign
        else:
            assert foreign[uuid] == found and uuid not in back
    assert set(back) | set(foreign) <= set(before)


def card(**values: Any) -> GpuFacts:
    return GpuFacts(
        **{"index": 0, "name": "card", "uuid": "GPU-0", "power_limit_w": 200.0, "offset_mhz": 200, **values}
    )


@pytest.mark.parametrize(
    ("gpus", "status", "words"),
    [
        ([card()], "ok", "as set"),
        ([card(power_limit_w=200.4)], "ok", "as set"),
        ([card(power_limit_w=250.0)], "fail", "power limit 250 W now, 200 W was set"),
        ([card(offset_mhz=0)], "fail", "clock offset +0 MHz now, +200 MHz was set"),
        ([card(power_limit_w=None)], "unknown", "cannot be read"),
        ([card(offset_mhz=None)], "unknown", "cannot be read"),
        ([card(uuid="GPU-1", power_limit_w=250.0)], "unknown", "cannot be read"),  # not a card of this lease
        ([], "unknown", "cannot be read"),
    ],
)
def test_values_of_a_lease_that_are_no_longer_there_are_named(gpus: list[GpuFacts], status: str, words: str) -> None:
    lease = Lease(
        profile="p", boot_id="b", uuids=("GPU-0",), power_limit_w=200, offset_mhz=200, locked=True, created_at="now"
    )
    finding = judge_values(lease, gpus)
    assert finding.status == status and words in finding.summary
    assert finding.status == Status.OK or (finding.fix and finding.why and finding.found)
