"""A proxy that keeps every good answer it hands on, so that "at the same instant" can be checked exactly.

`Recorder` runs this module as a process of its own, for the same reason as the load.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
FORWARD_DEADLINE_S = 5
KEEP = 20


class Kept(NamedTuple):
    """One answer: its file, when it was handed on in Unix time, and its text."""

    name: str
    at_s: float
    text: str


class Recorder:
    """Forwards GET requests to `target`; keeps each good answer as a file in `folder`."""

    def __init__(self, target: str, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "checks.engines.recorder", target, str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def last(self, *paths: str) -> dict[str, Kept] | None:
        """The newest answer of each path; None while one has not come yet."""
        found = {}
        for path in paths:
            newest = max(self._folder.glob(f"*{_suffix(path)}"), default=None)
            if newest is None:
                return None
            at_s = float(newest.name.split("-")[1])
            try:
                found[path] = Kept(newest.name, at_s, newest.read_text())
            except FileNotFoundError:  # newer ones have come since
                return None
        return found

    def close(self) -> None:
        """Stop listening."""
        self._process.terminate()
        self._process.wait(5)
        assert self._process.stdout is not None
        self._process.stdout.close()


def _suffix(path: str) -> str:
    return "-" + path.strip("/").replace("/", "_") + ".kept"


class Handler(BaseHTTPRequestHandler):
    """One reader's connection."""

    protocol_version = "HTTP/1.1"
    target = ""
    folder = Path()

    def do_GET(self) -> None:
        """Ask the server the same and hand its answer on; a server that fails is a connection that ends."""
        try:
            with urllib.request.urlopen(self.target + self.path, timeout=FORWARD_DEADLINE_S) as reply:
                body, status = reply.read(), reply.status
                kind = reply.headers.get("Content-Type", "text/plain")
        except urllib.error.HTTPError as error:
            body, status, kind = error.read(), error.code, "text/plain"
        except OSError:
            self.close_connection = True
            self.connection.close()
            return
        if status == 200:
            self._keep(body)
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # the reader's deadline has passed
            self.close_connection = True

    def _keep(self, body: bytes) -> None:
        suffix = _suffix(self.path)
        arriving = self.folder / f"arriving-{threading.get_ident()}{suffix}.part"
        arriving.write_bytes(body)
        arriving.rename(self.folder / f"{time.monotonic_ns():020d}-{time.time():.6f}{suffix}")
        for old in sorted(self.folder.glob(f"*{suffix}"))[:-KEEP]:
            old.unlink(missing_ok=True)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main(target: str, folder: str) -> None:
    """Serve until ended; the port is the only line on standard output."""
    Handler.target, Handler.folder = target, Path(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
