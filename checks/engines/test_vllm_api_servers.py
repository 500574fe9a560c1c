"""kvwatch beside a vLLM whose HTTP side is two processes, each with a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from checks.engines.server import command_of, descendants
from checks.engines.vllm import VllmServe, assert_same, samples
from checks.engines.watched import Watched, highest

pytestmark = pytest.mark.timeout(900)

CHAT = {"server": "chat", "engine": "0"}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched[VllmServe]]:
    """Two API servers in front of one engine."""
    folder = tmp_path_factory.mktemp("vllm-api")
    watched = Watched(
        folder,
        VllmServe(folder / "vllm.log", "--api-server-count", "2"),
        kind="vllm",
        same=assert_same,
        known="kvwatch_requests",
    )
    yield watched
    watched.close()


def test_cold(two: Watched[VllmServe]) -> None:
    """Before the first request the shared registry has no gauge: the server is up, and usage is unknown."""
    titles = [command_of(pid) for pid in descendants(two.server.process.pid)]
    assert sum(b"apiserver" in title.lower() for title in titles) == 2, titles

    two.daemon.until(lambda: two.daemon.metrics().get("kvwatch_server_up", server="chat"), 20, "up")
    page = two.daemon.metrics()
    assert not page.all("kvwatch_kv_usage_ratio")
    assert not page.all("kvwatch_requests", state="running")


def test_load(two: Watched[VllmServe]) -> None:
    """Whichever process answers, running requests are those of all clients, not of half of them."""
    load = two.load(concurrency=6, total=400, generate=100)
    load.start()
    two.daemon.until(lambda: two.running() == 6, 60, "all six to run")
    pages = two.follow(12)
    load.stop()
    load.join(90)

    assert highest(pages, "kvwatch_requests", state="running") == 6
    assert highest(pages, "kvwatch_kv_usage_ratio") > 0.2
    assert two.daemon.metrics().all("kvwatch_ttft_seconds", quantile="0.95")


def test_saturation(two: Watched[VllmServe]) -> None:
    """A full pool shows as usage near 1, requests waiting and preemptions, all as the server counts them."""
    load = two.load(concurrency=14, total=400, generate=300).start()
    pages = two.follow(20)
    load.stop()
    load.join(90)

    assert highest(pages, "kvwatch_kv_usage_ratio") > 0.9
    assert highest(pages, "kvwatch_requests", state="waiting") > 0
    assert highest(pages, "kvwatch_preemptions_total") > 0
    assert highest(pages, "kvwatch_recompute_tax_ratio") > 0


def test_counters_are_of_both_processes(two: Watched[VllmServe]) -> None:
    """What kvwatch reads counts every token that any client was given, through either process."""
    two.daemon.until(lambda: two.running() == 0, 60, "the server to be idle")
    before = generated(two)
    load = two.load(concurrency=4, total=40, generate=25).start()
    load.join(120)

    assert load.outcomes == {"200": 40}
    assert load.generated == 40 * 25
    two.daemon.until(lambda: generated(two) == before + load.generated or None, 30, "every token")


def generated(watched: Watched[VllmServe]) -> float:
    """Tokens that the engine has generated, by the page that kvwatch reads."""
    kept = watched.recorder.last("/metrics")
    assert kept is not None
    own = samples(kept["/metrics"].text)
    return sum(value for (name, _), value in own.items() if name == "vllm:generation_tokens_total")


def test_at_rest(two: Watched[VllmServe]) -> None:
    """At the end every figure is back to rest, whichever process had set a gauge last."""
    page = two.follow(5)[-1]

    assert page.get("kvwatch_requests", state="running", **CHAT) == 0
    assert page.get("kvwatch_requests", state="waiting", **CHAT) == 0
    assert page.get("kvwatch_kv_usage_ratio", **CHAT) == 0
