"""SGLang: /v1/loads, /metrics, and what each lacks."""

from __future__ import annotations

import json

import pytest

from kvwatch.model.sample import FailureKind
from kvwatch.model.server import EngineState, Evictable, ServerState
from kvwatch.model.settings import ServerSettings
from kvwatch.sources.base import SourceError
from kvwatch.sources.servers import registry, sglang
from tests.sources.loopback import pages, serving
from tests.sources.servers import recorded


def parse(**bodies: bytes) -> ServerState:
    return sglang.parse(bodies, ServerSettings(name="x", kind="sglang"))


def load(rank: int = 0, **values: object) -> dict[str, object]:
    figures = {
        "num_running_reqs": 3,
        "num_waiting_reqs": 1,
        "num_used_tokens": 600,
        "max_total_num_tokens": 1000,
    }
    return {"dp_rank": rank, "token_usage": 0.6, "max_running_requests": 32, **figures, **values}


def loads(*entries: object) -> bytes:
    return json.dumps({"version": "0.5.23", "loads": list(entries)}).encode()


def line(name: str, value: float, **labels: str) -> str:
    merged = {"engine_type": "unified", "model_name": "m", "pp_rank": "0", "tp_rank": "0", **labels}
    inner = ",".join(f'{key}="{text}"' for key, text in merged.items())
    return f"sglang:{name}{{{inner}}} {value}\n"


def test_recorded_retraction() -> None:
    """Retractions are counted from the counter (the gauge stays 0), and pages are disjoint and add up."""
    case = "retracting"
    version = "0.5.23-retract"
    state = parse(
        loads=recorded.page("sglang", version, case, "loads"), metrics=recorded.page("sglang", version, case)
    )
    engine = state.engines[0]

    assert engine.scheduler.preemptions_total == 1
    assert engine.scheduler.recomputed_tokens_total == 294
    assert (engine.scheduler.running, engine.scheduler.waiting, engine.scheduler.max_running) == (6, 10, 32)
    kv = engine.kv
    assert (kv.num_blocks, kv.used_blocks, kv.free_blocks, kv.evictable_blocks) == (2048, 1797, 191, 60)
    assert state.version == "0.5.23"
    assert state.semantics.evictable is Evictable.FREE


def test_loads_alone_are_enough() -> None:
    """Without --enable-metrics there are load, usage and the limit; the rest is said to be unknown."""
    state = parse(loads=loads(load()))
    engine = state.engines[0]

    assert (engine.kv.usage_ratio, engine.kv.capacity_tokens) == (0.6, 1000)
    assert (engine.scheduler.running, engine.scheduler.max_running) == (3, 32)
    assert engine.scheduler.preemptions_total is None
    assert any("--enable-metrics" in note for note in state.notes)


def test_metrics_alone_are_enough() -> None:
    """Before 0.5.10 there is no /v1/loads: the gauges are read."""
    state = parse(metrics=recorded.page("sglang", "0.5.23", "half"))
    engine = state.engines[0]

    assert engine.kv.usage_ratio == pytest.approx(0.322, abs=0.01)
    assert engine.scheduler.running == 3
    assert engine.scheduler.max_running is None


def test_no_retraction_yet_is_zero() -> None:
    """The retraction counters appear with the first retraction: on a metrics page without them it is 0."""
    state = parse(metrics=recorded.page("sglang", "0.5.23", "half"))

    assert state.engines[0].scheduler.preemptions_total == 0


def test_copies_of_ranks_and_priorities_are_not_added() -> None:
    """Tensor ranks repeat the figures and priorities are parts of them: each engine is counted once."""
    page = "".join(
        line("num_running_reqs", value, **labels)
        for value, labels in (
            (5, {"dp_rank": "0"}),
            (5, {"dp_rank": "0", "tp_rank": "1"}),
            (2, {"dp_rank": "0", "priority": "1"}),
            (7, {"dp_rank": "1"}),
        )
    )
    engines = parse(metrics=page.encode()).engines

    assert [(e.engine, e.scheduler.running) for e in engines] == [("0", 5), ("1", 7)]


def test_ranks_of_loads_are_engines() -> None:
    """Each data-parallel rank is an engine; latencies, which know no rank, belong to none of several."""
    engines = parse(loads=loads(load(1), load(0, num_running_reqs=9))).engines

    assert [(e.engine, e.scheduler.running) for e in engines] == [("0", 9), ("1", 3)]
    assert all(e.ttft is None for e in engines)


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"loads":{}}',
        loads(3),
        loads({"dp_rank": "0"}),
        loads({"dp_rank": True}),
        loads(load(), load()),
    ],
    ids=["none", "object", "number", "text", "bool", "twice"],
)
def test_loads_of_another_shape_are_refused(body: bytes) -> None:
    """An answer that is not /v1/loads is a SourceError."""
    with pytest.raises(SourceError):
        parse(loads=body)


@pytest.mark.parametrize("value", [None, "3", True, 1e300, -5, [], float("nan")])
def test_odd_figures_are_unknown(value: object) -> None:
    """A figure that is no count is not reported."""
    engine: EngineState = parse(loads=loads(load(num_running_reqs=value, token_usage=value))).engines[0]

    assert engine.scheduler.running is None
    assert engine.kv.usage_ratio is None


def test_neither_endpoint_says_what_to_switch_on() -> None:
    """A server that answers 404 to both is told apart from one that does not answer."""
    with serving(pages({})) as server:
        source = registry.create(ServerSettings(name="x", kind="sglang", url=server.url, timeout_s=5.0))
        with pytest.raises(SourceError, match="--enable-metrics") as caught:
            source.poll()
        source.close()

    assert caught.value.failure.kind is FailureKind.NOT_EXPECTED
