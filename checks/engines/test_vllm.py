"""kvwatch beside a really running vLLM: what it shows is what the server said, at the same instant."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from checks.engines.load import Load
from checks.engines.recorder import Recorder
from checks.engines.vllm import Vllm
from tests.harness import Daemon, Page

pytestmark = pytest.mark.timeout(900)

CHAT = {"server": "chat", "engine": "0"}
# kvwatch's name and labels, and the server's own series that it must equal.
SAME = (
    ("kvwatch_kv_usage_ratio", {}, "vllm:kv_cache_usage_perc"),
    ("kvwatch_requests", {"state": "running"}, "vllm:num_requests_running"),
    ("kvwatch_requests", {"state": "waiting"}, "vllm:num_requests_waiting"),
    ("kvwatch_preemptions_total", {}, "vllm:num_preemptions_total"),
)
CONFIG = """
gpus: {{source: none}}
servers:
  - {{name: chat, kind: vllm, url: "{url}", period: 1s, timeout: 900ms, slo: {{ttft_p95: 2s}}}}
"""


class Watched:
    """A server, a recorder in front of it, and kvwatch reading through the recorder."""

    def __init__(self, folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.arguments, self.environment = arguments, environment
        self.server = Vllm(folder / "vllm.log", *arguments, environment=environment).wait()
        self.recorder = Recorder(self.server.base, folder / "pages")
        self.daemon = Daemon(folder / "kvwatch", CONFIG.format(url=self.recorder.url)).start()

    def compare(self) -> Page:
        """Read kvwatch's page when it stands on the server's last page, and compare the two."""
        end_s = time.monotonic() + 30
        while time.monotonic() < end_s:
            before = self.recorder.last()
            page = self.daemon.metrics()
            read_at = page.get("kvwatch_source_last_success_timestamp_seconds", source="server/chat")
            known = page.all("kvwatch_kv_usage_ratio", server="chat")  # a late poll leaves nothing to compare
            quiet = known and before and self.recorder.last() == before
            if quiet and before and read_at is not None and read_at > before[1]:
                self._assert_same(page, before[2])
                return page
            time.sleep(0.05)
        raise AssertionError("no quiet moment between two polls")

    def _assert_same(self, page: Page, theirs: str) -> None:
        own = {
            (sample.name, sample.labels.get("engine", "0")): sample.value
            for family in text_string_to_metric_families(theirs)
            for sample in family.samples
            if sample.name.startswith("vllm:")
        }
        engines = {engine for name, engine in own if name == "vllm:num_requests_running"}
        assert engines
        for engine in engines:
            for name, labels, their_name in SAME:
                seen = page.get(name, server="chat", engine=engine, **labels)
                assert seen == own[their_name, engine], f"{name}{labels} of engine {engine}"

    def follow(self, seconds: float) -> list[Page]:
        """Compare for a while, at least five times."""
        end_s = time.monotonic() + seconds
        pages = []
        while time.monotonic() < end_s or len(pages) < 5:
            pages.append(self.compare())
        return pages

    def close(self) -> None:
        try:
            self.daemon.stop()
        finally:
            self.server.stop()
            self.recorder.close()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """One engine."""
    watched = Watched(tmp_path_factory.mktemp("vllm-one"))
    yield watched
    watched.close()


def highest(pages: list[Page], name: str, **labels: str) -> float:
    return max(value for page in pages for _, value in page.all(name, **labels))


def test_idle(one: Watched) -> None:
    """An idle server is up, empty and green."""
    page = one.follow(3)[-1]

    assert page.get("kvwatch_server_up", **CHAT) == 1
    assert page.get("kvwatch_kv_usage_ratio", server="chat", engine="0") == 0
    assert page.get("kvwatch_kv_capacity_tokens", server="chat", engine="0") == 32 * 32
    assert page.get("kvwatch_rule_level", rule="kv_usage", server="chat", engine="0") == 0


def test_load(one: Watched) -> None:
    """Under light load every figure equals the server's own, and latencies appear."""
    load = Load(one.server.base, concurrency=3, total=200, generate=400).start()
    pages = one.follow(10)
    load.stop()
    load.join(60)

    assert 1 <= highest(pages, "kvwatch_requests", state="running") <= 3
    assert highest(pages, "kvwatch_kv_usage_ratio") > 0.2
    assert one.daemon.metrics().all("kvwatch_ttft_seconds", quantile="0.95")
    assert load.outcomes["200"] > 0


def test_saturation(one: Watched) -> None:
    """A full pool shows as usage near 1, requests waiting and preemptions, all as the server counts them."""
    load = Load(one.server.base, concurrency=14, total=400, generate=300).start()
    pages = one.follow(20)
    load.stop()
    load.join(90)

    assert highest(pages, "kvwatch_kv_usage_ratio") > 0.9
    assert highest(pages, "kvwatch_requests", state="waiting") > 0
    assert highest(pages, "kvwatch_preemptions_total") > 0
    assert highest(pages, "kvwatch_recompute_tax_ratio") > 0
    assert highest(pages, "kvwatch_rule_level", rule="kv_usage") >= 1


def test_pause(one: Watched) -> None:
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


def test_hung_engine(one: Watched) -> None:
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


def start_from_idle(watched: Watched) -> Load:
    """Begin a load and wait until kvwatch has seen it (not the end of the one before)."""
    watched.daemon.until(lambda: running(watched) == 0, 60, "the server to be idle")
    load = Load(watched.server.base, concurrency=4, total=400, generate=400).start()
    watched.daemon.until(lambda: running(watched) >= 3, 20, "requests to run")
    return load


def stalled(watched: Watched) -> float | None:
    return watched.daemon.level("server_stalled", **CHAT)


def running(watched: Watched) -> float:
    return watched.daemon.metrics().get("kvwatch_requests", state="running", **CHAT) or 0


def up(watched: Watched) -> set[float]:
    return {value for _, value in watched.daemon.metrics().all("kvwatch_server_up", server="chat")}


def test_kill_and_restart(one: Watched) -> None:
    """A killed server is down and its figures are gone; a restarted one is read afresh from zero."""
    port = one.server.port
    one.server.kill()
    one.daemon.until(lambda: up(one) == {0.0}, 15, "down")
    one.daemon.until(lambda: not one.daemon.metrics().all("kvwatch_kv_usage_ratio"), 15, "no figures")
    one.server = Vllm(one.folder / "vllm.log", *one.arguments, port=port).wait()
    one.daemon.until(lambda: up(one) == {1.0}, 20, "up")
    page = one.follow(3)[-1]

    assert page.get("kvwatch_preemptions_total", **CHAT) == 0


def test_two_engines(tmp_path: Path) -> None:
    """Two data-parallel engines are two series each, and each equals its own."""
    watched = Watched(
        tmp_path,
        "--data-parallel-size",
        "2",
    )
    try:
        load = Load(watched.server.base, concurrency=24, total=400, generate=200).start()
        pages = watched.follow(15)
        load.stop()
        load.join(90)
    finally:
        watched.close()

    for engine in ("0", "1"):
        assert highest(pages, "kvwatch_requests", engine=engine, state="running") > 0
        assert pages[-1].get("kvwatch_kv_capacity_tokens", server="chat", engine=engine) == 32 * 32
