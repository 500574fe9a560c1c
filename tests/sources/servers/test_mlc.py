"""MLC-LLM: it answers, and that is all."""

from __future__ import annotations

from kvwatch.model.server import EngineState
from kvwatch.sources.servers import registry
from tests.sources.servers.made import answer
from tests.sources.servers.reading import only, read, refusal


def test_nothing_is_known_and_metrics_are_not_asked_for() -> None:
    """Reading MLC-LLM's /metrics would run a request: it is no endpoint of this adapter."""
    state = read("mlc", "0.20", "up")

    assert only(state) == EngineState()
    assert state.model == "Llama-3-8B-q4f16_1"
    assert [endpoint.path for endpoint in registry.adapter("mlc").endpoints] == ["/v1/models"]


def test_other_servers_with_models_are_refused() -> None:
    """Every OpenAI-like server has /v1/models; only MLC-LLM's own is taken."""
    body = answer({"object": "list", "data": [{"id": "m", "owned_by": "vllm"}]})

    assert "MLC-LLM" in refusal("mlc", models=body).message
