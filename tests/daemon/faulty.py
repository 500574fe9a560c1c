"""Hosts that can be broken, and ways to look at what the daemon makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path

from tests.fakes.nvml import Scenario, environment
from tests.harness import ROOT, Daemon

GIB = 2**30
PATIENCE_S = 60.0
NVML = "gpus: {source: nvml}\n"


class Host:
    """A host with two fake GPUs, and daemons on it."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder = folder
        self.gpus = Scenario(folder / "scenario", gpus=2).memory(0, 10 * GIB).memory(1, 20 * GIB).write()
        self.environment = environment(library, self.gpus.path)

    def daemon(self, text: str = NVML, *arguments: str) -> Daemon:
        """A daemon on this host's directories."""
        return Daemon(self.folder, text, *arguments, environment=self.environment)

    def workers(self) -> list[int]:
        """Process ids of every NVML worker of this host that is alive."""
        mark = str(self.folder / "run" / "nvml.lock").encode()
        return [pid for pid in _pids() if mark in _command(pid)]

    def no_worker_left(self) -> bool:
        """Whether every worker has ended."""
        return not self.workers()


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def until(look: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < end_s, f"waited for {what}"
        time.sleep(0.05)


def readings(daemon: Daemon) -> int:
    """How many GPUs have a memory figure."""
    return len(daemon.metrics().all("kvwatch_gpu_memory_used_bytes"))


def wait_for_gpus(daemon: Daemon, count: int = 2) -> None:
    daemon.until(lambda: readings(daemon) == count, PATIENCE_S, f"{count} GPUs")


def shown(daemon: Daemon) -> str:
    """The state as text; "" before the first report."""
    try:
        return daemon.get("/api/v1/state")
    except urllib.error.HTTPError as error:
        error.close()
        return ""


def stuck(daemon: Daemon) -> bool:
    return daemon.metrics().get("kvwatch_source_stuck", source="nvml") == 1


def levels(daemon: Daemon) -> dict[str, float]:
    """The highest level of each rule."""
    found: dict[str, float] = {}
    for labels, level in daemon.metrics().all("kvwatch_rule_level"):
        found[labels["rule"]] = max(level, found.get(labels["rule"], -1))
    return found


def strict(text: str) -> object:
    """JSON as everybody else reads it: no NaN, no Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def run_kvwatch(
    folder: Path, *arguments: str, before: Callable[[], None] | None = None, **variables: str
) -> subprocess.Popen[bytes]:
    """`kvwatch run` with pipes, without waiting for it."""
    folder.mkdir(exist_ok=True)
    directories = {"RUNTIME_DIRECTORY": str(folder / "run"), "STATE_DIRECTORY": str(folder / "state")}
    return subprocess.Popen(
        [sys.executable, "-m", "kvwatch", "run", "--web.listen-address", "127.0.0.1:0", *arguments],
        cwd=ROOT,
        env=os.environ | directories | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=before,
    )


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Exit status and everything it wrote."""
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, (out + err).decode()


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def watch(look: Callable[[], bool]) -> Callable[[], int]:
    """Look again and again in a thread; calling the answer ends it and gives how often it was not so."""
    end = threading.Event()
    wrong: list[int] = []

    def run() -> None:
        while not end.wait(0.1):
            if not look():
                wrong.append(1)

    thread = threading.Thread(target=run)
    thread.start()

    def finish() -> int:
        end.set()
        thread.join()
        return len(wrong)

    return finish
