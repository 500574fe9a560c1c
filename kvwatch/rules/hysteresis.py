"""When does a level change? Rising is immediate (or after `for`), falling waits for `hold` beyond `clear`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, nan, nextafter

from kvwatch.model.level import Level, Reason
from kvwatch.model.report import TickClock
from kvwatch.model.settings import RuleSettings
from kvwatch.rules.spec import OTHER_CLEAR_SHARE, RATIO_CLEAR, Direction, RuleSpec, Unit

Seconds = tuple[tuple[Level, float], tuple[Level, float], tuple[Level, float], tuple[Level, float]]

_NO_TIME = (0.0, 0.0, 0.0, 0.0)
_WAITING = frozenset({Reason.HOLDING, Reason.PENDING, Reason.STALE_HELD})  # time alone moves these


@dataclass(frozen=True, slots=True, kw_only=True)
class Bands:
    """The thresholds of one scope, made ready for comparing.

    `sign` times a value is worse the higher it is. A level begins at `*_at` and is clear below
    `*_clear_at`; both are NaN where there is no such threshold, which no value reaches.
    """

    yellow: float | None = None
    red: float | None = None
    sign: float = 1.0
    yellow_at: float = nan
    red_at: float = nan
    yellow_clear_at: float = nan
    red_clear_at: float = nan


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelState:
    """One rule in one scope. Times are monotonic seconds, `since_wall_s` Unix seconds (display only).

    `*_over_s`: since when the value has been at or beyond the threshold; `*_clear_s`: since when it
    has been back beyond the margin. `seconds_before` holds the time at each level (unknown, green,
    yellow, red) up to `since_s`: nothing is added up tick by tick, so nothing is lost to rounding.
    """

    level: Level = Level.UNKNOWN
    since_s: float
    since_wall_s: float
    reason: Reason = Reason.NOT_REPORTED
    yellow_over_s: float | None = None
    red_over_s: float | None = None
    yellow_clear_s: float | None = None
    red_clear_s: float | None = None
    stale_since_s: float | None = None
    seconds_before: tuple[float, float, float, float] = _NO_TIME


def start(clock: TickClock) -> LevelState:
    """Return the state of a scope seen for the first time: unknown since now."""
    return LevelState(since_s=clock.mono_s, since_wall_s=clock.wall_s)


def bands(
    spec: RuleSpec, settings: RuleSettings, yellow: float | None = None, red: float | None = None
) -> Bands:
    """Return the thresholds in force; `yellow` and `red` replace the configured ones in one scope."""
    yellow = settings.yellow if yellow is None else yellow
    red = settings.red if red is None else red
    sign = -1.0 if spec.direction is Direction.LOW else 1.0
    yellow_at, yellow_clear_at = _limits(spec, settings, yellow, sign)
    red_at, red_clear_at = _limits(spec, settings, red, sign)
    return Bands(
        yellow=yellow,
        red=red,
        sign=sign,
        yellow_at=yellow_at,
        red_at=red_at,
        yellow_clear_at=yellow_clear_at,
        red_clear_at=red_clear_at,
    )


def _limits(
    spec: RuleSpec, settings: RuleSettings, threshold: float | None, sign: float
) -> tuple[float, float]:
    """Return where a level begins and where it is clear, in signed values."""
    if threshold is None:
        return nan, nan
    at, clear_at = sign * threshold, sign * threshold - _margin(spec, settings, threshold)
    if spec.strict:
        at, clear_at = nextafter(at, inf), nextafter(clear_at, inf)
    if sign > 0 and threshold > 0:
        clear_at = max(clear_at, nextafter(0.0, inf))  # nothing is below zero, however wide the margin
    return at, clear_at


def _margin(spec: RuleSpec, settings: RuleSettings, threshold: float) -> float:
    if settings.clear is not None:
        return settings.clear
    size = abs(threshold)
    # A margin as large as the threshold itself (the tax has 0.02) would make a level that never ends.
    return min(RATIO_CLEAR, 0.5 * size) if spec.unit is Unit.RATIO else OTHER_CLEAR_SHARE * size


def advance(
    state: LevelState,
    value: float,
    clock: TickClock,
    settings: RuleSettings,
    band: Bands,
    *,
    red_allowed: bool = True,
) -> LevelState:
    """Take in one fresh value. Pure; wall-clock steps change nothing but what is shown."""
    timed, reached = _timed(state, value, clock.mono_s, band, red_allowed)
    level = _next_level(timed, reached, clock.mono_s, settings)
    reason = _reason(level, reached, band.sign * value >= band.red_at and not red_allowed)
    return _moved(timed, level, reason, clock)


def at_rest(state: LevelState, value: float, band: Bands) -> bool:
    """Whether `advance` would change nothing: green, and clear of every threshold as before."""
    signed = band.sign * value
    return (
        state.reason is Reason.BELOW
        and state.yellow_clear_s is not None
        and state.red_clear_s is not None
        and not signed >= band.yellow_clear_at
        and not signed >= band.red_clear_at
    )


def settled(state: LevelState) -> bool:
    """Whether the same reading once more, at any later time, would change nothing."""
    return state.reason not in _WAITING


def unknown(state: LevelState, reason: Reason, clock: TickClock) -> LevelState:
    """Go to UNKNOWN and forget every timer; a stale state remembers since when it is stale."""
    untimed = state.yellow_over_s is None and state.red_over_s is None
    if state.level is Level.UNKNOWN and state.reason is reason and untimed:
        return state
    bare = replace(state, yellow_over_s=None, red_over_s=None, yellow_clear_s=None, red_clear_s=None)
    return _moved(bare, Level.UNKNOWN, reason, clock)


def forced(state: LevelState, level: Level, reason: Reason, clock: TickClock) -> LevelState:
    """Go to a level whatever the value; falling from it needs a full `hold` of fresh values again."""
    if state.yellow_clear_s is None and state.red_clear_s is None:
        return _moved(state, level, reason, clock)
    return _moved(replace(state, yellow_clear_s=None, red_clear_s=None), level, reason, clock)


def seconds_by_level(state: LevelState, now_s: float) -> Seconds:
    """Seconds at each level since the scope appeared; they add up to the time since then."""
    unknown_s, green_s, yellow_s, red_s = state.seconds_before
    running_s, level = now_s - state.since_s, state.level
    if level is Level.GREEN:
        green_s += running_s
    elif level is Level.UNKNOWN:
        unknown_s += running_s
    elif level is Level.YELLOW:
        yellow_s += running_s
    else:
        red_s += running_s
    return (
        (Level.UNKNOWN, unknown_s),
        (Level.GREEN, green_s),
        (Level.YELLOW, yellow_s),
        (Level.RED, red_s),
    )


def _timed(
    state: LevelState, value: float, now_s: float, band: Bands, red_allowed: bool
) -> tuple[LevelState, Level]:
    """Return the state with its four timers brought up to date, and the level of the bare value."""
    signed = band.sign * value
    red_past = signed >= band.red_at
    red = red_past and red_allowed
    # Past red is past yellow too, also where a small device has its yellow threshold beyond red.
    yellow = band.yellow is not None and (red_past or signed >= band.yellow_at)
    red_clear = not red_allowed or not signed >= band.red_clear_at
    yellow_clear = not red_past and not signed >= band.yellow_clear_at
    timers = (
        _since(state.yellow_over_s, yellow or red, now_s),
        _since(state.red_over_s, red, now_s),
        _since(state.yellow_clear_s, yellow_clear or band.yellow is None, now_s),
        _since(state.red_clear_s, red_clear, now_s),
    )
    reached = Level.RED if red else Level.YELLOW if yellow else Level.GREEN
    kept = (state.yellow_over_s, state.red_over_s, state.yellow_clear_s, state.red_clear_s)
    if timers == kept and state.stale_since_s is None:
        return state, reached
    return _with_timers(state, timers), reached


def _since(before: float | None, holds: bool, now_s: float) -> float | None:
    if not holds:
        return None
    return now_s if before is None else before


def _with_timers(
    state: LevelState, timers: tuple[float | None, float | None, float | None, float | None]
) -> LevelState:
    return LevelState(
        level=state.level,
        since_s=state.since_s,
        since_wall_s=state.since_wall_s,
        reason=state.reason,
        yellow_over_s=timers[0],
        red_over_s=timers[1],
        yellow_clear_s=timers[2],
        red_clear_s=timers[3],
        seconds_before=state.seconds_before,
    )


def _next_level(state: LevelState, reached: Level, now_s: float, settings: RuleSettings) -> Level:
    risen = _risen(state, reached, now_s, settings.for_s)
    if risen > state.level:
        return risen
    if state.level is Level.UNKNOWN:
        # Crossed, but `for` has not passed: there is no green to go back to, so it stays unknown.
        return Level.UNKNOWN if reached > Level.GREEN else Level.GREEN
    return _fallen(state, now_s, settings.hold_s)


def _risen(state: LevelState, reached: Level, now_s: float, for_s: float) -> Level:
    if reached >= Level.RED and _lasted(state.red_over_s, now_s, for_s):
        return Level.RED
    if reached >= Level.YELLOW and _lasted(state.yellow_over_s, now_s, for_s):
        return min(reached, Level.YELLOW)
    return Level.UNKNOWN


def _fallen(state: LevelState, now_s: float, hold_s: float) -> Level:
    if state.level is Level.RED and not _lasted(state.red_clear_s, now_s, hold_s):
        return Level.RED
    if state.level >= Level.YELLOW and not _lasted(state.yellow_clear_s, now_s, hold_s):
        return Level.YELLOW
    return Level.GREEN


def _lasted(since_s: float | None, now_s: float, for_s: float) -> bool:
    return since_s is not None and now_s - since_s >= for_s


def _reason(level: Level, reached: Level, capped: bool) -> Reason:
    if reached > level:
        return Reason.PENDING
    if reached < level:
        return Reason.HOLDING
    if capped:
        return Reason.CAPPED
    return Reason.BELOW if level is Level.GREEN else Reason.CROSSED


def _moved(state: LevelState, level: Level, reason: Reason, clock: TickClock) -> LevelState:
    if level is state.level:
        return state if reason is state.reason else replace(state, reason=reason)
    (_, unknown_s), (_, green_s), (_, yellow_s), (_, red_s) = seconds_by_level(state, clock.mono_s)
    return replace(
        state,
        level=level,
        reason=reason,
        since_s=clock.mono_s,
        since_wall_s=clock.wall_s,
        seconds_before=(unknown_s, green_s, yellow_s, red_s),
    )
