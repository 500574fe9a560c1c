"""LMDeploy: a warm cache is full and no danger."""

from __future__ import annotations

from kvwatch.model.server import Evictable
from kvwatch.signals import occupancy
from tests.sources.servers.made import gauge, page
from tests.sources.servers.reading import only, parse, read, refusal


def test_warm_cache_is_declared_as_evictable() -> None:
    """Usage of 0.99 counts cached prefixes as used, so no forecast of "full" is made of it."""
    state = read("lmdeploy", "0.18.0", "warm")
    kv = only(state).kv

    assert kv.usage_ratio == 0.991
    assert state.semantics.evictable is Evictable.USED
    assert occupancy.fill_ratio(kv, state.semantics, kv.usage_ratio) is None


def test_gauges_are_up_to_ten_seconds_old() -> None:
    """The timer's 10 s are declared, so that a busy gauge with still counters is no stall at once."""
    assert read("lmdeploy", "0.18.0", "warm").semantics.fresh_within_s == 10.0


def test_ranks_are_engines_and_reasons_are_added() -> None:
    """Each rank is an engine of its own; finished requests are added up over their reasons."""
    engines = read("lmdeploy", "0.18.0", "dp2").engines

    assert [(e.engine, e.kv.usage_ratio, e.scheduler.running) for e in engines] == [
        ("0", 0.4, 3),
        ("1", 0.9, 9),
    ]
    assert engines[0].scheduler.finished_total == 32


def test_missing_usage_is_unknown_and_said() -> None:
    """Without the usage gauge usage is unknown, not 0."""
    state = parse("lmdeploy", metrics=page(gauge("lmdeploy:num_requests_running", 1)))

    assert only(state).kv.usage_ratio is None
    assert any("usage is unknown" in note for note in state.notes)


def test_page_without_the_gauges_is_refused() -> None:
    """An info series alone is not enough."""
    assert (
        "--disable-metrics" in refusal("lmdeploy", metrics=b'lmdeploy:backend_config_info{a="b"} 1\n').message
    )
