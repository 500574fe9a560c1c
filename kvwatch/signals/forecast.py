"""When will it be full? A deterministic floor, and a robust central time with an interval that is checked.

Central: Theil-Sen slope (median of pairwise slopes) of the level over a window without reset or gap.
Interval: order statistics of the same slopes, after Kendall's variance (Sen 1968), stated at 80 %.
Successive readings are correlated, so the interval is too narrow as it stands: past ones are checked when
they come due, the share that held is exported, and the interval is widened or narrowed towards 80 %.

The level rises towards `full`: the filled share of the KV pool (full = 1), or headroom with its sign
turned (full = 0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvwatch.model.signal import Forecast, ForecastState
from kvwatch.signals.series import Points, push, thin

INTERVAL = 0.80
INTERVAL_Z = 1.2816
"""Standard normal quantile of a two-sided 80 % interval."""

MAX_POINTS = 24
"""Points of one fit: 276 pairwise slopes. Sixty points would take six times as long for little."""

IMMINENT_S = 60.0
MIN_CHECKED = 20
"""Forecasts that must have come due before their coverage is stated."""

WIDEN = 0.1
MAX_WIDENING = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One resource's windows in seconds. At or over `saturated` the resource counts as full."""

    window_s: float
    min_span_s: float
    spacing_s: float
    horizon_s: float
    full: float
    saturated: float
    min_points: int = 5


KV = Spec(window_s=60.0, min_span_s=15.0, spacing_s=1.0, horizon_s=15.0, full=1.0, saturated=0.99)
DEVICE = Spec(
    window_s=3600.0, min_span_s=540.0, spacing_s=60.0, horizon_s=300.0, full=0.0, saturated=0.0, min_points=10
)
"""Ten points a minute apart span 9 minutes and cover ten, since each is the low of its minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Slope per second with its interval."""

    slope: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A stated interval of the level, to be checked at `due_s`."""

    due_s: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastTrack:
    """History of one level, its newest fit, and how the stated intervals have done."""

    points: Points = ()
    fit: Fit | None = None
    due: Due | None = None
    checked: int = 0
    held: int = 0
    widening: float = 1.0


def broken(track: ForecastTrack) -> ForecastTrack:
    """Forget the history (reset, gap or step change); the measured coverage lives on."""
    if not track.points:
        return track
    return ForecastTrack(checked=track.checked, held=track.held, widening=track.widening)


def observe(track: ForecastTrack, spec: Spec, now_s: float, level: float, *, gap_s: float) -> ForecastTrack:
    """Take in one reading of the level; fit anew only when it became a point (at most once a second)."""
    if track.points and now_s - track.points[-1][0] > max(gap_s, 2 * spec.spacing_s):
        track = broken(track)
    points = push(track.points, now_s, level, spacing_s=spec.spacing_s, window_s=spec.window_s)
    if points is track.points:
        return track
    track = _check(replace(track, points=points), now_s, level, gap_s)
    fit = fit_slope(points, spec)
    due = track.due
    if due is None and fit is not None and fit.slope > 0:
        due = _promise(_widened(fit, track.widening), spec, now_s, level)
    return replace(track, fit=fit, due=due)


def fit_slope(points: Points, spec: Spec) -> Fit | None:
    """Theil-Sen slope and interval; None with too few points or too short a span."""
    if len(points) < spec.min_points or points[-1][0] - points[0][0] < spec.min_span_s:
        return None
    chosen = thin(points, MAX_POINTS)
    first = chosen[0][1]
    if all(value == first for _, value in chosen):
        return Fit(slope=0.0, low=0.0, high=0.0)
    slopes = sorted(
        [
            (later - value) / (later_s - time_s)
            for index, (time_s, value) in enumerate(chosen, 1)
            for later_s, later in chosen[index:]
        ]
    )
    n, pairs = len(chosen), len(slopes)
    half = INTERVAL_Z * math.sqrt(n * (n - 1) * (2 * n + 5) / 18) / 2
    low = max(0, math.floor(pairs / 2 - half))
    high = min(pairs - 1, math.ceil(pairs / 2 + half))
    middle = (slopes[pairs // 2] + slopes[(pairs - 1) // 2]) / 2
    return Fit(slope=middle, low=slopes[low], high=slopes[high])


def _widened(fit: Fit, by: float) -> Fit:
    return Fit(
        slope=fit.slope,
        low=fit.slope - by * (fit.slope - fit.low),
        high=fit.slope + by * (fit.high - fit.slope),
    )


def _promise(fit: Fit, spec: Spec, now_s: float, level: float) -> Due:
    """Where the level is to be at the horizon; beyond "full" there is nothing to tell apart."""
    low, high = level + fit.low * spec.horizon_s, level + fit.high * spec.horizon_s
    return Due(
        due_s=now_s + spec.horizon_s,
        low=min(low, spec.saturated),
        high=math.inf if high >= spec.saturated else high,
    )


def _check(track: ForecastTrack, now_s: float, level: float, gap_s: float) -> ForecastTrack:
    """Score the interval that has come due, and widen (after a miss) or narrow the next ones."""
    due = track.due
    if due is None or now_s < due.due_s:
        return track
    if now_s - due.due_s > gap_s:
        return replace(track, due=None)
    slack = 1e-9 * max(1.0, abs(level))
    hit = due.low - slack <= level <= due.high + slack
    factor = math.exp(WIDEN * ((INTERVAL - 1.0) if hit else INTERVAL))
    return replace(
        track,
        due=None,
        checked=track.checked + 1,
        held=track.held + hit,
        widening=min(MAX_WIDENING, max(1.0, track.widening * factor)),
    )


def forecast(
    track: ForecastTrack, spec: Spec, level: float | None, max_rate_per_s: float | None = None
) -> Forecast:
    """What can be said now, with the level of now and the newest fit.

    `max_rate_per_s` (level per second, the highest seen) gives the floor. All times are >= 0, fall as the
    level rises, and are infinite where the level is not rising.
    """
    coverage = track.held / track.checked if track.checked >= MIN_CHECKED else None
    if level is None:
        return Forecast(coverage_ratio=coverage, coverage_count=track.checked)
    room = max(0.0, spec.full - level)
    floor_s = room / max_rate_per_s if max_rate_per_s else None
    if level >= spec.saturated:
        return Forecast(
            state=ForecastState.SATURATED,
            floor_s=floor_s,
            coverage_ratio=coverage,
            coverage_count=track.checked,
        )
    if track.fit is None:
        return Forecast(floor_s=floor_s, coverage_ratio=coverage, coverage_count=track.checked)
    fit = _widened(track.fit, track.widening)
    low_s, central_s = _time(room, fit.high), _time(room, fit.slope)
    return Forecast(
        state=_state(low_s, central_s),
        floor_s=floor_s,
        low_s=low_s,
        central_s=central_s,
        high_s=_time(room, fit.low),
        slope_per_s=fit.slope,
        coverage_ratio=coverage,
        coverage_count=track.checked,
    )


def _time(room: float, slope: float) -> float:
    return room / slope if slope > 0 else math.inf


def _state(low_s: float, central_s: float) -> ForecastState:
    if central_s == math.inf:
        return ForecastState.STABLE
    return ForecastState.IMMINENT if low_s < IMMINENT_S else ForecastState.RISING
