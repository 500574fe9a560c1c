"""The HTTP client: one total deadline, one size cap, and errors that say what to do."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch.model.sample import FailureKind
from kvwatch.model.settings import AuthSettings, TlsSettings
from kvwatch.sources.base import SourceError
from kvwatch.sources.http import Deadline, HttpClient, HttpStatusError, Response, parse_json, parse_url
from tests.sources.loopback import Peer, always, answer, certificate, server_context, serving

PLENTY_S = 5.0


def get(url: str, path: str = "/metrics", total_s: float = PLENTY_S, **options: object) -> Response:
    client = HttpClient(url, **options)  # type: ignore[arg-type]
    try:
        return client.get(path, deadline=Deadline(total_s))
    finally:
        client.close()


def failure(url: str, total_s: float = PLENTY_S, **options: object) -> tuple[FailureKind, str]:
    with pytest.raises(SourceError) as caught:
        get(url, total_s=total_s, **options)
    return caught.value.failure.kind, caught.value.failure.message


def test_body_by_length_by_chunks_and_to_the_end() -> None:
    """The three ways HTTP/1.1 marks the end of a body all give the whole body."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked = head + b"3;x=1\r\nabc\r\nA\r\n0123456789\r\n0\r\nT: 1\r\n\r\n"

    def to_the_end(peer: Peer) -> None:
        peer.request()
        peer.send(b"HTTP/1.0 200 OK\r\n\r\nabc0123456789")

    with serving(always(answer(b"abc0123456789"))) as sized, serving(always(chunked)) as chunks:
        assert get(sized.url).body == b"abc0123456789"
        assert get(chunks.url).body == b"abc0123456789"
    with serving(to_the_end) as server:
        response = get(server.url)
    assert response.body == b"abc0123456789"
    assert not response.framed


def test_connection_is_kept_and_used_again() -> None:
    """Polling a server opens one connection, not one a poll."""
    with serving(always(answer(b"x"))) as server:
        client = HttpClient(server.url)
        for _ in range(5):
            assert client.get("/metrics", deadline=Deadline(PLENTY_S)).body == b"x"
        client.close()

        assert server.connections == 1


def test_kept_connection_that_was_closed_is_retried_once() -> None:
    """A server that closes idle connections costs no failed poll."""

    def once(peer: Peer) -> None:
        peer.request()
        peer.send(answer(b"x"))

    with serving(once) as server:
        client = HttpClient(server.url)
        for _ in range(3):
            assert client.get("/", deadline=Deadline(PLENTY_S)).body == b"x"
        client.close()

        assert server.connections == 3


def test_retry_is_not_repeated() -> None:
    """A server that only hangs up is an error after the second try, not a loop."""

    def good_then_gone(peer: Peer) -> None:
        if peer.request() and peer.number == 1:
            peer.send(answer(b"x"))

    with serving(good_then_gone) as server:
        client = HttpClient(server.url)
        client.get("/", deadline=Deadline(PLENTY_S))
        with pytest.raises(SourceError) as caught:
            client.get("/", deadline=Deadline(PLENTY_S))
        client.close()

        assert caught.value.failure.kind is FailureKind.BROKEN
        assert server.connections == 2


@pytest.mark.parametrize(
    "head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n"], ids=["head", "body"]
)
def test_dripping_server_cannot_exceed_the_deadline(head: bytes) -> None:
    """Bytes that keep coming do not extend the time: the deadline is total."""

    def drip(peer: Peer) -> None:
        peer.request()
        peer.send(head)
        peer.drip(b"HTTP/1.1 200 OK\r\nX-Slow: " + b"y" * 5000)

    with serving(drip) as server:
        began_s = time.monotonic()
        kind, message = failure(server.url, total_s=0.3)

        assert kind is FailureKind.TIMED_OUT
        assert 0.25 < time.monotonic() - began_s < 2.0
        assert "0.3 s" in message


def test_server_that_accepts_and_says_nothing_times_out() -> None:
    """A hung server costs the deadline and no more."""
    with serving(lambda peer: peer.stop.wait(10)) as server:  # type: ignore[arg-type,return-value]
        assert failure(server.url, total_s=0.2)[0] is FailureKind.TIMED_OUT


