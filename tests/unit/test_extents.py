"""Extents behave as a set of offsets does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds41ctl.core.extents import Extents

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1])))


@given(SPANS, st.integers(0, 80))
def test_extents_are_the_set_of_their_offsets(spans: list[tuple[int, int]], size: int) -> None:
    extents = Extents(spans)
    offsets = {at for begin, end in spans for at in range(begin, end)}
    assert {at for begin, end in extents.spans for at in range(begin, end)} == offsets
    assert extents.total == len(offsets)
    missing = {at for begin, end in extents.missing(size) for at in range(begin, end)}
    assert missing == set(range(size)) - offsets
    assert extents.front == next(at for at in range(100) if at not in offsets)
    # sorted, and no two spans touch: every gap is a real one
    assert all(a[1] < b[0] for a, b in zip(extents.spans, extents.spans[1:], strict=False))
    copy = extents.copy()
    copy.add(0, 100)
    assert {at for begin, end in extents.spans for at in range(begin, end)} == offsets


@pytest.mark.parametrize("span", [(3, 2), (-1, 4)])
def test_what_is_no_span_is_refused(span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="is no span"):
        Extents([span])
