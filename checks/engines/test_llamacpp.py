"""kvwatch beside a really running llama-server, in each of its modes."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checks.engines import llamacpp
from checks.engines.llamacpp import METRICS, PROPS, SLOTS, Llamacpp
from checks.engines.load import Load
from checks.engines.watched import Watched, highest

pytestmark = pytest.mark.timeout(300)

CHAT = {"server": "chat", "engine": "0"}
TWIN = """\
  - {{name: asked, kind: llamacpp, url: "{url}", period: 1s, timeout: 900ms}}
"""


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched[Llamacpp]]:
    """Each slot has a quarter of the pool; both endpoints are on. A twin is read without `kv_unified`."""
    folder = tmp_path_factory.mktemp("llamacpp-split")
    watched = Watched(
        folder,
        Llamacpp(folder / "server.log", "--metrics"),
        kind="llamacpp",
        same=functools.partial(llamacpp.assert_same, unified=False),
        paths=(SLOTS, METRICS),
        more="kv_unified: false",
        rest=TWIN,
    )
    yield watched
    watched.close()


def load(watched: Watched[Llamacpp], clients: int, *, prompt: int = 100, generate: int = 300) -> Load:
    """Requests without an end; `stop` ends it."""
    return watched.load(concurrency=clients, total=20_000, prompt=prompt, generate=generate)


def end(load: Load) -> None:
    load.stop()
    load.join(60)


def test_idle(split: Watched[Llamacpp]) -> None:
    """A server that has had no request is up, empty and green; its build and model are known."""
    page = split.follow(3)[-1]

    assert page.get("kvwatch_server_up", **CHAT) == 1
    assert page.get("kvwatch_kv_usage_ratio", **CHAT) == 0
    info = [labels for labels, _ in page.all("kvwatch_server_info", server="chat")]
    assert [one["model"] for one in info] == ["tiny.gguf"]
    assert split.notes() == []
    assert split.limits() == [4]


def test_load(split: Watched[Llamacpp]) -> None:
    """Under light load running slots and held tokens are the server's own, and nothing waits."""
    light = load(split, 2).start()
    pages = split.follow(8)
    end(light)

    assert 1 <= highest(pages, "kvwatch_requests", server="chat", state="running") <= 2
    assert highest(pages, "kvwatch_requests", server="chat", state="waiting") == 0
    assert highest(pages, "kvwatch_kv_usage_ratio", server="chat") > 0.1
    assert light.outcomes["200"] > 0


def test_saturation(split: Watched[Llamacpp]) -> None:
    """With more clients than slots all slots run and the rest waits, as the server counts them."""
    heavy = load(split, 9, prompt=300, generate=400).start()
    pages = split.follow(12)
    end(heavy)

    assert highest(pages, "kvwatch_requests", server="chat", state="running") == 4
    assert highest(pages, "kvwatch_requests", server="chat", state="waiting") >= 4
    assert highest(pages, "kvwatch_kv_usage_ratio", server="chat") > 0.75


def test_idle_slots_keep_their_prompts(split: Watched[Llamacpp]) -> None:
    """After the load nothing runs, but the slots still hold tokens: that is no red pool."""
    split.daemon.until(lambda: split.running() == 0, 30, "the slots to be idle")
    page = split.compare()

    assert (page.get("kvwatch_kv_usage_ratio", **CHAT) or 0) > 0.2
    assert page.get("kvwatch_rule_level", rule="kv_usage", **CHAT) != 2


def test_pool_kind_not_configured(split: Watched[Llamacpp]) -> None:
    """Without `kv_unified` the requests are known, usage is not, and kvwatch says what to set."""
    page = split.daemon.metrics()
    (asked,) = [one for one in split.daemon.state()["servers"] if one["server"] == "asked"]

    assert page.get("kvwatch_requests", server="asked", state="running") is not None
    assert page.get("kvwatch_kv_usage_ratio", server="asked") is None
    assert any("kv_unified" in note for note in asked["notes"])


@pytest.fixture
def unified(tmp_path: Path) -> Iterator[Watched[Llamacpp]]:
    """One pool that all four slots share, which is what llama-server does when -np is left out."""
    watched = Watched(
        tmp_path,
        Llamacpp(tmp_path / "server.log", "--metrics", "--kv-unified"),
        kind="llamacpp",
        same=functools.partial(llamacpp.assert_same, unified=True),
        paths=(SLOTS, METRICS),
        more="kv_unified: true",
    )
    yield watched
    watched.close()


