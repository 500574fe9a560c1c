"""Stalled engines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvwatch.model.report import Snapshot
from kvwatch.model.server import Activity, EngineState
from kvwatch.model.settings import ServerSettings
from tests.signals.build import FREE_EVICTABLE, Run, engine, page, settings


def _run(seconds: int, make: object, run: Run | None = None, step_s: float = 1.0) -> Run:
    run = run or Run()
    for step in range(seconds):
        run.page(1000.0 + step * step_s, make(step))  # type: ignore[operator]
    return run


def test_frozen_counters_with_requests_are_a_stall_after_five_seconds() -> None:
    """Requests run, no token counter moves: not stalled at 4 s, stalled at 5 s, and for how long."""
    run = _run(5, lambda _: engine(generation=100))
    assert run.chat.engines[0].stalled is False
    last = run.page(1005.0, engine(generation=100))

    assert last.stalled is True
    assert last.stalled_for_s == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("generation", lambda step: engine(generation=step)),
        ("prompt", lambda step: engine(prompt=step)),
        ("idle", lambda step: engine(running=0, waiting=0)),
    ],
    ids=["generation moves", "prompt moves", "nothing to do"],
)
def test_progress_or_idleness_is_no_stall(name: str, make: object) -> None:
    """Any moving token counter, or no request at all, is not a stall."""
    assert _run(20, make).chat.engines[0].stalled is False


def test_steps_count_as_progress() -> None:
    """A long prefill that counts no token yet but takes steps is alive."""

    def at(step: int) -> EngineState:
        one = engine()
        return replace(one, scheduler=replace(one.scheduler, steps_total=step))

    assert _run(20, at).chat.engines[0].stalled is False


def test_waiting_alone_is_work() -> None:
    """Requests that only wait while nothing moves are a stall (a paused engine looks so, and is one)."""
    paused = _run(8, lambda _: engine(running=0, waiting=3, activity=Activity.PAUSED))

    assert paused.chat.engines[0].stalled is True


def test_without_counters_a_stall_cannot_be_told() -> None:
    """No token counter reported: unknown, not stalled."""
    run = _run(20, lambda _: engine(prompt=None, generation=None))

    assert run.chat.engines[0].stalled is None


def test_slow_poller_needs_three_periods() -> None:
    """With a period of 4 s, 8 s without movement is no stall yet, 12 s is."""
    config = settings(ServerSettings(name="chat", kind="vllm", period_s=4.0))
    run = _run(3, lambda _: engine(), Run(config), step_s=4.0)
    assert run.chat.engines[0].stalled is False

    assert run.page(1012.0, engine()).stalled is True


def test_old_page_says_nothing() -> None:
    """When pages stop coming, the engine is not called stalled: nothing is known."""
    run = _run(8, lambda _: engine())
    run.tick(Snapshot(servers={"chat": page(1007.0, engine())}), 1020.0)

    assert run.chat.engines[0].stalled is None


def test_gap_in_the_pages_starts_the_clock_again() -> None:
    """After ten seconds without a page, the first page alone is no evidence of a stall."""
    run = _run(2, lambda _: engine())

    assert run.page(1012.0, engine()).stalled is False


def test_gauges_that_may_be_old_are_believed_later() -> None:
    """Where "running" may be 30 s old at rest, standing counters are a stall only after 30 s."""
    slow = replace(FREE_EVICTABLE, fresh_within_s=30.0)
    run = Run()
    for step in range(30):
        last = run.page(1000.0 + step, engine(), semantics=slow)
    assert last.stalled is False

    assert run.page(1030.0, engine(), semantics=slow).stalled is True


def test_restart_is_no_stall() -> None:
    """After a restart the clock starts again, and one sample tells nothing."""
    run = _run(5, lambda _: engine(generation=100))

    assert run.page(1005.0, engine(generation=0)).stalled is None
