"""From a real datagram to /metrics, the state and the rules of a really running daemon."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwatch.model.server import AllocatorState
from kvwatch.wire_record import address
from tests.agent.build import GIB, MIB, agent, allocator, encode
from tests.harness import Daemon, free_port

CONFIG = """
gpus: {{source: none}}
servers:
  - {{name: chat, kind: vllm, url: "http://127.0.0.1:{port}", period: 1s}}
"""
CHAT = {"server": "chat", "engine": "0", "rank": "0"}


class Speaker:
    """Speaks as this process to a daemon's socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with address(str(path)) as name:
            self._socket.connect(name)
        self._seq = 0

    def say(self, found: AllocatorState, **change: object) -> None:
        self._seq += 1
        state = agent(pid=os.getpid(), seq=self._seq, allocator=found, **change)
        self._socket.send(encode(state, time.monotonic()))

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, CONFIG.format(port=free_port())) as running:
        running.until(lambda: (tmp_path / "run" / "agent.sock").exists() or None, 5, "the socket")
        yield running


@pytest.fixture
def speaker(daemon: Daemon) -> Iterator[Speaker]:
    found = Speaker(daemon.folder / "run" / "agent.sock")
    yield found
    found.close()


def test_figures_are_shown(daemon: Daemon, speaker: Speaker) -> None:
    """What an agent says is on /metrics under the contract's names, with its source beside it."""
    speaker.say(allocator())
    daemon.until(lambda: daemon.metrics().all("kvwatch_allocator_bytes") or None, 5, "the figures")
    page = daemon.metrics()

    assert page.get("kvwatch_allocator_bytes", state="reserved", **CHAT) == 10 * GIB
    assert page.get("kvwatch_allocator_releasable_bytes", **CHAT) == 2 * GIB
    assert page.get("kvwatch_allocator_fragmentation_ratio", kind="hard", **CHAT) == 0.1
    assert page.get("kvwatch_allocator_largest_allocatable_bytes", **CHAT) == 5 * GIB
    assert page.get("kvwatch_allocator_alloc_retries_total", **CHAT) == 3
    assert page.get("kvwatch_allocator_arena_fragmentation_ratio", arena="large/0", **CHAT) == pytest.approx(
        2 / 3
    )
    assert page.get("kvwatch_source_up", source="agent/chat/0/0") == 1
    daemon.until(
        lambda: daemon.metrics().get("kvwatch_agent_datagrams_total", outcome="accepted") == 1, 5, "the count"
    )
    assert daemon.metrics().get("kvwatch_agent_datagrams_total", outcome="rate") == 0
    assert daemon.state()["agents"][0]["pid"] == os.getpid()


def test_case_I6_rules_judge_by_the_allocator_alone(daemon: Daemon, speaker: Speaker) -> None:
    """Retries, a small largest block and hard fragmentation raise their rules; one sample raises none.

    Before an agent has spoken there is neither a figure nor a verdict, since nothing else can tell.
    """
    rules = ("alloc_retries", "largest_allocatable", "allocator_fragmentation")
    before = daemon.metrics()
    assert [name for name, _, _ in before.samples if name.startswith("kvwatch_allocator_")] == []
    assert [before.get("kvwatch_rule_level", rule=rule, server="chat") for rule in rules] == [None] * 3
    bad = {
        "largest_allocatable_bytes": 512 * MIB,
        "fragmentation_hard_ratio": 0.4,
        "releasable_bytes": 0,
    }
    speaker.say(allocator(num_alloc_retries=3, **bad))
    daemon.until(lambda: daemon.metrics().all("kvwatch_allocator_bytes") or None, 5, "the figures")
    assert daemon.level("largest_allocatable", server="chat") == -1

    def levels() -> bool:
        speaker.say(allocator(num_alloc_retries=30, **bad))
        time.sleep(0.3)
        page = daemon.metrics()
        seen = [page.get("kvwatch_rule_level", rule=rule, server="chat", engine="0") for rule in rules]
        return seen == [2, 2, 1]

    daemon.until(levels, 10, "the three rules")


def test_silence_is_unknown_not_green(daemon: Daemon, speaker: Speaker) -> None:
    """An agent that falls silent takes its figures with it."""
    for _ in range(2):
        speaker.say(allocator())
    daemon.until(lambda: daemon.metrics().all("kvwatch_allocator_bytes") or None, 5, "the figures")
    daemon.until(lambda: not daemon.metrics().all("kvwatch_allocator_bytes"), 10, "no figures")

    assert daemon.level("largest_allocatable", server="chat") in (-1, 0)


def test_hostile_datagrams_change_nothing(daemon: Daemon, speaker: Speaker) -> None:
    """Noise, another's pid and a flood from another process are counted; what is shown stays as it was."""
    speaker.say(allocator())
    hostile = (
        "import socket,sys,time,json\n"
        "s=socket.socket(socket.AF_UNIX,socket.SOCK_DGRAM);s.connect(sys.argv[1])\n"
        "bad={'v':1,'server':'chat','engine':0,'rank':0,'pid':1,'seq':9**9,'mono_s':1,"
        "'allocator':{'num_ooms':77}}\n"
        "s.send(json.dumps(bad).encode());s.send(b'['*9000)\n"
        "s.send(json.dumps(bad|{'mono_s':float('nan')}).encode())\n"
        "for _ in range(10000): s.send(b'x')\n"
    )
    path = os.path.relpath(daemon.folder / "run" / "agent.sock")
    subprocess.run([sys.executable, "-c", hostile, path], check=True, timeout=30)

    def counted() -> bool:
        speaker.say(allocator())
        page = daemon.metrics()
        count = {labels["outcome"]: value for labels, value in page.all("kvwatch_agent_datagrams_total")}
        return count.get("pid") == 1 and count.get("malformed", 0) >= 2 and count.get("rate", 0) > 9000

    daemon.until(counted, 10, "the counts")
    assert daemon.metrics().get("kvwatch_allocator_ooms_total", **CHAT) == 0
    assert len(daemon.metrics().all("kvwatch_allocator_ooms_total")) == 1


def test_socket_goes_with_the_daemon(daemon: Daemon) -> None:
    """A stopped daemon leaves no socket; the directory stays."""
    daemon.stop()

    assert not (daemon.folder / "run" / "agent.sock").exists()
    assert (daemon.folder / "run").is_dir()
