"""One client's connection: bytes in, bytes out, never waiting.

A connection belongs to one thread at a time: the selector's while it waits, a worker's while
it is being answered. Every socket is non-blocking; what cannot be done now goes back to the selector.
"""

from __future__ import annotations

import contextlib
import enum
import heapq
import selectors
import socket
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, TypeVar, cast

from kvwatch.exporters.web_auth import Access
from kvwatch.exporters.web_http import Request, head_length, parse

T = TypeVar("T")

if TYPE_CHECKING:
    import ssl

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE
SCRAPE = b"GET /metrics HTTP/1."
CHUNK_BYTES = 64 * 1024
DISCARDED_AT_ONCE = 16  # chunks: who sends without end may not keep the selector's thread


class Phase(enum.Enum):
    """What a connection is waiting for."""

    HANDSHAKE = "handshake"  # the client's part of the TLS handshake
    REQUEST = "request"  # a whole request
    ANSWER = "answer"  # the client to read the answer
    LINGER = "linger"  # the client to notice that we have closed, so that it can read the answer
    CLOSED = "closed"


class Stage(enum.Enum):
    """How far a client has come."""

    SILENT = "silent"  # connected, and not a word
    GREETING = "greeting"  # inside the TLS handshake
    ASKING = "asking"  # its first request is not whole yet
    ANSWERED = "answered"  # at least once


