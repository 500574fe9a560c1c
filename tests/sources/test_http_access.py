"""The HTTP client shows who it is, and looks at who the server is: secrets and certificates."""

from __future__ import annotations

from pathlib import Path

from kvwatch.model.sample import FailureKind
from kvwatch.model.settings import AuthSettings, TlsSettings
from kvwatch.sources.http import Deadline, HttpClient
from tests.sources.asking import PLENTY_S, failure, get
from tests.sources.loopback import Peer, always, answer, certificate, server_context, serving


def test_bearer_token_is_read_again_when_its_file_changes(tmp_path: Path) -> None:
    """A rotated token is used at the next poll, without a restart."""
    seen: list[bytes] = []

    def look(peer: Peer) -> None:
        while request := peer.request():
            seen.append(request)
            peer.send(answer(b"x"))

    token = tmp_path / "token"
    token.write_text("first\n")
    with serving(look) as server:
        client = HttpClient(server.url, auth=AuthSettings(bearer_file=str(token)))
        client.get("/", deadline=Deadline(PLENTY_S))
        token.write_text("second-one\n")
        client.get("/", deadline=Deadline(PLENTY_S))
        client.close()

    assert b"Authorization: Bearer first\r\n" in seen[0]
    assert b"Authorization: Bearer second-one\r\n" in seen[1]


def test_basic_auth_is_sent(tmp_path: Path) -> None:
    """User and password file become a Basic header (the example of RFC 7617)."""
    seen: list[bytes] = []

    def look(peer: Peer) -> None:
        seen.append(peer.request())
        peer.send(answer(b"x"))

    password = tmp_path / "password"
    password.write_text("open sesame\n")
    with serving(look) as server:
        get(server.url, auth=AuthSettings(user="Aladdin", password_file=str(password)))

    assert b"Authorization: Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==\r\n" in seen[0]


def test_missing_or_unusable_secret_is_an_error_without_the_secret(tmp_path: Path) -> None:
    """A secret that cannot be used names its file, never its content, and nothing is sent."""
    bad = tmp_path / "bad"
    bad.write_text("s3cret\r\nX-Injected: yes")
    with serving(always(answer(b"x"))) as server:
        for path in (tmp_path / "missing", bad):
            kind, message = failure(server.url, auth=AuthSettings(bearer_file=str(path)))
            assert kind is FailureKind.UNAUTHORISED
            assert str(path) in message
            assert "s3cret" not in message
        assert server.connections == 0


def test_secret_that_a_server_echoes_is_hidden(tmp_path: Path) -> None:
    """An error page that repeats our credentials does not carry them into logs."""
    token = tmp_path / "token"
    token.write_text("s3cret-t0ken")
    with serving(always(answer(b"bad token: Bearer s3cret-t0ken", "500 Oops"))) as server:
        message = failure(server.url, auth=AuthSettings(bearer_file=str(token)))[1]

    assert "bad token" in message
    assert "s3cret" not in message


def test_tls_needs_the_authority(tmp_path: Path) -> None:
    """A certificate is verified: accepted with its authority, refused without, and skipped only when told."""
    cert, key = certificate(tmp_path, "localhost")
    with serving(always(answer(b"x")), tls=server_context(cert, key)) as server:
        assert get(server.url, tls=TlsSettings(ca_file=str(cert))).body == b"x"
        assert get(server.url, tls=TlsSettings(insecure_skip_verify=True)).body == b"x"
        kind, message = failure(server.url)

    assert kind is FailureKind.TLS
    assert "ca_file" in message


def test_tls_with_another_name(tmp_path: Path) -> None:
    """A certificate for another name is refused, and accepted when that name is configured."""
    cert, key = certificate(tmp_path, "engine.example")
    with serving(always(answer(b"x")), tls=server_context(cert, key)) as server:
        assert failure(server.url, tls=TlsSettings(ca_file=str(cert)))[0] is FailureKind.TLS
        named = TlsSettings(ca_file=str(cert), server_name="engine.example")
        assert get(server.url, tls=named).body == b"x"


def test_tls_and_plain_http_are_told_apart(tmp_path: Path) -> None:
    """https to a plain port and http to a TLS port each say what to write instead."""
    cert, key = certificate(tmp_path, "localhost")
    with serving(always(b"HTTP/1.1 400 Bad\r\n\r\n")) as plain:
        kind, _ = failure(plain.url.replace("http:", "https:"), total_s=1)
        assert kind in (FailureKind.TLS, FailureKind.TIMED_OUT)
    with serving(always(answer(b"x")), tls=server_context(cert, key)) as server:
        assert failure(server.url.replace("https:", "http:"))[0] in (FailureKind.TLS, FailureKind.BROKEN)


def test_tls_files_that_are_no_pem(tmp_path: Path) -> None:
    """Unusable certificate files are a TLS error that names them."""
    junk = tmp_path / "junk.pem"
    junk.write_text("nothing")
    with serving(always(answer(b"x"))) as server:
        kind, message = failure(server.url.replace("http:", "https:"), tls=TlsSettings(ca_file=str(junk)))

    assert kind is FailureKind.TLS
    assert str(junk) in message
