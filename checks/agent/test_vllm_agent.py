"""The agent inside a really running vLLM: exact state, limits at the next step, limits that end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from checks.engines.load import Load
from checks.engines.vllm import ROOT, Vllm
from kvwatch import wire
from tests.harness import Daemon, Page

pytestmark = pytest.mark.timeout(900)

CONFIG = """
gpus: {{source: none}}
servers:
  - {{name: chat, kind: vllm, url: "{url}", period: 500ms, timeout: 400ms}}
control:
  mode: {mode}
  targets:
    - server: chat
      policy: fixed
      params: {{max_running: 3}}
      floor: 2
      ceiling: 16
      lease: 3s
      cooldown: 1s
      via: [{{lease: {{}}}}]
"""


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

    def own(self) -> Page:
        """The server's own page."""
        import urllib.request

        with urllib.request.urlopen(f"{self.server.base}/metrics", timeout=10) as reply:
            return Page(reply.read().decode())

    def running(self) -> float:
        return self.own().get("vllm:num_requests_running", engine="0") or 0.0

    def preemptions(self) -> float:
        return self.own().get("vllm:num_preemptions_total", engine="0") or 0.0

    def until_running(self, low: int, high: int, seconds: float) -> float:
        """Wait until between so many run; seconds it took."""
        began_s = time.monotonic()
        while time.monotonic() < began_s + seconds:
            if low <= self.running() <= high:
                return time.monotonic() - began_s
            time.sleep(0.05)
        raise AssertionError(f"{self.running()} run; wanted {low} to {high} within {seconds} s")

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
    found = Load(chat.server.base, concurrency=14, total=4000, generate=300, seconds=200).start()
    chat.until_running(6, 16, 60)
    yield found
    found.stop()
    found.join(90)


def agents(daemon: Daemon) -> list[dict[str, object]]:
    try:
        return list(daemon.state()["agents"])
    except OSError:  # no report yet
        return []


def test_exact_state_is_published(chat: Guarded, load: Load) -> None:
    """Under load the agent tells blocks, tokens and both limits, and the waste is exact."""
    daemon = chat.watch("observe")
    found = daemon.until(lambda: agents(daemon) or None, 20, "the agent")[0]
    kv = found["kv"]
    assert isinstance(kv, dict)
    assert kv["num_blocks"] == 32
    assert kv["used_blocks"] + kv["free_blocks"] + kv["evictable_blocks"] == 32
    assert 0 < kv["tokens"] <= kv["used_blocks"] * 32
    assert found["effective_max_running"] == 16
    assert found["limits"] == "obeyed"
    assert str(found["host"]).startswith("vllm 0.")
    daemon.until(
        lambda: daemon.metrics().all("kvwatch_kv_block_waste_ratio", method="exact") or None, 10, "the waste"
    )
    chat.unwatch()


def test_limit_stops_preemptions(chat: Guarded, load: Load) -> None:
    """A lease holds admission from the next step on: running drains to it, and preemptions stop."""
    before = chat.preemptions()
    time.sleep(4)
    rate = (chat.preemptions() - before) / 4
    assert rate > 0, "no overload, nothing to show"
    chat.lease(ttl_s=60, max_running=3)
    drained_s = chat.until_running(1, 3, 30)
    settled = chat.preemptions()
    seen = []
    for _ in range(50):
        seen.append(chat.running())
        time.sleep(0.1)
    held = (chat.preemptions() - settled) / 5
    print(f"preemptions {rate:.1f}/s -> {held:.1f}/s, drained in {drained_s:.1f} s")

    assert max(seen) <= 3
    assert held == 0
    wire.clear(chat.run / "limits", "chat")
    released_s = chat.until_running(6, 16, 20)
    print(f"released {released_s:.1f} s after the lease was taken away")


def test_admission_stops_and_returns(chat: Guarded, load: Load) -> None:
    """Without admission the running ones finish and nothing starts; the server lives and takes up again."""
    chat.lease(ttl_s=6, admit=False)
    chat.until_running(0, 0, 30)
    assert chat.server.process.poll() is None
    chat.until_running(6, 16, 30)


def test_killed_daemon_gives_back(chat: Guarded, load: Load) -> None:
    """kvwatch dies by SIGKILL while it limits: the server is back to its own limit within the lease."""
    daemon = chat.watch("act")
    chat.until_running(1, 3, 40)
    assert daemon.process is not None
    daemon.process.kill()
    daemon.process.wait(10)
    began_s = time.monotonic()
    chat.daemon = None
    chat.until_running(6, 16, 15)
    took_s = time.monotonic() - began_s
    print(f"own limit back {took_s:.1f} s after SIGKILL (lease 3 s)")

    assert took_s < 3 + 2.5, "the lease, one look and one admission"
    assert chat.server.process.poll() is None


def test_lowering_far_below_running(chat: Guarded, load: Load) -> None:
    """Limits that jump up and down under what runs never end the engine."""
    for limit in (1, 16, 2, 12, 1, 5, 1):
        chat.lease(ttl_s=10, max_running=limit)
        time.sleep(0.7)
    wire.clear(chat.run / "limits", "chat")
    chat.until_running(6, 16, 30)

    assert chat.server.process.poll() is None
    assert "AssertionError" not in (chat.folder / "vllm.log").read_text()


def test_entry_point_is_what_the_package_installs() -> None:
    """The line that these checks write by hand is the one in the project's own metadata."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert project["entry-points"]["vllm.general_plugins"] == {
        "kvwatch": "kvwatch.agent.vllm_plugin:register"
    }
    assert metadata.EntryPoint("kvwatch", "kvwatch.agent.vllm_plugin:register", "x").load() is not None
