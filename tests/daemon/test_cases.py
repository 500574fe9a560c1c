"""Public bug reports that concern the whole daemon: real processes, a fake driver, real pages."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.daemon.acting import config as acting
from tests.daemon.acting import exec_lever
from tests.daemon.faulty import NVML, PATIENCE_S, Host, readings, stuck, wait_for_gpus, watch
from tests.daemon.page_server import PageServer
from tests.daemon.test_daemon import ask, config, up
from tests.harness import ROOT, Daemon, free_port

pytestmark = pytest.mark.needs("gcc")
SERVE = """
import signal, sys, time
from tests.daemon.page_server import PageServer
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with PageServer(int(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(600)
"""


@contextmanager
def systemd(folder: Path) -> Iterator[tuple[socket.socket, dict[str, str]]]:
    """The socket that systemd would listen on, and the variables of a service with a watchdog of 2 s."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        path = folder / "notify"
        channel.bind(os.path.relpath(path) if len(str(path)) > 100 else str(path))
        channel.setblocking(False)
        yield channel, {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "2000000"}


def beats(channel: socket.socket) -> int:
    """How many WATCHDOG=1 have come since the last look."""
    found = 0
    while True:
        try:
            found += b"WATCHDOG=1" in channel.recv(4096).split(b"\n")
        except BlockingIOError:
            return found


def test_case_E7_a_hung_driver_starves_neither_watchdog_nor_health(host: Host) -> None:
    """While a driver call hangs the loop goes on: healthy, its watchdog fed, its process the same."""
    host.folder.mkdir(exist_ok=True)
    with systemd(host.folder) as (channel, variables):
        host.environment |= variables
        with host.daemon() as daemon:
            wait_for_gpus(daemon)
            assert daemon.process is not None
            host.gpus.hang().write()
            daemon.until(lambda: stuck(daemon), PATIENCE_S, "stuck")
            unhealthy = watch(lambda: ask(daemon, "/-/healthy")[0] == ask(daemon, "/metrics")[0] == 200)
            beats(channel)
            gaps = []
            for _ in range(3):
                time.sleep(2.0)  # the watchdog's interval: one beat at least must be in each
                gaps.append(beats(channel))
            assert unhealthy() == 0
            assert min(gaps) >= 1, gaps
            assert readings(daemon) == 0
            assert daemon.process.poll() is None


def test_case_H4_a_server_that_ends_with_status_0_is_down(tmp_path: Path) -> None:
    """An engine whose process ends cleanly, so that systemd restarts nothing, is red all the same."""
    port = free_port()
    command = [sys.executable, "-c", SERVE, str(port)]
    more = "gpus: {source: none}\nrules: {server_down: {for: 1s}}\n"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        engine.stdout.readline()
        with Daemon(tmp_path, config(("chat", f"http://127.0.0.1:{port}"), more=more)) as daemon:
            daemon.until(lambda: up(daemon, "chat"), PATIENCE_S, "the server")
            daemon.until(lambda: daemon.level("server_down", server="chat") == 0, PATIENCE_S, "green")
            engine.send_signal(signal.SIGTERM)
            assert engine.wait(PATIENCE_S) == 0
            daemon.until(lambda: daemon.level("server_down", server="chat") == 2, PATIENCE_S, "red")
            assert daemon.metrics().get("kvwatch_server_up", server="chat", engine="0") == 0


def test_case_H6_metrics_500_keeps_the_gpus_and_moves_no_hook(host: Host) -> None:
    """The page of a full server turns into 500: GPUs are read on, the server is unknown, no hook runs."""
    lever, via = exec_lever(host.folder)
    with PageServer() as server:
        text = acting(server.url, via).replace("gpus: {source: none}\n", NVML)
        with host.daemon(text) as daemon:
            wait_for_gpus(daemon)
            daemon.until(lambda: up(daemon, "chat"), PATIENCE_S, "the server")
            server.broken = True
            daemon.until(lambda: not daemon.metrics().all("kvwatch_kv_usage_ratio"), PATIENCE_S, "no usage")
            server.full()
            asked = server.pages
            daemon.until(lambda: server.pages > asked + 5, PATIENCE_S, "more polls")
            page = daemon.metrics()
            assert page.get("kvwatch_server_up", server="chat", engine="0") == 0
            assert page.get("kvwatch_rule_level", rule="kv_usage", server="chat", engine="0") == -1
            assert readings(daemon) == 2
            assert not lever.exists()
            assert page.get("kvwatch_actions_total", action="exec", outcome="applied") == 0
            server.broken = False
            daemon.until(lever.exists, PATIENCE_S, "the limit, once the page is back")
            daemon.stop()
