"""kvwatch beside a really running Dynamo: its front end, its mocker, and a vLLM behind it."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checks.engines import dynamo, vllm
from checks.engines.dynamo import METRICS, RUNNING_MAX, Frontend, Worker
from checks.engines.load import Load
from checks.engines.watched import Watched, highest
from tests.harness import Page

pytestmark = pytest.mark.timeout(400)

CHAT = {"server": "chat", "engine": "0"}
WORKER = """\
  - {{{{name: worker, kind: dynamo, url: "{url}", period: 1s, timeout: 900ms}}}}
"""


class Front:
    """A front end that is watched, and a mocker behind it, watched too but not compared."""

    def __init__(self, folder: Path) -> None:
        self.worker = dynamo.mocker(folder)
        self.worker.wait()
        frontend = Frontend(folder)
        self.watched = Watched(
            folder,
            frontend,
            kind="dynamo",
            same=dynamo.assert_same_queue,
            known="kvwatch_requests",
            rest=WORKER.format(url=self.worker.base),
        )
        self.watched.daemon.until(frontend.serves, 60, "the model")

    def load(self, clients: int, *, generate: int = 200) -> Load:
        """Requests without an end; `stop` ends it."""
        return self.watched.load(concurrency=clients, total=5000, generate=generate)

    def close(self) -> None:
        """End them all."""
        try:
            self.watched.close()
        finally:
            self.worker.stop()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """One front end with one mocker of at most 8 requests at once."""
    front = Front(tmp_path_factory.mktemp("dynamo"))
    yield front
    front.close()


def end(load: Load) -> None:
    load.stop()
    load.join(120)


def test_idle(front: Front) -> None:
    """A front end that has had no request is up and idle, although it has no series of requests yet."""
    page = front.watched.follow(3)[-1]

    assert "dynamo_frontend_inflight_requests" not in front.watched.server.get(METRICS)
    assert page.get("kvwatch_server_up", **CHAT) == 1
    assert page.get("kvwatch_requests", state="running", **CHAT) == 0
    assert not page.all("kvwatch_kv_usage_ratio", server="chat")
    assert front.watched.limits() == [RUNNING_MAX]
    assert front.watched.told()["model"] == "tiny"
    assert any("first request" in note for note in told(front.watched, "worker")["notes"])


def test_load(front: Front) -> None:
    """Under light load running requests are the front end's own, nothing waits, and latencies appear."""
    light = front.load(3).start()
    pages = front.watched.follow(8)
    end(light)

    assert highest(pages, "kvwatch_requests", server="chat", state="running") == 3
    assert highest(pages, "kvwatch_requests", server="chat", state="waiting") <= 3
    assert front.watched.daemon.metrics().all("kvwatch_ttft_seconds", server="chat", quantile="0.95")
    assert light.outcomes["200"] > 0, light.outcomes


def test_saturation(front: Front) -> None:
    """With more clients than the worker takes the rest waits; the worker's pool fills and preempts."""
    heavy = front.load(24).start()
    pages = front.watched.follow(15)
    end(heavy)

    assert RUNNING_MAX <= highest(pages, "kvwatch_requests", server="chat", state="running") <= 24
    assert highest(pages, "kvwatch_requests", server="chat", state="waiting") >= 8
    assert highest(pages, "kvwatch_kv_usage_ratio", server="worker") > 0.75
    assert highest(pages, "kvwatch_preemptions_total", server="worker") > 0
    assert highest(pages, "kvwatch_requests", server="worker", state="waiting") >= 8


