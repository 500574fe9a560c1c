"""Time to exhaustion, for the KV pool and the device."""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.model.settings import GIB, MIB
from kvwatch.model.signal import ForecastState
from kvwatch.signals.forecast import DEVICE, KV, Fit, ForecastTrack, fit_slope, forecast, observe
from tests.signals.build import Run, engine, gpu, process

TRACE = Path(__file__).parent / "vllm_trace.csv"


def test_linear_growth_is_forecast_exactly() -> None:
    """1 % a second from 0: after 30 s, 70 s are left, with no doubt about it."""
    run = Run()
    for second in range(31):
        last = run.page(1000.0 + second, engine(second / 100))
    found = last.kv_forecast

    assert found.state is ForecastState.RISING
    assert found.central_s == pytest.approx(70.0)
    assert found.low_s == pytest.approx(70.0)
    assert found.high_s == pytest.approx(70.0)
    assert found.slope_per_s == pytest.approx(0.01)


def test_interval_holds_the_central_time() -> None:
    """With noise the interval is open on both sides of the central time."""
    noise = random.Random(3)
    run = Run()
    for second in range(60):
        last = run.page(1000.0 + second, engine(0.2 + second / 200 + noise.uniform(-0.02, 0.02)))
    found = last.kv_forecast

    assert found.low_s is not None
    assert found.central_s is not None
    assert found.high_s is not None
    assert found.low_s < found.central_s < found.high_s
    assert found.central_s == pytest.approx(100.0, rel=0.25)


@pytest.mark.parametrize(
    ("level", "state"),
    [
        (lambda second: 0.5, ForecastState.STABLE),
        (lambda second: 0.9 - second / 100, ForecastState.STABLE),
        (lambda second: second / 100, ForecastState.RISING),
        (lambda second: 0.4 + second / 100, ForecastState.IMMINENT),
        (lambda second: 0.995, ForecastState.SATURATED),
    ],
    ids=["flat", "falling", "rising", "imminent", "full"],
)
def test_states(level: object, state: ForecastState) -> None:
    """Not filling is stable (and infinite); under a minute imminent; at 99 % full there is no time."""
    run = Run()
    for second in range(31):
        last = run.page(1000.0 + second, engine(level(second)))  # type: ignore[operator]
    found = last.kv_forecast

    assert found.state is state
    if state is ForecastState.STABLE:
        assert found.central_s == math.inf
    if state is ForecastState.SATURATED:
        assert (found.low_s, found.central_s, found.high_s) == (None, None, None)


def test_floor_is_room_over_the_highest_token_rate() -> None:
    """Half of 16,000 slots free, 4,000 tokens a second seen at most: 2 s, even when usage stands still."""
    run = Run()
    run.page(1000.0, engine(0.5, prompt=0, generation=0))
    run.page(1001.0, engine(0.5, prompt=3000, generation=1000))
    last = run.page(1002.0, engine(0.5, prompt=3010, generation=1010))

    assert last.kv_forecast.floor_s == pytest.approx(2.0)


def test_too_short_a_window_forecasts_nothing() -> None:
    """Under 15 s of history there is no slope."""
    run = Run()
    for second in range(14):
        last = run.page(1000.0 + second, engine(second / 20))

    assert last.kv_forecast.state is ForecastState.UNKNOWN
    assert last.kv_forecast.central_s is None


@pytest.mark.parametrize("event", ["reset", "gap"])
def test_reset_or_gap_in_the_window_forecasts_nothing(event: str) -> None:
    """After a counter reset or a gap of more than three periods, the history starts anew."""
    run = Run()
    for second in range(30):
        run.page(1000.0 + second, engine(second / 100, generation=second))
    if event == "reset":
        last = run.page(1030.0, engine(0.3, generation=0))
    else:
        last = run.page(1036.0, engine(0.3, generation=99))

    assert last.kv_forecast.state is ForecastState.UNKNOWN


def test_device_drift_is_forecast_over_minutes() -> None:
    """10 MiB a minute with 600 MiB left: about an hour, once ten minutes have been seen."""
    run = Run()
    for second in range(0, 1201, 2):
        used = 80 * GIB - 512 * MIB - 800 * MIB + second * 10 * MIB // 60
        last = run.gpu(1000.0 + second, gpu(1000.0 + second, used))

    assert last.headroom_bytes == 600 * MIB
    assert last.device_forecast.central_s == pytest.approx(3600.0, rel=0.05)
    assert last.device_forecast.state is ForecastState.RISING


def test_step_change_starts_the_device_history_anew() -> None:
    """A new process is a step, not a trend: the forecast is unknown until ten minutes later."""
    run = Run()
    for second in range(0, 800, 2):
        run.gpu(1000.0 + second, gpu(1000.0 + second, 10 * GIB))
    assert run.signals.gpus[0].device_forecast.state is ForecastState.STABLE
    for second in range(800, 810, 2):
        last = run.gpu(1000.0 + second, gpu(1000.0 + second, 20 * GIB, [process(1, 10 * GIB, "x")]))

    assert last.last_step_change_s is not None
    assert last.last_step_change_s >= 1800.0
    assert last.device_forecast.state is ForecastState.UNKNOWN