def test_unified_pool(unified: Watched[Llamacpp]) -> None:
    """A shared pool is divided by itself once: four slots fill it. Overflow fails requests, not kvwatch."""
    unified.follow(3)
    heavy = load(unified, 4, prompt=400, generate=600).start()
    pages = unified.follow(15)
    end(heavy)

    assert highest(pages, "kvwatch_requests", state="running") == 4
    assert highest(pages, "kvwatch_kv_usage_ratio") > 0.75
    assert heavy.outcomes["500"] > 0, heavy.outcomes
    assert unified.compare().get("kvwatch_server_up", **CHAT) == 1


def test_context_capped_below_the_pool(tmp_path: Path) -> None:
    """With --kv-unified-per-slot the pool is larger than any slot's context: what the slots hold beyond one
    context is never shown as a share of it."""
    watched = Watched(
        tmp_path,
        Llamacpp(tmp_path / "server.log", "--metrics", "--kv-unified", "--kv-unified-per-slot", "512"),
        kind="llamacpp",
        same=lambda page, theirs: None,
        paths=(SLOTS, METRICS),
        more="kv_unified: true",
    )
    try:
        heavy = load(watched, 4, prompt=200, generate=250).start()
        watched.daemon.until(lambda: any("per-slot" in note for note in watched.notes()), 60, "the note")
        assert watched.daemon.metrics().get("kvwatch_kv_usage_ratio", **CHAT) is None
        end(heavy)
    finally:
        watched.close()


def test_metrics_off(tmp_path: Path) -> None:
    """Without --metrics, as by default: slots tell usage and running; waiting is not told, and not 0."""
    watched = Watched(
        tmp_path,
        Llamacpp(tmp_path / "server.log"),
        kind="llamacpp",
        same=functools.partial(llamacpp.assert_same, unified=False),
        paths=(SLOTS,),
        more="kv_unified: false",
    )
    try:
        light = load(watched, 6).start()
        pages = watched.follow(6)
        end(light)
        assert highest(pages, "kvwatch_requests", state="running") == 4
        assert not pages[-1].all("kvwatch_requests", state="waiting")
        assert any("--metrics" in note for note in watched.notes())
    finally:
        watched.close()


def test_slots_off(tmp_path: Path) -> None:
    """With --no-slots the server is up and its requests are known; KV usage is not, and kvwatch says why."""
    watched = Watched(
        tmp_path,
        Llamacpp(tmp_path / "server.log", "--metrics", "--no-slots"),
        kind="llamacpp",
        same=llamacpp.assert_page_alone,
        paths=(METRICS,),
        more="kv_unified: false",
    )
    try:
        heavy = load(watched, 6).start()
        pages = watched.follow(6)
        end(heavy)
        assert pages[-1].get("kvwatch_server_up", **CHAT) == 1
        assert highest(pages, "kvwatch_requests", state="running") == 4
        assert highest(pages, "kvwatch_requests", state="waiting") > 0
        assert not pages[-1].all("kvwatch_kv_usage_ratio")
        assert any("--no-slots" in note for note in watched.notes())
    finally:
        watched.close()


def test_both_off(tmp_path: Path) -> None:
    """With neither it is up with its slots counted, and nothing else is claimed; once gone, it is down."""
    watched = Watched(
        tmp_path,
        Llamacpp(tmp_path / "server.log", "--no-slots"),
        kind="llamacpp",
        same=lambda page, theirs: None,
        paths=(PROPS,),
    )
    try:
        page = watched.compare()
        assert page.get("kvwatch_server_up", **CHAT) == 1
        assert watched.limits() == [4]
        assert not page.all("kvwatch_requests")
        assert not page.all("kvwatch_kv_usage_ratio")
        assert any("--no-slots" in note for note in watched.notes())
        watched.server.kill()
        time.sleep(2)
        watched.daemon.until(
            lambda: {value for _, value in watched.daemon.metrics().all("kvwatch_server_up")} == {0.0},
            15,
            "down",
        )
    finally:
        watched.close()