def test_nobody_listening_is_refused() -> None:
    """A closed port is REFUSED, with the address in the text."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    kind, message = failure(f"http://127.0.0.1:{port}")

    assert kind is FailureKind.REFUSED
    assert f"127.0.0.1:{port}" in message


def test_unknown_host_is_refused_within_the_deadline() -> None:
    """A name without address is an error of its own, looked up off the polling thread."""
    kind, message = failure("http://no-such-host.invalid:1", total_s=3)

    assert kind in (FailureKind.REFUSED, FailureKind.TIMED_OUT)
    assert "no-such-host.invalid" in message


@pytest.mark.parametrize("declared", [True, False], ids=["content-length", "endless"])
def test_huge_body_is_refused_at_the_cap(declared: bool) -> None:
    """100 MB are refused from the header alone, or as soon as the cap is passed."""
    sent: list[int] = []

    def huge(peer: Peer) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\n" + (b"Content-Length: 100000000\r\n\r\n" if declared else b"\r\n"))
        for _ in range(1600):
            peer.send(b"x" * 65536)
            sent.append(65536)

    with serving(huge) as server:
        kind, message = failure(server.url)

    assert kind is FailureKind.TOO_LARGE
    assert "8 MiB" in message
    assert sum(sent) < 40_000_000


def test_huge_chunks_and_headers_are_refused() -> None:
    """The caps hold inside chunked coding and for headers."""
    chunk = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n"
    head = b"HTTP/1.1 200 OK\r\n" + b"X-A: " + b"y" * 100_000
    for reply in (chunk, head):
        with serving(always(reply)) as server:
            assert failure(server.url)[0] is FailureKind.TOO_LARGE


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Le",
    ],
    ids=["length", "chunk", "head"],
)
def test_cut_answer_is_broken(reply: bytes) -> None:
    """An answer that ends early is never taken for a short one."""

    def cut(peer: Peer) -> None:
        peer.request()
        peer.send(reply)

    with serving(cut) as server:
        kind, message = failure(server.url)

    assert kind is FailureKind.BROKEN
    assert "cut short" in message


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 two OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b",
    ],
    ids=["ssh", "status", "header", "negative", "two-lengths", "chunk-size", "chunk-long", "gzip"],
)
def test_what_is_no_http_is_malformed(reply: bytes) -> None:
    """Other protocols, and HTTP that contradicts itself, are MALFORMED."""
    with serving(always(reply)) as server:
        assert failure(server.url)[0] is FailureKind.MALFORMED


@given(data=st.binary(max_size=400))
@settings(max_examples=60, deadline=None)
def test_any_bytes_give_an_answer_or_a_source_error(data: bytes) -> None:
    """Whatever a server sends, nothing but SourceError comes out, and in time."""

    def send(peer: Peer) -> None:
        peer.request()
        peer.send(data)

    with serving(send) as server:
        with contextlib.suppress(SourceError):
            assert get(server.url, total_s=2).status == 200


def test_connection_reset_is_broken() -> None:
    """A reset in the middle of an answer is BROKEN, not a crash."""

    def reset(peer: Peer) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nab")
        peer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.connection.close()

    with serving(reset) as server:
        assert failure(server.url)[0] is FailureKind.BROKEN


def test_statuses_have_their_kinds_and_fixes() -> None:
    """Redirects, refusals, loading and server errors are told apart, with what was said."""
    cases = [
        (
            answer(b"", "302 Found", "Location: http://10.0.0.9/metrics\r\n"),
            FailureKind.HTTP_STATUS,
            "10.0.0.9",
        ),
        (answer(b"", "401 Unauthorized"), FailureKind.UNAUTHORISED, "auth"),
        (answer(b'{"error":{"message":"Loading model"}}', "503 Busy"), FailureKind.LOADING, "Loading model"),
        (answer(b"Traceback: no such file", "500 Oops"), FailureKind.HTTP_STATUS, "no such file"),
    ]
    for reply, kind, part in cases:
        with serving(always(reply)) as server, pytest.raises(HttpStatusError) as caught:
            get(server.url)
        assert caught.value.failure.kind is kind
        assert part in caught.value.failure.message


def test_redirect_is_not_followed() -> None:
    """A redirect towards a server that would answer is still an error, and that server is not asked."""
    with serving(always(answer(b"x"))) as target:
        reply = answer(b"", "301 Moved", f"Location: {target.url}/\r\n")
        with serving(always(reply)) as server:
            assert failure(server.url)[0] is FailureKind.HTTP_STATUS
        assert target.connections == 0


def test_request_names_the_host_and_asks_for_no_compression() -> None:
    """The request has the Host header with the port, the base path, and `identity`."""
    seen: list[bytes] = []

    def look(peer: Peer) -> None:
        while request := peer.request():
            seen.append(request)
            peer.send(answer(b"x"))

    with serving(look) as server:
        get(server.url + "/base/", "/metrics")

        assert seen[0].startswith(b"GET /base/metrics HTTP/1.1\r\n")
        assert f"\r\nHost: 127.0.0.1:{server.port}\r\n".encode() in seen[0]
        assert b"\r\nAccept-Encoding: identity\r\n" in seen[0]


def test_ipv6_and_localhost() -> None:
    """Bracketed IPv6 addresses work, and localhost tries every address it has."""
    try:
        probe = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.fail("this machine has no IPv6 loopback")
    probe.close()
    with serving(always(answer(b"six")), family=socket.AF_INET6) as server:
        assert get(f"http://[::1]:{server.port}").body == b"six"
    with serving(always(answer(b"four"))) as server:
        assert get(f"http://localhost:{server.port}").body == b"four"


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


@pytest.mark.parametrize(
    "url",
    ["ftp://x", "127.0.0.1:80", "http://u:p@x", "http://x:99999", "http://x?y", "http://x:0", "http://"],
)
def test_bad_url_is_one_clear_error(url: str) -> None:
    """A URL that cannot be used is refused before anything is sent, without repeating credentials."""
    with pytest.raises(ValueError, match=r".") as caught:
        parse_url(url)
    assert "u:p" not in str(caught.value)
    with pytest.raises(SourceError):
        HttpClient(url)


def test_no_thread_or_descriptor_is_left_behind() -> None:
    """Failures of every sort leave as many threads and descriptors as there were."""

    def count() -> tuple[int, int]:
        return threading.active_count(), sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = count()
    replies = [
        b"",
        b"junk",
        answer(b"x", "500 No"),
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n",
        answer(b"ok"),
    ]
    for reply in replies:

        def handle(peer: Peer, reply: bytes = reply) -> None:
            peer.request()
            peer.send(reply)

        with serving(handle) as server:
            with contextlib.suppress(SourceError):
                get(server.url, total_s=1)

    assert count() == before


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"a":' * 100, b'["\\"[[[", ' * 70 + b"1", b"[{" * 40],
    ids=["flat", "objects", "mixed", "both"],
)
def test_deep_json_is_refused_before_parsing(body: bytes) -> None:
    """Nesting over the cap is TOO_LARGE, whatever stands around it."""
    with pytest.raises(SourceError) as caught:
        parse_json(body)
    assert caught.value.failure.kind is FailureKind.TOO_LARGE


def test_brackets_in_strings_are_no_depth() -> None:
    """Text that has brackets and escaped quotes does not count as nesting."""
    assert parse_json(b'["' + b'\\"[{' * 500 + b'", NaN, Infinity]') == ['"[{' * 500, None, None]


def test_unclosed_string_costs_linear_time() -> None:
    """A megabyte of escaped quotes without an end is refused at once."""
    with pytest.raises(SourceError) as caught:
        parse_json(b'["' + b'\\"' * 500_000)
    assert caught.value.failure.kind is FailureKind.MALFORMED


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_json_reads_back(value: object) -> None:
    """What json writes is read back, at any allowed depth."""
    import json

    assert parse_json(json.dumps(value).encode()) == value


@given(body=st.binary(max_size=200))
def test_any_bytes_as_json(body: bytes) -> None:
    """Any bytes give a value or a SourceError."""
    with contextlib.suppress(SourceError):
        parse_json(body)


def test_client_imports_neither_ssl_nor_the_http_package() -> None:
    """Plain HTTP costs no TLS and no e-mail parser: those imports take megabytes."""
    code = (
        "import sys, kvwatch.sources.http as h; h.HttpClient('http://127.0.0.1:1'); "
        "print([m for m in ('ssl', 'http.client', 'email', 'urllib.request') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )

    assert done.stdout.strip() == "[]"
