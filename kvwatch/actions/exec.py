"""Run a program: an argument list, never a shell; the request on standard input and in the environment."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING

from kvwatch.actions.base import Action, ActionError, Attempt, Context, payload
from kvwatch.model.action import ActionRequest, Outcome

if TYPE_CHECKING:
    import subprocess

SELF_EXPIRING = False

MAX_OUTPUT = 4096
TERM_GRACE_S = 1.0
TRY_LATER = 75  # EX_TEMPFAIL of sysexits.h
_POLL_S = 0.005
# What a hook is told beside its standard input (the hook contract).
_VARIABLES = {
    "event": "EVENT", "server": "SERVER", "engine": "ENGINE", "rule": "RULE", "level": "LEVEL",
    "max_running": "MAX_RUNNING", "admit": "ADMIT", "expires_in_s": "EXPIRES_IN_S", "reason": "REASON",
    "request_id": "REQUEST_ID",
}  # fmt: skip


class ExecAction:
    """One program. Exit 0 is applied, 75 try later, anything else failed."""

    self_expiring = SELF_EXPIRING

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = tuple(argv)

    def perform(self, request: ActionRequest) -> Attempt:
        """Start it in a process group of its own; end the whole group at the deadline."""
        process = self._start(request)
        output = _Output(process.stdout)
        end_s = time.monotonic() + request.deadline_s
        try:
            _feed(process.stdin, json.dumps(payload(request)).encode() + b"\n", end_s, process)
            ended = _wait(process, output, end_s)
            if not ended:
                _end_group(process, output)
            output.drain()
        finally:
            _kill_group(process)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            process.wait()
        return _judge(process.returncode, ended=ended, output=output.text(), deadline_s=request.deadline_s)

    def _start(self, request: ActionRequest) -> subprocess.Popen[bytes]:
        import subprocess

        try:
            process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(request),
                start_new_session=True,
                close_fds=True,
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
            except (BlockingIOError, OSError):
                return
            if not piece:
                return
            self._total += len(piece)
            self._kept += piece[: MAX_OUTPUT - len(self._kept)]

    def text(self) -> str:
        """What was kept, on one line's worth of printable text."""
        text = self._kept.decode("utf-8", "replace").strip()
        more = f" … ({self._total} bytes in all)" if self._total > MAX_OUTPUT else ""
        return "".join(char if char.isprintable() else " " for char in text) + more


def _environment(request: ActionRequest) -> dict[str, str]:
    """A small environment: the search path and what the contract names; no secrets of the daemon."""
    told = payload(request)
    variables = {
        key: value for key in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH") if (value := os.environ.get(key))
    }
    for key, name in _VARIABLES.items():
        if key in told:
            value = told[key]
            variables[f"KVWATCH_{name}"] = str(value).lower() if isinstance(value, bool) else str(value)
    return variables


def _feed(pipe: IO[bytes] | None, content: bytes, end_s: float, process: subprocess.Popen[bytes]) -> None:
    """Write the request; a hook that does not read it is not waited for beyond the deadline."""
    if pipe is None:
        return
    view = memoryview(content)
    while view and time.monotonic() < end_s and process.poll() is None:
        try:
            view = view[os.write(pipe.fileno(), view) :]
        except BlockingIOError:
            time.sleep(_POLL_S)
        except OSError:
            break
    try:
        pipe.close()
    except OSError:
        return


def _wait(process: subprocess.Popen[bytes], output: _Output, end_s: float) -> bool:
    """Until the program itself ends (not its grandchildren); False at the deadline."""
    pause_s = _POLL_S
    while process.poll() is None:
        output.drain()
        if time.monotonic() >= end_s:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)
    return True


def _end_group(process: subprocess.Popen[bytes], output: _Output) -> None:
    """TERM to the group and a grace; KILL follows in any case."""
    _signal_group(process, signal.SIGTERM)
    _wait(process, output, time.monotonic() + TERM_GRACE_S)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Whatever is left of the group ends; a child that made its own session is its own affair."""
    _signal_group(process, signal.SIGKILL)


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _judge(code: int, *, ended: bool, output: str, deadline_s: float) -> Attempt:
    told = f": {output}" if output else ""
    if not ended:
        raise ActionError(
            Outcome.TIMED_OUT, f"still running after {deadline_s:g} s; its group was ended{told}"
        )
    if code == 0:
        return Attempt(outcome=Outcome.APPLIED, detail=output)
    if code == TRY_LATER:
        raise ActionError(Outcome.REFUSED, f"exit 75, try later{told}")
    raise ActionError(Outcome.FAILED, f"exit {code}{told}")


def create(params: Mapping[str, object], _context: Context) -> Action:
    """`argv`: a non-empty list of strings."""
    argv = params.get("argv")
    if not isinstance(argv, list | tuple) or not argv or not all(isinstance(part, str) for part in argv):
        raise ActionError(Outcome.REFUSED, "exec needs argv, a list of strings")
    return ExecAction([str(part) for part in argv])