def test_coverage_is_measured_after_twenty_checks() -> None:
    """Intervals are scored when they come due; the share that held is near the stated 80 %."""
    noise = random.Random(5)
    track, level, shares = ForecastTrack(), 0.0, []
    for second in range(40_000):
        level = level + 0.002 + noise.gauss(0, 0.004) if level < 0.9 else 0.05
        track = observe(track, KV, float(second), max(0.0, level), gap_s=3.0)
        found = forecast(track, KV, level)
        shares.append(found.coverage_ratio)
        assert (found.coverage_ratio is None) == (found.coverage_count < 20)

    assert shares[-1] == pytest.approx(0.8, abs=0.08)


def test_case_I3_slow_drift_is_told_hours_ahead() -> None:
    """Free memory drifts from 1,517 to 337 MB in 5 h: on the way the time left is known within a quarter."""
    start, per_s = 1517 * 10**6, (1517 - 337) * 10**6 / 18_000
    run = Run()
    for second in range(0, 5400, 5):
        now_s = 1000.0 + second
        free = start - int(per_s * second) // (2 * MIB) * (2 * MIB)
        last = run.gpu(now_s, gpu(now_s, 80 * GIB - 512 * MIB - free))
    truth_s = (start - per_s * 5400) / per_s

    assert last.device_forecast.central_s == pytest.approx(truth_s, rel=0.25)


def test_real_overload_is_replayed() -> None:
    """A real vLLM run into thrashing: every preemption is seen, saturation is called, no time is negative."""
    run, rows = Run(), list(csv.DictReader(TRACE.read_text().splitlines()))
    begin_s, states, previous, peak = float(rows[0]["t"]), set(), 0.0, 0.0
    for row in rows:
        now_s = 1000.0 + float(row["t"]) - begin_s
        preempted = int(float(row["preemptions"]))
        one = engine(
            float(row["usage_max"]),
            slots=1024,
            block=32,
            running=int(float(row["running"])),
            waiting=int(float(row["waiting"])),
            preemptions=preempted,
            prompt=int((now_s - 1000.0) * 400),
            generation=int((now_s - 1000.0) * 200),
        )
        shown = run.page(now_s, one)
        found = shown.kv_forecast
        states.add(found.state)
        previous = max(previous, shown.preemptions_per_s or 0.0)
        peak = max(peak, shown.recompute_tax_ratio or 0.0)
        assert all(
            time_s is None or time_s >= 0
            for time_s in (found.floor_s, found.low_s, found.central_s, found.high_s)
        )

    assert {ForecastState.SATURATED, ForecastState.UNKNOWN} <= states
    assert shown.preemptions_per_s == pytest.approx(61 / (now_s - 1000.0), rel=0.01)
    assert shown.restarts_total == 0
    assert 0.05 < peak <= 1.0


points = st.lists(st.floats(0.0, 1.0), min_size=5, max_size=60).map(
    lambda levels: tuple((4.0 * index, level) for index, level in enumerate(levels))
)


@given(points, st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(1e-6, 10.0))
def test_forecast_is_never_negative_and_falls_with_the_level(
    history: tuple[tuple[float, float], ...], one: float, other: float, rate: float
) -> None:
    """With the same history a fuller pool never has more time; times are ordered and never negative."""
    track = ForecastTrack(points=history, fit=fit_slope(history, KV))
    emptier, fuller = forecast(track, KV, min(one, other), rate), forecast(track, KV, max(one, other), rate)

    for found in (emptier, fuller):
        times = [time_s for time_s in (found.low_s, found.central_s, found.high_s) if time_s is not None]
        assert times == sorted(times)
        assert all(time_s >= 0 for time_s in times)
    if fuller.central_s is not None:
        assert emptier.central_s is not None
        assert fuller.central_s <= emptier.central_s
    assert fuller.floor_s is not None
    assert emptier.floor_s is not None
    assert fuller.floor_s <= emptier.floor_s


@given(points)
def test_slope_lies_within_its_interval(history: tuple[tuple[float, float], ...]) -> None:
    """The median slope is never outside its own order statistics."""
    fit = fit_slope(history, KV)

    assert fit is None or fit.low <= fit.slope <= fit.high


def test_slope_ignores_an_outlier() -> None:
    """One wild reading among thirty does not move the slope."""
    clean = tuple((float(second), 0.01 * second) for second in range(30))
    wild = (*clean[:15], (15.0, 0.9), *clean[16:])
    fit = fit_slope(wild, KV)

    assert fit is not None
    assert fit.slope == pytest.approx(0.01)


def test_memory_is_bounded() -> None:
    """Ten hours of readings keep no more points than one window."""
    track = ForecastTrack()
    for second in range(0, 36_000, 5):
        track = observe(track, DEVICE, float(second), -1e9 + second, gap_s=180.0)

    assert len(track.points) <= 70
    assert isinstance(track.fit, Fit)
