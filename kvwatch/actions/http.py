"""POST the request as JSON; any 2xx is applied. No redirects, one total deadline."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from kvwatch.actions.base import Action, ActionError, Attempt, Context, body
from kvwatch.model.action import ActionRequest, Outcome

if TYPE_CHECKING:
    import ssl

SELF_EXPIRING = False

MAX_HEAD = 8192
MAX_KEY = 4096

_Address = tuple[int, int, int, str, Any]  # as getaddrinfo gives them


class HttpAction:
    """One endpoint. `key_file` holds the key of the HMAC-SHA256 signature."""

    self_expiring = SELF_EXPIRING

    def __init__(self, url: str, key_file: str | None, ca_file: str | None) -> None:
        self._url = url
        self._parts = urlsplit(url)
        self._key_file = key_file
        self._ca_file = ca_file

    def perform(self, request: ActionRequest, held: int | None = None) -> Attempt:  # noqa: ARG002
        """One POST on a connection of its own."""
        content = body(request)
        end_s = time.monotonic() + request.deadline_s
        with (
            explained(self._url, request.deadline_s),
            connect(self._parts, end_s, self._ca_file) as connection,
        ):
            send(connection, self._head(content) + content, end_s)
            status = _status(connection, end_s)
        if 200 <= status < 300:
            return Attempt(outcome=Outcome.APPLIED, detail=f"HTTP {status}")
        if 300 <= status < 400:
            raise ActionError(
                Outcome.FAILED,
                f"{self._url}: HTTP {status}; redirects are not followed, give the final address",
            )
        raise ActionError(Outcome.FAILED, f"{self._url}: HTTP {status}")

    def _head(self, content: bytes) -> bytes:
        target = self._parts.path or "/"
        if self._parts.query:
            target += f"?{self._parts.query}"
        lines = [
            f"POST {target} HTTP/1.1",
            f"Host: {self._parts.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
            "User-Agent: kvwatch",
            "Connection: close",
        ]
        if self._key_file is not None:
            lines.append(f"X-Kvwatch-Signature: sha256={_signature(self._key_file, content)}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _signature(key_file: str, content: bytes) -> str:
    import hashlib
    import hmac

    try:
        key = Path(key_file).read_bytes()[:MAX_KEY].strip()
    except OSError as error:
        raise ActionError(
            Outcome.FAILED, f"{key_file}: {error.strerror}; it must hold the hook's key"
        ) from error
    if not key:
        raise ActionError(Outcome.FAILED, f"{key_file}: empty; it must hold the hook's key")
    return hmac.new(key, content, hashlib.sha256).hexdigest()


@contextlib.contextmanager
def explained(url: str, deadline_s: float) -> Iterator[None]:
    """Make an ActionError, with the address in it, of what a connection may raise."""
    try:
        yield
    except TimeoutError as error:
        raise ActionError(Outcome.TIMED_OUT, f"{url}: no answer within {deadline_s:g} s") from error
    except OSError as error:
        raise ActionError(Outcome.FAILED, f"{url}: {error.strerror or error}") from error


def left_s(end_s: float) -> float:
    """What is left until `end_s` (monotonic). Raises TimeoutError when that is nothing."""
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def connect(parts: SplitResult, end_s: float, ca_file: str | None) -> socket.socket:
    """A connection to the URL's host, over TLS for https. Raises OSError, ActionError for a bad `ca_file`."""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    plain = _connect_plain(parts.hostname or "", port, end_s)
    if parts.scheme != "https":
        return plain
    try:
        context = _tls(ca_file)
        plain.settimeout(left_s(end_s))
        return context.wrap_socket(plain, server_hostname=parts.hostname)
    except (OSError, ValueError, ActionError):
        plain.close()
        raise


def _tls(ca_file: str | None) -> ssl.SSLContext:
    """Verifies; trusts the system's certificates, or those of the file alone."""
    import ssl

    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ActionError(
            Outcome.FAILED, f"{ca_file}: {error.strerror or error}; it must hold PEM certificates"
        ) from error


def _connect_plain(host: str, port: int, end_s: float) -> socket.socket:
    """The first of the host's addresses that answers, all within one deadline."""
    failure: OSError = OSError("the name has no address")
    for family, kind, protocol, _, address in _resolve(host, port, end_s):
        plain = socket.socket(family, kind, protocol)
        try:
            plain.settimeout(left_s(end_s))
            plain.connect(address)
        except OSError as error:
            plain.close()
            failure = error
        else:
            return plain
    raise failure


def _resolve(host: str, port: int, end_s: float) -> list[_Address]:
    """Addresses of a name. The resolver knows no deadline, so it is left behind when it is too slow."""
    found: list[_Address] = []
    failures: list[OSError] = []

    def ask() -> None:
        try:
            found.extend(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            failures.append(error)

    asking = threading.Thread(target=ask, name="act-resolve", daemon=True)
    asking.start()
    asking.join(left_s(end_s))
    if asking.is_alive():
        raise TimeoutError
    if failures:
        raise failures[0]
    return found


def send(connection: socket.socket, content: bytes, end_s: float) -> None:
    """Send all of it by `end_s`. Raises OSError."""
    view = memoryview(content)
    while view:
        connection.settimeout(left_s(end_s))
        view = view[connection.send(view) :]


def _status(connection: socket.socket, end_s: float) -> int:
    """The status code; the rest of the answer is of no interest."""
    head = b""
    while b"\n" not in head:
        connection.settimeout(left_s(end_s))
        piece = connection.recv(MAX_HEAD - len(head))
        if not piece:
            raise OSError("the connection was closed before an answer")
        head += piece
    words = head.split(b"\n", 1)[0].split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise OSError("the answer is not HTTP/1.x")
    return int(words[1])


def endpoint(kind: str, params: Mapping[str, object], secret: str) -> tuple[str, str | None, str | None]:
    """`url`, the file named by `secret`, and `ca_file`. Raises ActionError without a usable URL."""
    url = params.get("url")
    if not isinstance(url, str) or urlsplit(url).scheme not in ("http", "https"):
        raise ActionError(Outcome.REFUSED, f"{kind} needs url, http:// or https://")
    secret_file, ca_file = params.get(secret), params.get("ca_file")
    return url, None if secret_file is None else str(secret_file), None if ca_file is None else str(ca_file)


def create(params: Mapping[str, object], _context: Context) -> Action:
    """`url`, and optionally `key_file` and `ca_file`."""
    return HttpAction(*endpoint("http", params, "key_file"))
