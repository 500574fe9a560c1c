"""A web server in a process of its own: answers by path, and writes down what it was asked for.

    NAME SCRIPT --port PORT --pages PAGES --log LOG

PAGES is a JSON object: path to [status, content type, body]; "*" stands for every other path.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main(port: int, pages: dict[str, tuple[int, str, str]], log: Path) -> None:
    """Serve until killed."""
    lock, busy = threading.Lock(), 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            nonlocal busy
            with lock, log.open("a") as stream:
                busy += 1
                stream.write(f"{busy} {self.command} {self.path}\n")
            status, kind, text = pages.get(self.path) or pages.get("*") or (404, "text/plain", "not found")
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with lock:
                busy -= 1
            self.wfile.write(body)

        do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            return

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    main(int(given["--port"]), json.loads(Path(given["--pages"]).read_text()), Path(given["--log"]))
