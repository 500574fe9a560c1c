"""How is the worker process started, heard and ended? Never killed inside a driver call.

os.posix_spawn instead of subprocess: it does not copy a threaded process and needs no import.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import kvwatch

MODULE = "kvwatch.sources.gpu.nvml_worker"
MAX_LINE = 1 << 22
SCRUBBED = "NVML_MPS_DEVICE_ENUMERATION"
TERM_AFTER_S = 1.0


class WorkerProcess:
    """One worker with its pipes. `status` is the wait status once it has ended."""

    def __init__(
        self,
        lock: Path | None,
        tick_s: float,
        *,
        memory_only: bool = False,
        module: str = MODULE,
        arguments: tuple[str, ...] = (),
    ) -> None:
        stdin_read, self._stdin = os.pipe()
        try:
            self._stdout, stdout_write = os.pipe()
        except OSError:
            os.close(stdin_read)
            os.close(self._stdin)
            raise
        mode = "memory" if memory_only else "all"
        common = (str(lock or ""), str(tick_s), str(os.getpid()), mode)
        argv = [sys.executable, "-P", "-m", module, *common, *arguments]
        actions = [(os.POSIX_SPAWN_DUP2, stdin_read, 0), (os.POSIX_SPAWN_DUP2, stdout_write, 1)]
        try:
            self.pid = os.posix_spawn(sys.executable, argv, _environment(), file_actions=actions, setpgroup=0)
        except OSError:
            os.close(self._stdin)
            os.close(self._stdout)
            raise
        finally:
            os.close(stdin_read)
            os.close(stdout_write)
        self.status: int | None = None
        self._buffer = b""
        self._stdin_open = self._stdout_open = True
        self.abandoned = False  # its pipes are closed and it has not ended yet

    def wait_for_output(self, wake: int, timeout_s: float) -> bool:
        """Wait for output or the wake-up descriptor; say whether there is output (or its end)."""
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        poll.register(wake, select.POLLIN)
        ready = poll.poll(max(0.0, timeout_s) * 1000)
        return any(descriptor == self._stdout for descriptor, _ in ready)

    def read_lines(self) -> list[bytes] | None:
        """Every whole line that is there; None at the end of the output. Call after `wait_for_output`."""
        chunk = os.read(self._stdout, 1 << 16)
        if not chunk:
            return None
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        if len(self._buffer) > MAX_LINE:
            self._buffer = b""
        return lines

    def ended(self) -> bool:
        """Say whether the process is gone, collecting its status."""
        if self.status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # collected elsewhere: gone in any case
                pid, status = self.pid, 0
            if pid:
                self.status = status
        return self.status is not None

    def stop(self, deadline_s: float, sleep: Callable[[float], None] = time.sleep) -> bool:
        """End it gently: close its pipes, then TERM, which acts only between NVML calls.

        A worker that does neither is inside a driver call. Killing such a process has frozen GPUs, so
        it is left alone (it ends by itself when the call returns); only a *stopped* one is killed.
        Returns whether it ended within `deadline_s`.
        """
        self.close_pipes()
        started = time.monotonic()
        termed = False
        while not self.ended():
            passed = time.monotonic() - started
            if passed >= deadline_s:
                self.abandoned = not self._kill_if_stopped()
                return not self.abandoned
            if passed >= TERM_AFTER_S and not termed:
                termed = True
                os.kill(self.pid, signal.SIGTERM)
            sleep(0.01)
        return True

    def _kill_if_stopped(self) -> bool:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            state = "?"
        if state not in "Tt":
            return False
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.status = signal.SIGKILL
        return True

    def close_pipes(self) -> None:
        """Close our ends: the worker takes that as the order to end."""
        if self._stdin_open:
            self._stdin_open = False
            os.close(self._stdin)
        if self._stdout_open:
            self._stdout_open = False
            os.close(self._stdout)


def _environment() -> dict[str, str]:
    """Ours, less what changes NVML's enumeration; a source checkout stays importable from any folder."""
    variables = {name: value for name, value in os.environ.items() if name != SCRUBBED}
    root = Path(kvwatch.__file__).parent.parent
    if root.name not in ("site-packages", "dist-packages"):
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), variables.get("PYTHONPATH"))))
    return variables


def describe_end(status: int) -> str:
    """A wait status in words."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"killed by {signal.Signals(number).name}"
        except ValueError:
            return f"killed by signal {number}"
    return f"ended with status {os.waitstatus_to_exitcode(status)}"
