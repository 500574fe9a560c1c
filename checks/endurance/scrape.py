"""A scraper that measures: one connection kept, or a new one each time, over plain TCP or TLS."""

from __future__ import annotations

import gzip
import socket
import ssl
import time
from dataclasses import dataclass

# What a Prometheus sends with every scrape.
OPENMETRICS = (
    b"Accept: application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5\r\n"
    b"Accept-Encoding: gzip\r\n"
)


class UnansweredError(OSError):
    """The request was sent whole and no answer came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer: status, body (unpacked), seconds from the first byte out (or connect) to the last in."""

    status: int
    body: bytes
    took_s: float


class Scraper:
    """Asks one server. `reopened` counts how often it closed a kept connection between two requests."""

    def __init__(
        self, port: int, *, keep: bool = False, tls: ssl.SSLContext | None = None, timeout_s: float = 10.0
    ) -> None:
        self._port = port
        self._keep = keep
        self._tls = tls
        self._timeout_s = timeout_s
        self._open: socket.socket | None = None
        self.reopened = 0

    def get(self, path: str = "/metrics", fields: bytes = b"", pause_s: float = 0.0) -> Answer:
        """One GET. With `pause_s` the request goes out in four pieces that far apart (not counted as time
        taken). Raises ConnectionRefusedError where nobody listens, UnansweredError, or another OSError."""
        begun_s = time.perf_counter()
        connection = self._connection()
        kept = b"" if self._keep else b"Connection: close\r\n"
        request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode() + fields + kept + b"\r\n"
        try:
            for piece in _pieces(request, pause_s):
                connection.sendall(piece)
                if pause_s:
                    time.sleep(pause_s)
            head, body = _read(connection)
        except OSError as error:
            self.close()
            raise UnansweredError(f"no answer to a whole request: {error or type(error).__name__}") from error
        took_s = time.perf_counter() - begun_s - 4 * pause_s
        if not self._keep or b"\r\nconnection: close" in head.lower():
            self.close()
        if b"\r\ncontent-encoding: gzip" in head.lower():
            body = gzip.decompress(body)
        return Answer(status=int(head.split(None, 2)[1]), body=body, took_s=took_s)

    def _connection(self) -> socket.socket:
        if self._open is not None and _closed(self._open):
            self.reopened += 1
            self.close()
        if self._open is None:
            plain = socket.create_connection(("127.0.0.1", self._port), timeout=self._timeout_s)
            try:
                self._open = plain if self._tls is None else self._tls.wrap_socket(plain)
            except OSError as error:
                plain.close()
                raise UnansweredError(f"no TLS handshake: {error or type(error).__name__}") from error
        return self._open

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._open is not None:
            self._open.close()
            self._open = None


def _pieces(request: bytes, pause_s: float) -> list[bytes]:
    if not pause_s:
        return [request]
    size = -(-len(request) // 4)
    return [request[at : at + size] for at in range(0, len(request), size)]


def _closed(connection: socket.socket) -> bool:
    """Whether the server has closed this idle connection (TLS says goodbye first: bytes are there)."""
    connection.setblocking(False)
    try:
        raw = socket.socket.recv(connection, 1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.setblocking(True)
        connection.settimeout(10.0)
    return not raw or not isinstance(connection, ssl.SSLSocket) or _goodbye(connection)


def _goodbye(connection: ssl.SSLSocket) -> bool:
    """Take in what TLS itself has sent (session tickets); whether it was the end."""
    connection.setblocking(False)
    try:
        return not connection.recv(1)
    except (ssl.SSLWantReadError, BlockingIOError):
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(10.0)


def _read(connection: socket.socket) -> tuple[bytes, bytes]:
    data = bytearray()
    while b"\r\n\r\n" not in data:
        data += _more(connection)
    head, _, body = bytes(data).partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    parts, left = [body], int(fields[b"content-length"]) - len(body)
    while left > 0:
        parts.append(_more(connection))
        left -= len(parts[-1])
    return head, b"".join(parts)


def _more(connection: socket.socket) -> bytes:
    found = connection.recv(1 << 18)
    if not found:
        raise ConnectionResetError("closed before the whole answer")
    return found
