"""Who is at the other end of a URL? Its addresses, TLS with it, and the credentials it wants."""

from __future__ import annotations

import binascii
import re
import select
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvwatch.model.sample import FailureKind
from kvwatch.model.settings import AuthSettings, TlsSettings
from kvwatch.sources.base import SourceError
from kvwatch.sources.http_reader import Deadline

if TYPE_CHECKING:
    import ssl

_MAX_SECRET_BYTES = 16 * 1024
_RESOLVED_FOR_S = 60.0
_URL = re.compile(r"(https?)://(?:([^/@]*)@)?(\[[0-9A-Fa-f:.%]+\]|[^/:?#\[\]\s]+)(?::(\d{1,5}))?(/[^?#\s]*)?")
_NUMERIC = re.compile(r"[\d.]+|.*:.*")

Address = tuple[int, tuple[str, int] | tuple[str, int, int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Url:
    """A parsed base URL; `path` has no slash at its end."""

    tls: bool
    host: str
    port: int
    path: str = ""

    @property
    def netloc(self) -> str:
        """Host and port as the Host header wants them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.netloc}{self.path}"


def parse_url(text: str) -> Url:
    """Parse `http[s]://host[:port][/path]`; raises ValueError with the fix."""
    found = _URL.fullmatch(text)
    if not found:
        raise ValueError("write it as http://host:port or https://host:port, without a query")
    if found[2] is not None:
        raise ValueError("credentials do not belong in a URL: put them in a file and name it under `auth`")
    tls, host = found[1] == "https", found[3].strip("[]")
    port = int(found[4]) if found[4] else 443 if tls else 80
    if not 0 < port < 65536:
        raise ValueError(f"{port} is no port")
    return Url(tls=tls, host=host, port=port, path=(found[5] or "").rstrip("/"))


class Resolver:
    """Addresses of one host. A lookup cannot be interrupted, so one that is not plainly local runs in
    a thread of its own, at most one at a time, and is waited for within the deadline."""

    def __init__(self, url: Url) -> None:
        self._url = url
        self._found: list[Address] = []
        self._found_s = 0.0
        self._lookup: _Lookup | None = None

    def addresses(self, deadline: Deadline) -> list[Address]:
        """Addresses to try in this order; raises SourceError(REFUSED) where there are none."""
        if self._found and time.monotonic() - self._found_s < _RESOLVED_FOR_S:
            return self._found
        local = self._url.host == "localhost" or _NUMERIC.fullmatch(self._url.host) is not None
        self._found = _look_up(self._url) if local else self._wait(deadline)
        self._found_s = time.monotonic()
        return self._found

    def prefer(self, address: Address) -> None:
        """Try this one first from now on: it answered."""
        self._found.sort(key=lambda known: known != address)

    def forget(self) -> None:
        """Look up again next time: the addresses did not answer."""
        self._found = []

    def _wait(self, deadline: Deadline) -> list[Address]:
        lookup = self._lookup = self._lookup or _Lookup(self._url)
        lookup.join(deadline.left_s())
        if lookup.is_alive():
            raise SourceError(
                FailureKind.TIMED_OUT,
                f"looking up {self._url.host} took over {deadline.total_s:g} s; "
                "use an address, or mend the name service",
            )
        self._lookup = None
        if lookup.error is not None:
            raise lookup.error
        return lookup.found


class _Lookup(threading.Thread):
    def __init__(self, url: Url) -> None:
        super().__init__(name="lookup", daemon=True)
        self._url = url
        self.found: list[Address] = []
        self.error: SourceError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.found = _look_up(self._url)
        except SourceError as error:
            self.error = error


def _look_up(url: Url) -> list[Address]:
    try:
        found = socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SourceError(
            FailureKind.REFUSED, f"{url.host} has no address ({reason(error)}); correct the host in `url`"
        ) from None
    addresses: list[Address] = []
    for family, _, _, _, where in found:
        if family in (socket.AF_INET, socket.AF_INET6) and isinstance(where[0], str):
            addresses.append((family, where))
    return addresses


def open_connection(address: Address, timeout_s: float) -> socket.socket:
    """Connect; raises OSError (TimeoutError past `timeout_s`)."""
    family, where = address
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.connect(where)
    except OSError:
        connection.close()
        raise
    return connection


class Plain:
    """A connected socket without TLS that waits for itself (http_reader.Connection).

    A socket of Python's makes two calls of the kernel more for each read where it has a timeout, and lets
    other threads in between each of them: with 64 servers that is a tenth of all work.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._timeout_ms = 0.0
        self._inbox = select.poll()
        self._inbox.register(connection, select.POLLIN)

    def settimeout(self, timeout_s: float) -> None:
        """Let the waits to come end with TimeoutError after this long."""
        self._timeout_ms = 1000 * timeout_s

    def recv(self, size: int) -> bytes:
        """Some bytes, b"" at the end of the connection."""
        while True:
            if not self._inbox.poll(self._timeout_ms):
                raise TimeoutError
            try:
                return self._connection.recv(size)
            except BlockingIOError:  # woken for nothing
                continue

    def sendall(self, data: bytes) -> None:
        """Send all of it; it fits into the kernel's buffer unless the peer does not read."""
        while data:
            try:
                data = data[self._connection.send(data) :]
            except BlockingIOError:
                outbox = select.poll()
                outbox.register(self._connection, select.POLLOUT)
                if not outbox.poll(self._timeout_ms):
                    raise TimeoutError from None

    def close(self) -> None:
        """Close it."""
        self._connection.close()


@dataclass(slots=True)
class _SecretFile:
    """A file with a secret, read again when it changes."""

    path: str
    what: str
    _signature: tuple[int, int, int] | None = None
    _text: str = field(default="", repr=False)

    def read(self) -> str:
        """The secret; raises SourceError(UNAUTHORISED), which never has the content in it."""
        try:
            stat = Path(self.path).stat()
            signature = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if signature != self._signature:
                with Path(self.path).open("rb") as file:
                    self._text = self._checked(file.read(_MAX_SECRET_BYTES + 1))
                self._signature = signature
        except OSError as error:
            raise SourceError(
                FailureKind.UNAUTHORISED,
                f"{self.what} {self.path} cannot be read ({reason(error)}); create it, or correct the path",
            ) from None
        return self._text

    def _checked(self, raw: bytes) -> str:
        text = raw.decode("utf-8", "replace").rstrip("\r\n\t ")
        if not text or len(raw) > _MAX_SECRET_BYTES or not text.isprintable():
            raise SourceError(
                FailureKind.UNAUTHORISED, f"{self.what} {self.path} must hold the secret alone, on one line"
            )
        return text


class Secrets:
    """Credentials from files; they appear in the Authorization header and nowhere else."""

    def __init__(self, auth: AuthSettings) -> None:
        self._user = auth.user
        self._bearer = _SecretFile(auth.bearer_file, "auth.bearer_file") if auth.bearer_file else None
        self._password = (
            _SecretFile(auth.password_file, "auth.basic.password_file") if auth.password_file else None
        )
        self._shown: tuple[str, ...] = ()

    def header(self) -> str:
        """The value of the Authorization header, "" without credentials."""
        if self._bearer is not None:
            token = self._bearer.read()
            if not token.isascii():
                raise SourceError(
                    FailureKind.UNAUTHORISED, f"auth.bearer_file {self._bearer.path} must hold plain ASCII"
                )
            self._shown = (token,)
            return f"Bearer {token}"
        if self._user is not None and self._password is not None:
            password = self._password.read()
            pair = binascii.b2a_base64(f"{self._user}:{password}".encode(), newline=False).decode()
            self._shown = (pair, password)
            return f"Basic {pair}"
        return ""

    def hide(self, text: str) -> str:
        """Foreign text without our secrets, should a server echo them."""
        for secret in self._shown:
            text = text.replace(secret, "…")
        return text


class Tls:
    """TLS towards one server; the context is made anew when one of its files changed."""

    def __init__(self, url: Url, settings: TlsSettings) -> None:
        self._url = url
        self._settings = settings
        self._context: ssl.SSLContext | None = None
        self._signature: tuple[object, ...] = ()

    def wrap(self, plain: socket.socket, deadline: Deadline) -> socket.socket:
        """Shake hands within the deadline; closes `plain` where that fails."""
        import ssl  # only where a URL is https: 5 MiB

        try:
            context = self._current()
            plain.settimeout(deadline.left_s())
            return context.wrap_socket(plain, server_hostname=self._settings.server_name or self._url.host)
        except TimeoutError:
            plain.close()
            raise
        except ssl.SSLCertVerificationError as error:
            plain.close()
            raise SourceError(
                FailureKind.TLS,
                f"the certificate of {self._url} is not accepted: {error.verify_message}; "
                "set `tls.ca_file` to its authority, or `tls.server_name` to the name in it",
            ) from error
        except (OSError, ValueError) as error:
            plain.close()
            hint = "; does it speak plain http?" if "WRONG_VERSION" in str(error) else ""
            raise SourceError(FailureKind.TLS, f"no TLS with {self._url}: {reason(error)}{hint}") from error

    def _current(self) -> ssl.SSLContext:
        signature = tuple(_signature(path) for path in self._files())
        if self._context is None or signature != self._signature:
            self._context, self._signature = self._made(), signature
        return self._context

    def _files(self) -> tuple[str, ...]:
        named = (self._settings.ca_file, self._settings.cert_file, self._settings.key_file)
        return tuple(path for path in named if path)

    def _made(self) -> ssl.SSLContext:
        import ssl

        settings = self._settings
        try:
            context = ssl.create_default_context(cafile=settings.ca_file)
            if settings.cert_file:
                context.load_cert_chain(settings.cert_file, settings.key_file, password="")
        except (OSError, ValueError) as error:
            names = " or ".join(self._files())
            raise SourceError(
                FailureKind.TLS,
                f"{names} cannot be used ({reason(error)}); PEM files without a passphrase are needed",
            ) from error
        if settings.insecure_skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def _signature(path: str) -> tuple[int, int, int] | None:
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def reason(error: Exception) -> str:
    """The shortest text that says what an exception means."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
