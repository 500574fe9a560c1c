"""A real HAProxy in front of a small real server that counts how many requests it runs at once."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.harness import ROOT, free_port

RECIPE = ROOT / "packaging/recipes/haproxy-maxconn.py"
CONFIGURED = 16
CONFIG = """
global
    stats socket {folder}/admin.sock mode 600 level admin
    maxconn 200
defaults
    mode http
    timeout connect 1s
    timeout client 10s
    timeout server 10s
    timeout queue 8s
frontend in
    bind 127.0.0.1:{port}
    default_backend engine
backend engine
    server s1 127.0.0.1:{server} maxconn {configured}
"""


class Engine:
    """Answers after `work_s`; `most` is the largest number of requests it has had at once."""

    def __init__(self, work_s: float) -> None:
        self.now, self.most = 0, 0
        lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with lock:
                    owner.now += 1
                    owner.most = max(owner.most, owner.now)
                time.sleep(work_s)
                with lock:
                    owner.now -= 1
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


class Proxy:
    """HAProxy and what stands behind it. Use as a context manager."""

    def __init__(self, folder: Path, *, work_s: float = 0.15) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.engine = Engine(work_s)
        self.port = free_port()
        self.socket = folder / "admin.sock"
        self._config = folder / "haproxy.cfg"
        self._config.write_text(
            CONFIG.format(folder=folder, port=self.port, server=self.engine.port, configured=CONFIGURED)
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def argv(self) -> list[str]:
        return [str(RECIPE), str(self.socket), "engine/s1", str(CONFIGURED)]

    def start(self) -> None:
        self._process = subprocess.Popen(
            ["haproxy", "-q", "-db", "-f", str(self._config)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end_s = time.monotonic() + 10
        while time.monotonic() < end_s:
            try:
                self.ask("show info")
            except OSError:
                time.sleep(0.02)
            else:
                return
        raise AssertionError("haproxy does not answer")

    def stop(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(5)

    def ask(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(2)
            channel.connect(str(self.socket))
            channel.sendall(command.encode() + b"\n")
            reply = b""
            while piece := channel.recv(65536):
                reply += piece
        return reply.decode()

    def stat(self, name: str, column: str) -> int:
        """A figure of `show stat` for s1 or BACKEND."""
        lines = self.ask("show stat").splitlines()
        columns = lines[0].lstrip("# ").split(",")
        rows = [dict(zip(columns, line.split(","), strict=False)) for line in lines[1:] if line]
        return next(
            int(row[column] or 0) for row in rows if (row["pxname"], row["svname"]) == ("engine", name)
        )

    @property
    def maxconn(self) -> int:
        return self.stat("s1", "slim")

    def load(self, count: int) -> list[threading.Thread]:
        """This many clients at once, each with one request."""

        def client() -> None:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=10) as reply:
                reply.read()

        threads = [threading.Thread(target=client, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        return threads

    def __enter__(self) -> Proxy:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.engine.close()
