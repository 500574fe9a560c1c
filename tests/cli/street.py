"""Processes of a host that answer as servers do, for those who look for servers."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.harness import ROOT

SERVERS = ROOT / "tests/fixtures/servers"
VLLM, LLAMA = SERVERS / "vllm/0.32.0/preempting", SERVERS / "llamacpp/b11434/busy_deferred"
HTML = "<!doctype html><html><body>shop: models, metrics, loads</body></html>"
HARMLESS = {
    "/v1/models", "/v1/metrics", "/v1/loads", "/metrics", "/prometheus/metrics", "/version", "/props",
    "/info", "/token_load", "/api/ps", "/server_info", "/health", "/slots",
}  # fmt: skip
Pages = dict[str, tuple[int, str, str]]


def port_below_the_kernels() -> int:
    """A free port that was chosen, not handed out: as those of servers are."""
    while True:
        port = random.randint(20000, 29999)
        with socket.socket() as probing:
            try:
                probing.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def vllm_pages() -> Pages:
    text = gzip.decompress(VLLM.with_suffix(".metrics.prom.gz").read_bytes()).decode()
    return {
        "/metrics": (200, "text/plain; version=0.0.4", text),
        "/version": (200, "application/json", '{"version":"0.32.0"}'),
        "/health": (200, "text/plain", ""),
        "/v1/models": (
            200,
            "application/json",
            '{"object":"list","data":[{"id":"tiny","object":"model","created":1,"owned_by":"vllm"}]}',
        ),
        "*": (404, "application/json", '{"detail":"Not Found"}'),
    }


def llama_pages() -> Pages:
    return {
        "/metrics": (200, "text/plain", LLAMA.with_suffix(".metrics.prom").read_text()),
        "/props": (200, "application/json", LLAMA.with_suffix(".props.json").read_text()),
        "/slots": (200, "application/json", LLAMA.with_suffix(".slots.json").read_text()),
        "/health": (200, "application/json", '{"status":"ok"}'),
        "*": (404, "application/json", '{"error":{"code":404,"message":"File Not Found"}}'),
    }


def shop_pages() -> Pages:
    """A web application: one page for every path, and metrics of its own."""
    own = "# TYPE http_requests_total counter\nhttp_requests_total 7\nprocess_start_time_seconds 1.0\n"
    return {"/metrics": (200, "text/plain; version=0.0.4", own), "*": (200, "text/html", HTML)}


class Street:
    """Processes that listen, each under the command line that a test gives it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[bytes]] = []

    def open(self, *command: str, pages: Pages) -> tuple[int, int]:
        """Start one; its pid and port. `command` is what `ps` shows, the second word a file made for it."""
        port, name = port_below_the_kernels(), f"house{len(self.running)}"
        house = self.folder / name
        house.mkdir()
        shutil.copy(ROOT / "tests/cli/stand_in.py", house / command[1])
        (house / "pages.json").write_text(json.dumps(pages))
        arguments = [*command, "--port", str(port), "--pages", "pages.json", "--log", "asked.log"]
        # Named as something else, Python looks for its library in the wrong place.
        home = os.environ | {"PYTHONHOME": sys.base_prefix}
        process = subprocess.Popen(arguments, executable=sys.executable, cwd=house, env=home)
        self.running.append(process)
        end_s = time.monotonic() + 20
        while time.monotonic() < end_s:
            with socket.socket() as probing:
                if probing.connect_ex(("127.0.0.1", port)) == 0:
                    return process.pid, port
            time.sleep(0.02)
        raise AssertionError(f"{command} does not listen")

    def asked(self, pid: int) -> list[str]:
        """What the process was asked for: "requests under way, method, path"."""
        number = [process.pid for process in self.running].index(pid)
        log = self.folder / f"house{number}" / "asked.log"
        return log.read_text().splitlines() if log.exists() else []

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.wait(10)


def only_harmless(asked: list[str]) -> bool:
    """Whether these were GETs of known paths, never two at once."""
    return all(line.split()[:2] == ["1", "GET"] and line.split()[2] in HARMLESS for line in asked)
