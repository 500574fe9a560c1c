"""Dynamo: workers are their engines, a front end is a queue without a cache."""

from __future__ import annotations

import pytest

from kvwatch.model.server import Evictable, KvCacheState
from kvwatch.sources.base import SourceError
from tests.sources.servers import recorded
from tests.sources.servers.made import gauge, page, sample
from tests.sources.servers.reading import only, parse, read, refusal


def test_worker_is_read_as_its_engine() -> None:
    """vLLM's own series count, with vLLM's semantics, and Dynamo's gauges do not replace them."""
    state = read("dynamo", "1.6.1-worker", "vllm")

    assert state.kind == "dynamo"
    assert only(state).kv.usage_ratio == 0.46875
    assert state.semantics.evictable is Evictable.FREE


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
    engine = only(read("dynamo", "1.6.1-frontend", "busy"))

    assert (engine.scheduler.running, engine.scheduler.waiting, engine.scheduler.max_running) == (3, 7, 3)
    assert engine.scheduler.finished_total == 100
    assert engine.kv == KvCacheState()
    assert engine.ttft is not None


def test_models_of_a_front_end_are_kept_apart() -> None:
    """Two models are two entries, each with its own queue."""
    text = page(*([sample("dynamo_frontend_queued_requests", n, model=m)] for m, n in (("a", 1), ("b", 2))))

    assert [(e.engine, e.scheduler.waiting) for e in parse("dynamo", metrics=text).engines] == [
        ("a", 1),
        ("b", 2),
    ]


def test_replaced_prefix_is_found() -> None:
    """DYN_METRICS_PREFIX replaces "dynamo" in every name."""
    text = page(gauge("acme_component_total_blocks", 7, dp_rank=0))

    assert only(parse("dynamo", metrics=text)).kv.num_blocks == 7


def test_several_workers_on_one_page_are_refused() -> None:
    """Two values for one rank mean that the page mixes workers."""
    text = page(
        *([sample("dynamo_component_total_blocks", n, dp_rank=0, worker_id=n)] for n in (1, 2)),
    )

    with pytest.raises(SourceError, match="several"):
        parse("dynamo", metrics=text)
    assert "DYN_SYSTEM_PORT" in refusal("dynamo", metrics=b"other 1\n").message
