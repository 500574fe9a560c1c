"""TGI: a reservation is no occupancy, and what has not happened yet is unknown."""

from __future__ import annotations

from kvwatch.model.server import Basis, KvCacheState, SchedulerState
from tests.sources.servers.made import answer, gauge, page
from tests.sources.servers.reading import only, parse, read, refusal


def test_usage_is_reserved_over_budget_and_declared_as_such() -> None:
    """Usage is what the batch may grow to; the rule that warns of full caches is told that it is no fill."""
    state = read("tgi", "v3", "busy")

    assert only(state).kv.usage_ratio == 49152 / 65536
    assert only(state).kv.tokens is None
    assert state.semantics.basis is Basis.RESERVATION
    assert (state.version, state.model) == ("3.3.6", "org/model")


def test_cold_server_is_up_and_unknown() -> None:
    """Before the first request no gauge is there: TGI is recognised by /info, and nothing is 0."""
    for version in ("v2", "v3"):
        state = read("tgi", version, "cold")

        assert only(state).kv.usage_ratio is None
        assert only(state).scheduler == SchedulerState()
        assert any("first event" in note for note in state.notes) or version == "v3"


def test_idle_after_load_is_zero() -> None:
    """After a batch the gauges say 0, and that is a figure."""
    engine = only(read("tgi", "v3", "after"))

    assert (engine.kv.usage_ratio, engine.scheduler.running, engine.scheduler.waiting) == (0.0, 0, 0)


def test_router_without_budget_has_no_usage() -> None:
    """Router v2 does not show its budget: usage is unknown, and a note says so."""
    state = read("tgi", "v2", "busy")

    assert only(state).kv == KvCacheState()
    assert only(state).scheduler.running == 12
    assert any("v3" in note for note in state.notes)


def test_counters_without_total_and_steps_of_both_methods() -> None:
    """TGI's counters have no `_total`; steps are prefills and decodes together."""
    scheduler = only(read("tgi", "v3", "busy")).scheduler

    assert (scheduler.steps_total, scheduler.finished_total) == (5140, 231)
    assert scheduler.preemptions_total is None


def test_embedding_server_is_not_taken_for_tgi() -> None:
    """Hugging Face's embedding server answers /info too; without a text budget it is refused."""
    info = answer({"model_id": "bge", "max_concurrent_requests": 512, "max_input_length": 512})

    assert "TGI" in refusal("tgi", metrics=page(gauge("te_queue_size", 0)), info=info).message


def test_reservation_over_the_budget_is_unknown() -> None:
    """A reservation far over the budget is no ratio."""
    text = page(gauge("tgi_batch_current_max_tokens", 900), gauge("tgi_batch_max_total_tokens", 100))

    assert only(parse("tgi", metrics=text)).kv.usage_ratio is None
