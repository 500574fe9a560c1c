"""kvwatch beside a really running SGLang: load, retraction, and its batch limited over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from checks.engines import sglang
from checks.engines.load import Load
from checks.engines.sglang import LOADS, METRICS, RUNNING_MAX, Sglang
from checks.engines.watched import Watched, highest
from tests.harness import Daemon

pytestmark = pytest.mark.timeout(900)

CHAT = {"server": "chat", "engine": "0"}
LIMIT = 2
ACTING = """
gpus: {{source: none}}
servers:
  - {{name: chat, kind: sglang, url: "{url}", period: 1s, timeout: 900ms}}
control:
  mode: act
  targets:
    - server: chat
      policy: fixed
      params: {{max_running: {limit}}}
      floor: 1
      ceiling: 32
      lease: 15s
      cooldown: 1s
      via: [{{sglang: {{url: "{url}"}}}}]
"""


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched[Sglang]]:
    """One rank with the metrics page on."""
    folder = tmp_path_factory.mktemp("sglang")
    watched = Watched(
        folder,
        Sglang(folder / "server.log"),
        kind="sglang",
        same=sglang.assert_same,
        paths=(LOADS, METRICS),
        known="kvwatch_kv_usage_ratio",
    )
    yield watched
    watched.close()


def load(watched: Watched[Sglang], clients: int, *, generate: int = 300) -> Load:
    """Requests without an end; `stop` ends it.

    Not `ignore_eos`: with it SGLang reserves a request's whole length at admission and never retracts.
    """
    return watched.load(
        concurrency=clients,
        total=5000,
        generate=generate,
        body={"min_tokens": generate},
    )


def end(load: Load) -> None:
    load.stop()
    load.join(90)


def own_limit(watched: Watched[Sglang]) -> list[int]:
    """The batch limit of every rank, as the server itself tells it."""
    info = json.loads(watched.server.get("/server_info"))
    return [state["pp_max_micro_batch_size"] for state in info["internal_states"]]


def test_idle(one: Watched[Sglang]) -> None:
    """An idle server is up, empty and green; nothing was retracted although that counter is not there yet."""
    page = one.follow(3)[-1]

    assert page.get("kvwatch_server_up", **CHAT) == 1
    assert page.get("kvwatch_kv_usage_ratio", **CHAT) == 0
    assert page.get("kvwatch_kv_capacity_tokens", **CHAT) == 2048
    assert one.limits() == [RUNNING_MAX]
    assert page.get("kvwatch_preemptions_total", **CHAT) == 0
    assert page.get("kvwatch_rule_level", rule="kv_usage", **CHAT) == 0


def test_load(one: Watched[Sglang]) -> None:
    """Under light load every figure equals the server's own, and latencies appear."""
    light = load(one, 3).start()
    pages = one.follow(10)
    end(light)

    assert 1 <= highest(pages, "kvwatch_requests", state="running") <= 3
    assert highest(pages, "kvwatch_kv_usage_ratio") > 0.1
    assert one.daemon.metrics().all("kvwatch_ttft_seconds", quantile="0.95")
    assert light.outcomes["200"] > 0


def test_retraction(one: Watched[Sglang]) -> None:
    """An overfull pool shows as high usage, requests waiting and retractions, all as the server counts them.

    How near to 1 the usage comes is SGLang's affair: after a retraction it admits more carefully.
    """
    heavy = load(one, 24, generate=400).start()
    pages = one.follow(25)
    end(heavy)

    assert highest(pages, "kvwatch_kv_usage_ratio") > 0.75
    assert highest(pages, "kvwatch_requests", state="waiting") > 0
    assert highest(pages, "kvwatch_preemptions_total") > 0
    assert highest(pages, "kvwatch_recompute_tax_ratio") > 0


def test_cached_prompts_do_not_count(one: Watched[Sglang]) -> None:
    """After the load the radix cache is warm and the pool is empty all the same."""
    one.daemon.until(lambda: one.running() == 0, 60, "the server to be idle")
    one.daemon.until(lambda: one.compare().get("kvwatch_kv_usage_ratio", **CHAT) == 0, 60, "an empty pool")
    states = {labels["state"]: value for labels, value in one.compare().all("kvwatch_kv_blocks")}

    assert states["used"] == 0
    assert states["evictable"] > 0


def test_live_limit(one: Watched[Sglang], tmp_path: Path) -> None:
    """kvwatch's own action lowers the running batch under load and reads it back; its end gives it back."""
    heavy = load(one, 8, generate=150)
    one.start_from_idle(heavy, running=LIMIT + 2)
    assert own_limit(one) == [RUNNING_MAX]
    acting = Daemon(tmp_path / "acting", ACTING.format(url=one.server.base, limit=LIMIT)).start()
    try:
        acting.until(lambda: own_limit(one) == [LIMIT], 30, "the limit at the server")
        one.daemon.until(lambda: one.running() <= LIMIT, 60, "the batch to drain")
        pages = one.follow(5)
        assert highest(pages, "kvwatch_requests", state="running") <= LIMIT
        assert highest(pages, "kvwatch_requests", state="waiting") > 0
        assert acting.metrics().get("kvwatch_limit_running", server="chat", engine="0") == LIMIT
        applied = acting.metrics().get("kvwatch_actions_total", action="sglang", outcome="applied")
        assert applied is not None
        assert applied >= 1
    finally:
        acting.stop()
    assert own_limit(one) == [RUNNING_MAX]
    one.daemon.until(lambda: one.running() > LIMIT, 30, "the batch to grow again")
    end(heavy)


def test_metrics_off(tmp_path: Path) -> None:
    """Without --enable-metrics, as by default, /v1/loads tells load and limit; the rest is unknown."""
    watched = Watched(
        tmp_path,
        Sglang(tmp_path / "server.log", metrics=False),
        kind="sglang",
        same=sglang.assert_same,
        paths=(LOADS,),
        known="kvwatch_kv_usage_ratio",
    )
    try:
        light = load(watched, 3).start()
        pages = watched.follow(6)
        end(light)
        assert highest(pages, "kvwatch_requests", state="running") >= 1
        assert not pages[-1].all("kvwatch_preemptions_total")
        assert any("--enable-metrics" in note for note in watched.notes())
    finally:
        watched.close()