class Conn:
    """State of one connection. Times are monotonic seconds."""

    __slots__ = (
        "_sock",
        "access",
        "answered",
        "deadline_s",
        "inbox",
        "keep_alive",
        "need_bytes",
        "outbox",
        "pending",
        "phase",
        "progress_s",
        "searched",
        "tls",
        "want",
    )

    def __init__(self, sock: socket.socket, now_s: float, *, tls: bool) -> None:
        self._sock = sock
        self.tls = tls
        self.phase = Phase.HANDSHAKE if tls else Phase.REQUEST
        self.want = READ
        self.inbox = bytearray()
        self.outbox = memoryview(b"")
        self.pending: Request | None = None  # waits for its password to be checked
        self.access: Access | None = None  # what the check found
        self.searched = 0
        self.need_bytes = 0
        self.keep_alive = True
        self.answered = False
        self.progress_s = now_s  # of the accept or of the last whole request: dripping is no progress
        self.deadline_s = now_s

    def fileno(self) -> int:
        """For the selector."""
        return self._sock.fileno()

    def wrap(self, context: ssl.SSLContext) -> None:
        """Start TLS; nothing is exchanged yet."""
        self._sock = context.wrap_socket(self._sock, server_side=True, do_handshake_on_connect=False)

    @property
    def secure_socket(self) -> ssl.SSLSocket | None:
        """The TLS socket once `wrap` was called."""
        return cast("ssl.SSLSocket", self._sock) if hasattr(self._sock, "do_handshake") else None

    @property
    def stage(self) -> Stage:
        """How far this client has come."""
        if self.answered:
            return Stage.ANSWERED
        if self.phase is Phase.HANDSHAKE and self.secure_socket is not None:
            return Stage.GREETING
        return Stage.ASKING if self.inbox or self.secure_socket is not None else Stage.SILENT

    def unread(self) -> bool:
        """Whether the client has sent something that was not looked at yet."""
        try:
            return bool(socket.socket.recv(self._sock, 1, socket.MSG_PEEK))  # raw bytes, also under TLS
        except OSError:
            return False

    def holds_one_scrape(self) -> bool:
        """Whether what has arrived is one GET of /metrics and nothing behind it: milliseconds, no waiting."""
        return (
            self.phase is Phase.REQUEST
            and bytes(self.inbox[: len(SCRAPE)]) == SCRAPE
            and self.inbox.count(b"HTTP/") == 1
        )

    def receive(self) -> bool:
        """Take what has arrived; whether a whole request may be there. EOFError when the client has closed.

        Raises HttpError 431 when the head is too long, OSError when the connection is broken.
        """
        self.want = READ
        while True:
            data = self._transfer(lambda: self._sock.recv(CHUNK_BYTES))
            if data is None:
                return False
            if not data:
                raise EOFError
            self.inbox += data
            if self.maybe_complete():
                return True

    def maybe_complete(self) -> bool:
        """Whether the inbox holds a whole head (and a whole body, once its length is known)."""
        if self.need_bytes:
            return len(self.inbox) >= self.need_bytes
        length = head_length(self.inbox, self.searched)
        self.searched = len(self.inbox)
        return length is not None

    def holds_input(self) -> bool:
        """Whether bytes have been taken off the network that the selector will not report again."""
        secure = self.secure_socket
        return self.tls and secure is not None and secure.pending() > 0

    def take_request(self) -> Request | None:
        """The first whole request, taken out of the inbox; None while it is incomplete."""
        length = head_length(self.inbox)
        if length is None:
            return None
        request = parse(bytes(self.inbox[:length]), length)
        if len(self.inbox) < request.size:
            self.need_bytes = request.size
            return None
        del self.inbox[: request.size]
        self.need_bytes = self.searched = 0
        return request

    def flush(self) -> bool:
        """Send what the client takes now; whether all of it is sent."""
        self.want = WRITE
        while self.outbox:
            sent = self._transfer(lambda: self._sock.send(self.outbox))
            if sent is None:
                return False
            self.outbox = self.outbox[sent:]
        return True

    def handshake(self) -> bool:
        """Go on with the TLS handshake; whether it is done."""
        secure = self.secure_socket
        assert secure is not None, "wrap() comes first"  # noqa: S101 a programming error, not an input

        def step() -> bool:
            secure.do_handshake()
            return True

        return self._transfer(step) is not None

    def linger(self) -> None:
        """Stop sending but go on reading: a close with unread input would take the answer away."""
        self.phase, self.want = Phase.LINGER, READ
        self.inbox.clear()
        self._say_goodbye()
        self._sock.shutdown(socket.SHUT_WR)

    def discard(self) -> bool:
        """Read and forget a good deal while lingering; whether the client has closed."""
        for _ in range(DISCARDED_AT_ONCE):
            try:
                data = socket.socket.recv(self._sock, CHUNK_BYTES)  # raw bytes, also under TLS
            except BlockingIOError:
                return False
            if not data:
                return True
        return False

    def close(self) -> None:
        """Close; any number of times."""
        if self.phase is not Phase.CLOSED:
            if self.phase is not Phase.LINGER:
                self._say_goodbye()
            self.phase = Phase.CLOSED
            self._sock.close()

    def _say_goodbye(self) -> None:
        secure = self.secure_socket
        if secure is not None and self.phase is not Phase.HANDSHAKE:
            with contextlib.suppress(OSError, ValueError):  # close_notify, if the client still listens
                secure.unwrap()

    def _transfer(self, action: Callable[[], T]) -> T | None:
        """Do it now, or None when the other side has to move first (`want` says how)."""
        if self.tls:
            return self._tls_transfer(action)
        try:
            return action()
        except BlockingIOError:
            return None

    def _tls_transfer(self, action: Callable[[], T]) -> T | None:
        import ssl

        try:
            return action()
        except (ssl.SSLWantReadError, BlockingIOError):
            self.want = READ
        except ssl.SSLWantWriteError:
            self.want = WRITE
        return None


def first_to_go(waiting: Collection[Conn], count: int) -> list[Conn]:
    """Who gives way to newcomers: of the most crowded stage those that have got nowhere for longest.

    A flood crowds one stage, and then pays for itself: the silent push out each other and not a client
    that is sending its request.
    """
    stages = {conn: conn.stage for conn in waiting}
    for crowded, _ in Counter(stages.values()).most_common(1):
        crowd = [conn for conn in waiting if stages[conn] is crowded]
        return heapq.nsmallest(count, crowd, key=lambda conn: conn.progress_s)
    return []
