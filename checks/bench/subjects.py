"""The two programs that are measured, and what is read off their processes."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from checks.engines.vllm import descendants
from tests.fakes.nvml import environment

ROOT = Path(__file__).parent.parent.parent
TICKS = os.sysconf("SC_CLK_TCK")
# The header lines a Prometheus 2.42 sends with every scrape.
PROMETHEUS_ASKS = (
    b"Accept: application/openmetrics-text;version=1.0.0,"
    b"application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1\r\n"
    b"Accept-Encoding: gzip\r\nUser-Agent: Prometheus/2.42.0\r\nX-Prometheus-Scrape-Timeout-Seconds: 10\r\n"
)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Subject:
    """A running program with a /metrics page, and all of its processes."""

    def __init__(self, name: str, command: list[str], port: int, env: dict[str, str], log: Path) -> None:
        self.name = name
        self.port = port
        self._connection: socket.socket | None = None
        self._buffer = bytearray(4 * 1024 * 1024)  # made once: a new one each time would be timed along
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | env, stdout=stream, stderr=subprocess.STDOUT
            )
        self._log = log

    def wait(self) -> None:
        """Until the page answers."""
        end_s = time.monotonic() + 30
        while time.monotonic() < end_s and self.process.poll() is None:
            try:
                self.scrape()
                return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"{self.name} did not start:\n{self._log.read_text(errors='replace')[-2000:]}")

    def scrape(self, fields: bytes = b"") -> tuple[float, bytes]:
        """Seconds to the last byte, and the body, of one scrape: HTTP/1.1, the connection kept if the server
        keeps it, made anew (and counted) if not; `fields` are header lines to send along."""
        begun = time.perf_counter()
        try:
            head, body, done, kept = self._ask(fields)
        except (OSError, ValueError):
            self._close()  # the server had closed a kept connection meanwhile
            head, body, done, kept = self._ask(fields)
        if not kept:
            self._close()
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise OSError(f"{self.name} answered {head[:80]!r}")
        return done - begun, body

    def _ask(self, fields: bytes) -> tuple[bytes, bytes, float, bool]:
        """Head, body, when its last byte was here, and whether the connection can be used again."""
        if self._connection is None:
            self._connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        connection = self._connection
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + fields + b"\r\n")
        filled, end, told = 0, 0, {}
        while not end or filled < end:
            filled += self._piece(connection, filled)
            if not end:
                end, told = self._length(filled)
        done = time.perf_counter()
        head, _, body = bytes(self._buffer[:end]).partition(b"\r\n\r\n")
        kept = head.startswith(b"HTTP/1.1") and told.get(b"connection") != b"close"
        return head, body, done, kept

    def _length(self, filled: int) -> tuple[int, dict[bytes, bytes]]:
        """Length of the whole answer, and its headers; 0 while they are not all here."""
        head, found, _ = bytes(self._buffer[: min(filled, 8192)]).partition(b"\r\n\r\n")
        if not found:
            return 0, {}
        told = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:])
        return len(head) + 4 + int(told[b"content-length"]), told

    def _piece(self, connection: socket.socket, filled: int) -> int:
        """Bytes that came now, put behind those that came before."""
        size = connection.recv_into(memoryview(self._buffer)[filled:])
        if not size:
            raise ConnectionResetError("closed in the middle")
        return size

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def pids(self) -> list[int]:
        """This program and everything below it."""
        return [self.process.pid, *descendants(self.process.pid)]

    def cpu_s(self) -> float:
        """User and system seconds of all processes so far."""
        total = 0.0
        for pid in self.pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / TICKS
        return total

    def pss_mib(self) -> float:
        """Proportional set size of all processes."""
        total = 0
        for pid in self.pids():
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
        return total / 1024

    def stop(self) -> None:
        """TERM, then KILL."""
        self._close()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)


def kvwatch(folder: Path, fake: Path, scenario: Path, server_url: str) -> Subject:
    """kvwatch with one vLLM page a second."""
    port = free_port()
    config = folder / "kvwatch.yml"
    config.write_text(
        f"servers:\n  - {{name: chat, kind: vllm, url: '{server_url}', period: 1s, timeout: 800ms}}\n"
    )
    env = environment(fake, scenario) | {
        "RUNTIME_DIRECTORY": str(folder / "run"),
        "STATE_DIRECTORY": str(folder / "state"),
        "MALLOC_ARENA_MAX": "2",  # as in the unit
    }
    command = [sys.executable, "-m", "kvwatch", "run", "--config", str(config)]
    return Subject(
        "kvwatch", [*command, "--web.listen-address", f"127.0.0.1:{port}"], port, env, folder / "kvwatch.log"
    )


def nvitop(folder: Path, fake: Path, scenario: Path, venv: Path) -> Subject:
    """nvitop-exporter at its default interval of one second."""
    port = free_port()
    command = [str(venv / "bin/nvitop-exporter"), "--bind-address", "127.0.0.1", "--port", str(port)]
    return Subject("nvitop-exporter", command, port, environment(fake, scenario), folder / "nvitop.log")


def median(values: list[float]) -> float:
    """The middle value."""
    return statistics.median(values)
