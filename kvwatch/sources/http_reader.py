"""What answer comes over this connection? One HTTP/1.1 answer, read within a deadline and size caps."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol

from kvwatch.model.sample import FailureKind
from kvwatch.sources.base import SourceError
from kvwatch.sources.exposition import excerpt

MAX_HEAD_BYTES = 32 * 1024
_MAX_CHUNK_LINE_BYTES = 1024
_RECEIVE_BYTES = 64 * 1024
_STATUS = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: [^\r\n]*)?\r?\n")


class Deadline:
    """A point in time on the monotonic clock that a whole exchange must not pass."""

    __slots__ = ("_end_s", "_now", "total_s")

    def __init__(self, total_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self.total_s = total_s
        self._now = now
        self._end_s = now() + total_s

    def left_s(self) -> float:
        """Seconds left; raises SourceError(TIMED_OUT) when there are none."""
        left_s = self._end_s - self._now()
        if left_s <= 0:
            raise TimeoutError
        return left_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A complete answer. Header names are in lower case. `framed` is False where only the end of
    the connection ended the body, so that a cut cannot be told from the end."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    framed: bool = True


class Connection(Protocol):
    """What is asked of a connection: as a socket does it, with a timeout for each wait."""

    def settimeout(self, timeout_s: float, /) -> None:
        """Let the waits to come end with TimeoutError after this long."""

    def recv(self, size: int, /) -> bytes:
        """Some bytes, b"" at the end of the connection."""

    def sendall(self, data: bytes, /) -> None:
        """Send all of it."""

    def close(self) -> None:
        """Close it."""


class NothingCameError(Exception):
    """The connection ended before the first byte of an answer."""


class Reader:
    """Reads one answer from a connection."""

    def __init__(
        self,
        connection: Connection,
        buffer: bytearray,
        deadline: Deadline,
        max_body_bytes: int,
        where: str,
    ) -> None:
        self._connection = connection
        self._buffer = buffer
        self._deadline = deadline
        self._max_body_bytes = max_body_bytes
        self._where = where
        self._behind = b""  # what came with the head and is not in the buffer

    def response(self) -> tuple[Response, bool]:
        """Give the answer, and whether the connection can be used again."""
        minor, status, headers = self._head()
        while 100 <= status < 200:
            self._unread()
            minor, status, headers = self._head()
        keep = "close" not in headers.get("connection", "keep-alive" if minor else "close").lower()
        if status in (204, 304):
            self._unread()
            return Response(status=status, headers=headers, body=b""), keep
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            self._malformed(
                f"is compressed ({encoding[:20]}) although that was not asked for; turn it off there"
            )
        if "transfer-encoding" in headers:
            body, framed = self._chunked(headers["transfer-encoding"]), True
        elif "content-length" in headers:
            body, framed = self._sized(headers["content-length"]), True
        else:
            body, framed, keep = self._rest(), False, False
        return Response(status=status, headers=headers, body=body, framed=framed), keep

    def _receive(self) -> bytes:
        """What there is, b"" at the end of the connection."""
        self._connection.settimeout(self._deadline.left_s())
        return self._connection.recv(_RECEIVE_BYTES)

    def _more(self) -> bool:
        """Receive what there is into the buffer; False at the end of the connection."""
        data = self._receive()
        self._buffer += data
        return bool(data)

    def _unread(self) -> None:
        """Put what came with the head into the buffer, for all but the simplest answer."""
        self._buffer += self._behind
        self._behind = b""

    def _head(self) -> tuple[int, int, dict[str, str]]:
        if not self._buffer:  # nearly always the whole answer comes at once: it is not copied about then
            data = self._receive()
            end = data.find(b"\r\n\r\n") if data.startswith(b"HTTP/1.") else -1
            if end >= 0:
                self._behind = data[end + 4 :]
                return self._parsed(data[: end + 2])
            self._buffer += data
            if not data:
                raise NothingCameError
            self._refuse_foreign()
        end = self._buffer.find(b"\r\n\r\n")
        while end < 0:
            start = max(0, len(self._buffer) - 3)
            if not self._more():
                if not self._buffer:
                    raise NothingCameError
                self._refuse_foreign()
                self._cut("in its header")
            self._refuse_foreign()
            end = self._buffer.find(b"\r\n\r\n", start)
            if end < 0 and len(self._buffer) > MAX_HEAD_BYTES:
                raise SourceError(
                    FailureKind.TOO_LARGE, f"{self._where}: a header of over {MAX_HEAD_BYTES} bytes"
                )
        head = bytes(self._buffer[: end + 2])
        del self._buffer[: end + 4]
        return self._parsed(head)

    def _parsed(self, head: bytes) -> tuple[int, int, dict[str, str]]:
        status = _STATUS.match(head)
        if status is None:
            self._malformed(f"begins with {excerpt(head, 40)!r}, which is no HTTP/1.1")
        return int(status[1]), int(status[2]), self._headers(head[status.end() :])

    def _refuse_foreign(self) -> None:
        """Say early that something else than HTTP speaks there."""
        if b"HTTP/1."[: len(self._buffer)] == self._buffer[:7]:
            return
        start = bytes(self._buffer[:40])
        if start[:1] == b"\x15":
            raise SourceError(FailureKind.TLS, f"{self._where} speaks TLS: write https:// in its `url`")
        self._malformed(f"begins with {excerpt(start, 40)!r}, which is no HTTP/1.1; is that the right port?")

    def _headers(self, head: bytes) -> dict[str, str]:
        headers: dict[str, str] = {}
        for line in head.decode("latin-1").split("\r\n")[:-1]:
            name, colon, value = line.partition(":")
            key, value = name.lower(), value.strip()
            if not colon or not name or name != name.strip():
                self._malformed(f"has the header line {excerpt(line.encode(), 40)!r}")
            if key == "content-length" and headers.get(key, value) != value:
                self._malformed("has two different content-lengths")
            headers[key] = f"{headers[key]}, {value}" if key in headers and key != "content-length" else value
        return headers

    def _sized(self, text: str) -> bytes:
        if not (text.isascii() and text.isdigit()) or len(text) > 18:
            self._malformed(f"has the content-length {excerpt(text.encode(), 20)!r}")
        size = int(text)
        if size > self._max_body_bytes:
            self._too_large(f"says it is {size} bytes")
        if len(self._behind) == size:
            return self._behind
        self._unread()
        while len(self._buffer) < size:
            if not self._more():
                self._cut(f"after {len(self._buffer)} of {size} bytes")
        return self._take(size)

    def _rest(self) -> bytes:
        self._unread()
        while self._more():
            if len(self._buffer) > self._max_body_bytes:
                self._too_large("does not end")
        return self._take(len(self._buffer))

    def _chunked(self, encoding: str) -> bytes:
        if encoding.strip().lower() != "chunked":
            self._malformed(f"has the transfer-encoding {excerpt(encoding.encode(), 20)!r}")
        self._unread()
        body = bytearray()
        while size := self._chunk_size():
            if len(body) + size > self._max_body_bytes:
                self._too_large("does not end")
            while len(self._buffer) < size + 2:
                if not self._more():
                    self._cut("inside a chunk")
            body += self._take(size)
            if self._take(2) != b"\r\n":
                self._malformed("has a chunk that is longer than it says")
        trailer_bytes = 0
        while line := self._line():
            trailer_bytes += len(line)
            if trailer_bytes > MAX_HEAD_BYTES:
                raise SourceError(
                    FailureKind.TOO_LARGE, f"{self._where}: a trailer of over {MAX_HEAD_BYTES} bytes"
                )
        return bytes(body)

    def _chunk_size(self) -> int:
        digits = self._line().partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9A-Fa-f]{1,15}", digits):
            self._malformed(f"has a chunk of size {excerpt(digits, 20)!r}")
        return int(digits, 16)

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > _MAX_CHUNK_LINE_BYTES:
                self._malformed("has a chunk without a size line")
            if not self._more():
                self._cut("between chunks")
        line = self._take(end)
        del self._buffer[:2]
        return line

    def _take(self, size: int) -> bytes:
        with memoryview(self._buffer) as view:
            data = bytes(view[:size])
        del self._buffer[:size]
        return data

    def _malformed(self, what: str) -> NoReturn:
        raise SourceError(FailureKind.MALFORMED, f"{self._where}: the answer {what}")

    def _cut(self, where: str) -> NoReturn:
        raise SourceError(FailureKind.BROKEN, f"{self._where}: the answer was cut short {where}")

    def _too_large(self, what: str) -> NoReturn:
        limit_mib = self._max_body_bytes / (1024 * 1024)
        raise SourceError(
            FailureKind.TOO_LARGE, f"{self._where}: the body {what}; {limit_mib:g} MiB at most are read"
        )
