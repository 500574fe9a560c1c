"""Input that is not there: held for a while, then unknown; never green, never a trigger."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.model.level import Reason, RuleId, Scope
from kvwatch.model.settings import OnStale, RuleSettings
from kvwatch.rules import hysteresis, staleness
from kvwatch.rules.hysteresis import LevelState
from kvwatch.rules.shipped import BY_RULE
from kvwatch.rules.spec import Reading
from tests.rules.build import G, R, U, clock

SPEC = BY_RULE[RuleId.RECOMPUTE_TAX]


def reading(value: float | None = None, absent: Reason | None = None) -> Reading:
    return Reading(scope=Scope(), value=value, absent=absent, period_s=1.0)


def judge(
    points: list[tuple[float, float | Reason]], on_stale: OnStale = OnStale.HOLD, hold_s: float = 30.0
) -> list[LevelState]:
    settings = RuleSettings(yellow=0.02, red=0.05, clear=0.0, on_stale=on_stale, hold_s=hold_s)
    band = hysteresis.bands(SPEC, settings)
    state, states = hysteresis.start(clock(points[0][0])), []
    for now_s, point in points:
        said = reading(absent=point) if isinstance(point, Reason) else reading(point)
        state = staleness.judge(state, said, clock(now_s), settings, band)
        states.append(state)
    return states


@pytest.mark.parametrize("value", [0.03, 0.09])
def test_hold_keeps_an_alarm_for_three_periods_then_unknown(value: float) -> None:
    """A yellow or red level outlives its data by three periods, and says that it is only held."""
    states = judge([(0, value), (1, Reason.STALE), (3.9, Reason.STALE), (4, Reason.STALE)])

    assert [state.level for state in states[1:3]] == [states[0].level] * 2
    assert states[1].reason is Reason.STALE_HELD
    assert (states[3].level, states[3].reason) == (U, Reason.STALE)


@pytest.mark.parametrize("on_stale", list(OnStale))
def test_green_is_never_kept_on_stale_data(on_stale: OnStale) -> None:
    """Whatever the setting, data that has gone stale is never shown green."""
    assert judge([(0, 0.0), (1, Reason.STALE)], on_stale)[-1].level is not G


def test_on_stale_unknown_and_red_act_at_once() -> None:
    """`unknown` and `red` do not hold."""
    assert judge([(0, 0.03), (1, Reason.STALE)], OnStale.UNKNOWN)[-1].level is U
    assert judge([(0, 0.0), (1, Reason.STALE)], OnStale.RED)[-1].level is R


@pytest.mark.parametrize("absent", [Reason.TOO_FEW, Reason.NOT_REPORTED, Reason.STARTING, Reason.MAINTENANCE])
def test_what_cannot_be_judged_is_unknown_at_once(absent: Reason) -> None:
    """Too few samples, nothing reported, a start or maintenance end a level without ceremony."""
    last = judge([(0, 0.09), (1, absent)])[-1]

    assert (last.level, last.reason) == (U, absent)


@pytest.mark.parametrize("absent", [Reason.TOO_FEW, Reason.NOT_REPORTED, Reason.STARTING])
def test_on_stale_red_never_triggers_without_a_judged_level(absent: Reason) -> None:
    """`on_stale: red` speaks of data that was good once: a single sample or none stays unknown."""
    assert judge([(0, absent), (1, Reason.STALE), (9, Reason.STALE)], OnStale.RED)[-1].level is U


def test_red_by_staleness_falls_only_after_hold() -> None:
    """Data that is back and good ends a red of staleness after `hold`, not at once."""
    states = judge([(0, 0.0), (1, Reason.STALE), (2, 0.0), (31, 0.0), (32, 0.0)], OnStale.RED)

    assert [state.level for state in states] == [G, R, R, R, G]


def test_hold_counts_fresh_values_only() -> None:
    """Time without data does not count towards falling."""
    states = judge([(0, 0.09), (1, 0.0), (29, Reason.STALE), (31, 0.0), (60, 0.0), (61, 0.0)])

    assert [state.level for state in states] == [R, R, R, R, R, G]


POINTS = st.lists(
    st.tuples(
        st.floats(0.01, 10.0),
        st.one_of(st.floats(0.0, 0.1), st.sampled_from([Reason.STALE, Reason.TOO_FEW, Reason.NOT_REPORTED])),
    ),
    min_size=1,
    max_size=50,
)


@given(POINTS, st.sampled_from([OnStale.HOLD, OnStale.UNKNOWN]))
def test_absent_data_never_raises_a_level_nor_turns_it_green(
    points: list[tuple[float, float | Reason]], on_stale: OnStale
) -> None:
    """Only a fresh value raises a level or makes it green."""
    now_s, previous, timed = 0.0, U, []
    for gap_s, point in points:
        now_s += gap_s
        timed.append((now_s, point))
    for (_, point), state in zip(timed, judge(timed, on_stale), strict=True):
        if isinstance(point, Reason):
            assert state.level <= previous
            assert state.level is not G
        previous = state.level
