"""A provider with fixed answers, and helpers that speak to a server over real sockets."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvwatch.exporters.events import EventLog
from kvwatch.exporters.provider import EvidenceTally
from kvwatch.exporters.web import WebServer
from kvwatch.model.report import Event, TickReport
from tests.exporters import sample


@dataclass
class FixedShelf:
    """Pieces of evidence in memory."""

    pieces: dict[str, bytes] = field(default_factory=dict)
    failure: OSError | None = None
    told: EvidenceTally = field(default_factory=EvidenceTally)

    def names(self) -> list[str]:
        return sorted(self.pieces, reverse=True)

    def read(self, name: str) -> bytes | None:
        if self.failure is not None:
            raise self.failure
        return self.pieces.get(name)

    def tally(self) -> EvidenceTally:
        return self.told


@dataclass
class FixedProvider:
    """Answers what it was given."""

    current: TickReport | None = field(default_factory=sample.report)
    log: EventLog = field(default_factory=EventLog)
    is_healthy: bool = True
    missing: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    reloads: int = 0
    shelf: FixedShelf = field(default_factory=FixedShelf)

    def report(self) -> TickReport | None:
        return self.current

    def events(self, since_wall_s: float) -> list[Event]:
        return self.log.since(since_wall_s)

    def evidence(self) -> FixedShelf:
        return self.shelf

    def healthy(self) -> bool:
        return self.is_healthy

    def ready(self) -> tuple[bool, list[str]]:
        return not self.missing, self.missing

    def reload(self) -> list[str]:
        self.reloads += 1
        return self.findings


@dataclass
class Answer:
    """A response as it came over the wire."""

    status: int
    headers: dict[str, str]
    body: bytes


@contextlib.contextmanager
def serving(provider: FixedProvider | None = None, **options: object) -> Iterator[WebServer]:
    """A started server on a free port."""
    server = WebServer("127.0.0.1", 0, provider or FixedProvider(), **options)  # type: ignore[arg-type]
    server.start()
    try:
        yield server
    finally:
        server.close()


def connect(server: WebServer, context: ssl.SSLContext | None = None) -> socket.socket:
    """A connected client."""
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    if context is None:
        return sock
    try:
        return context.wrap_socket(sock, server_hostname="localhost")
    except BaseException:
        sock.close()
        raise


def read_answer(sock: socket.socket, *, head_only: bool = False) -> Answer:
    """Read exactly one response; ConnectionError when the server closes first."""
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        data += _some(sock, 1)  # byte by byte: what follows belongs to the next answer
    status, *lines = data.decode("latin-1").rstrip("\r\n").split("\r\n")
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
    want = 0 if head_only else int(headers["content-length"])
    body = bytearray()
    while len(body) < want:
        body += _some(sock, want - len(body))
    return Answer(int(status.split()[1]), headers, bytes(body))


def _some(sock: socket.socket, limit: int) -> bytes:
    data = sock.recv(limit)
    if not data:
        raise ConnectionError("closed")
    return data


def ask(
    server: WebServer,
    path: str,
    *,
    method: str = "GET",
    context: ssl.SSLContext | None = None,
    **headers: str,
) -> Answer:
    """One request on a connection of its own."""
    with connect(server, context) as sock:
        sock.sendall(request(path, method=method, **headers))
        return read_answer(sock, head_only=method == "HEAD")


def request(path: str, *, method: str = "GET", **headers: str) -> bytes:
    """A request as bytes; underscores in header names become dashes."""
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode()
