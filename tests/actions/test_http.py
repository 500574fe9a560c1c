"""The http action: one POST, one deadline, a signature that can be checked, and no detours."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvwatch.actions.base import ActionError, create
from kvwatch.model.action import Outcome
from tests.actions.build import context, limit_request
from tests.sources.loopback import Loopback, Peer, answer, certificate, server_context, serving


def post(folder: Path, url: str, *, deadline_s: float = 3.0, **params: str) -> object:
    action = create("http", {"url": url, **params}, context(folder))
    return action.perform(limit_request(action="http", deadline_s=deadline_s))


def failure(folder: Path, url: str, **options: object) -> ActionError:
    with pytest.raises(ActionError) as caught:
        post(folder, url, **options)  # type: ignore[arg-type]
    return caught.value


def collecting(reply: bytes) -> tuple[list[tuple[bytes, bytes]], Callable[[Peer], None]]:
    """A handler that keeps (head, body) of each request, and the list it keeps them in."""
    seen: list[tuple[bytes, bytes]] = []

    def handle(peer: Peer) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += peer.connection.recv(65536)
        head, body = data.split(b"\r\n\r\n", 1)
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(body) < length:
            body += peer.connection.recv(65536)
        seen.append((head, body))
        peer.send(reply)

    return seen, handle


def test_the_request_is_posted_as_json(tmp_path: Path) -> None:
    """Any 2xx is applied; path and query arrive as configured."""
    seen, handle = collecting(answer(b"", "204 No Content"))
    with serving(handle) as server:
        attempt = post(tmp_path, f"{server.url}/hook?host=a")

    head, body = seen[0]
    assert attempt.outcome is Outcome.APPLIED  # type: ignore[attr-defined]
    assert head.startswith(b"POST /hook?host=a HTTP/1.1\r\n")
    assert f"Host: 127.0.0.1:{server.port}".encode() in head
    assert json.loads(body)["max_running"] == 24


def test_the_signature_is_the_hmac_of_the_body(tmp_path: Path) -> None:
    """A receiver that knows the key can check that the request is ours and whole."""
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    seen, handle = collecting(answer(b""))
    with serving(handle) as server:
        post(tmp_path, server.url, key_file=str(key))

    head, body = seen[0]
    expected = hmac.new(b"s3cret", body, hashlib.sha256).hexdigest()
    assert f"X-Kvwatch-Signature: sha256={expected}".encode() in head
    assert b"s3cret" not in head + body


@pytest.mark.parametrize("content", [None, ""], ids=["missing", "empty"])
def test_without_its_key_nothing_is_sent(tmp_path: Path, content: str | None) -> None:
    """A hook that should be signed is never called unsigned."""
    key = tmp_path / "key"
    if content is not None:
        key.write_text(content)
    with serving(lambda peer: peer.send(answer(b""))) as server:
        error = failure(tmp_path, server.url, key_file=str(key))

    assert error.outcome is Outcome.FAILED
    assert str(key) in str(error)


def test_a_dripping_answer_ends_at_the_total_deadline(tmp_path: Path) -> None:
    """A byte now and then buys no time."""
    with serving(lambda peer: (peer.request(), peer.drip(b"HTTP/1.1 200 OK" * 100, 0.05))) as server:  # type: ignore[func-returns-value]
        started_s = time.monotonic()
        error = failure(tmp_path, server.url, deadline_s=0.5)

    assert error.outcome is Outcome.TIMED_OUT
    assert time.monotonic() - started_s < 2


def test_a_server_that_never_reads_ends_at_the_deadline(tmp_path: Path) -> None:
    """A connection that only waits in the backlog is not waited for."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        error = failure(tmp_path, f"http://127.0.0.1:{listener.getsockname()[1]}/", deadline_s=0.4)

    assert error.outcome is Outcome.TIMED_OUT


