"""A running `kvwatch run` that nobody waits for: started, asked, stopped, killed, started again."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from checks.endurance.process import die_with_parent
from checks.endurance.scrape import Scraper

ROOT = Path(__file__).parent.parent.parent
START_S = 20.0
STOP_S = 15.0


class Kvwatch:
    """One place for a daemon: its folder, its port, its log; a process while it runs. Use as a context."""

    def __init__(self, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.run, self.state = folder / "run", folder / "state"
        self.log = folder / "daemon.log"
        self.port = _free_port()
        self.arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None
        self._environment = os.environ | {
            "RUNTIME_DIRECTORY": str(self.run),
            "STATE_DIRECTORY": str(self.state),
            "MALLOC_ARENA_MAX": "2",  # as in the unit
        } | (environment or {})  # fmt: skip

    def launch(self) -> None:
        """Start it; returns at once."""
        address = f"127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "kvwatch", "run", "--web.listen-address", address, *self.arguments]
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=self._environment, stdout=stream, stderr=stream,
                preexec_fn=die_with_parent,
            )  # fmt: skip

    def wait(self, tls: ssl.SSLContext | None = None) -> None:
        """Until it answers a scrape; RuntimeError with its log when it does not."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self.alive:
            asking = Scraper(self.port, tls=tls)
            try:
                asking.get()
                return
            except OSError:
                time.sleep(0.1)
            finally:
                asking.close()
        raise RuntimeError(f"kvwatch does not answer:\n{self.tail()}")

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.process is not None and self.alive:
            self.process.send_signal(number)

    def stop(self) -> int:
        """SIGTERM and wait; the exit status. Raises subprocess.TimeoutExpired, having killed it."""
        if self.process is None:
            return 0
        if self.alive:
            self.process.terminate()
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
            raise

    def tail(self, length: int = 3000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-length:] if self.log.exists() else ""

    def __enter__(self) -> Kvwatch:
        self.launch()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