def test_an_unknown_model_is_no_second_engine(front: Front) -> None:
    """A request for a model that nobody serves is counted by Dynamo as a model; kvwatch's series stay."""
    front.watched.daemon.until(lambda: front.watched.running() == 0, 60, "the front end to be idle")
    request = urllib.request.Request(
        front.watched.server.base + "/v1/completions",
        b'{"model": "other", "prompt": "a"}',
        {"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    caught.value.close()

    assert caught.value.code == 404
    assert "unknown_model" in front.watched.server.get(METRICS)
    page = front.watched.follow(3)[-1]
    engines = {labels["engine"] for labels, _ in page.all("kvwatch_requests", server="chat")}
    assert engines == {"0"}


def test_worker_killed(front: Front) -> None:
    """Once the worker is gone its page is down, and the front end is up."""
    front.worker.kill()
    front.watched.daemon.until(lambda: up(front.watched, "worker") == {0.0}, 15, "the worker to be down")

    assert up(front.watched, "chat") == {1.0}


def test_killed(front: Front) -> None:
    """Once the front end is gone it is down."""
    front.watched.server.kill()
    front.watched.daemon.until(lambda: up(front.watched, "chat") == {0.0}, 15, "the front end to be down")


def test_other_prefix(tmp_path: Path) -> None:
    """With DYN_METRICS_PREFIX the front end has other names: kvwatch finds them. No worker is no error."""
    watched = Watched(
        tmp_path,
        Frontend(tmp_path, DYN_METRICS_PREFIX="acme"),
        kind="auto",
        same=lambda page, theirs: None,
    )
    try:
        watched.daemon.until(lambda: up(watched, "chat") == {1.0}, 30, "it to be recognised")
        assert "acme_disconnected_clients" in watched.server.get(METRICS)
        assert any("no model" in note for note in watched.notes())
    finally:
        watched.close()


@pytest.mark.skipif(
    (os.cpu_count() or 1) < 4,
    reason="a front end, a worker and its vLLM want four processors: on two it fails at times",
)
def test_vllm_behind_dynamo(tmp_path: Path) -> None:
    """A worker's page is its vLLM's: usage, queue and preemptions are the engine's own under preemption."""
    frontend = Frontend(tmp_path).wait()
    watched: Watched[Worker] | None = None
    try:
        watched = Watched(
            tmp_path,
            dynamo.vllm_worker(tmp_path),
            kind="dynamo",
            same=vllm.assert_same,
            known="kvwatch_kv_usage_ratio",
        )
        idle = watched.follow(3)[-1]
        assert idle.get("kvwatch_kv_usage_ratio", **CHAT) == 0
        assert idle.get("kvwatch_kv_capacity_tokens", **CHAT) == 1024
        watched.daemon.until(frontend.serves, 60, "the model")
        load = Load(frontend.base, concurrency=14, total=5000, generate=380).start()
        pages = watched.follow(10)
        end_s = time.monotonic() + 120  # on two cores the first requests take their time
        while not preempting(pages) and time.monotonic() < end_s:
            pages += watched.follow(5)
        end(load)
        assert preempting(pages)
        watched.daemon.until(lambda: watched.compare().get("kvwatch_kv_usage_ratio", **CHAT) == 0, 60, "idle")
        watched.server.kill()
        watched.daemon.until(lambda: up(watched, "chat") == {0.0}, 15, "down")
    finally:
        if watched is not None:
            watched.close()
        frontend.stop()


def preempting(pages: list[Page]) -> bool:
    """Whether the pool was nearly full, somebody waited, and requests lost their blocks."""
    return (
        highest(pages, "kvwatch_kv_usage_ratio") > 0.75
        and highest(pages, "kvwatch_requests", state="waiting") > 0
        and highest(pages, "kvwatch_preemptions_total") > 0
    )


def told(watched: Watched[Frontend], name: str) -> dict[str, Any]:
    """What kvwatch knows of one of its servers."""
    (found,) = [one for one in watched.daemon.state()["servers"] if one["server"] == name]
    return dict(found)


def up(watched: Watched[Frontend] | Watched[Worker], name: str) -> set[float]:
    """Whether kvwatch says that a server is up."""
    return {value for _, value in watched.daemon.metrics().all("kvwatch_server_up", server=name)}
