"""What becomes of a level when there is no value to judge? Held for a while, then unknown; never green."""

from __future__ import annotations

from dataclasses import replace

from kvwatch.model.level import Level, Reason
from kvwatch.model.report import TickClock
from kvwatch.model.settings import OnStale, RuleSettings
from kvwatch.rules import hysteresis
from kvwatch.rules.hysteresis import Bands, LevelState
from kvwatch.rules.spec import Reading

HELD_PERIODS = 3  # contract: `on_stale: hold` keeps a level for three periods, then unknown
PERIOD_FLOOR_S = 1.0  # shorter periods count as a second, so that a busy host does not blink


def judge(
    state: LevelState, reading: Reading, clock: TickClock, settings: RuleSettings, band: Bands
) -> LevelState:
    """Advance one scope by one reading, whether or not it has a value.

    A level is only ever raised by a fresh value, or by `on_stale: red` where there was a judged
    level before; too few samples, a starting server or a source never seen stay unknown.
    """
    if reading.absent is Reason.STALE:
        return _stale(state, clock, settings, reading.period_s)
    if reading.absent is not None:
        return hysteresis.unknown(state, reading.absent, clock)
    if reading.value is None:
        return hysteresis.unknown(state, Reason.NOT_REPORTED, clock)
    return hysteresis.advance(state, reading.value, clock, settings, band, red_allowed=reading.red_allowed)


def _stale(state: LevelState, clock: TickClock, settings: RuleSettings, period_s: float) -> LevelState:
    """Say what stale input makes of a level. Green is never kept: nothing here knows that all is well."""
    if state.level is Level.UNKNOWN:
        return hysteresis.unknown(state, Reason.STALE, clock)
    if settings.on_stale is OnStale.RED:
        return hysteresis.forced(state, Level.RED, Reason.STALE, clock)
    if settings.on_stale is OnStale.UNKNOWN or state.level is Level.GREEN:
        return hysteresis.unknown(state, Reason.STALE, clock)
    since_s = clock.mono_s if state.stale_since_s is None else state.stale_since_s
    if clock.mono_s - since_s >= HELD_PERIODS * max(period_s, PERIOD_FLOOR_S):
        return hysteresis.unknown(state, Reason.STALE, clock)
    if state.stale_since_s is None:
        state = replace(state, stale_since_s=since_s)
    return hysteresis.forced(state, state.level, Reason.STALE_HELD, clock)
