"""Whether a locked clock was kept: samples under load decide, and too few of them decide nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds41ctl.core.finding import Status
from ds41ctl.core.lease import KEPT_SHARE, SAMPLES_MIN, TOLERANCE_MHZ, Reading, judge_kept


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
