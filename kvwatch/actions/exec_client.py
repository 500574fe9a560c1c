"""Ask the helper to run a hook: one connection, one request, one answer, all within a deadline."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable

from kvwatch import wire_exec
from kvwatch.actions.base import ActionError
from kvwatch.model.action import Outcome

CONNECT_WITHIN_S = 1.0
# systemd starts a Python for each request; on a busy host that takes a while.
START_GRACE_S = 1.0
_POLL_S = 0.05
_PIECE = 64 * 1024


def ask(
    path: str,
    request: wire_exec.HookRequest,
    content: bytes,
    broken_off: Callable[[], bool],
    held: int | None = None,
) -> wire_exec.HookAnswer:
    """Have the helper at `path` run a hook; `held` goes with it and is inherited by the hook.

    Raises ActionError when it was not run, or when nobody can say what became of it (timed_out: it counts
    as moved), and BadFrameError for a request that cannot be sent.
    """
    line = wire_exec.encode_request(request)
    grace_s = wire_exec.TERM_GRACE_S + wire_exec.KILL_GRACE_S + START_GRACE_S
    talk = _Talk(_connect(path), end_s=time.monotonic() + request.deadline_s + grace_s, broken_off=broken_off)
    try:
        talk.send(line, content, held)
        answer = _answer(path, talk.receive())
    finally:
        talk.close()
    if answer.problem:
        raise ActionError(Outcome.FAILED, f"{request.argv[0]}: {answer.problem}")
    return answer


def _connect(path: str) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    channel.settimeout(CONNECT_WITHIN_S)
    try:
        channel.connect(path)
    except OSError as error:
        channel.close()
        reason = error.strerror or "no answer"
        raise ActionError(
            Outcome.FAILED, f"{path}: {reason}; look at: systemctl status kvwatch-exec.socket"
        ) from error
    channel.setblocking(False)
    return channel


class _Talk:
    """A connection on which nothing waits longer than until `end_s`.

    When the caller breaks off, our side is shut down once: the helper then ends the hook and still answers.
    """

    def __init__(self, channel: socket.socket, *, end_s: float, broken_off: Callable[[], bool]) -> None:
        self._channel = channel
        self._end_s = end_s
        self._broken_off = broken_off
        self._shut = False

    def send(self, line: bytes, content: bytes, held: int | None) -> None:
        """The whole request. A helper that has heard enough has answered: that is read next."""
        left = memoryview(line + content)
        descriptors = [] if held is None else [held]
        while left and self._wait(select.POLLOUT):
            try:
                sent = (
                    socket.send_fds(self._channel, [left[:_PIECE]], descriptors)
                    if descriptors
                    else self._channel.send(left[:_PIECE])
                )
            except BlockingIOError:
                continue
            except OSError:
                return
            descriptors = []
            left = left[sent:]

    def receive(self) -> bytes:
        """The answer's line, or what came of it."""
        received = bytearray()
        while not received.endswith(b"\n") and len(received) < wire_exec.MAX_ANSWER:
            if not self._wait(select.POLLIN):
                break
            try:
                piece = self._channel.recv(_PIECE)
            except BlockingIOError:
                continue
            except OSError:
                break
            if not piece:
                break
            received += piece
        return bytes(received)

    def _wait(self, event: int) -> bool:
        """Until the connection is ready; False at the end of all patience."""
        poll = select.poll()
        poll.register(self._channel, event)
        while (left_s := self._end_s - time.monotonic()) > 0:
            if self._broken_off() and not self._shut:
                self._shut = True
                self._shut_down()
            if poll.poll(1000 * min(_POLL_S, left_s)):
                return True
        return False

    def _shut_down(self) -> None:
        try:
            self._channel.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        """The helper ends a hook whose asker has gone."""
        self._channel.close()


def _answer(path: str, line: bytes) -> wire_exec.HookAnswer:
    try:
        return wire_exec.decode_answer(line)
    except wire_exec.BadFrameError as error:
        raise ActionError(
            Outcome.TIMED_OUT,
            f"{path}: the helper gave no answer ({error}); see: journalctl -u 'kvwatch-exec@*'",
        ) from error
