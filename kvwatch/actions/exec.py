"""Run a program: an argument list, never a shell; the request on standard input and in the environment.

Under systemd a helper runs it outside the daemon's sandbox (`$KVWATCH_EXEC_SOCKET`, docs/hooks.md). Where
there is no such socket the daemon runs it itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvwatch import wire_exec
from kvwatch.actions.base import Action, ActionError, Attempt, Context, body, payload
from kvwatch.model.action import ActionRequest, EventKind, Outcome
from kvwatch.wire_exec import BadFrameError, HookAnswer, HookRequest

SELF_EXPIRING = False

TRY_LATER = 75  # EX_TEMPFAIL of sysexits.h

_Asked = Callable[[], bool]


class ExecAction:
    """One program. Exit 0 is applied, 75 try later, anything else failed."""

    self_expiring = SELF_EXPIRING

    def __init__(self, argv: Sequence[str], stopping: threading.Event) -> None:
        self._argv = tuple(argv)
        self._stopping = stopping

    def perform(self, request: ActionRequest, held: int | None = None) -> Attempt:
        """Start it in a process group of its own; end the whole group at the deadline."""
        # A limit is not worth finishing when kvwatch stops; everything else is.
        limiting = request.event is EventKind.LIMIT
        broken_off = self._stopping.is_set if limiting else _never
        helper = os.environ.get(wire_exec.SOCKET_VARIABLE, "")
        if helper and Path(helper).exists():
            answer = self._ask(helper, request, broken_off, held)
        else:
            answer = self._run(request, broken_off, held)
        return _judge(answer, request.deadline_s)

    def _run(self, request: ActionRequest, broken_off: _Asked, held: int | None) -> HookAnswer:
        from kvwatch.actions.exec_run import execute  # with subprocess, which few need

        try:
            return execute(
                self._argv,
                variables(request),
                body(request),
                deadline_s=request.deadline_s,
                broken_off=broken_off,
                held=held,
            )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ActionError(
                Outcome.FAILED, f"{self._argv[0]}: {reason}; it must exist and be executable for this user"
            ) from error

    def _ask(self, helper: str, request: ActionRequest, broken_off: _Asked, held: int | None) -> HookAnswer:
        from kvwatch.actions.exec_client import ask

        content = body(request)
        asked = HookRequest(
            argv=self._argv,
            variables=variables(request),
            deadline_s=request.deadline_s,
            body_bytes=len(content),
        )
        try:
            return ask(helper, asked, content, broken_off, held)
        except BadFrameError as error:
            raise ActionError(Outcome.FAILED, f"{self._argv[0]}: not sent to the helper: {error}") from error


def _never() -> bool:
    return False


def variables(request: ActionRequest) -> dict[str, str]:
    """What the contract names, as environment variables."""
    told = payload(request)
    return {
        wire_exec.PREFIX + name: wire_exec.printable(_text(told[key]))[: wire_exec.MAX_VARIABLE]
        for key, name in wire_exec.VARIABLES.items()
        if key in told
    }


def _text(value: object) -> str:
    """As a shell script likes it: true and false, 15 rather than 15.0."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _judge(answer: HookAnswer, deadline_s: float) -> Attempt:
    told = f": {answer.output}" if answer.output else ""
    if not answer.ended:
        raise ActionError(
            Outcome.TIMED_OUT, f"still running after {deadline_s:g} s (or at stop); its group was ended{told}"
        )
    if answer.code == 0:
        return Attempt(outcome=Outcome.APPLIED, detail=answer.output)
    if answer.code == TRY_LATER:
        raise ActionError(Outcome.REFUSED, f"exit 75, try later{told}")
    raise ActionError(Outcome.FAILED, f"exit {answer.code}{told}")


def create(params: Mapping[str, object], context: Context) -> Action:
    """`argv`: a non-empty list of strings."""
    argv = params.get("argv")
    if not isinstance(argv, list | tuple) or not argv or not all(isinstance(part, str) for part in argv):
        raise ActionError(Outcome.REFUSED, "exec needs argv, a list of strings")
    return ExecAction([str(part) for part in argv], context.stopping)
