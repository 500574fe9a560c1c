"""One program in a process group of its own, that nothing can make last, fill or outlive its deadline.

Used by the exec action inside the daemon and by the helper outside its sandbox. Standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from kvwatch.wire_exec import KILL_GRACE_S, TERM_GRACE_S, HookAnswer, printable

MAX_OUTPUT = 4096
_POLL_S = 0.005
_INHERITED = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")

Asked = Callable[[], bool]


def execute(
    argv: Sequence[str],
    variables: Mapping[str, str],
    content: bytes,
    *,
    deadline_s: float,
    broken_off: Asked,
    held: int | None = None,
) -> HookAnswer:
    """Run a program with `content` on standard input; its whole group is ended at the deadline.

    `variables` are added to a small environment: no secrets of the caller. `held` is one descriptor that
    it inherits. Raises OSError or ValueError where it cannot be started.
    """
    process = _start(argv, variables, held)
    output = _Output(process.stdout)
    run = _Run(process, output, end_s=time.monotonic() + deadline_s, broken_off=broken_off)
    try:
        run.feed(content)
        ended = run.wait()
        if not ended:
            run.terminate()
        output.drain()
    finally:
        run.finish()
    return HookAnswer(code=process.returncode, ended=ended, output=output.text())


def _start(argv: Sequence[str], variables: Mapping[str, str], held: int | None) -> subprocess.Popen[bytes]:
    inherited = {key: value for key in _INHERITED if (value := os.environ.get(key))}
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**inherited, **variables},
        start_new_session=True,
        pass_fds=() if held is None else (held,),
    )
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            os.set_blocking(pipe.fileno(), False)
    return process


class _Output:
    """Reads what a hook prints: the beginning is kept, the rest is thrown away, nothing ever waits."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        self._pipe = pipe
        self._kept = bytearray()
        self._total = 0

    def drain(self) -> None:
        """Take what is there now, at most a megabyte, so that a flood cannot hold us."""
        for _ in range(16):
            try:
                piece = os.read(self._pipe.fileno(), 65536) if self._pipe else b""
            except OSError:
                return
            if not piece:
                return
            self._total += len(piece)
            self._kept += piece[: MAX_OUTPUT - len(self._kept)]

    def text(self) -> str:
        """What was kept, as printable text."""
        text = self._kept.decode("utf-8", "replace").strip()
        more = f" … ({self._total} bytes in all)" if self._total > MAX_OUTPUT else ""
        return printable(text) + more


class _Run:
    """One started program and its group.

    The program stays a zombie until its group has been killed: as long as it is one, its number
    cannot pass to a stranger.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], output: _Output, *, end_s: float, broken_off: Asked
    ) -> None:
        self._process = process
        self._output = output
        self._end_s = end_s
        self._broken_off = broken_off

    def feed(self, content: bytes) -> None:
        """Write the request; a hook that does not read it is not waited for beyond the deadline."""
        pipe = self._process.stdin
        if pipe is None:
            return
        view = memoryview(content)
        while view and not self._over() and not self._exited():
            try:
                view = view[os.write(pipe.fileno(), view) :]
            except BlockingIOError:
                self._output.drain()
                time.sleep(_POLL_S)
            except OSError:
                break
        pipe.close()

    def wait(self) -> bool:
        """Until the program itself ends (not its grandchildren); False at the deadline."""
        return self._until(self._over)

    def terminate(self) -> None:
        """TERM to the group and a grace; KILL follows in any case."""
        self._signal(signal.SIGTERM)
        end_s = time.monotonic() + TERM_GRACE_S
        self._until(lambda: time.monotonic() >= end_s)

    def finish(self) -> None:
        """Whatever is left of the group ends; a child that made its own session is its own affair."""
        self._signal(signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(KILL_GRACE_S)
        except subprocess.TimeoutExpired:
            return

    def _until(self, over: Asked) -> bool:
        pause_s = _POLL_S
        while not self._exited():
            self._output.drain()
            if over():
                return False
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.05)
        return True

    def _over(self) -> bool:
        return time.monotonic() >= self._end_s or self._broken_off()

    def _exited(self) -> bool:
        """Whether the program has ended, without collecting it."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return (
            self._process.returncode is not None or os.waitid(os.P_PID, self._process.pid, flags) is not None
        )

    def _signal(self, number: int) -> None:
        if self._process.returncode is not None:
            return
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return
