"""A proxy that keeps every metrics page it hands on, so that "at the same instant" can be checked exactly."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Recorder:
    """Forwards GET requests to `target`; keeps (Unix seconds, body) of each good /metrics answer."""

    def __init__(self, target: str) -> None:
        self.pages: list[tuple[float, bytes]] = []
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                recorder._forward(self)

            def log_message(self, *_: object) -> None:
                return

        self.target = target
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _forward(self, handler: BaseHTTPRequestHandler) -> None:
        try:
            with urllib.request.urlopen(self.target + handler.path, timeout=5) as reply:
                body, status = reply.read(), reply.status
                kind = reply.headers.get("Content-Type", "text/plain")
        except urllib.error.HTTPError as error:
            body, status, kind = error.read(), error.code, "text/plain"
        except OSError:
            handler.close_connection = True
            handler.connection.close()
            return
        if handler.path == "/metrics" and status == 200:
            self.pages.append((time.time(), body))
        try:
            handler.send_response(status)
            handler.send_header("Content-Type", kind)
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)
        except OSError:  # the reader's deadline has passed
            handler.close_connection = True

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
