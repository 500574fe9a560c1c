"""LightLLM: load per rank from one endpoint, requests from another."""

from __future__ import annotations

import pytest

from kvwatch.model.server import Evictable, SchedulerState
from tests.sources.servers.made import answer
from tests.sources.servers.reading import only, parse, read, refusal


def test_current_load_is_usage_and_the_expected_peak_is_not() -> None:
    """What is held now is the usage; what the batch may grow to is left out."""
    state = read("lightllm", "2026", "busy")

    assert only(state).kv.usage_ratio == 0.41
    assert state.semantics.evictable is Evictable.FREE
    assert (only(state).scheduler.running, only(state).scheduler.waiting) == (14, 2)


def test_histogram_named_bucket() -> None:
    """The queue's histogram has `_bucket` in its own name and is read all the same."""
    queue = only(read("lightllm", "2026", "busy")).queue

    assert queue is not None
    assert queue.count == 2


def test_ranks_have_a_load_but_no_requests() -> None:
    """/metrics adds ranks up, so with several ranks requests belong to none of them."""
    engines = read("lightllm", "2026-dp2", "busy").engines

    assert [(e.engine, e.kv.usage_ratio) for e in engines] == [("0", 0.2), ("1", 0.9)]
    assert all(engine.scheduler == SchedulerState() for engine in engines)


def test_load_alone_is_enough() -> None:
    """Without /metrics the load is known and the rest is not, and a note says so."""
    state = parse("lightllm", token_load=answer({"current_load": 0.5}))

    assert only(state).kv.usage_ratio == 0.5
    assert any("/metrics" in note for note in state.notes)


@pytest.mark.parametrize("value", [None, [], "0.5", [0.5, None], True, {}])
def test_other_answers_are_refused(value: object) -> None:
    """A load that is no number is not LightLLM's."""
    assert "LightLLM" in refusal("lightllm", token_load=answer({"current_load": value})).message
