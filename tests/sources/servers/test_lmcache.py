"""LMCache: the fill of a host cache, never that of the GPU's pool."""

from __future__ import annotations

import pytest

from kvwatch.model.server import Evictable, SchedulerState
from kvwatch.sources.servers import registry
from tests.sources.servers import recorded
from tests.sources.servers.made import answer, gauge, page
from tests.sources.servers.reading import only, parse, read


def test_bytes_over_the_configured_capacity() -> None:
    """The metrics tell bytes and /conf the capacity; everything cached can be evicted."""
    state = read("lmcache", "0.5.6", "busy")

    assert only(state).kv.usage_ratio == pytest.approx(0.6)
    assert only(state).kv.pool_bytes is None
    assert only(state).scheduler == SchedulerState()
    assert state.semantics.evictable is Evictable.USED
    assert any("disk 12.00 GiB" in note for note in state.notes)


@pytest.mark.parametrize(
    "conf", [None, b"", b"{}", b'{"max_local_cpu_size":0}', b'{"max_local_cpu_size":"5"}']
)
def test_without_capacity_usage_is_unknown(conf: bytes | None) -> None:
    """Bytes without a capacity are no ratio."""
    bodies = {"metrics": page(gauge("lmcache:local_cache_usage", 1e9))}
    state = parse("lmcache", metrics_path=None, **bodies if conf is None else {**bodies, "conf": conf})

    assert only(state).kv.usage_ratio is None
    assert any("max_local_cpu_size" in note for note in state.notes)


def test_capacity_may_be_nested() -> None:
    """/conf may wrap the settings in `config`."""
    conf = answer({"config": {"max_local_cpu_size": 2}})

    assert (
        only(
            parse("lmcache", metrics=page(gauge("lmcache:local_cache_usage", 1024**3)), conf=conf)
        ).kv.usage_ratio
        == 0.5
    )


def test_multiprocess_server_tells_a_ratio() -> None:
    """The multiprocess server has the ratio itself."""
    assert only(read("lmcache", "0.5.6-mp", "busy")).kv.usage_ratio == 0.83


def test_engine_with_lmcache_inside_is_still_the_engine() -> None:
    """LMCache's series on vLLM's page leave it a vLLM server for `auto`, and a note says so."""
    mixed = recorded.page("vllm", "0.32.0", "half") + page(gauge("lmcache:local_cache_usage", 1e9))
    (clue,) = registry.adapter("lmcache").clues

    assert not clue.body.search(mixed)
    assert any("own `kind`" in note for note in parse("lmcache", metrics=mixed).notes)
