"""Preemptions and what they cost, in tokens and in time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.model.server import EngineState
from kvwatch.model.signal import EngineSignals
from kvwatch.signals.pressure import time_share, token_share
from tests.signals.build import Run, engine


def _minute(run: Run, make: object, seconds: int = 61, start: int = 0) -> EngineSignals:
    for second in range(start, start + seconds):
        last = run.page(1000.0 + second, make(second))  # type: ignore[operator]
    return last


def test_tax_is_recomputed_tokens_over_the_highest_prompt_rate() -> None:
    """One preemption a second of 1,000-token requests is 500 tokens/s: 5 % of 10,000 prompt tokens/s."""

    def at(second: int) -> EngineState:
        # Prompts at 10,000/s in the first ten seconds only: the highest rate is remembered.
        return engine(
            1.0,
            slots=16000,
            running=16,
            preemptions=second,
            prompt=min(second, 10) * 10000,
            generation=second * 400,
        )

    last = _minute(Run(), at, 121)

    assert last.preemptions_per_s == pytest.approx(1.0)
    assert last.recompute_tax_ratio == pytest.approx(0.05)
    assert last.recomputed_tokens_ratio == pytest.approx(500 / 900)


@pytest.mark.parametrize("leap", [10**9, 10**15, 10**17])
def test_a_leap_that_no_engine_makes_is_no_rate(leap: int) -> None:
    """A page that leaps once neither makes a server red at that moment nor, as the highest rate ever seen,
    keeps its tax at nothing for ever."""

    def at(second: int) -> EngineState:
        more = leap if second >= 20 else 0
        return engine(
            1.0,
            slots=16000,
            running=16,
            preemptions=second + (more if leap > 10**12 else 0),
            prompt=min(second, 10) * 10000 + more,
            generation=second * 400,
        )

    run = Run()
    shares = [run.page(1000.0 + second, at(second)).recompute_tax_ratio or 0.0 for second in range(121)]

    assert max(shares) <= 0.0501
    assert shares[-1] == pytest.approx(0.05)


def test_numbers_that_no_server_has_are_unknown() -> None:
    """A billion requests running or waiting: nothing is decided on such a page."""
    last = Run().page(1000.0, engine(running=10**17, waiting=10**9))

    assert (last.running, last.waiting) == (None, None)


def test_share_of_tokens_is_not_share_of_time() -> None:
    """A decode-heavy server that recomputes two thirds of its tokens spends a tenth of its time on it."""

    def at(second: int) -> EngineState:
        # 16 requests of 1,000 tokens; 8.5 preempted in 2 s; prefill has been seen to do 22,000 tokens/s.
        return engine(
            1.0,
            slots=16000,
            running=16,
            preemptions=int(second * 4.25),
            prompt=22000 * min(second, 2),
            generation=1000 * second,
        )

    last = _minute(Run(), at, 125)

    assert last.recomputed_tokens_ratio == pytest.approx(0.68, abs=0.01)
    assert last.recompute_tax_ratio == pytest.approx(0.097, abs=0.002)


def test_own_counter_is_preferred_to_the_estimate() -> None:
    """Where the server counts recomputed tokens itself, its count is used."""

    def at(second: int) -> EngineState:
        one = engine(1.0, preemptions=second, prompt=second * 1000, generation=0)
        return replace(one, scheduler=replace(one.scheduler, recomputed_tokens_total=second * 100))

    last = _minute(Run(), at)

    assert last.recompute_tax_ratio == pytest.approx(0.1)
    assert last.recomputed_tokens_ratio == pytest.approx(100 / 1100)


def test_one_sample_gives_no_rate() -> None:
    """Rates need two samples; levels do not."""
    first = Run().page(1000.0, engine(0.5, preemptions=7, prompt=100))

    assert first.samples == 1
    assert first.kv_usage_ratio == 0.5
    assert first.preemptions_per_s is None
    assert first.recompute_tax_ratio is None
    assert first.recomputed_tokens_ratio is None
    assert first.prompt_tokens_per_s is None


def test_a_server_without_the_counter_has_no_tax() -> None:
    """No preemption counter: unknown, not zero."""
    last = _minute(Run(), lambda second: engine(preemptions=None, prompt=second * 100))

    assert last.recompute_tax_ratio is None
    assert last.preemptions_per_s is None


def test_no_preemptions_cost_nothing() -> None:
    """A counter that stands still is a tax of exactly zero, even before any prompt was seen."""
    last = _minute(Run(), lambda second: engine(preemptions=5, prompt=0, generation=second))

    assert last.recompute_tax_ratio == 0.0
    assert last.recomputed_tokens_ratio == 0.0


def test_restart_begins_the_window_anew_and_is_counted() -> None:
    """Counters that went back give no negative rate: samples restart at 1 and the old minute is forgotten."""
    run = Run()
    _minute(run, lambda second: engine(1.0, preemptions=second * 10, prompt=second * 1000))
    reset = run.page(1061.0, engine(0.0, preemptions=0, prompt=10))
    later = run.page(1062.0, engine(0.1, preemptions=0, prompt=20))

    assert (reset.samples, reset.restarts_total, reset.recompute_tax_ratio) == (1, 1, None)
    assert (later.samples, later.preemptions_per_s, later.prompt_tokens_per_s) == (2, 0.0, 10.0)


def test_two_servers_at_one_url_cost_nothing() -> None:
    """Behind a balancer the pages of two replicas take turns: the leap between them is nobody's work."""
    run, busy, idle = Run(), 4_000, 10
    told = []
    for turn in range(12):
        base = busy if turn // 2 % 2 else idle
        page = engine(1.0, preemptions=base + turn, prompt=1000 * base + 100 * turn, generation=100 * base)
        told.append(run.page(1000.0 + turn, page))
    shown = told[5:]  # the first leap up is not known for what it is before the first fall

    assert {one.samples for one in shown} == {1, 2}
    assert {one.preemptions_per_s for one in shown} == {None, 1.0}
    assert max(one.recompute_tax_ratio or 0.0 for one in shown) < 1.0


