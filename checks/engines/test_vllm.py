"""kvwatch beside a really running vLLM: what it shows is what the server said, at the same instant."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from checks.engines.load import Load
from checks.engines.vllm import Vllm, assert_same
from checks.engines.watched import Watched, highest

pytestmark = pytest.mark.timeout(900)

CHAT = {"server": "chat", "engine": "0"}


def watch(folder: Path, *arguments: str) -> Watched[Vllm]:
    """vLLM and kvwatch beside it, whose every figure is compared."""
    server = Vllm(folder / "vllm.log", *arguments)
    return Watched(
        folder,
        server,
        kind="vllm",
        same=assert_same,
        known="kvwatch_kv_usage_ratio",
        more="slo: {ttft_p95: 2s}",
    )


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched[Vllm]]:
    """One engine."""
    watched = watch(tmp_path_factory.mktemp("vllm-one"))
    yield watched
    watched.close()


def test_idle(one: Watched[Vllm]) -> None:
    """An idle server is up, empty and green."""
    page = one.follow(3)[-1]

    assert page.get("kvwatch_server_up", **CHAT) == 1
    assert page.get("kvwatch_kv_usage_ratio", server="chat", engine="0") == 0
    assert page.get("kvwatch_kv_capacity_tokens", server="chat", engine="0") == 32 * 32
    assert page.get("kvwatch_rule_level", rule="kv_usage", server="chat", engine="0") == 0


def test_load(one: Watched[Vllm]) -> None:
    """Under light load every figure equals the server's own, and latencies appear."""
    load = one.load(concurrency=3, total=200, generate=400).start()
    pages = one.follow(10)
    load.stop()
    load.join(60)

    assert 1 <= highest(pages, "kvwatch_requests", state="running") <= 3
    assert highest(pages, "kvwatch_kv_usage_ratio") > 0.2
    assert one.daemon.metrics().all("kvwatch_ttft_seconds", quantile="0.95")
    assert load.outcomes["200"] > 0


def test_saturation(one: Watched[Vllm]) -> None:
    """A full pool shows as usage near 1, requests waiting and preemptions, all as the server counts them."""
    load = one.load(concurrency=14, total=400, generate=300).start()
    pages = one.follow(20)
    load.stop()
    load.join(90)

    assert highest(pages, "kvwatch_kv_usage_ratio") > 0.9
    assert highest(pages, "kvwatch_requests", state="waiting") > 0
    assert highest(pages, "kvwatch_preemptions_total") > 0
    assert highest(pages, "kvwatch_recompute_tax_ratio") > 0
    assert highest(pages, "kvwatch_rule_level", rule="kv_usage") >= 1


def test_pause(one: Watched[Vllm]) -> None:
    """A server paused with requests in flight is stalled, and recovers when it resumes."""
    load = start_from_idle(one)
    one.server.post("/pause?mode=keep")
    try:
        one.daemon.until(lambda: stalled(one) == 2, 20, "stalled")
        one.compare()
    finally:
        one.server.post("/resume")
    one.daemon.until(lambda: stalled(one) == 0, 60, "recovery")
    load.stop()
    load.join(60)


def test_hung_engine(one: Watched[Vllm]) -> None:
    """An engine stopped under load keeps a 200 page with frozen gauges: kvwatch says stalled, not green."""
    load = start_from_idle(one)
    pids = one.server.engine_pids()
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        one.daemon.until(
            lambda: one.daemon.metrics().get("kvwatch_server_stalled", **CHAT) == 1, 20, "stalled"
        )
        assert stalled(one) == 2
        assert one.daemon.state()["headline"]["level"] == "red"
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    one.daemon.until(lambda: stalled(one) == 0, 60, "recovery")
    load.stop()
    load.join(60)


def start_from_idle(watched: Watched[Vllm]) -> Load:
    """Begin a load of four and wait until kvwatch has seen it."""
    load = watched.load(concurrency=4, total=400, generate=400)
    watched.start_from_idle(load, running=3)
    return load


def stalled(watched: Watched[Vllm]) -> float | None:
    return watched.daemon.level("server_stalled", **CHAT)


def running(watched: Watched[Vllm], engine: str) -> float:
    """Running requests of one engine."""
    return watched.daemon.metrics().get("kvwatch_requests", engine=engine, state="running") or 0


def up(watched: Watched[Vllm]) -> set[float]:
    return {value for _, value in watched.daemon.metrics().all("kvwatch_server_up", server="chat")}


def test_kill_and_restart(one: Watched[Vllm]) -> None:
    """A killed server is down and its figures are gone; a restarted one is read afresh from zero."""
    port = one.server.port
    one.server.kill()
    one.daemon.until(lambda: up(one) == {0.0}, 15, "down")
    one.daemon.until(lambda: not one.daemon.metrics().all("kvwatch_kv_usage_ratio"), 15, "no figures")
    one.server = Vllm(one.folder / "vllm.log", port=port).wait()
    one.daemon.until(lambda: up(one) == {1.0}, 20, "up")
    page = one.follow(3)[-1]

    assert page.get("kvwatch_preemptions_total", **CHAT) == 0


def test_two_engines(tmp_path: Path) -> None:
    """Two data-parallel engines are two series each, and each equals its own."""
    watched = watch(tmp_path, "--data-parallel-size", "2")
    try:
        load = watched.load(concurrency=24, total=2000, generate=200, seconds=180).start()
        # Where the requests go first is vLLM's affair, and its engines start slowly on a busy machine.
        for engine in ("0", "1"):
            watched.daemon.until(lambda e=engine: running(watched, e) > 0, 60, f"engine {engine} to run")
        pages = watched.follow(15)
        load.stop()
        load.join(90)
    finally:
        watched.close()

    for engine in ("0", "1"):
        assert highest(pages, "kvwatch_requests", engine=engine, state="running") > 0
        assert pages[-1].get("kvwatch_kv_capacity_tokens", server="chat", engine=engine) == 32 * 32
