"""The agent inside a really running vLLM: exact state, limits at the next step, limits that end."""

from __future__ import annotations

import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from checks.engines.load import Load
from checks.engines.vllm import ROOT, Vllm
from kvwatch import wire
from kvwatch.sources import agents
from tests.harness import Daemon, Page

pytestmark = pytest.mark.timeout(900)

OWN = 16  # --max-num-seqs of the server
LIMIT = 2  # so few always fit into the pool: 2 x 12 of 32 blocks
LEASE_S = 3

CONFIG = """
gpus: {{source: none}}
servers:
  - {{name: chat, kind: vllm, url: "{url}", period: 500ms, timeout: 400ms}}
control:
  mode: {mode}
  targets:
    - server: chat
      policy: fixed
      params: {{max_running: 2}}
      floor: 1
      ceiling: auto
      lease: 3s
      cooldown: 1s
      via: [{{lease: {{}}}}]
"""


class Seen(NamedTuple):
    """One datagram: seconds since listening began, running requests, the admission limit in force."""

    at_s: float
    running: int
    effective: int


class Guarded:
    """vLLM with the agent in it (nothing but variables of the environment), and kvwatch beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "kvwatch" / "run"
        (self.run / "limits").mkdir(parents=True)
        plugin = folder / "plugin"
        info = plugin / "kvwatch_agent-0.dist-info"
        info.mkdir(parents=True)
        # What `pip install kvwatch` would put into the server's environment: the entry point, and the code.
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvwatch-agent\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nkvwatch = kvwatch.agent.vllm_plugin:register\n"
        )
        environment = {
            "PYTHONPATH": f"{ROOT}:{plugin}",
            "KVWATCH_SERVER": "chat",
            "KVWATCH_RUNTIME": str(self.run),
        }
        self.server = Vllm(folder / "vllm.log", environment=environment).wait()
        self.daemon: Daemon | None = None
        self.lease_seq = 0

    def clear(self) -> None:
        """Take the lease away."""
        wire.clear(self.run / "limits", "chat")

    def watch(self, mode: str) -> Daemon:
        """Start kvwatch in this mode, with the same directories."""
        config = CONFIG.format(url=self.server.base, mode=mode)
        self.daemon = Daemon(self.folder / "kvwatch", config).start()
        return self.daemon

    def unwatch(self) -> None:
        if self.daemon is not None:
            self.daemon.stop()
        self.daemon = None

    def lease(self, ttl_s: float = 15.0, **limit: object) -> None:
        """A lease by hand, where no daemon is wanted between the two."""
        self.lease_seq = wire.next_seq(self.lease_seq)
        wire.write(
            self.run / "limits",
            wire.Lease(server="chat", boot_id=wire.boot_id(), seq=self.lease_seq, ttl_s=ttl_s, **limit),  # type: ignore[arg-type]
        )

    def listen(self, seconds: float, enough: Callable[[list[Seen]], bool] = lambda _: False) -> list[Seen]:
        """What the engine core itself says, in kvwatch's place; until enough or for so long.

        The server's own page lags behind its engine on a busy machine; the agent does not.
        """
        listening = agents.create(self.run / "agent.sock")
        began_s, seen = time.monotonic(), []
        try:
            while time.monotonic() < began_s + seconds and not enough(seen):
                for heard in listening.receive(0.2):
                    told = heard.state.scheduler
                    assert told is not None
                    assert told.running is not None
                    at_s = heard.observed_s - began_s
                    seen.append(Seen(at_s, told.running, heard.state.effective_max_running or 0))
        finally:
            listening.close()
        return seen

    def until(self, enough: Callable[[Seen], bool], seconds: float) -> float:
        """Listen until a state like this; seconds it took."""
        seen = self.listen(seconds, lambda all_seen: any(map(enough, all_seen)))
        found = next((one for one in seen if enough(one)), None)
        assert found is not None, f"not within {seconds} s: {seen[-5:]}"
        return found.at_s

    def preemptions(self) -> float:
        """The server's own count."""
        with urllib.request.urlopen(f"{self.server.base}/metrics", timeout=30) as reply:
            page = Page(reply.read().decode())
        return page.get("vllm:num_preemptions_total", engine="0") or 0.0

    def close(self) -> None:
        self.unwatch()
        self.server.stop()


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    guarded = Guarded(tmp_path_factory.mktemp("agent"))
    yield guarded
    guarded.close()


@pytest.fixture
def load(chat: Guarded) -> Iterator[Load]:
    """More than the pool holds, all the time."""
    found = Load(chat.server.base, concurrency=14, total=4000, generate=300, seconds=300).start()
    chat.until(lambda seen: seen.running > LIMIT, 60)
    yield found
    found.stop()
    chat.clear()
    found.join(90)