def test_highest_rate_survives_a_restart_but_not_another_model() -> None:
    """The speed of the engine is remembered over a restart, unless another model was loaded."""
    for model, expected in (("m", 0.05), ("other", None)):
        run = Run()
        run.page(1000.0, engine(1.0, slots=16000, running=16, prompt=0))
        run.page(1001.0, engine(1.0, slots=16000, running=16, prompt=10000))
        run.page(1002.0, engine(1.0, slots=16000, running=16, prompt=0), model=model)
        last = run.page(1003.0, engine(1.0, slots=16000, running=16, prompt=0, preemptions=1), model=model)

        assert last.recompute_tax_ratio == (None if expected is None else pytest.approx(expected))


def test_fast_polling_does_not_inflate_the_highest_rate() -> None:
    """Prompts counted in lumps between polls 50 ms apart are not taken for a rate of 20 lumps a second."""
    run = Run()
    for step in range(200):
        last = run.page(1000.0 + step * 0.05, engine(1.0, prompt=(step // 20) * 1000, preemptions=step // 20))

    assert last.recompute_tax_ratio is not None
    assert last.recompute_tax_ratio > 0.6


def test_unknown_request_size_is_not_taken_as_free() -> None:
    """A preemption whose size cannot be told makes the tax unknown, not smaller."""
    run = Run()
    run.page(1000.0, engine(None, preemptions=0, prompt=0))
    last = run.page(1001.0, engine(None, preemptions=3, prompt=1000))

    assert last.preemptions_per_s == 3.0
    assert last.recompute_tax_ratio is None


def test_case_H9_tax_does_not_depend_on_prefix_hits() -> None:
    """Cached-token counts, which preempted requests inflate, change nothing."""

    def at(second: int, cached: int) -> EngineState:
        one = engine(1.0, preemptions=second, prompt=second * 1000, generation=second * 100)
        return replace(one, scheduler=replace(one.scheduler, cached_prompt_tokens_total=cached))

    plain = _minute(Run(), lambda second: at(second, 0))
    inflated = _minute(Run(), lambda second: at(second, second * 990))

    assert plain == inflated


@given(st.floats(0, 1e9), st.floats(1e-3, 1e9), st.floats(0, 1e9), st.floats(0, 1e9))
def test_shares_are_ratios(recomputed: float, fastest: float, prompt: float, generation: float) -> None:
    """Both shares stay between 0 and 1."""
    time, tokens = time_share(recomputed, fastest), token_share(recomputed, prompt, generation)

    assert time is not None
    assert tokens is not None
    assert 0.0 <= time <= 1.0
    assert 0.0 <= tokens <= 1.0
