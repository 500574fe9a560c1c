"""From need to memory given back: a running daemon in act, and the real agent in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwatch import wire
from tests.daemon.page_server import PageServer
from tests.harness import ROOT, Daemon

CONFIG = """
gpus: {{source: none}}
servers:
  - {{name: chat, kind: vllm, url: "{url}", period: 500ms, timeout: 400ms}}
control:
  mode: {mode}
  targets:
    - server: chat
      policy: threshold
      accept_goodput_loss: true
      floor: 4
      ceiling: 64
      lease: 6s
      via: [{{lease: {{}}}}]
      compact: {compact}
"""
# A torch whose allocator holds 1.25 GiB in whole free segments on a device with 256 MiB free: the largest
# allocation is under 2 GiB, so the agent's rule is yellow.
TORCH = """
GIB, FREE = 1 << 30, 1 << 28
class Cuda:
    emptied = 0
    def is_initialized(self): return True
    def device_count(self): return 1
    def spare(self): return 0 if self.emptied else 5 * GIB // 4
    def memory_stats(self, device):
        live = 6 * GIB
        return {"reserved_bytes.all.current": live + self.spare(), "allocated_bytes.all.current": live,
                "active_bytes.all.current": live, "requested_bytes.all.current": live,
                "num_ooms": 0, "num_alloc_retries": 0}
    def memory_snapshot(self):
        def segment(size, state):
            block = {"size": size, "state": state}
            used = size if state != "inactive" else 0
            return {"device": 0, "address": size, "total_size": size, "allocated_size": used, "stream": 0,
                    "active_size": used, "segment_type": "large", "segment_pool_id": (0, 0),
                    "blocks": [block]}
        spare = self.spare()
        return [segment(6 * GIB, "active_allocated"), *([segment(spare, "inactive")] if spare else [])]
    def mem_get_info(self, device): return FREE + 5 * GIB // 4 - self.spare(), 8 * GIB
    def get_device_properties(self, device): return type("P", (), {"uuid": "1234"})()
    def empty_cache(self): self.emptied += 1
cuda = Cuda()
"""
SCHEDULER = """
class Scheduler:
    def __init__(self):
        from types import SimpleNamespace as Name
        self.running, self.waiting, self.max_num_running_reqs, self.max_num_active_reqs = [], [], 64, 64
        self.vllm_config = Name(parallel_config=Name(data_parallel_rank=0))
        pool = Name(num_gpu_blocks=9, blocks=[], enable_caching=False, get_num_free_blocks=lambda: 4)
        self.kv_cache_manager = Name(block_pool=pool, coordinator=None)
    def schedule(self): return self.max_num_active_reqs
"""
WORKER = """
class Worker:
    def __init__(self, config): self.vllm_config, self.rank = config, 0
    def execute_model(self): return None
"""
# An engine that steps a hundred times a second, and says when its allocator has been emptied.
ENGINE = """
import sys, time, torch
from kvwatch.agent.vllm_plugin import register
register()
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_worker import Worker
scheduler = Scheduler()
worker = Worker(scheduler.vllm_config)
seen, end_s = 0, time.monotonic() + 60
while time.monotonic() < end_s:
    assert scheduler.schedule() == 64
    worker.execute_model()
    if torch.cuda.emptied != seen:
        seen = torch.cuda.emptied
        print("emptied", seen, flush=True)
    time.sleep(0.01)
"""


@pytest.fixture
def page() -> Iterator[PageServer]:
    """A server whose page shows nothing to worry about."""
    with PageServer() as server:
        yield server


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The real plugin in a made vLLM with a made torch."""
    made = tmp_path / "lib"
    for module, text in (
        ("vllm/v1/core/sched/scheduler.py", SCHEDULER),
        ("vllm/v1/worker/gpu_worker.py", WORKER),
        ("torch.py", TORCH),
    ):
        path = made / module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in (made / "vllm", *(path for path in (made / "vllm").rglob("*") if path.is_dir())):
        (folder / "__init__.py").write_text("__version__ = '0.32.0'\n")
    run = tmp_path / "k" / "run"
    (run / "limits").mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE],
        env=os.environ
        | {"PYTHONPATH": f"{ROOT}:{made}", "KVWATCH_SERVER": "chat", "KVWATCH_RUNTIME": str(run)},
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.wait(10)
    assert process.stdout is not None
    process.stdout.close()


def messages(daemon: Daemon) -> list[str]:
    """What the audit log says of compacting."""
    events = json.loads(daemon.get("/api/v1/events?since=0"))["events"]
    return [event["message"] for event in events if "compact" in event["message"]]


def judged(daemon: Daemon) -> list[str]:
    """What it says of the effect."""
    return [message for message in messages(daemon) if "brought" in message]


def test_need_is_met(tmp_path: Path, page: PageServer, engine: subprocess.Popen[str]) -> None:
    """Yellow on the agent's own rule: the lease asks, the engine returns its memory between two steps, the
    daemon says what that brought and cost, and no lease is left."""
    config = CONFIG.format(url=page.url, mode="act", compact="true")
    with Daemon(tmp_path / "k", config) as daemon:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "emptied 1\n"
        said = daemon.until(lambda: judged(daemon) or None, 20, "the judgement")
        assert said == ["chat: compact: brought enough"]
        total = daemon.metrics().get("kvwatch_allocator_compactions_total", server="chat")
        assert total == 1
        cost_s = daemon.metrics().get("kvwatch_allocator_compact_seconds_total", server="chat")
        assert cost_s is not None
        lease = daemon.folder / "run" / "limits" / "chat.json"
        daemon.until(lambda: not lease.exists(), 10, "the lease's end")
        assert daemon.metrics().get("kvwatch_limit_active", server="chat") in (0.0, None)


@pytest.mark.parametrize(("mode", "compact"), [("advise", "true"), ("act", "false")])
def test_not_without_consent(
    tmp_path: Path, page: PageServer, engine: subprocess.Popen[str], mode: str, compact: str
) -> None:
    """Advising is only told, and act without `compact: true` does not even tell."""
    with Daemon(tmp_path / "k", CONFIG.format(url=page.url, mode=mode, compact=compact)) as daemon:
        yellow = {"rule": "largest_allocatable", "server": "chat"}
        daemon.until(lambda: daemon.metrics().get("kvwatch_rule_level", **yellow) == 1.0, 20, "yellow")
        if mode == "advise":
            said = daemon.until(lambda: messages(daemon) or None, 20, "the advice")
            assert "(advice only)" in said[0]
        else:
            assert messages(daemon) == []
        assert daemon.metrics().get("kvwatch_allocator_compactions_total", server="chat") == 0
        assert not (daemon.folder / "run" / "limits" / "chat.json").exists()
    assert wire.LeaseReader(tmp_path / "k" / "run" / "limits" / "chat.json").current() is None
