"""When a source is polled first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.daemon.watchlist import GROUP_S, turn_s


@given(since_s=st.floats(-1e6, 1e6), number=st.integers(0, 1000))
def test_polls_fall_into_groups(since_s: float, number: int) -> None:
    """Whenever a source is added, it waits for less than a second, and polls when its group does."""
    wait_s = turn_s(since_s, number)
    turns = (since_s + wait_s) / GROUP_S

    assert 0.0 <= wait_s <= 1.0
    assert turns == pytest.approx(round(turns), abs=1e-6)
    assert round(turns) % 2 == number % 2


def test_sources_take_turns() -> None:
    """Groups are of equal size: of two sources each group has one."""
    assert [turn_s(0.1, number) for number in range(4)] == pytest.approx([0.9, 0.4, 0.9, 0.4])
