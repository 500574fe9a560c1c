"""Serves one recorded vLLM page, in a process of its own so that it costs the subjects nothing."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


def main(page: Path, port: int) -> None:
    """Answer every GET with the page, changed in one counter so that it is news each time."""
    body = page.read_bytes()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer = body if self.path == "/metrics" else b'{"version":"0.32.0"}'
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            return

    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
