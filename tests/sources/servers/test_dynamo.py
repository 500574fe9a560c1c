"""Dynamo: workers are their engines, a front end is a queue without a cache."""

from __future__ import annotations

import pytest

from kvwatch.model.server import Evictable, KvCacheState, SchedulerState
from kvwatch.sources.base import SourceError
from tests.sources.servers import recorded
from tests.sources.servers.made import gauge, page, sample
from tests.sources.servers.reading import only, parse, read, refusal


def test_worker_is_read_as_its_engine() -> None:
    """vLLM's own series count, with vLLM's semantics, and Dynamo's gauges do not replace them."""
    state = read("dynamo", "1.6.1-vllm", "preempting")

    assert state.kind == "dynamo"
    assert only(state).kv.usage_ratio == 29 / 32
    assert (only(state).kv.num_blocks, only(state).scheduler.preemptions_total) == (32, 69)
    assert state.semantics.evictable is Evictable.FREE


def test_null_block_of_vllm_is_not_counted() -> None:
    """Where vLLM does not tell its blocks, Dynamo's figure is taken without the block that is never used."""
    body = recorded.page("dynamo", "1.6.1-vllm", "preempting")
    without = b"\n".join(line for line in body.splitlines() if b"cache_config_info" not in line) + b"\n"

    assert b"dynamo_component_total_blocks" in without
    assert only(parse("dynamo", metrics=without)).kv.num_blocks == 32


def test_mocker_shows_its_engine_from_the_first_request_on() -> None:
    """The mocker's page is vLLM's in small; before the first request the state says what is missing."""
    busy = only(read("dynamo", "1.6.1-mocker", "queue"))
    cold = read("dynamo", "1.6.1-mocker", "cold")

    assert (busy.kv.usage_ratio, busy.scheduler.running, busy.scheduler.waiting) == (0.875, 4, 20)
    assert (only(cold).kv, only(cold).scheduler) == (KvCacheState(), SchedulerState())
    assert any("first request" in note for note in cold.notes)


def test_other_engines_are_passed_through_too() -> None:
    """SGLang's and TensorRT-LLM's series are recognised behind Dynamo's."""
    own = page(gauge("dynamo_component_total_blocks", 10, dp_rank=0))
    sglang = recorded.page("sglang", "0.5.23", "half")
    trtllm = recorded.page("trtllm", "main", "busy")

    assert only(parse("dynamo", metrics=own + sglang)).scheduler.running == 3
    assert only(parse("dynamo", metrics=own + trtllm)).kv.used_blocks == 1536


def test_own_gauges_fill_what_is_missing() -> None:
    """Without the engine's series blocks and usage per rank are Dynamo's; a prefill worker has none."""
    assert only(read("dynamo", "1.6.1-worker", "alone")).kv == KvCacheState(usage_ratio=0.5, num_blocks=32)
    prefill = read("dynamo", "1.6.1-worker", "prefill")
    assert only(prefill).kv == KvCacheState()
    assert any("prefill" in note for note in prefill.notes)


def test_percent_in_the_name_is_a_ratio() -> None:
    """The gauge called percent is 0 to 1; a value of 62 is not taken for one."""
    text = page(gauge("dynamo_component_gpu_cache_usage_percent", 62, dp_rank=0))

    assert only(parse("dynamo", metrics=text)).kv.usage_ratio is None


def test_front_end_has_queue_and_latency_but_no_usage() -> None:
    """Queued requests are part of those in flight; the router's guess of blocks is no usage."""
    engine = only(read("dynamo", "1.6.1-frontend", "queue"))

    assert (engine.scheduler.running, engine.scheduler.waiting, engine.scheduler.max_running) == (8, 16, 8)
    assert engine.scheduler.finished_total == 6
    assert engine.kv == KvCacheState()
    assert engine.ttft is not None


def test_finished_requests_are_added_up() -> None:
    """Endpoints, outcomes and kinds of request are series of one counter."""
    name = "dynamo_frontend_requests_total"
    done = [
        sample(name, count, endpoint=endpoint, model="m", status=status)
        for endpoint, status, count in (
            ("chat", "success", 80),
            ("chat", "error", 5),
            ("completions", "", 20),
        )
    ]
    text = page(gauge("dynamo_frontend_model_ready", 1, model="m"), [f"# TYPE {name} counter", *done])

    assert only(parse("dynamo", metrics=text)).scheduler.finished_total == 105


def test_front_end_before_its_first_request_is_idle() -> None:
    """Its series of requests come with the first one: until then a model that is served has none."""
    scheduler = only(read("dynamo", "1.6.1-frontend", "cold")).scheduler

    assert (scheduler.running, scheduler.waiting, scheduler.finished_total) == (0, 0, 0)
    assert scheduler.max_running == 8


def test_missing_gauges_of_a_front_end_in_use_are_unknown() -> None:
    """Once requests were counted, a missing gauge is a gauge that was renamed, and no 0."""
    body = recorded.page("dynamo", "1.6.1-frontend", "queue")
    for name in (b"inflight_requests", b"active_requests", b"queued_requests"):
        body = body.replace(b"dynamo_frontend_" + name, b"dynamo_frontend_new_" + name)
    scheduler = only(parse("dynamo", metrics=body)).scheduler

    assert (scheduler.running, scheduler.waiting, scheduler.finished_total) == (None, None, 6)


def test_front_end_without_a_model_is_no_error() -> None:
    """It is up, nothing is known of requests, and it says so."""
    state = read("dynamo", "1.6.1-frontend", "without_model")

    assert only(state).scheduler == SchedulerState()
    assert any("no model" in note for note in state.notes)


def test_request_for_an_unknown_model_adds_none() -> None:
    """Dynamo counts it under a model "unknown_model": the one that is served stays engine 0."""
    state = read("dynamo", "1.6.1-frontend", "prefix")

    assert [engine.engine for engine in state.engines] == ["0"]
    assert state.model == "tinyv"


def test_models_of_a_front_end_are_kept_apart() -> None:
    """Two models are two entries, each with its own queue."""
    text = page(*([sample("dynamo_frontend_queued_requests", n, model=m)] for m, n in (("a", 1), ("b", 2))))

    assert [(e.engine, e.scheduler.waiting) for e in parse("dynamo", metrics=text).engines] == [
        ("a", 1),
        ("b", 2),
    ]


def test_replaced_prefix_is_found() -> None:
    """DYN_METRICS_PREFIX replaces "dynamo_frontend" in the names that count."""
    state = read("dynamo", "1.6.1-frontend", "prefix")

    assert only(state).scheduler.max_running == 16
    assert (only(state).scheduler.running, only(state).scheduler.waiting) == (0, 0)


def test_several_workers_on_one_page_are_refused() -> None:
    """Two values for one rank mean that the page mixes workers."""
    text = page(
        *([sample("dynamo_component_total_blocks", n, dp_rank=0, worker_id=n)] for n in (1, 2)),
    )

    with pytest.raises(SourceError, match="several"):
        parse("dynamo", metrics=text)
    assert "DYN_SYSTEM_PORT" in refusal("dynamo", metrics=b"other 1\n").message
