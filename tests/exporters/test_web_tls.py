"""TLS, client certificates, and clients that never finish a handshake."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import ssl
import time
from pathlib import Path

import pytest

from kvwatch.exporters.web import WebServer
from kvwatch.exporters.web_config import TlsServerConfig, WebConfig
from kvwatch.exporters.web_limits import Limits
from tests.exporters.certs import Authority, Pair
from tests.exporters.serve import FixedProvider, ask, connect, read_answer, request, serving


@dataclasses.dataclass
class Pki:
    """What one test session signs."""

    ca: Authority
    server: Pair
    client: Pair
    stranger: Pair

    def config(self, **changes: object) -> WebConfig:
        """A configuration that serves TLS with the server's certificate."""
        tls = TlsServerConfig(cert_file=str(self.server.cert), key_file=str(self.server.key))
        return WebConfig(tls=dataclasses.replace(tls, **changes))  # type: ignore[arg-type]

    def mutual(self, **changes: object) -> WebConfig:
        """The same, and clients have to show a certificate of the CA."""
        wanted = {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": str(self.ca.cert)}
        return self.config(**(wanted | changes))

    def trust(self, pair: Pair | None = None) -> ssl.SSLContext:
        """A client that trusts the CA, with a certificate if given."""
        context = ssl.create_default_context(cafile=str(self.ca.cert))
        if pair is not None:
            context.load_cert_chain(pair.cert, pair.key)
        return context


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """Certificates for this module."""
    folder = tmp_path_factory.mktemp("pki")
    ca, other = Authority(folder), Authority(folder, "other ca")
    return Pki(ca, ca.sign("localhost"), ca.sign("scraper.example"), other.sign("stranger.example"))


def refused(server: WebServer, context: ssl.SSLContext) -> bool:
    """Whether this client gets no answer (TLS 1.3 tells a client only when it reads)."""
    with contextlib.suppress(OSError):
        ask(server, "/metrics", context=context)
        return False
    return True


def test_https_with_keep_alive(pki: Pki) -> None:
    """Requests over TLS are answered, several on one connection, and the URL says https."""
    with serving(web_config=pki.config) as server, connect(server, pki.trust()) as sock:
        assert server.url.startswith("https://")
        for _ in range(3):
            sock.sendall(request("/metrics") + request("/-/healthy"))
            assert len(read_answer(sock).body) > 10_000
            assert read_answer(sock).body == b"kvwatch is healthy.\n"


def test_pipelining_over_tls(pki: Pki) -> None:
    """A hundred requests in one write are all answered: none is left behind inside the TLS layer."""
    with serving(web_config=pki.config) as server, connect(server, pki.trust()) as sock:
        sock.sendall(request("/-/healthy", X_Padding="p" * 400) * 100)
        for _ in range(100):
            assert read_answer(sock).status == 200


def test_old_tls_is_refused(pki: Pki) -> None:
    """With min_version TLS13 a TLS 1.2 client is turned away, by default it is served."""
    old = pki.trust()
    old.maximum_version = ssl.TLSVersion.TLSv1_2

    with serving(web_config=pki.config) as server:
        assert not refused(server, old)
    with serving(web_config=lambda: pki.config(min_version="TLS13")) as server:
        assert refused(server, old)
        assert not refused(server, pki.trust())


def test_client_certificates(pki: Pki) -> None:
    """Clients without a certificate, or with one of another CA, get nothing; ours is served."""
    with serving(web_config=pki.mutual) as server:
        assert refused(server, pki.trust())
        assert refused(server, pki.trust(pki.stranger))
        assert ask(server, "/metrics", context=pki.trust(pki.client)).status == 200


def test_allowed_names_of_clients(pki: Pki) -> None:
    """With client_allowed_sans only the named clients are served."""
    with serving(web_config=lambda: pki.mutual(client_allowed_sans=("scraper.example",))) as server:
        assert not refused(server, pki.trust(pki.client))
    with serving(web_config=lambda: pki.mutual(client_allowed_sans=("else.example",))) as server:
        assert refused(server, pki.trust(pki.client))


def test_inline_certificates(pki: Pki) -> None:
    """Certificate, key and CA may stand in the file itself."""
    config = WebConfig(
        tls=TlsServerConfig(
            cert=pki.server.cert.read_text(),
            key=pki.server.key.read_text(),
            client_auth_type="RequireAndVerifyClientCert",
            client_ca=pki.ca.cert.read_text(),
        )
    )
    with serving(web_config=lambda: config) as server:
        assert not refused(server, pki.trust(pki.client))
        assert refused(server, pki.trust())
    assert pki.server.key.read_text() not in repr(config)


def test_half_open_handshakes_block_nobody(pki: Pki) -> None:
    """Sixty clients that connect and say nothing, or half a hello, do not delay a TLS scrape."""
    with serving(web_config=pki.config) as server, contextlib.ExitStack() as stack:
        for i in range(60):
            sock = stack.enter_context(connect(server))
            if i % 2:
                sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00")
        assert ask(server, "/metrics", context=pki.trust()).status == 200


def test_a_handshake_has_a_deadline(pki: Pki) -> None:
    """A client that never finishes its handshake is closed; plain HTTP to a TLS port is closed as well."""
    with serving(web_config=pki.config, limits=Limits(request_s=0.3)) as server:
        with connect(server) as sock:
            assert sock.recv(10) == b""
        with connect(server) as sock, contextlib.suppress(ConnectionResetError):
            sock.sendall(request("/metrics"))
            while sock.recv(100):
                pass
        assert ask(server, "/-/healthy", context=pki.trust()).status == 200


def test_bad_requests_over_tls_get_their_answer(pki: Pki) -> None:
    """A refusal arrives over TLS too, before the end."""
    with serving(web_config=pki.config) as server, connect(server, pki.trust()) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nX: " + b"y" * 20_000)
        assert read_answer(sock).status == 431


def test_a_new_certificate_is_used_without_a_restart(pki: Pki, tmp_path: Path) -> None:
    """When the files change the next handshake shows the new certificate; a broken file keeps the old one."""
    cert, key = tmp_path / "c.pem", tmp_path / "k.pem"
    first, second = pki.ca.sign("localhost"), pki.ca.sign("renewed.example")
    key.write_bytes(first.key.read_bytes())
    cert.write_bytes(first.cert.read_bytes())
    config = WebConfig(tls=TlsServerConfig(cert_file=str(cert), key_file=str(key)))

    def name(server: WebServer) -> str:
        context = pki.trust()
        context.check_hostname = False
        with connect(server, context) as sock:
            return str(sock.getpeercert()["subjectAltName"][0][1])  # type: ignore[attr-defined, index]

    with serving(web_config=lambda: config) as server:
        assert name(server) == "localhost"
        cert.write_text("broken")
        assert name(server) == "localhost"
        key.write_bytes(second.key.read_bytes())
        cert.write_bytes(second.cert.read_bytes())
        _touch(cert)
        assert name(server) == "renewed.example"


def _touch(path: Path) -> None:
    later = time.time() + 5
    os.utime(path, (later, later))


def test_a_bad_certificate_is_an_error_at_start(pki: Pki, tmp_path: Path) -> None:
    """start() says at once that certificate and key do not fit, and listens nowhere."""
    server = WebServer(
        "127.0.0.1", 0, FixedProvider(), web_config=lambda: pki.config(key_file=str(pki.client.key))
    )

    with pytest.raises(OSError, match="mismatch"):
        server.start()
    server.close()


def test_close_with_tls_clients_leaves_nothing(pki: Pki) -> None:
    """Closing gives back the descriptors of finished and half-open TLS connections."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    with contextlib.ExitStack() as stack:
        server = WebServer("127.0.0.1", 0, FixedProvider(), web_config=pki.config)
        server.start()
        stack.enter_context(connect(server))
        open_one = stack.enter_context(connect(server, pki.trust()))
        open_one.sendall(request("/metrics"))
        assert read_answer(open_one).status == 200
        server.close()

    assert len(list(Path("/proc/self/fd").iterdir())) == before
