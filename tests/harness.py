"""A really running kvwatch process, and eyes on what it shows."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parent.parent
Labels = Mapping[str, str]
T = TypeVar("T")


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Page:
    """One /metrics page, parsed by prometheus_client."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def samples(self) -> list[tuple[str, Labels, float]]:
        """Name, labels and value of every sample."""
        return self._parse(self.text)

    def all(self, name: str, **labels: str) -> list[tuple[Labels, float]]:
        """Every series of this name whose labels include these; only their lines are parsed."""
        lines = [line for line in self.text.split("\n") if line.startswith((f"{name}{{", f"{name} "))]
        return [
            (found, value)
            for _, found, value in self._parse("\n".join([*lines, ""]))
            if all(found.get(key) == text for key, text in labels.items())
        ]

    @staticmethod
    def _parse(text: str) -> list[tuple[str, Labels, float]]:
        return [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def get(self, name: str, **labels: str) -> float | None:
        """The one series of this name with these labels; None when there is none."""
        found = self.all(name, **labels)
        assert len(found) <= 1, f"{name} {labels}: {found}"
        return found[0][1] if found else None


class Daemon:
    """`kvwatch run` with its own directories and port. Use as a context manager."""

    def __init__(
        self,
        folder: Path,
        config: str | None = None,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.config = folder / "kvwatch.yml"
        folder.mkdir(parents=True, exist_ok=True)
        if config is not None:
            self.config.write_text(config)
        self._arguments = [*(["--config", str(self.config)] if config is not None else []), *arguments]
        self._environment = os.environ | {
            "RUNTIME_DIRECTORY": str(folder / "run"),
            "STATE_DIRECTORY": str(folder / "state"),
        } | (environment or {})  # fmt: skip
        self.log = folder / "daemon.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        *,
        stdout: int | None = None,
        stderr: int | None = None,
        before: Callable[[], None] | None = None,
        seconds: float = 20,
    ) -> Daemon:
        """Start and wait until it answers. Output goes into `log` where no descriptor is given;
        `before` runs in the child."""
        command = [sys.executable, "-m", "kvwatch", "run", "--web.listen-address", f"127.0.0.1:{self.port}"]
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(
                [*command, *self._arguments],
                cwd=ROOT,
                env=self._environment,
                stdout=stream if stdout is None else stdout,
                stderr=stream if stderr is None else stderr,
                preexec_fn=before,
            )
        self.until(lambda: self._answers() or None, seconds, "the daemon to answer")
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"kvwatch ended with {self.process.returncode}:\n{self.log.read_text()}")
        try:
            self.get("/-/healthy")
        except OSError:
            return False
        return True

    def get(self, path: str, timeout: float = 5.0) -> str:
        """The body of one GET; raises OSError (HTTPError included)."""
        with urllib.request.urlopen(self.url + path, timeout=timeout) as reply:
            return reply.read().decode()

    def metrics(self) -> Page:
        """The page as it is now."""
        return Page(self.get("/metrics"))

    def state(self) -> dict[str, Any]:
        """The last report as JSON."""
        return dict(json.loads(self.get("/api/v1/state")))

    def level(self, rule: str, **labels: str) -> float | None:
        """A rule's level now."""
        return self.metrics().get("kvwatch_rule_level", rule=rule, **labels)

    def until(self, look: Callable[[], T | None], seconds: float, what: str) -> T:
        """Ask again and again until `look` gives something; fails with `what` and the log's end."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            found = look()
            if found is not None and found is not False:
                return found
            time.sleep(0.05)
        tail = self.log.read_text()[-2000:] if self.log.exists() else ""
        raise AssertionError(f"waited {seconds} s for {what}\n{tail}")

    def signal(self, number: int) -> None:
        """Send a signal to the daemon."""
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self, seconds: float = 10.0) -> int:
        """SIGTERM and wait; the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5)
                raise
        return int(self.process.returncode)

    def __enter__(self) -> Daemon:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.stop()
