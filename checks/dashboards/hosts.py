"""A small fleet under a real Prometheus: a demo daemon per scenario, one that acts, one that has run long.

The pages come from kvwatch's own daemon or, for what takes hours (forecasts of device memory), from its core
moved through two hours at once. Made up are the simulated hosts, and what the agents say.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from kvwatch.agent.environment import Place
from kvwatch.agent.publisher import Publisher
from kvwatch.config import default_settings
from kvwatch.exporters.prometheus import Page
from kvwatch.lab import demo
from kvwatch.lab.demo_gpus import UUIDS
from kvwatch.wire_record import Record
from tests.core.host import Host
from tests.harness import Daemon, free_port

SCENARIOS = ("calm", "overload", "leak", "faults", "tour")
SPEED = 4.0  # every scenario has gone through all of its phases in 45 s
LONG = "hours.example:9843"  # named as Prometheus does it, with what regular expressions take as special
MIB = 2**20
GIB = 2**30

# The second server is the first one once more: vLLM does not tell its own limit, a mapped page can.
ACTING = """
servers:
  - {{name: chat, kind: vllm, url: "{url}"}}
  - name: batch
    kind: mapped
    url: "{url}"
    metrics:
      running: 'vllm:num_requests_running'
      waiting: 'vllm:num_requests_waiting'
      usage_ratio: 'vllm:kv_cache_usage_perc'
      max_running: 'vllm:engine_sleep_state{{sleep_state="awake"}} * 64'
gpus: {{source: none}}
control:
  mode: act
  targets:
    - {{server: chat, policy: fixed, params: {{max_running: 12}}, ceiling: 64, via: [{{lease: {{}}}}]}}
    - {{server: batch, policy: fixed, params: {{max_running: 40}}, via: [{{lease: {{}}}}]}}
"""


class Agent:
    """An agent as it runs inside a server; what it reads there is made here and moves a little."""

    def __init__(self, runtime: Path) -> None:
        self._begun_s = time.monotonic()
        here = Place("chat", str(runtime / "agent.sock"), str(runtime / "limits/chat.json"))
        self._publisher = Publisher(here, engine=self._engine, memory=self._memory)
        self._publisher.start()

    def close(self) -> None:
        """Say nothing any more."""
        self._publisher.stop()

    def _engine(self) -> Record:
        return {
            "server": "chat",
            "engine": 0,
            "rank": 0,
            "pid": os.getpid(),
            "host": "vllm 0.32.0",
            "limits": "obeyed",
            "scheduler": {"max_running": 64},
        }

    def _memory(self) -> list[tuple[str, Record]]:
        passed = time.monotonic() - self._begun_s
        used = int((68 + passed % 20 / 4) * GIB)
        reserved = 76 * GIB
        free = reserved - used
        return [
            (
                UUIDS[0],
                {
                    "allocated_bytes.all.current": used,
                    "reserved_bytes.all.current": reserved,
                    "active_bytes.all.current": used + 64 * MIB,
                    "requested_bytes.all.current": used - 96 * MIB,
                    "inactive_split_bytes.all.current": free // 3,
                    "num_alloc_retries": int(passed / 10),
                    "num_ooms": int(passed / 30),
                    "largest_free_bytes": free // 4,
                    "largest_allocatable_bytes": 2 * GIB + free // 2,
                    "releasable_bytes": free // 2,
                    "private_bytes": 512 * MIB,
                    "soft_ratio": free / 2 / reserved,
                    "hard_ratio": free / 3 / reserved,
                    "total_ratio": 0.75,
                },
            )
        ]


class LongRun:
    """A host watched for two hours while its memory and its pool filled; only the core runs, no daemon."""

    DEVICE_S = 6900  # 20 forecasts of 5 min each must come due, after 9 min of history
    POOL_S = 420  # the same with 15 s each

    def __init__(self) -> None:
        now_s = time.time()
        self._host = Host(used_bytes=60 * GIB, usage=0.05, wall_s=now_s - self.DEVICE_S - self.POOL_S)
        self._page = Page()
        self._lock = threading.Lock()
        for _ in range(self.DEVICE_S // 10):
            self._pass(10.0)
        for _ in range(self.POOL_S):
            self._pass(1.0)
        long = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = long.scrape()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _pass(self, seconds: float) -> None:
        host = self._host
        host.used_bytes += int(seconds * 7 * MIB)
        host.usage = min(0.95, (host.usage or 0.0) + seconds * 1e-4)
        host.tick(seconds)

    def scrape(self) -> bytes:
        """Let the time since the last scrape pass, a second at a time; the page then."""
        with self._lock:
            while self._host.wall_s + 1.0 <= time.time():
                self._pass(1.0)
            return self._page.render(self._host.report, openmetrics=False)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class Prometheus:
    """A Prometheus on `folder/tsdb` that scrapes these targets (name: URL) every second, or none."""

    def __init__(self, folder: Path, targets: Mapping[str, str]) -> None:
        jobs = ", ".join(
            f"{{targets: ['{url.removeprefix('http://')}'], labels: {{instance: '{name}'}}}}"
            for name, url in targets.items()
        )
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            f"scrape_configs: [{{job_name: kvwatch, static_configs: [{jobs}]}}]\n"
        )
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}"
        self.log = folder / "prometheus.log"
        with self.log.open("wb") as stream:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder}/prometheus.yml",
                    f"--storage.tsdb.path={folder}/tsdb",
                    f"--web.listen-address={address}",
                ],
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def wait(self, seconds: float = 30.0) -> None:
        """Until it answers."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            try:
                urllib.request.urlopen(f"{self.url}/-/ready", timeout=2).close()
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError(f"no Prometheus:\n{self.log.read_text()[-2000:]}")

    def close(self) -> None:
        """Stop it; what it has stays on disk."""
        self._process.terminate()
        self._process.wait(20)


class Fleet:
    """All of it, running between `with` and its end. `from_s` (Unix seconds) is when scraping began."""

    def __init__(self, folder: Path, speed: float = SPEED) -> None:
        self._folder = folder
        self._speed = speed
        self._stack = ExitStack()

    def __enter__(self) -> Fleet:
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def _start(self, stack: ExitStack) -> None:
        long = LongRun()
        stack.callback(long.close)
        targets = {LONG: long.url}
        fast = {"KVWATCH_DEMO_SPEED": f"{self._speed:g}"}
        for name in SCENARIOS:
            place = self._folder / name
            daemon = stack.enter_context(Daemon(place, None, "--demo", name, environment=fast))
            targets[name] = daemon.url
        targets["acting"] = self._acting(stack)
        self.prometheus = Prometheus(self._folder, targets)
        stack.callback(self.prometheus.close)
        self.from_s = time.time()
        self.prometheus.wait()

    def _acting(self, stack: ExitStack) -> str:
        """A daemon that may limit: it watches a simulated server of its own, and an agent obeys in it."""
        world = demo.start("overload", default_settings(), speed=self._speed)
        stack.callback(world.close)
        place = self._folder / "acting"
        daemon = stack.enter_context(Daemon(place, ACTING.format(url=world.server.url)))
        stack.callback(Agent(place / "run").close)
        return daemon.url

    def __exit__(self, *_: object) -> None:
        self._stack.close()
