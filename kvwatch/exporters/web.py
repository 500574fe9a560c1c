"""Who listens to the clients? A small HTTP server that no client can hold up.

One thread accepts, and holds each connection until a whole request is there; two workers answer.
Nothing waits for a client outside the selector: half a request, half a TLS handshake, and an
answer that nobody reads cost a connection, never a thread. Connections are capped below the
descriptor limit; at the cap somebody who has got nowhere gives way (`first_to_go`). Who may come in at
all is the guard's business.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from kvwatch.exporters.provider import Provider
from kvwatch.exporters.web_auth import Access
from kvwatch.exporters.web_config import WebConfig
from kvwatch.exporters.web_conn import READ, Conn, Phase, first_to_go
from kvwatch.exporters.web_guard import Guard
from kvwatch.exporters.web_http import (
    HttpError,
    Request,
    Response,
    error_response,
    unauthorized,
    wire,
)
from kvwatch.exporters.web_limits import ACCEPTS_AT_ONCE, SHORT_OF_ROOM, Limits, connection_cap, listen
from kvwatch.exporters.web_routes import Routes

WORKERS = 2
DEFAULT_LIMITS = Limits()
MAX_PIPELINED = 16
CLOSE_S = 0.9


class WebServer:
    """Serves a provider over HTTP or HTTPS until it is closed.

    `web_config` gives the protection in force and is asked for every request; None: none.
    """

    def __init__(
        self,
        host: str,
        port: int,
        provider: Provider,
        *,
        enable_lifecycle: bool = False,
        web_config: Callable[[], WebConfig | None] | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._limits = limits
        self._address = (host, port)
        self._routes = Routes(provider, enable_lifecycle=enable_lifecycle)
        self._cap = connection_cap(limits.connections)
        self._waiting: set[Conn] = set()  # the selector thread's
        self._count = 0  # all connections, those with workers included
        self._returned: deque[Conn] = deque()
        self._jobs: queue.SimpleQueue[Conn | None] = queue.SimpleQueue()
        self._guard = Guard(web_config, limits.unchecked, self._jobs.put)
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()  # guards _threads
        self._here: Conn | None = None  # answered in the selector thread now
        self._stopping = False
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Listen and serve. OSError when the port is taken, BadCertificateError (one as well) for bad TLS."""
        self._guard.try_certificate()
        self._listener = listen(*self._address)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, READ)
        self._selector.register(self._wake_out, READ)
        self._spawn(self._loop, "web")
        for number in range(WORKERS):
            self._spawn(self._work, f"web-{number}")

    @property
    def port(self) -> int:
        """The port in use, also when 0 was asked for."""
        assert self._listener is not None, "start() comes first"  # noqa: S101 a programming error
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        """Where to look, with a name that works on this host."""
        host = self._address[0].strip("[]") or "127.0.0.1"
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 shown, not bound
        scheme = "https" if self._guard.config.tls is not None else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def close(self) -> None:
        """Stop within a second; answers under way may be cut off."""
        if self._listener is None or self._stopping:
            return
        self._stopping = True
        self._wake()
        for _ in range(WORKERS):
            self._jobs.put(None)
        self._guard.stop()
        until = time.monotonic() + CLOSE_S
        for thread in filter(None, (*self._threads, self._guard.thread)):
            thread.join(max(0.0, until - time.monotonic()))
        with contextlib.suppress(queue.Empty):
            while True:
                conn = self._jobs.get_nowait()
                if conn is not None:
                    conn.close()
        for conn in [*self._waiting, *self._returned]:
            conn.close()
        self._selector.close()
        for sock in (self._listener, self._wake_in, self._wake_out):
            sock.close()

    def _spawn(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        with self._starting:
            self._threads.append(thread)
        thread.start()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # a full pipe wakes as well; a closed one needs nobody
            self._wake_in.send(b"x")

    # -- the selector thread

    def _loop(self) -> None:
        try:
            self._turn()
        finally:
            conn, self._here = self._here, None
            if conn is not None:  # as in a worker: a fault of ours is on its way to the log
                self._refuse(conn, HttpError(500, "kvwatch has met a fault of its own; its log says which"))
                self._take_back(conn)
            if not self._stopping:
                self._spawn(self._loop, threading.current_thread().name)

    def _turn(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(self._timeout()):
                if isinstance(key.fileobj, Conn):
                    if key.fileobj in self._waiting:  # else it had to give way a moment ago
                        self._ready(key.fileobj)
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    self._drain_wakes()
            while self._returned:
                self._take_back(self._returned.popleft())
            self._expire(time.monotonic())

    def _timeout(self) -> float | None:
        if not self._waiting:
            return None
        first = min(conn.deadline_s for conn in self._waiting)
        return max(0.01, first - time.monotonic())

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass

    def _accept(self) -> None:
        assert self._listener is not None  # noqa: S101 start() has set it
        for _ in range(ACCEPTS_AT_ONCE):
            if self._count >= self._cap and not self._waiting:
                time.sleep(0.005)  # all are being answered: newcomers wait in the kernel's queue
                return
            try:
                sock, _peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in SHORT_OF_ROOM and not self._evict():
                    time.sleep(0.05)  # nothing to close: let the workers finish something
                return
            sock.setblocking(False)
            if self._count >= self._cap:
                self._evict()
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            conn = Conn(sock, time.monotonic(), tls=self._guard.config.tls is not None)
            conn.deadline_s = conn.progress_s + self._limits.request_s
            self._count += 1
            if conn.tls or not self._arrived(conn):
                self._wait(conn)

    def _arrived(self, conn: Conn) -> bool:
        """Take a request that came with its connection, as most do: one turn of the selector saved."""
        if self._advance_plain(conn):
            self._hand_over(conn)
            return True
        return conn.phase is Phase.CLOSED

    def _hand_over(self, conn: Conn) -> None:
        """A whole request is there: answer a scrape now, give the rest to a worker.

        Handing a scrape over would wake a thread on a cold core: a fifth of its time.
        """
        if self._guard.absent and conn.holds_one_scrape():
            self._answer_here(conn)
        else:
            self._jobs.put(conn)

    def _evict(self) -> bool:
        """Close some; False when nobody was: there is nobody, or all had sent more and were heard first."""
        closed = False
        for conn in first_to_go(self._waiting, max(1, self._cap // 32)):
            if conn.unread():
                self._ready(conn)
            else:
                self._drop(conn)
                closed = True
        return closed

    def _wait(self, conn: Conn) -> None:
        self._waiting.add(conn)
        self._selector.register(conn, conn.want)

    def _unwait(self, conn: Conn) -> None:
        self._waiting.discard(conn)
        self._selector.unregister(conn)

    def _drop(self, conn: Conn) -> None:
        if conn in self._waiting:
            self._unwait(conn)
        conn.close()
        self._count -= 1

    def _take_back(self, conn: Conn) -> None:
        if conn.phase is Phase.CLOSED:
            self._count -= 1
        elif conn.phase is Phase.REQUEST and (self._complete(conn) or conn.holds_input()):
            self._jobs.put(conn)
        else:
            self._wait(conn)

    @staticmethod
    def _complete(conn: Conn) -> bool:
        try:
            return bool(conn.inbox) and conn.maybe_complete()
        except HttpError:
            return True  # a worker will find the same and answer it

    def _ready(self, conn: Conn) -> None:
        """A client has moved: do what costs nothing here, hand the rest to a worker."""
        if conn.phase is Phase.LINGER:
            self._linger(conn)
        elif conn.tls or self._advance_plain(conn):
            self._unwait(conn)
            self._hand_over(conn)

    def _answer_here(self, conn: Conn) -> None:
        self._here = conn
        if self._step(conn):
            self._take_back(conn)
        self._here = None

    def _linger(self, conn: Conn) -> None:
        try:
            done = conn.discard()
        except OSError:
            done = True
        if done:
            self._drop(conn)

    def _advance_plain(self, conn: Conn) -> bool:
        """Read or write what can be done at once; whether a worker is needed now."""
        try:
            if conn.phase is Phase.ANSWER:
                return conn.flush()
            return self._receive(conn)
        except HttpError:
            return True
        except (OSError, EOFError):
            self._drop(conn)
            return False

    def _receive(self, conn: Conn) -> bool:
        idle = not conn.inbox
        try:
            return conn.receive()
        finally:
            if idle and conn.inbox:
                conn.deadline_s = time.monotonic() + self._limits.request_s

    def _expire(self, now_s: float) -> None:
        late = [conn for conn in self._waiting if conn.deadline_s <= now_s]
        for conn in late:
            if conn.phase is Phase.REQUEST and conn.inbox and not conn.tls:
                self._unwait(conn)
                self._refuse(
                    conn, HttpError(408, f"the request did not come within {self._limits.request_s:g} s")
                )
                self._take_back(conn)
            else:
                self._drop(conn)

    # --- the workers

    def _work(self) -> None:
        conn: Conn | None = None
        try:
            while (conn := self._jobs.get()) is not None:
                if self._step(conn):
                    self._returned.append(conn)
                    self._wake()
        finally:
            if conn is not None:  # a fault of ours is on its way to the log; the next request finds a worker
                self._refuse(conn, HttpError(500, "kvwatch has met a fault of its own; its log says which"))
                self._returned.append(conn)
                self._wake()
                if not self._stopping:
                    self._spawn(self._work, threading.current_thread().name)

    def _step(self, conn: Conn) -> bool:
        """Take one connection as far as it goes now; False when another thread has taken it over."""
        try:
            if self._stopping:
                conn.close()
                return True
            return self._advance(conn)
        except HttpError as error:
            self._refuse(conn, error)
        except (OSError, EOFError):
            conn.close()
        return True

    def _advance(self, conn: Conn) -> bool:
        config = self._guard.refresh()
        if conn.phase is Phase.HANDSHAKE and not self._handshake(conn, config):
            return True
        if conn.phase is Phase.ANSWER:
            self._finish(conn)
        for _ in range(MAX_PIPELINED):
            request = self._next_request(conn)
            if request is None:
                break
            access = self._guard.access(conn, request, config)
            if access is Access.UNCHECKED:
                return False
            self._answer(conn, request, config, allowed=access is Access.ALLOWED)
        return True

    def _next_request(self, conn: Conn) -> Request | None:
        if conn.phase is not Phase.REQUEST:
            return None
        checked, conn.pending = conn.pending, None
        if checked is not None:
            return checked
        request = conn.take_request()
        if request is None and conn.tls and self._receive(conn):
            request = conn.take_request()
        return request

    def _handshake(self, conn: Conn, config: WebConfig) -> bool:
        if not self._guard.handshake(conn, config):
            return False
        conn.phase, conn.want = Phase.REQUEST, READ
        conn.deadline_s = time.monotonic() + self._limits.request_s
        return True

    def _answer(self, conn: Conn, request: Request, config: WebConfig, *, allowed: bool) -> None:
        try:
            if not allowed:
                raise unauthorized()
            response = self._routes.answer(request)
        except HttpError as error:
            response = error_response(error)
        conn.keep_alive = request.keep_alive and not self._stopping
        head_only = request.method == "HEAD"
        self._send(conn, response, head_only=head_only, headers=config.headers)

    def _refuse(self, conn: Conn, error: HttpError) -> None:
        """Answer what is no request, and close."""
        conn.keep_alive = False
        if conn.phase in (Phase.CLOSED, Phase.HANDSHAKE, Phase.LINGER):
            conn.close()
            return
        try:
            self._send(conn, error_response(error), head_only=False, headers=self._guard.config.headers)
        except OSError:
            conn.close()

    def _send(
        self, conn: Conn, response: Response, *, head_only: bool, headers: tuple[tuple[str, str], ...]
    ) -> None:
        data = wire(
            response, wall_s=time.time(), keep_alive=conn.keep_alive, head_only=head_only, extra=headers
        )
        conn.outbox = memoryview(data)
        conn.phase, conn.answered = Phase.ANSWER, True
        conn.deadline_s = time.monotonic() + self._limits.write_s
        self._finish(conn)

    def _finish(self, conn: Conn) -> None:
        """Send on; then wait for the next request, or close."""
        if not conn.flush():
            return
        now_s = time.monotonic()
        if conn.keep_alive:
            conn.phase, conn.want = Phase.REQUEST, READ
            conn.progress_s, conn.deadline_s = now_s, now_s + self._limits.idle_s
        else:
            conn.linger()
            conn.deadline_s = now_s + self._limits.linger_s
