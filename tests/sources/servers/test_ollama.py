"""Ollama: bytes and names, nothing else."""

from __future__ import annotations

import pytest

from kvwatch.model.server import EngineState
from tests.sources.servers.made import answer
from tests.sources.servers.reading import only, parse, read, refusal


def test_loaded_models_are_named_and_nothing_is_invented() -> None:
    """The estimate of bytes is a note for people; no figure of the KV cache comes of it."""
    state = read("ollama", "0.12", "loaded")

    assert only(state) == EngineState()
    assert (state.model, state.version) == ("llama3.1:8b", "0.12.3")
    assert any("6.2 GiB" in note for note in state.notes)


def test_no_model_loaded() -> None:
    """An idle Ollama is up and says that nothing is loaded."""
    state = read("ollama", "0.12", "empty")

    assert state.model == ""
    assert "no model is loaded" in state.notes


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"name": "a"}, "unknown"),
        ({"name": "a", "size_vram": 0}, "nothing on the GPU"),
        ({"size_vram": "x"}, "?"),
    ],
    ids=["absent", "on the CPU", "odd"],
)
def test_sizes_that_are_not_told(model: dict[str, object], said: str) -> None:
    """A missing size is unknown, and 0 means that the model is on the CPU."""
    assert said in parse("ollama", ps=answer({"models": [model]})).notes[1]


@pytest.mark.parametrize("body", [b"{}", b'{"models":1}', b'{"models":[1]}', b"[]"])
def test_other_answers_are_refused(body: bytes) -> None:
    """What is no list of models is not Ollama."""
    assert "Ollama" in refusal("ollama", ps=body).message
