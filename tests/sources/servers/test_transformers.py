"""transformers serve: healthy or not."""

from __future__ import annotations

import pytest

from kvwatch.model.sample import FailureKind
from kvwatch.model.server import EngineState, ServerState
from kvwatch.sources.servers import registry
from tests.sources.loopback import always, answer, pages
from tests.sources.servers import made, recorded
from tests.sources.servers.reading import only, parse, poll, read, refusal


def test_up_and_nothing_else_is_known() -> None:
    """Health makes it up; a note says that an agent has to tell the rest."""
    state = read("transformers", "5.24.0", "up")

    assert only(state) == EngineState()
    assert any("agent" in note for note in state.notes)


def test_dead_worker_is_a_failure() -> None:
    """The 503 after the worker of continuous batching died is this server being down."""
    body = b'{"status":"unhealthy","reason":"cb_worker_dead"}'
    failure = poll("transformers", always(answer(body, "503 Service Unavailable")))

    assert not isinstance(failure, ServerState)
    assert failure.kind is FailureKind.HTTP_STATUS
    assert "cb_worker_dead" in failure.message


@pytest.mark.parametrize("body", [b"", b"{}", b'"ok"', b'{"status":"unhealthy"}', b"ok"])
def test_other_health_answers_are_refused(body: bytes) -> None:
    """What does not say ok is not up."""
    assert refusal("transformers", health=body)


def test_models_name_the_model_only_where_there_is_one() -> None:
    """The list has every model of the local cache: two of them do not tell which is served."""
    two = made.answer({"data": [{"id": "a/b"}, {"id": "c/d"}]})

    assert parse("transformers", health=b'{"status":"ok"}', models=two).model == ""


def test_models_as_recorded() -> None:
    """A server started on a folder names it by path, one that loads on demand lists its cache; both are known
    by their list."""
    assert read("transformers", "5.24.0", "folder").model == "tiny-llama"
    assert read("transformers", "5.24.0", "up").model == "org/tiny"
    (clue,) = registry.adapter("transformers").clues
    for case in ("folder", "up"):
        assert clue.body.search(recorded.page("transformers", "5.24.0", case, "models"))


def test_health_alone_is_not_recognised_by_auto() -> None:
    """Many servers say {"status":"ok"}: that alone does not make `auto` call one transformers serve."""
    failure = poll("auto", pages({"/health": b'{"status":"ok"}'}))

    assert not isinstance(failure, ServerState)
    (clue,) = registry.adapter("transformers").clues
    for owner in ('"Qwen"', '["Qwen","Q"]', '""'):
        assert clue.body.search(b'{"data":[{"owned_by":%s,"id":"Qwen/Q","object":"model"}]}' % owner.encode())
    assert not clue.body.search(b'{"data":[{"id":"m","object":"model","created":1,"owned_by":"vllm"}]}')
