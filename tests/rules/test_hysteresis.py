"""Levels rise at once (or after `for`), fall only after `hold`, and account for every second."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.model.level import Level, Reason, RuleId
from kvwatch.model.settings import RuleSettings
from kvwatch.rules import hysteresis
from kvwatch.rules.hysteresis import LevelState
from kvwatch.rules.shipped import BY_RULE
from tests.rules.build import G, R, U, Y, clock

RATIO = BY_RULE[RuleId.KV_USAGE]
BYTES_LOW = BY_RULE[RuleId.DEVICE_HEADROOM]
RETRIES = BY_RULE[RuleId.ALLOC_RETRIES]
SETTINGS = RuleSettings(yellow=0.70, red=0.95, hold_s=30.0)


def walk(
    points: list[tuple[float, float]],
    settings: RuleSettings = SETTINGS,
    spec: object = RATIO,
    red_allowed: bool = True,
) -> list[LevelState]:
    band = hysteresis.bands(spec, settings)  # type: ignore[arg-type]
    state = hysteresis.start(clock(points[0][0]))
    states = []
    for now_s, value in points:
        state = hysteresis.advance(state, value, clock(now_s), settings, band, red_allowed=red_allowed)
        states.append(state)
    return states


def levels(
    points: list[tuple[float, float]], settings: RuleSettings = SETTINGS, spec: object = RATIO
) -> list[Level]:
    return [state.level for state in walk(points, settings, spec)]


@pytest.mark.parametrize(
    ("value", "level"), [(0.0, G), (0.699, G), (0.70, Y), (0.949, Y), (0.95, R), (1.0, R)]
)
def test_rising_is_immediate(value: float, level: Level) -> None:
    """The first judged value sets the level, and a threshold belongs to its own level."""
    assert levels([(0, 0.1), (1, value)])[-1] is level
    assert levels([(0, value)])[-1] is level


@pytest.mark.parametrize(
    ("points", "level"),
    [
        ([(0, 0.96), (1, 0.94), (60, 0.94)], R),  # within the margin: never falls
        ([(0, 0.96), (1, 0.92), (30.9, 0.92)], R),  # clear, but not for long enough
        ([(0, 0.96), (1, 0.92), (31, 0.92)], Y),
        ([(0, 0.96), (1, 0.10), (31, 0.10)], G),  # straight to green
        ([(0, 0.96), (1, 0.80), (20, 0.10), (31, 0.10)], Y),  # green has not held yet
        ([(0, 0.96), (1, 0.80), (20, 0.10), (31, 0.10), (50, 0.10)], G),
        ([(0, 0.96), (1, 0.92), (20, 0.94), (40, 0.92), (60, 0.92)], R),  # the margin was touched again
        ([(0, 0.75), (1, 0.69), (90, 0.69)], Y),
        ([(0, 0.75), (1, 0.67), (31, 0.67)], G),
    ],
)
def test_falling_waits_for_hold(points: list[tuple[float, float]], level: Level) -> None:
    """Falling goes to the level that has held for `hold`, counted from when the value was clear of it."""
    assert levels(points)[-1] is level


def test_for_delays_rising_and_says_pending() -> None:
    """With `for`, a crossing must last; one that does not leaves no trace."""
    settings = RuleSettings(yellow=0.70, red=0.95, for_s=10.0)
    states = walk([(0, 0.1), (1, 0.99), (10.9, 0.99), (11, 0.99)], settings)

    assert [state.level for state in states] == [G, G, G, R]
    assert states[1].reason is Reason.PENDING
    assert levels([(0, 0.1), (1, 0.99), (5, 0.5), (6, 0.99), (15, 0.99)], settings)[-1] is G


def test_a_first_crossing_that_pends_is_not_called_green() -> None:
    """A scope that has never been fine stays unknown while `for` runs."""
    settings = RuleSettings(red=1.0, for_s=120.0)

    assert levels([(0, 1.0), (119, 1.0), (120, 1.0)], settings) == [U, U, R]


@pytest.mark.parametrize(
    ("points", "level"),
    [
        ([(0, 1000.0)], G),
        ([(0, 200.0)], Y),
        ([(0, 50.0)], R),
        ([(0, 50.0), (1, 52.0), (90, 52.0)], R),  # within 5 % of the threshold
        ([(0, 50.0), (1, 53.0), (31, 53.0)], Y),
        ([(0, 50.0), (1, 500.0), (31, 500.0)], G),
        ([(0, 50.0), (1, float("inf")), (31, float("inf"))], G),
    ],
)
def test_low_is_bad_is_the_mirror(points: list[tuple[float, float]], level: Level) -> None:
    """Where low is bad, thresholds and margins are mirrored; infinity is the best there is."""
    settings = RuleSettings(yellow=200.0, red=50.0)

    assert levels(points, settings, BYTES_LOW)[-1] is level


@pytest.mark.parametrize(("value", "level"), [(0.0, G), (1.0, Y), (6.0, Y), (7.0, R)])
def test_strict_rules_begin_beyond_the_threshold(value: float, level: Level) -> None:
    """More than none is yellow and more than six is red, not none and six themselves."""
    assert levels([(0, value)], RETRIES.defaults, RETRIES)[-1] is level


def test_strict_rule_with_threshold_zero_can_fall() -> None:
    """No retries for `hold` is green again, although nothing is below zero."""
    assert levels([(0, 3.0), (1, 0.0), (31, 0.0)], RETRIES.defaults, RETRIES)[-1] is G


@pytest.mark.parametrize("clear", [None, 0.02, 0.5])
def test_a_low_threshold_can_be_left(clear: float | None) -> None:
    """A margin as wide as the threshold does not make a level that never ends."""
    settings = RuleSettings(yellow=0.02, red=0.05, clear=clear)

    assert levels([(0, 0.06), (1, 0.0), (31, 0.0)], settings)[-1] is G


def test_capped_red_stays_yellow_and_a_lost_condition_falls_after_hold() -> None:
    """Where red's other conditions do not hold, the value makes yellow; red whose conditions end is held."""
    band = hysteresis.bands(RATIO, SETTINGS)
    state = hysteresis.start(clock(0))
    state = hysteresis.advance(state, 0.99, clock(0), SETTINGS, band, red_allowed=False)
    assert (state.level, state.reason) == (Y, Reason.CAPPED)

    state = hysteresis.advance(state, 0.99, clock(1), SETTINGS, band, red_allowed=True)
    state = hysteresis.advance(state, 0.99, clock(2), SETTINGS, band, red_allowed=False)
    assert (state.level, state.reason) == (R, Reason.HOLDING)
    state = hysteresis.advance(state, 0.99, clock(32), SETTINGS, band, red_allowed=False)
    assert state.level is Y


