"""`kvwatch probe` on a host with inference servers, a dcgm-exporter and a web server that is none of it."""

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
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwatch.cli import probe
from kvwatch.sources import discovery
from tests.cli.test_cli import kvwatch
from tests.fakes.dcgm import uuid_of
from tests.fakes.dcgm.exporter import Board, page
from tests.harness import ROOT, Daemon

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


@pytest.fixture
def street(tmp_path: Path) -> Iterator[Street]:
    """A host's processes, ended afterwards."""
    folder = tmp_path / "street"
    folder.mkdir()
    street = Street(folder)
    yield street
    street.close()


def only_harmless(asked: list[str]) -> bool:
    """Whether these were GETs of known paths, never two at once."""
    return all(line.split()[:2] == ["1", "GET"] and line.split()[2] in HARMLESS for line in asked)


def test_three_are_found_and_the_file_that_is_written_runs(street: Street, tmp_path: Path) -> None:
    """vLLM, llama.cpp and a dcgm-exporter are found, a web server is left alone; `check` accepts the file
    that probe writes, and `run` has both servers up and the GPUs of the exporter on it, unchanged."""
    _, vllm = street.open("vllm", "serve", "tiny", "x", pages=vllm_pages())
    _, llama = street.open("/opt/llama.cpp/llama-server", "server", pages=llama_pages())
    exporter_page = page("4.4", [Board(0), Board(1)]).decode()
    exporter_pages: Pages = {"/metrics": (200, "text/plain", exporter_page)}
    _, exporter = street.open("/usr/bin/dcgm-exporter", "exporter", pages=exporter_pages)
    shop_pid, shop = street.open("gunicorn", "shop", pages=shop_pages())
    target, no_driver = tmp_path / "found.yml", {"LD_LIBRARY_PATH": str(tmp_path)}

    told = kvwatch("probe", "--json", "--write", str(target), folder=tmp_path, extra=no_driver)
    seen = json.loads(told.stdout)
    checked = kvwatch("check", str(target), folder=tmp_path)
    names = {server["name"]: server["problem"] for server in seen["servers"]}

    assert told.returncode == 0
    assert {f"vllm-{vllm}", f"llamacpp-{llama}"} <= names.keys()
    assert names[f"vllm-{vllm}"] is names[f"llamacpp-{llama}"] is None
    assert seen["dcgm_exporter"] == {
        "url": f"http://127.0.0.1:{exporter}/metrics",
        "gpus": [uuid_of(0), uuid_of(1)],
    }
    assert str(shop) not in told.stdout + target.read_text()
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    with Daemon(tmp_path / "run", None, "--config", str(target), environment=no_driver) as daemon:
        for name in (f"vllm-{vllm}", f"llamacpp-{llama}"):
            daemon.until(
                lambda name=name: daemon.metrics().get("kvwatch_source_up", source=f"server/{name}") == 1,
                20,
                f"{name} to be up",
            )
        daemon.until(lambda: len(daemon.metrics().all("kvwatch_gpu_memory_used_bytes")) == 2, 20, "both GPUs")
        reported = {gpu["uuid"]: gpu["reported_by"] for gpu in daemon.state()["gpus"]}
    assert reported == {uuid_of(0): "dcgm_exporter", uuid_of(1): "dcgm_exporter"}
    assert street.asked(shop_pid) == []


def test_gpu_users_without_a_known_name_are_asked_what_they_are(street: Street) -> None:
    """A GPU user that listens is asked for known paths, one at a time: a llama.cpp under another name is
    found, a web application that uses a GPU is asked politely and not listed, others are left alone."""
    llama_pid, llama = street.open("python", "my_model.py", pages=llama_pages())
    shop_pid, shop = street.open("python", "shop.py", pages=shop_pages())
    other_pid, _ = street.open("python", "other.py", pages=shop_pages())
    ours = {llama_pid, shop_pid, other_pid}
    running = [process for process in discovery.processes() if process.pid in ours]

    found = list(probe.look_at_servers(running, users=[llama_pid, shop_pid]))

    assert [(one.settings.name, one.settings.kind, one.pid) for one in found] == [
        (f"llamacpp-{llama}", "llamacpp", llama_pid)
    ]
    assert street.asked(shop_pid), shop
    assert only_harmless(street.asked(shop_pid))
    assert only_harmless(street.asked(llama_pid))
    assert street.asked(shop_pid)[-1].endswith(" /metrics"), "reading it may disturb others: it comes last"
    assert street.asked(other_pid) == []


def test_the_server_above_a_gpu_user_is_the_one_that_is_asked(street: Street) -> None:
    """The process that holds the GPU is often a worker: its parent listens."""
    server_pid, port = street.open("python", "my_model.py", pages=llama_pages())
    processes = [
        discovery.Process(pid=1, parent=0, command="/sbin/init"),
        discovery.Process(pid=server_pid, parent=1, command="python my_model.py"),
        discovery.Process(pid=4194000, parent=server_pid, command="python worker"),
    ]

    found = list(probe.look_at_servers(processes, users=[4194000]))

    assert [(one.settings.url, one.pid) for one in found] == [(f"http://127.0.0.1:{port}", server_pid)]


def test_a_port_that_the_command_line_does_not_tell_is_looked_up(street: Street) -> None:
    """A recognised server is asked where it listens, not at its kind's default."""
    pid, port = street.open("/opt/llama.cpp/llama-server", "server", pages=llama_pages())
    silent = discovery.Process(pid=pid, parent=1, command="llama-server -m model.gguf")

    found = list(probe.look_at_servers([silent]))

    assert [(one.settings.url, one.problem) for one in found] == [(f"http://127.0.0.1:{port}", "")]
