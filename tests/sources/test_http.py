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
from kvwatch.sources.base import SourceError
from kvwatch.sources.http import Deadline, HttpClient, HttpStatusError, parse_url
from tests.sources.asking import PLENTY_S, failure, get
from tests.sources.loopback import Peer, always, answer, serving


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
