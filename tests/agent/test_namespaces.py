"""An agent in a container: pid and network namespaces of its own, the runtime directory by bind mount."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvwatch import wire
from tests.harness import ROOT, Daemon

CONFIG = """
gpus: {source: none}
servers:
  - {name: chat, kind: vllm, url: "http://127.0.0.1:9", period: 1s}
"""
# Inside: pid 1 of its own, no network; publishes as "chat" and prints the limit it sees.
PROGRAM = """
import os, sys, time
from kvwatch.agent.environment import place
from kvwatch.agent.limits import Limits
from kvwatch.agent.publisher import Publisher
here = place()
limits = Limits(here.lease, here.server)
assert os.getpid() == 1
state = {"server": "chat", "engine": 0, "rank": 0, "pid": 1, "scheduler": {"running": 1}}
Publisher(here, engine=lambda: state).start()
end, shown = time.monotonic() + 60, None
while time.monotonic() < end:
    found = limits.look(time.monotonic()).max_running
    if found != shown:
        shown = found
        print(found, flush=True)
    time.sleep(0.05)
"""


def told(daemon: Daemon) -> list[dict[str, object]]:
    """The agents of the last report; none before the first one."""
    try:
        return list(daemon.state()["agents"])
    except OSError:
        return []


def check(daemon: Daemon, inside: subprocess.Popen[str], seq: int) -> None:
    """The agent is known by its pid here, and a lease written here is seen there."""
    pid = daemon.until(lambda: told(daemon) or None, 15, "the agent")[0]["pid"]
    assert pid not in (1, inside.pid)
    assert "kvwatch.agent" in Path(f"/proc/{pid}/cmdline").read_text()
    lease = wire.Lease(server="chat", boot_id=wire.boot_id(), seq=seq, ttl_s=30, max_running=seq)
    wire.write(daemon.folder / "run" / "limits", lease)
    assert inside.stdout is not None
    assert any(line.strip() == str(seq) for line in inside.stdout)


@pytest.mark.needs("root", "unshare")
def test_container(tmp_path: Path) -> None:
    """The daemon knows it by its pid on the host; the lease reaches it; both survive a kvwatch restart."""
    run = tmp_path / "k" / "run"
    (run / "limits").mkdir(parents=True)
    inside = subprocess.Popen(
        [
            "unshare",
            "--kill-child",
            "--pid",
            "--net",
            "--fork",
            "--mount-proc",
            sys.executable,
            "-c",
            PROGRAM,
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT), "KVWATCH_SERVER": "chat", "KVWATCH_RUNTIME": str(run)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert inside.stdout is not None
    try:
        for seq in (1, 2):
            with Daemon(tmp_path / "k", CONFIG) as daemon:
                check(daemon, inside, seq)
    finally:
        inside.kill()
        inside.wait(10)
        inside.stdout.close()
