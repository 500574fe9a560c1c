"""Servers on loopback that answer exactly the bytes a test wants, well-behaved or not."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

Handler = Callable[["Peer"], None]


class Peer:
    """One accepted connection; `stop` is set when the test is over."""

    def __init__(self, connection: socket.socket, number: int, stop: threading.Event) -> None:
        self.connection = connection
        self.number = number
        self.stop = stop

    def request(self) -> bytes:
        """Read one request's head; b"" when the client has gone."""
        data = b""
        while b"\r\n\r\n" not in data:
            more = self.connection.recv(4096)
            if not more:
                return b""
            data += more
        return data

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def drip(self, data: bytes, every_s: float = 0.02) -> None:
        """Send a byte at a time until the test is over."""
        for i in range(len(data)):
            if self.stop.wait(every_s):
                return
            self.send(data[i : i + 1])


class Loopback:
    """Accepts connections in one thread and handles each in its own."""

    def __init__(
        self, handler: Handler, *, tls: ssl.SSLContext | None = None, family: int = socket.AF_INET
    ) -> None:
        self._handler = handler
        self._tls = tls
        self._stop = threading.Event()
        host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self.requests: list[bytes] = []
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection, self.connections), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):
            if self._tls is not None:
                connection.settimeout(5)
                connection = self._tls.wrap_socket(connection, server_side=True)
                self._open.append(connection)
            self._handler(Peer(connection, number, self._stop))
        connection.close()

    def close(self) -> None:
        self._stop.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for connection in self._open:
            connection.close()


@contextlib.contextmanager
def serving(handler: Handler, **options: object) -> Iterator[Loopback]:
    """A loopback server for the length of a block."""
    server = Loopback(handler, **options)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        server.close()


def answer(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    """A plain answer with a content-length."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def always(reply: bytes) -> Handler:
    """A handler that gives the same bytes to every request of a connection."""

    def handle(peer: Peer) -> None:
        while peer.request():
            peer.send(reply)

    return handle


def pages(bodies: dict[str, bytes]) -> Handler:
    """A handler that serves bodies by path, and 404."""

    def handle(peer: Peer) -> None:
        while request := peer.request():
            body = bodies.get(request.split()[1].decode())
            peer.send(answer(b"", "404 Not Found") if body is None else answer(body))

    return handle


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for a DNS name (and 127.0.0.1 where the name is "localhost")."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    names: list[x509.GeneralName] = [x509.DNSName(name)]
    if name == "localhost":
        names.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / f"{name}.pem", folder / f"{name}.key"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return cert_file, key_file


def server_context(cert_file: Path, key_file: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert_file, key_file)
    return context
