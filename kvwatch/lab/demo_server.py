"""How is the simulated server reached? `/metrics`, `/version` and `/health` on loopback, while it is up."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvwatch.lab.vllm_page import VERSION

_LOOK_S = 0.2  # how often the listener looks whether it should be there


class DemoServer:
    """Serves what `page` returns while `up` says so, and refuses connections otherwise; keeps its port."""

    def __init__(self, page: Callable[[], str], up: Callable[[], bool]) -> None:
        self._page = page
        self._up = up
        self._stop = threading.Event()
        self._listener: _Listener | None = _Listener(("127.0.0.1", 0), page)
        self.port: int = self._listener.server_address[1]
        self._thread = threading.Thread(target=self._serve, name="demo-server", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Stop listening and drop every connection; may be called twice."""
        self._stop.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._stop.is_set():
            if self._up():
                listener = self._listener or _Listener(("127.0.0.1", self.port), self._page)
                self._listener = listener
                listener.handle_request()  # returns after `_LOOK_S` at the latest
            else:
                self._drop()
                self._stop.wait(_LOOK_S)
        self._drop()

    def _drop(self) -> None:
        if self._listener is not None:
            self._listener.drop()
            self._listener = None


class _Listener(ThreadingHTTPServer):
    """A listener that knows its open connections, so that it can break them as a dying process does."""

    daemon_threads = True
    block_on_close = False
    timeout = _LOOK_S
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], page: Callable[[], str]) -> None:
        self.page = page
        self._open: set[socket.socket] = set()
        self._guard = threading.Lock()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Note the connection, then serve it in a thread."""
        with self._guard:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget the connection and close it."""
        with self._guard:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""

    def drop(self) -> None:
        """Stop listening and break every open connection."""
        self.server_close()
        with self._guard:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:  # the other side was faster
                    continue


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "uvicorn"
    sys_version = ""
    timeout = 60.0  # of an idle connection, seconds
    server: _Listener

    def do_GET(self) -> None:
        """Answer the three paths of a vLLM server that a watcher reads."""
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", self.server.page().encode())
        elif path == "/version":
            self._answer(200, "application/json", json.dumps({"version": VERSION}).encode())
        elif path == "/health":
            self._answer(200, "text/plain", b"")
        else:
            self._answer(404, "application/json", b'{"detail":"Not Found"}')

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the demo's terminal tells a story."""

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
