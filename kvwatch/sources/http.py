"""What does this URL answer, within one total deadline and one size cap?

A small HTTP/1.1 GET client on sockets: keep-alive, no redirects, no proxies, no compression asked for.
The stdlib's client gives each *read* a timeout (a server that drips a byte a second holds it for ever)
and costs 7 MiB of memory; here the time left is set before every wait on the network.
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

from kvwatch.model.sample import FailureKind
from kvwatch.model.settings import AuthSettings, TlsSettings
from kvwatch.sources.base import SourceError
from kvwatch.sources.exposition import excerpt, printable
from kvwatch.sources.http_peer import Plain, Resolver, Secrets, Tls, Url, open_connection, parse_url, reason
from kvwatch.sources.http_reader import Connection, Deadline, NothingCameError, Reader, Response

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_JSON_DEPTH = 64
_JSON_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)

__all__ = ["Deadline", "HttpClient", "HttpStatusError", "Response", "parse_json", "parse_url"]


class HttpStatusError(SourceError):
    """An answer came, but not 200; `status` says which."""

    def __init__(self, kind: FailureKind, message: str, status: int) -> None:
        super().__init__(kind, message)
        self.status = status


class HttpClient:
    """One server, one connection, used by one thread at a time."""

    def __init__(
        self,
        url: str,
        *,
        auth: AuthSettings | None = None,
        tls: TlsSettings | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        try:
            self.url = parse_url(url)
        except ValueError as error:
            raise SourceError(FailureKind.NOT_EXPECTED, f"the URL cannot be used: {error}") from None
        self._secrets = Secrets(auth or AuthSettings())
        self._tls = Tls(self.url, tls or TlsSettings()) if self.url.tls else None
        self._names = Resolver(self.url)
        self._max_body_bytes = max_body_bytes
        self._socket: Connection | None = None
        self._buffer = bytearray()

    def get(self, path: str, *, deadline: Deadline, accept: str = "*/*") -> Response:
        """GET `path` under the base URL; only 200 is an answer.

        Raises SourceError: HttpStatusError for other statuses (the connection stays), else the
        connection is closed.
        """
        where = f"{self.url}{path}"
        try:
            response = self._exchange(path, deadline, accept)
            _refuse_status(response, where, self._secrets)
        except TimeoutError:
            self.close()
            raise SourceError(
                FailureKind.TIMED_OUT,
                f"{where} gave no whole answer within {deadline.total_s:g} s; "
                "raise `timeout`, or look at the server",
            ) from None
        except HttpStatusError:
            raise
        except SourceError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise SourceError(
                FailureKind.BROKEN, f"the connection to {where} broke off: {reason(error)}"
            ) from error
        return response

    def close(self) -> None:
        """Close the connection, if there is one."""
        self._buffer.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _exchange(self, path: str, deadline: Deadline, accept: str) -> Response:
        request = self._request(path, accept)
        if self._socket is not None:
            # The server may have closed it meanwhile; before any byte of an answer a GET can be repeated.
            try:
                return self._send_and_read(self._socket, request, deadline)
            except TimeoutError:
                raise
            except (OSError, NothingCameError):
                self.close()
        connection = self._connect(deadline)
        try:
            return self._send_and_read(connection, request, deadline)
        except NothingCameError:
            raise SourceError(
                FailureKind.BROKEN,
                f"{self.url} closed the connection without an answer; look at the server's log",
            ) from None

    def _request(self, path: str, accept: str) -> bytes:
        lines = [
            f"GET {self.url.path}{path} HTTP/1.1",
            f"Host: {self.url.netloc}",
            "User-Agent: kvwatch",
            f"Accept: {accept}",
            "Accept-Encoding: identity",
        ]
        authorisation = self._secrets.header()
        if authorisation:
            lines.append(f"Authorization: {authorisation}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")

    def _connect(self, deadline: Deadline) -> Connection:
        self.close()
        plain = None
        addresses = self._names.addresses(deadline)
        for i, address in enumerate(tuple(addresses)):
            last = i == len(addresses) - 1
            share_s = deadline.left_s() / (1 if last else 2)
            try:
                plain = open_connection(address, share_s)
                self._names.prefer(address)
                break
            except OSError as error:
                if last:
                    self._names.forget()
                    _refuse_connection(self.url, error)
        if plain is None:  # pragma: no cover - the resolver gives an address or raises
            raise SourceError(FailureKind.REFUSED, f"{self.url.host} has no address")
        self._socket = plain  # closed with us should TLS fail
        self._socket = Plain(plain) if self._tls is None else self._tls.wrap(plain, deadline)
        return self._socket

    def _send_and_read(self, connection: Connection, request: bytes, deadline: Deadline) -> Response:
        self._buffer.clear()
        connection.settimeout(deadline.left_s())
        connection.sendall(request)
        reader = Reader(connection, self._buffer, deadline, self._max_body_bytes, str(self.url))
        response, keep = reader.response()
        if not keep or self._buffer:
            self.close()
        return response


def _refuse_connection(url: Url, error: OSError) -> NoReturn:
    if isinstance(error, TimeoutError):
        raise error
    raise SourceError(
        FailureKind.REFUSED,
        f"nobody answers at {url.netloc} ({reason(error)}); is the server running, and is `url` right?",
    ) from error


def _refuse_status(response: Response, where: str, secrets: Secrets) -> None:
    status = response.status
    if status == 200:
        return
    said = printable(secrets.hide(response.body[:4096].decode("utf-8", "replace")), 120)
    kind, fix = FailureKind.HTTP_STATUS, f": {said}" if said else ""
    if 300 <= status < 400:
        target = printable(secrets.hide(response.headers.get("location", "?")), 120)
        fix = f" towards {target}; redirects are not followed, so write the final address as `url`"
    elif status in (401, 403):
        kind, fix = FailureKind.UNAUTHORISED, "; check `auth` (a bearer_file, or basic with a password_file)"
    elif status == 503 and "loading" in said.lower():
        kind = FailureKind.LOADING
    raise HttpStatusError(kind, f"{where} answered {status}{fix}", status)


def parse_json(body: bytes, what: str = "the answer", max_depth: int = MAX_JSON_DEPTH) -> object:
    """Parse JSON; NaN and infinities become None.

    Nesting is counted before parsing (deep nesting ends a thread with a small stack). Raises
    SourceError MALFORMED, or TOO_LARGE where it is nested deeper than `max_depth`.
    """
    depth = 0
    for token in _JSON_TOKEN.finditer(body):
        first = body[token.start()]
        depth += (first in b"[{") - (first in b"]}")
        if depth > max_depth:
            raise SourceError(FailureKind.TOO_LARGE, f"{what} is nested deeper than {max_depth}")
    try:
        value: object = json.loads(body, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            FailureKind.MALFORMED,
            f"{what} is no JSON ({reason(error)[:60]}): it begins with {excerpt(body, 40)!r}",
        ) from None
    return value
