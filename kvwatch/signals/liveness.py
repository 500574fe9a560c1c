"""Is an engine with requests making progress? A hung engine's page looks perfectly healthy."""

from __future__ import annotations

from kvwatch.model.server import EngineState, SchedulerState

LEAST_S = 5.0
PERIODS = 3.0
"""Contract: stalled = running or waiting, and no token counter moved for max(3 periods, 5 s)."""


def limit_s(period_s: float, fresh_within_s: float) -> float:
    """How long the counters must have stood still.

    Where a gauge may be `fresh_within_s` old although the page is new (SGLang at rest: 30 s), requests
    "running" are believed only after that long.
    """
    return max(PERIODS * period_s, LEAST_S, fresh_within_s)


def busy(scheduler: SchedulerState) -> bool | None:
    """Whether requests are running or waiting; None when neither is reported."""
    if scheduler.running is None and scheduler.waiting is None:
        return None
    return (scheduler.running or 0) > 0 or (scheduler.waiting or 0) > 0


def progressed(last: SchedulerState, new: SchedulerState) -> bool | None:
    """Whether any token counter moved between two readings; None when none is reported in both."""
    pairs = (
        (last.generation_tokens_total, new.generation_tokens_total),
        (last.prompt_tokens_total, new.prompt_tokens_total),
        (last.steps_total, new.steps_total),
    )
    known = [(old, now) for old, now in pairs if old is not None and now is not None]
    return any(old != now for old, now in known) if known else None


def moved_s(before_s: float, last: EngineState, new: EngineState, now_s: float, *, gap: bool) -> float:
    """When the engine last made progress or had nothing to do; a gap in the readings counts as progress."""
    still = busy(new.scheduler) and progressed(last.scheduler, new.scheduler) is False and not gap
    return before_s if still else now_s


def stalled(last: EngineState, new: EngineState, stood_s: float, limit: float) -> bool | None:
    """Whether the engine is stalled, having stood still for `stood_s`; None when it cannot be told."""
    has_work = busy(new.scheduler)
    if has_work is None or progressed(last.scheduler, new.scheduler) is None:
        return None
    return has_work and stood_s >= limit
