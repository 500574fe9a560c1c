"""What every really running server here has in common: start, wait, control, end (what was started here)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parent.parent.parent
ENGINES = Path(os.environ.get("KVWATCH_ENGINES_DIR", ROOT / "engines-work"))
START_DEADLINE_S = 240
LOW_PRIORITY = 15


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One server process and those it starts; `ready` is the path that answers 200 once it serves."""

    ready = "/health"
    # Titles of the processes that compute: see `_give_way`.
    computing: tuple[bytes, ...] = ()

    def __init__(
        self, log: Path, command: Sequence[str], environment: Mapping[str, str] | None, port: int
    ) -> None:
        self.port = port
        self.base = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                command,
                env=os.environ | (environment or {}),
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> Self:
        """Until it answers; raises with the end of its log when it does not."""
        end_s = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < end_s and self.process.poll() is None:
            try:
                with urllib.request.urlopen(self.base + self.ready, timeout=2):
                    self._give_way()
                    return self
            except OSError:
                time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"{type(self).__name__} did not start:\n{self.log_tail()}")

    def log_tail(self) -> str:
        """The end of what it has written."""
        return self._log.read_text(errors="replace")[-3000:]

    def computing_threads(self) -> Iterable[int]:
        """Threads that compute; on two cores they starve the front end, whose page this is about."""
        for pid in self.computing_pids():
            yield from (int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir())

    def computing_pids(self) -> list[int]:
        """Processes below this one whose title is that of a computing one."""
        below = descendants(self.process.pid)
        return [pid for pid in below if any(title in command_of(pid) for title in self.computing)]

    def _give_way(self) -> None:
        """Lower the priority of what computes."""
        for thread in self.computing_threads():
            os.setpriority(os.PRIO_PROCESS, thread, LOW_PRIORITY)

    def post(self, path: str) -> None:
        """One POST without a body."""
        request = urllib.request.Request(self.base + path, b"", method="POST")
        with urllib.request.urlopen(request, timeout=30) as reply:
            reply.read()

    def get(self, path: str) -> str:
        """The body of one GET."""
        with urllib.request.urlopen(self.base + path, timeout=10) as reply:
            return str(reply.read().decode())

    def kill(self) -> None:
        """SIGKILL to the server and every process it started."""
        for pid in [*descendants(self.process.pid), self.process.pid]:
            end(pid)
        self.process.wait(20)

    def stop(self) -> None:
        """The gentle way, then the other."""
        if self.process.poll() is None:
            for pid in self.computing_pids():
                os.kill(pid, signal.SIGCONT)
            children = descendants(self.process.pid)
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
            for pid in children:
                end(pid)


def end(pid: int) -> None:
    """SIGKILL, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def command_of(pid: int) -> bytes:
    """A process's command line or title; nothing once it has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def descendants(root: int) -> list[int]:
    """Every process below `root`, by parent pid."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                text = (folder / "stat").read_text()
            except OSError:
                continue
            parents[int(folder.name)] = int(text.rpartition(")")[2].split()[1])
    below: list[int] = []
    wave = [root]
    while wave:
        wave = [pid for pid, parent in parents.items() if parent in wave]
        below += wave
    return below