def told(daemon: Daemon) -> list[dict[str, object]]:
    try:
        return list(daemon.state()["agents"])
    except OSError:  # no report yet
        return []


def test_exact_state_is_published(chat: Guarded, load: Load) -> None:
    """Under load the agent tells blocks, tokens and both limits, and the waste is exact."""
    daemon = chat.watch("observe")
    found = daemon.until(lambda: told(daemon) or None, 20, "the agent")[0]
    kv = found["kv"]
    assert isinstance(kv, dict)
    assert kv["num_blocks"] == 32
    assert kv["used_blocks"] + kv["free_blocks"] + kv["evictable_blocks"] == 32
    assert 0 < kv["tokens"] <= kv["used_blocks"] * 32
    assert found["effective_max_running"] == OWN
    assert found["limits"] == "obeyed"
    assert str(found["host"]).startswith("vllm 0.")
    daemon.until(
        lambda: daemon.metrics().all("kvwatch_kv_block_waste_ratio", method="exact") or None, 10, "the waste"
    )
    chat.unwatch()


def test_limit_stops_preemptions(chat: Guarded, load: Load) -> None:
    """A lease holds admission from the next step on: nothing is admitted above it, and preemptions stop."""
    before, began_s = chat.preemptions(), time.monotonic()
    chat.listen(8)
    rate = (chat.preemptions() - before) / (time.monotonic() - began_s)
    assert rate > 0, "no overload, nothing to show"
    chat.lease(ttl_s=100, max_running=LIMIT)
    seen = chat.listen(60, lambda all_seen: bool(all_seen) and all_seen[-1].running <= LIMIT)
    held = [one for one in seen if one.effective == LIMIT]
    assert held[0].at_s < 3
    for earlier, later in pairwise(held):
        assert later.running <= max(earlier.running, LIMIT)
    chat.listen(5)  # the page catches up with the engine
    settled = chat.preemptions()
    after = chat.listen(10)
    assert max(one.running for one in after) == LIMIT
    assert chat.preemptions() == settled
    print(f"preemptions {rate:.1f}/s -> 0 in 10 s; drained {seen[-1].at_s:.1f} s after the lease")
    chat.clear()
    print(f"released {chat.until(lambda one: one.running > LIMIT, 30):.1f} s after it was taken away")


def test_admission_stops_and_returns(chat: Guarded, load: Load) -> None:
    """Without admission the running ones finish and nothing starts; the server takes up again by itself."""
    chat.lease(ttl_s=20, admit=False)
    chat.until(lambda one: one.running == 0, 60)
    assert chat.server.process.poll() is None
    chat.until(lambda one: one.effective == OWN and one.running > LIMIT, 60)


def test_killed_daemon_gives_back(chat: Guarded, load: Load) -> None:
    """kvwatch dies by SIGKILL while it limits: the server's own limit is back within the lease.

    The ceiling is that limit, which vLLM's pages do not tell but its agent does."""
    daemon = chat.watch("act")
    daemon.until(
        lambda: [one for one in told(daemon) if one["effective_max_running"] == LIMIT] or None,
        60,
        "the limit",
    )
    assert daemon.metrics().get("kvwatch_limit_configured", server="chat", engine="0") == OWN
    assert daemon.process is not None
    daemon.process.kill()
    daemon.process.wait(10)
    chat.daemon = None
    took_s = chat.until(lambda one: one.effective == OWN, 20)
    print(f"own limit told {took_s:.1f} s after SIGKILL (lease {LEASE_S} s)")

    assert took_s < LEASE_S + 2, "the lease, and the next datagram"
    assert chat.server.process.poll() is None


def test_lowering_far_below_running(chat: Guarded, load: Load) -> None:
    """Limits that jump up and down under what runs never end the engine."""
    for limit in (1, 16, 2, 12, 1, 5, 1):
        chat.lease(ttl_s=10, max_running=limit)
        time.sleep(0.7)
    chat.clear()
    chat.until(lambda one: one.running > LIMIT, 30)

    assert chat.server.process.poll() is None
    assert "AssertionError" not in (chat.folder / "vllm.log").read_text()


def test_entry_point_is_what_the_package_installs() -> None:
    """The line that these checks write by hand is the one in the project's own metadata."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert project["entry-points"]["vllm.general_plugins"] == {
        "kvwatch": "kvwatch.agent.vllm_plugin:register"
    }
    assert metadata.EntryPoint("kvwatch", "kvwatch.agent.vllm_plugin:register", "x").load() is not None
