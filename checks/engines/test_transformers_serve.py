"""kvwatch beside a really running `transformers serve`: up or down, and nothing made up."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator

import pytest

from checks.engines.transformers import MODEL, TransformersServe
from checks.engines.watched import Watched

pytestmark = pytest.mark.timeout(300)

CHAT = {"server": "chat", "engine": "0"}
FIGURES = ("kvwatch_kv_usage_ratio", "kvwatch_kv_capacity_tokens", "kvwatch_requests", "kvwatch_ttft_seconds")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched[TransformersServe]]:
    """Continuous batching, and no agent inside."""
    folder = tmp_path_factory.mktemp("transformers")
    watched = Watched(
        folder,
        TransformersServe(folder / "server.log"),
        kind="transformers",
        same=lambda page, theirs: None,
        paths=("/health",),
    )
    yield watched
    watched.close()


def test_idle(one: Watched[TransformersServe]) -> None:
    """It is up, has no figures, and kvwatch says that only an agent could tell them."""
    page = one.compare()

    assert page.get("kvwatch_server_up", **CHAT) == 1
    assert [name for name in FIGURES if page.all(name)] == []
    assert any("agent" in note for note in one.notes())


def test_load(one: Watched[TransformersServe]) -> None:
    """Under load that is still all: no figure appears, and no rule but that of the server's life is known."""
    load = one.load(
        concurrency=4,
        total=40,
        generate=50,
        seconds=30,
        body={"model": MODEL, "max_tokens": 50},
    )
    load.start()
    pages = one.follow(8)
    load.stop()
    load.join(120)

    assert load.outcomes["200"] > 0, load.outcomes
    assert {value for page in pages for _, value in page.all("kvwatch_server_up")} == {1.0}
    assert [name for name in FIGURES if any(page.all(name) for page in pages)] == []
    levels = {value for page in pages for _, value in page.all("kvwatch_rule_level", rule="kv_usage")}
    assert levels <= {-1.0}


def test_it_has_no_metrics_page(one: Watched[TransformersServe]) -> None:
    """The reason: the paths where other engines tell their load are not there."""
    for path in ("/metrics", "/load", "/stats", "/slots", "/v1/loads"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            one.server.get(path)
        caught.value.close()
        assert caught.value.code == 404


def test_killed(one: Watched[TransformersServe]) -> None:
    """Once it is gone it is down."""
    one.server.kill()
    one.daemon.until(
        lambda: {value for _, value in one.daemon.metrics().all("kvwatch_server_up")} == {0.0}, 15, "down"
    )