@pytest.mark.parametrize("status", ["500 Internal Server Error", "404 Not Found", "102 Processing"])
def test_other_answers_are_failures(tmp_path: Path, status: str) -> None:
    """Only 2xx is applied."""
    with serving(lambda peer: (peer.request(), peer.send(answer(b"no", status)))) as server:  # type: ignore[func-returns-value]
        error = failure(tmp_path, server.url)

    assert error.outcome is Outcome.FAILED
    assert f"HTTP {status.split()[0]}" in str(error)


def test_redirects_are_not_followed(tmp_path: Path) -> None:
    """A limit goes where the configuration says, or nowhere; the error says so."""
    with serving(lambda peer: peer.send(answer(b""))) as other:
        reply = answer(b"", "307 Temporary Redirect", f"Location: {other.url}/\r\n")
        with serving(lambda peer: (peer.request(), peer.send(reply))) as server:  # type: ignore[func-returns-value]
            error = failure(tmp_path, server.url)
        assert other.connections == 0

    assert "redirects are not followed" in str(error)


def test_nobody_listening_is_a_failure(tmp_path: Path) -> None:
    """Refused is said in the system's words, with the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    error = failure(tmp_path, url)

    assert error.outcome is Outcome.FAILED
    assert str(error) == f"{url}: Connection refused"


@pytest.mark.parametrize("reply", [b"", b"\n", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 abc\r\n", b"x" * 20000])
def test_what_is_not_http_is_a_failure(tmp_path: Path, reply: bytes) -> None:
    """Garbage is never taken for an answer."""

    def handle(peer: Peer) -> None:
        peer.request()
        if reply:
            peer.send(reply)

    with serving(handle) as server:
        error = failure(tmp_path, server.url)

    assert error.outcome is Outcome.FAILED


def tls_server(folder: Path, name: str) -> tuple[Loopback, Path]:
    cert, key = certificate(folder, name)
    handler = lambda peer: (peer.request(), peer.send(answer(b"")))  # noqa: E731
    return Loopback(handler, tls=server_context(cert, key)), cert  # type: ignore[arg-type]


def test_a_trusted_certificate_is_accepted(tmp_path: Path) -> None:
    """https works with a CA of one's own."""
    server, cert = tls_server(tmp_path, "localhost")
    try:
        attempt = post(tmp_path, server.url, ca_file=str(cert))
    finally:
        server.close()

    assert attempt.outcome is Outcome.APPLIED  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", ["unknown authority", "another name"])
def test_a_certificate_that_does_not_fit_is_refused(tmp_path: Path, case: str) -> None:
    """Nothing is sent to somebody who cannot prove the name."""
    server, cert = tls_server(tmp_path, "localhost" if case == "unknown authority" else "elsewhere.example")
    try:
        options = {} if case == "unknown authority" else {"ca_file": str(cert)}
        error = failure(tmp_path, server.url, **options)
    finally:
        server.close()

    assert error.outcome is Outcome.FAILED
    assert "certificate" in str(error).lower()


def test_a_missing_ca_file_is_named(tmp_path: Path) -> None:
    """The error names the file, not the hook's address alone."""
    with serving(lambda peer: peer.send(answer(b""))) as server:
        error = failure(tmp_path, server.url.replace("http:", "https:"), ca_file="/no/such/ca.pem")

    assert str(error).startswith("/no/such/ca.pem: ")


def test_an_unknown_name_is_a_failure_in_time(tmp_path: Path) -> None:
    """The resolver's patience is not ours."""
    started_s = time.monotonic()
    error = failure(tmp_path, "http://name.invalid/", deadline_s=2.0)

    assert error.outcome in (Outcome.FAILED, Outcome.TIMED_OUT)
    assert time.monotonic() - started_s < 4


@pytest.mark.parametrize("url", [None, "", "ftp://x/", "/path"], ids=str)
def test_bad_parameters_are_refused(tmp_path: Path, url: object) -> None:
    """Only http and https addresses can be posted to."""
    with pytest.raises(ActionError) as caught:
        create("http", {"url": url}, context(tmp_path))

    assert caught.value.outcome is Outcome.REFUSED
