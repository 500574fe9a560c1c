"""Run a program: an argument list, never a shell; the request on standard input and in the environment."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING

from kvwatch.actions.base import Action, ActionError, Attempt, Context, body, payload
from kvwatch.model.action import ActionRequest, EventKind, Outcome

if TYPE_CHECKING:
    import subprocess

SELF_EXPIRING = False

MAX_OUTPUT = 4096
MAX_VARIABLE = 500  # characters of one environment variable
TERM_GRACE_S = 1.0
# After KILL a program is gone at once, unless it hangs inside the kernel; then it is left behind.
KILL_GRACE_S = 2.0
TRY_LATER = 75  # EX_TEMPFAIL of sysexits.h
_POLL_S = 0.005
# What a hook is told beside its standard input (the hook contract).
_VARIABLES = {
    "event": "EVENT", "server": "SERVER", "engine": "ENGINE", "rule": "RULE", "level": "LEVEL",
    "max_running": "MAX_RUNNING", "admit": "ADMIT", "expires_in_s": "EXPIRES_IN_S", "reason": "REASON",
    "request_id": "REQUEST_ID",
}  # fmt: skip

_Asked = Callable[[], bool]


class ExecAction:
    """One program. Exit 0 is applied, 75 try later, anything else failed."""

    self_expiring = SELF_EXPIRING

    def __init__(self, argv: Sequence[str], stopping: threading.Event) -> None:
        self._argv = tuple(argv)
        self._stopping = stopping

    def perform(self, request: ActionRequest, held: int | None = None) -> Attempt:
        """Start it in a process group of its own; end the whole group at the deadline."""
        process = self._start(request, held)
        output = _Output(process.stdout)
        # A limit is not worth finishing when kvwatch stops; everything else is.
        limiting = request.event is EventKind.LIMIT
        broken_off = self._stopping.is_set if limiting else _never
        run = _Run(process, output, end_s=time.monotonic() + request.deadline_s, broken_off=broken_off)
        try:
            run.feed(body(request))
            ended = run.wait()
            if not ended:
                run.terminate()
            output.drain()
        finally:
            run.finish()
        return _judge(process.returncode, ended=ended, output=output.text(), deadline_s=request.deadline_s)

    def _start(self, request: ActionRequest, held: int | None) -> subprocess.Popen[bytes]:
        import subprocess

        try:
            process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(request),
                start_new_session=True,
                pass_fds=() if held is None else (held,),
            )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ActionError(
                Outcome.FAILED, f"{self._argv[0]}: {reason}; it must exist and be executable for this user"
            ) from error
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
        return process


def _never() -> bool:
    return False


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
        return _printable(text) + more


class _Run:
    """One started program and its group.

    The program stays a zombie until its group has been killed: as long as it is one, its number
    cannot pass to a stranger.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], output: _Output, *, end_s: float, broken_off: _Asked
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
        import subprocess

        self._signal(signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(KILL_GRACE_S)
        except subprocess.TimeoutExpired:
            return

    def _until(self, over: _Asked) -> bool:
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


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def _environment(request: ActionRequest) -> dict[str, str]:
    """A small environment: the search path and what the contract names; no secrets of the daemon."""
    told = payload(request)
    variables = {
        key: value for key in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH") if (value := os.environ.get(key))
    }
    for key, name in _VARIABLES.items():
        if key in told:
            variables[f"KVWATCH_{name}"] = _printable(_text(told[key]))[:MAX_VARIABLE]
    return variables


def _text(value: object) -> str:
    """As a shell script likes it: true and false, 15 rather than 15.0."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _judge(code: int | None, *, ended: bool, output: str, deadline_s: float) -> Attempt:
    told = f": {output}" if output else ""
    if not ended:
        raise ActionError(
            Outcome.TIMED_OUT, f"still running after {deadline_s:g} s (or at stop); its group was ended{told}"
        )
    if code == 0:
        return Attempt(outcome=Outcome.APPLIED, detail=output)
    if code == TRY_LATER:
        raise ActionError(Outcome.REFUSED, f"exit 75, try later{told}")
    raise ActionError(Outcome.FAILED, f"exit {code}{told}")


def create(params: Mapping[str, object], context: Context) -> Action:
    """`argv`: a non-empty list of strings."""
    argv = params.get("argv")
    if not isinstance(argv, list | tuple) or not argv or not all(isinstance(part, str) for part in argv):
        raise ActionError(Outcome.REFUSED, "exec needs argv, a list of strings")
    return ExecAction([str(part) for part in argv], context.stopping)
