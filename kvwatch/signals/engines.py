"""One engine from reading to reading: its histories, and the signals that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvwatch.model.server import AgentState, EngineState, Semantics
from kvwatch.model.signal import EngineSignals, Forecast
from kvwatch.signals import forecast, latency, liveness, occupancy, phase, pressure
from kvwatch.signals.series import Points, halves_rise, push
from kvwatch.signals.waste import waste

WAITING_WINDOW_S = 60.0
MOST_REQUESTS = 1_000_000  # as of a lease
RETURN_S = 60.0
"""Counters that fall and are back above what they fell from within this belong to two servers at one URL:
what lies between the two pages was never counted by either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One good page of a server, and what is needed to make sense of it."""

    server: str
    observed_s: float
    gap_s: float  # readings further apart than this leave a gap
    period_s: float
    semantics: Semantics
    model: str
    agents: Sequence[AgentState]
    restarted: bool  # the server refused connections since the last page


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTrack:
    """Everything remembered of one engine; its size does not grow with time."""

    last: EngineState
    last_s: float
    model: str
    samples: int
    restarts: int
    pressure: pressure.PressureTrack
    ttft: latency.History
    tpot: latency.History
    queue: latency.History
    waiting: Points
    waiting_rise: float | None
    moved_s: float
    stalled: bool | None
    kv: forecast.ForecastTrack
    fell_from: tuple[float, EngineState] | None = None  # when counters last fell, and from where


def advance(track: EngineTrack | None, engine: EngineState, reading: Reading) -> EngineTrack:
    """Take in one reading of an engine; a restart begins every history anew, and so does a return."""
    if track is None:
        return _begin(None, engine, reading)
    if phase.counters_fell(track.last, engine):
        return replace(_begin(track, engine, reading), fell_from=(reading.observed_s, track.last))
    if reading.restarted and not phase.same_process(track.last, engine):
        return _begin(track, engine, reading)
    if _returned(track, engine, reading.observed_s):
        return replace(_begin(track, engine, reading), restarts=track.restarts)
    return _continue(track, engine, reading)


def _returned(track: EngineTrack, engine: EngineState, now_s: float) -> bool:
    if track.fell_from is None:
        return False
    at_s, before = track.fell_from
    return now_s - at_s <= RETURN_S and not phase.counters_fell(before, engine)


def _begin(before: EngineTrack | None, engine: EngineState, reading: Reading) -> EngineTrack:
    now_s, usage = reading.observed_s, occupancy.usage_ratio(engine.kv, reading.semantics)
    same_model = before is not None and before.model == reading.model
    old_kv = forecast.ForecastTrack() if before is None else forecast.broken(before.kv)
    return EngineTrack(
        last=engine,
        last_s=now_s,
        model=reading.model,
        samples=1,
        restarts=0 if before is None else before.restarts + 1,
        pressure=pressure.begin(engine, usage, now_s, before.pressure if before and same_model else None),
        ttft=latency.remember((), now_s, engine.ttft, None),
        tpot=latency.remember((), now_s, engine.tpot, None),
        queue=latency.remember((), now_s, engine.queue, None),
        waiting=_waiting((), engine, now_s),
        waiting_rise=None,
        moved_s=now_s,
        stalled=None,
        kv=_kv_forecast(old_kv, engine, usage, reading),
    )


def _continue(track: EngineTrack, engine: EngineState, reading: Reading) -> EngineTrack:
    now_s, last = reading.observed_s, track.last
    usage = occupancy.usage_ratio(engine.kv, reading.semantics)
    waiting = _waiting(track.waiting, engine, now_s)
    gap = now_s - track.last_s > reading.gap_s
    moved_s = liveness.moved_s(track.moved_s, last, engine, now_s, gap=gap)
    limit_s = liveness.limit_s(reading.period_s, reading.semantics.fresh_within_s)
    return EngineTrack(
        last=engine,
        last_s=now_s,
        model=reading.model,
        samples=track.samples + 1,
        restarts=track.restarts,
        pressure=pressure.advance(track.pressure, engine, usage, now_s),
        ttft=latency.remember(track.ttft, now_s, engine.ttft, last.ttft),
        tpot=latency.remember(track.tpot, now_s, engine.tpot, last.tpot),
        queue=latency.remember(track.queue, now_s, engine.queue, last.queue),
        waiting=waiting,
        waiting_rise=track.waiting_rise if waiting is track.waiting else halves_rise(waiting),
        moved_s=moved_s,
        stalled=liveness.stalled(last, engine, now_s - moved_s, limit_s),
        kv=_kv_forecast(track.kv, engine, usage, reading),
        fell_from=track.fell_from,
    )


def signals(track: EngineTrack, reading: Reading) -> EngineSignals:
    """What the newest reading, with what came before it, means."""
    engine, now_s = track.last, track.last_s
    usage = occupancy.usage_ratio(engine.kv, reading.semantics)
    costs = pressure.pressure(track.pressure)
    rise = track.waiting_rise
    return EngineSignals(
        server=reading.server,
        engine=engine.engine,
        samples=track.samples,
        kv_usage_ratio=usage,
        running=_requests(engine.scheduler.running),
        waiting=_requests(engine.scheduler.waiting),
        waiting_rising=None if rise is None else rise > 0,
        preemptions_per_s=costs.preemptions_per_s,
        recompute_tax_ratio=costs.tax_ratio,
        recomputed_tokens_ratio=costs.tokens_ratio,
        prompt_tokens_per_s=costs.prompt_tokens_per_s,
        generation_tokens_per_s=costs.generation_tokens_per_s,
        ttft=latency.quantiles(track.ttft, now_s, engine.ttft),
        tpot=latency.quantiles(track.tpot, now_s, engine.tpot),
        queue=latency.quantiles(track.queue, now_s, engine.queue),
        waste=waste(engine, reading.semantics, usage, _agents_of(engine, reading)),
        demand_ratio=occupancy.demand_ratio(engine, usage),
        kv_forecast=_forecast_now(track.kv, engine, usage, track.pressure, reading),
        stalled=track.stalled,
        stalled_for_s=now_s - track.moved_s if track.stalled else None,
        restarts_total=track.restarts,
    )


def _requests(number: int | None) -> int | None:
    """A number of requests; unknown where no server can have so many: nothing is decided on such a page."""
    return None if number is None or number > MOST_REQUESTS else number


def stale_signals(server: str, track: EngineTrack) -> EngineSignals:
    """What is left to say when there is no current page: nothing but counts."""
    return EngineSignals(
        server=server, engine=track.last.engine, samples=track.samples, restarts_total=track.restarts
    )


def _agents_of(engine: EngineState, reading: Reading) -> list[AgentState]:
    return [agent for agent in reading.agents if agent.engine == engine.engine]


def _waiting(points: Points, engine: EngineState, now_s: float) -> Points:
    waiting = engine.scheduler.waiting
    if waiting is None:
        return ()
    return push(points, now_s, float(waiting), spacing_s=1.0, window_s=WAITING_WINDOW_S)


def _kv_forecast(
    track: forecast.ForecastTrack, engine: EngineState, usage: float | None, reading: Reading
) -> forecast.ForecastTrack:
    level = occupancy.fill_ratio(engine.kv, reading.semantics, usage)
    if level is None:
        return forecast.broken(track)
    return forecast.observe(track, forecast.KV, reading.observed_s, level, gap_s=reading.gap_s)


def _forecast_now(
    track: forecast.ForecastTrack,
    engine: EngineState,
    usage: float | None,
    tracked: pressure.PressureTrack,
    reading: Reading,
) -> Forecast:
    """Forecast with the level of this reading; the floor is room for tokens over the highest token rate."""
    level = occupancy.fill_ratio(engine.kv, reading.semantics, usage)
    slots, tokens_per_s = occupancy.capacity_tokens(engine.kv), tracked.max_tokens_per_s
    fastest = tokens_per_s / slots if tokens_per_s is not None and slots is not None else None
    return forecast.forecast(track, forecast.KV, level, fastest)
