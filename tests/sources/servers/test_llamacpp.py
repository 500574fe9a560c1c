"""llama.cpp: slots, the unified pool, and a server that is loading."""

from __future__ import annotations

import json

import pytest

from kvwatch.model.sample import FailureKind
from kvwatch.model.server import Basis, Evictable, KvCacheState, ServerState
from kvwatch.model.settings import ServerSettings
from kvwatch.sources.base import SourceError
from kvwatch.sources.servers import llamacpp, registry
from tests.sources.loopback import always, answer, pages, serving
from tests.sources.servers import recorded


def parse(unified: bool | None = False, **bodies: bytes) -> ServerState:
    return llamacpp.parse(bodies, ServerSettings(name="x", kind="llamacpp", kv_unified=unified))


def kv(slots: list[dict[str, object]], unified: bool | None = False) -> KvCacheState:
    return parse(unified, slots=json.dumps(slots).encode()).engines[0].kv


def slot(tokens: int | None = None, *, busy: bool = True, context: int = 1000) -> dict[str, object]:
    made: dict[str, object] = {"id": 0, "n_ctx": context, "is_processing": busy}
    return made if tokens is None else {**made, "id_task": 1, "n_prompt_tokens": tokens}


def test_recorded_busy_server() -> None:
    """Four busy slots and five requests waiting, as recorded."""
    case = {
        name: recorded.page("llamacpp", "b11434", "busy_deferred", name)
        for name in ("slots", "metrics", "props")
    }
    state = parse(**case)
    engine = state.engines[0]

    assert engine.kv.usage_ratio == 2000 / 4096
    assert (engine.scheduler.running, engine.scheduler.waiting, engine.scheduler.max_running) == (4, 5, 4)
    assert state.version == "b11434-sdist"
    assert (state.semantics.evictable, state.semantics.basis) == (Evictable.USED, Basis.SLOTS)
    assert state.semantics.destructive


def test_unified_pool_is_divided_by_one_context() -> None:
    """A unified pool is every slot's context: four slots of 512 in 2048 are full, not a quarter."""
    slots = recorded.page("llamacpp", "b11434-unified", "peak", "slots")

    assert parse(True, slots=slots).engines[0].kv.usage_ratio == 1.0
    assert parse(True, slots=slots).engines[0].kv.capacity_tokens == 2048


def test_pool_kind_unknown_leaves_usage_unknown() -> None:
    """The API does not tell split from unified: without the setting usage is unknown, and a note says why."""
    state = parse(None, slots=json.dumps([slot(500), slot(500)]).encode())

    assert state.engines[0].kv == KvCacheState(tokens=1000)
    assert any("kv_unified" in note for note in state.notes)
    assert kv([slot(500)], None).usage_ratio == 0.5


def test_idle_slots_hold_their_prompt_and_new_ones_hold_nothing() -> None:
    """An idle slot's prompt counts as used, a slot without history holds nothing, a busy one is unknown."""
    assert kv([slot(800, busy=False), slot(busy=False)]).usage_ratio == 0.4
    assert kv([slot(800), slot(busy=True)]).usage_ratio is None


@pytest.mark.parametrize("body", [b"[]", b"{}", b'[{"id":0}]', b'[{"is_processing":1}]', b"[1]"])
def test_other_json_is_refused(body: bytes) -> None:
    """What is no list of slots is refused."""
    with pytest.raises(SourceError):
        parse(slots=body)


def test_loading_is_told_apart() -> None:
    """While the model loads the server is LOADING, not broken."""
    reply = answer(
        b'{"error":{"message":"Loading model","type":"unavailable_error"}}', "503 Service Unavailable"
    )
    with serving(always(reply)) as server:
        source = registry.create(ServerSettings(name="x", kind="llamacpp", url=server.url, timeout_s=5.0))
        with pytest.raises(SourceError) as caught:
            source.poll()
        source.close()

    assert caught.value.failure.kind is FailureKind.LOADING


def test_metrics_switched_off() -> None:
    """Without --metrics the slots still tell usage; counters are unknown and a note says why."""
    with serving(pages({"/slots": json.dumps([slot(300)]).encode()})) as server:
        source = registry.create(ServerSettings(name="x", kind="llamacpp", url=server.url, timeout_s=5.0))
        state = source.poll()
        source.close()

    assert state.engines[0].kv.usage_ratio == 0.3
    assert state.engines[0].scheduler.waiting is None
    assert any("--metrics" in note for note in state.notes)


def test_slots_switched_off() -> None:
    """With --no-slots the metrics page tells the requests; usage is unknown, and a note says why."""
    metrics = b"llamacpp:requests_processing 3\nllamacpp:requests_deferred 2\n"
    served = pages({"/metrics": metrics, "/props": b'{"total_slots":4}'})
    with serving(served) as server:
        source = registry.create(ServerSettings(name="x", kind="llamacpp", url=server.url, timeout_s=5.0))
        state = source.poll()
        source.close()
    scheduler = state.engines[0].scheduler

    assert (scheduler.running, scheduler.waiting, scheduler.max_running) == (3, 2, 4)
    assert state.engines[0].kv == KvCacheState()
    assert any("--no-slots" in note for note in state.notes)


def test_everything_switched_off() -> None:
    """With neither slots nor metrics, /props shows that it is llama-server; nothing else is claimed."""
    state = parse(props=b'{"total_slots":4,"build_info":"b1"}')

    assert (state.engines[0].scheduler.running, state.engines[0].scheduler.max_running) == (None, 4)
    assert len(state.notes) == 2


@pytest.mark.parametrize("body", [b"", b"vllm:num_requests_running 1\n", b"<html>"])
def test_other_metrics_page_is_refused(body: bytes) -> None:
    """A page of another server, without slots and without llama.cpp's properties, is not llama-server."""
    with pytest.raises(SourceError) as caught:
        parse(metrics=body, props=b'{"error":1}')

    assert caught.value.failure.kind is FailureKind.NOT_EXPECTED


def test_pool_larger_than_a_context() -> None:
    """Slots that hold more than one context in a unified pool prove a larger pool (--kv-unified-per-slot):
    its capacity is unknown. One token a slot is only under way."""
    more = kv([slot(600, context=1000), slot(600, context=1000)], True)

    assert (more.usage_ratio, more.capacity_tokens, more.tokens) == (None, None, 1200)
    assert kv([slot(501, context=1000), slot(501, context=1000)], True).usage_ratio == 1.0


def test_model_is_named_not_located() -> None:
    """The alias names the model; where it is only the file's path again, the file's name does."""
    for alias, name in (
        ("chat", "chat"),
        ("org/model:Q4", "org/model:Q4"),
        ("/m/a.gguf", "a.gguf"),
        ("", "a.gguf"),
    ):
        props = json.dumps({"model_alias": alias, "model_path": "/m/a.gguf", "total_slots": 1}).encode()
        assert parse(props=props).model == name