def test_threshold_of_none_is_never_reached() -> None:
    """A rule without a red threshold knows no red, one without any is green."""
    assert levels([(0, 1.0)], RuleSettings(yellow=0.3))[-1] is Y
    assert levels([(0, 1.0)], RuleSettings())[-1] is G


STEPS = st.lists(
    st.tuples(st.floats(0.01, 20.0), st.floats(0.0, 1.0), st.booleans()), min_size=1, max_size=60
)


def timeline(steps: list[tuple[float, float, bool]]) -> list[tuple[float, float, bool]]:
    now_s, points = 0.0, []
    for gap_s, value, known in steps:
        now_s += gap_s
        points.append((now_s, value, known))
    return points


@given(STEPS)
def test_seconds_add_up_to_the_elapsed_time(steps: list[tuple[float, float, bool]]) -> None:
    """However levels change, the seconds of all levels are the time since the scope appeared."""
    band = hysteresis.bands(RATIO, SETTINGS)
    points = timeline(steps)
    state = hysteresis.start(clock(0.0))
    before: dict[Level, float] = {}
    for now_s, value, known in points:
        if known:
            state = hysteresis.advance(state, value, clock(now_s), SETTINGS, band)
        else:
            state = hysteresis.unknown(state, Reason.STALE, clock(now_s))
        seconds = dict(hysteresis.seconds_by_level(state, now_s))
        assert sum(seconds.values()) == pytest.approx(now_s)
        assert all(spent >= before.get(level, 0.0) - 1e-9 for level, spent in seconds.items())
        before = seconds


@given(st.lists(st.tuples(st.floats(0.01, 5.0), st.floats(0.931, 0.949)), min_size=1, max_size=60))
def test_no_flapping_inside_a_band(steps: list[tuple[float, float]]) -> None:
    """Between a threshold and its margin nothing ever changes, on either side."""
    settings = RuleSettings(red=0.95, hold_s=0.0)
    now_s, red, green = 1.0, [(0.0, 0.96)], [(0.0, 0.5)]
    for gap_s, value in steps:
        now_s += gap_s
        red.append((now_s, value))
        green.append((now_s, value))

    assert set(levels(red, settings)) == {R}
    assert set(levels(green, settings)) == {G}


@given(STEPS)
def test_rises_at_once_and_falls_only_after_hold(steps: list[tuple[float, float, bool]]) -> None:
    """No level is ever below that of the bare value, and none falls within `hold` of its cause."""
    points = [(now_s, value) for now_s, value, _ in timeline(steps)]
    last_at: dict[Level, float] = {}
    previous = U
    for (now_s, value), state in zip(points, walk(points), strict=True):
        bare = R if value >= 0.95 else Y if value >= 0.70 else G
        assert state.level >= bare
        for level in (Y, R):
            if bare >= level:
                last_at[level] = now_s
        if state.level < previous:
            assert now_s - last_at[previous] >= SETTINGS.hold_s
        previous = state.level


@given(STEPS, st.lists(st.floats(-1e6, 1e6), min_size=60, max_size=60))
def test_wall_clock_steps_change_nothing(steps: list[tuple[float, float, bool]], wall: list[float]) -> None:
    """A wall clock that jumps about moves no level, no timer and no second."""
    band = hysteresis.bands(RATIO, SETTINGS)
    steady = jumping = hysteresis.start(clock(0.0))
    for (now_s, value, _), jump_s in zip(timeline(steps), wall, strict=False):
        steady = hysteresis.advance(steady, value, clock(now_s), SETTINGS, band)
        jumping = hysteresis.advance(jumping, value, clock(now_s, jump_s), SETTINGS, band)
        assert (steady.level, steady.since_s, steady.reason) == (
            jumping.level,
            jumping.since_s,
            jumping.reason,
        )
        assert hysteresis.seconds_by_level(steady, now_s) == hysteresis.seconds_by_level(jumping, now_s)
