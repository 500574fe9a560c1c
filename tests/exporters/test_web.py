"""The HTTP server: routes, formats, methods, and clients that misbehave, over real sockets."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kvwatch.exporters.web import WebServer
from kvwatch.exporters.web_limits import Limits
from kvwatch.model.report import Event
from tests.exporters import sample
from tests.exporters.serve import FixedProvider, ask, connect, read_answer, request, serving

SCRAPE = {
    "Accept": "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
}


def until_closed(sock: socket.socket) -> bytes:
    """Everything the server sends until it closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(65536):
            data += chunk
    return data


def test_metrics_in_text_and_openmetrics() -> None:
    """The Accept header chooses the format, and the content type says which it is."""
    with serving() as server:
        plain, browser = ask(server, "/metrics"), ask(server, "/metrics", Accept="text/html,*/*;q=0.8")
        wanted = ask(server, "/metrics", **SCRAPE)

    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert browser.headers["content-type"] == plain.headers["content-type"]
    assert wanted.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert list(parse_text(plain.body.decode()))
    assert list(parse_openmetrics(wanted.body.decode()))


def test_gzip_when_asked() -> None:
    """Gzip comes when it is accepted, holds the same page, and does not come with q=0."""
    with serving() as server:
        plain = ask(server, "/metrics")
        packed = ask(server, "/metrics", Accept_Encoding="br, gzip;q=0.5")
        refused = ask(server, "/metrics", Accept_Encoding="gzip;q=0, identity")

    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body
    assert len(packed.body) < len(plain.body) / 4
    assert "content-encoding" not in refused.headers


def test_a_page_is_rendered_once_per_report() -> None:
    """Between two reports the very same bytes come again, process figures included; a new report is shown."""
    provider = FixedProvider()
    with serving(provider) as server:
        first, second = ask(server, "/metrics"), ask(server, "/metrics")
        provider.current = sample.report(tick=7, version="9.9.9")
        third = ask(server, "/metrics")

    assert first.body == second.body
    assert b'version="9.9.9"' in third.body


def test_metrics_before_the_first_report() -> None:
    """/metrics is 200 from the start; the state is not there yet and says so."""
    with serving(FixedProvider(current=None)) as server:
        page, state = ask(server, "/metrics"), ask(server, "/api/v1/state")

    assert page.status == 200
    assert b"kvwatch_build_info" in page.body
    assert (state.status, json.loads(state.body)["state"]) == (503, "starting")


def test_state_and_events() -> None:
    """The state is the last report; events are those since the asked moment, its own included."""
    provider = FixedProvider()
    provider.log.add(sample.events())
    with serving(provider) as server:
        state = ask(server, "/api/v1/state")
        everything = json.loads(ask(server, "/api/v1/events").body)["events"]
        late = json.loads(ask(server, f"/api/v1/events?since={sample.NOW_WALL_S - 4}").body)["events"]
        bad = [ask(server, f"/api/v1/events?since={x}").status for x in ("x", "nan", "inf", "1e999")]

    assert json.loads(state.body)["headline"]["level"] == "red"
    assert state.headers["content-type"].startswith("application/json")
    assert [e["seq"] for e in everything] == [41, 42]
    assert [e["seq"] for e in late] == [42]
    assert bad == [400] * 4


def test_health_and_readiness() -> None:
    """Both are 200 when good and 503 when not; readiness names what is missing."""
    provider = FixedProvider()
    with serving(provider) as server:
        good = [ask(server, path).status for path in ("/-/healthy", "/-/ready")]
        provider.is_healthy, provider.missing = False, ["server/chat"]
        healthy, ready = ask(server, "/-/healthy"), ask(server, "/-/ready")

    assert good == [200, 200]
    assert healthy.status == ready.status == 503
    assert b"server/chat" in ready.body


def test_reload_only_by_post_and_only_when_allowed() -> None:
    """Reload wants POST and the lifecycle flag, gives findings as 400, and refuses other sites."""
    provider = FixedProvider()
    with serving(provider) as server:
        off = ask(server, "/-/reload", method="POST", Content_Length="0")
    with serving(provider, enable_lifecycle=True) as server:
        got = ask(server, "/-/reload")
        done = ask(server, "/-/reload", method="POST", Content_Length="0")
        foreign = ask(server, "/-/reload", method="POST", Origin="http://evil.example")
        own = ask(server, "/-/reload", method="POST", Origin="http://localhost")
        provider.findings = ["kvwatch.yml:3:5: tick: must be > 0"]
        bad = ask(server, "/-/reload", method="POST")

    assert (off.status, got.status, got.headers["allow"]) == (403, 405, "POST")
    assert (done.status, own.status, foreign.status) == (200, 200, 403)
    assert (bad.status, bad.body) == (400, b"kvwatch.yml:3:5: tick: must be > 0\n")
    assert provider.reloads == 3


def test_head_has_the_headers_of_get_and_no_body() -> None:
    """HEAD answers with GET's length and nothing behind it; the connection stays usable."""
    with serving() as server, connect(server) as sock:
        for path in ("/", "/metrics", "/nothing"):
            sock.sendall(request(path, method="HEAD"))
            head = read_answer(sock, head_only=True)
            sock.sendall(request(path))
            got = read_answer(sock)
            assert head.headers["content-length"] == got.headers["content-length"] == str(len(got.body))
            assert head.status == got.status


def test_other_methods_and_paths() -> None:
    """Unknown paths are 404, wrong methods 405 with what is allowed."""
    with serving() as server:
        missing = [
            ask(server, p).status for p in ("/x", "/metricsx", "//metrics", "/assets/../web.py", "/.git")
        ]
        wrong = [ask(server, "/metrics", method=m) for m in ("PUT", "DELETE", "OPTIONS", "POST")]

    assert missing == [404] * 5
    assert [a.status for a in wrong] == [405] * 4
    assert {a.headers["allow"] for a in wrong} == {"GET, HEAD"}


def test_keep_alive_and_pipelining() -> None:
    """One connection carries many requests, also when they are sent at once; HTTP/1.0 closes."""
    with serving() as server:
        with connect(server) as sock:
            sock.sendall(request("/-/healthy") * 40)
            data = b""
            while data.count(b"kvwatch is healthy.\n") < 40:
                data += sock.recv(65536)
            assert data.count(b"HTTP/1.1 200") == 40
        with connect(server) as sock:
            sock.sendall(b"GET /-/healthy HTTP/1.0\r\n\r\n")
            assert b"Connection: close" in until_closed(sock)


def test_a_request_in_pieces_is_answered() -> None:
    """A request that comes byte by byte, with bare newlines and blank lines in front, is a request."""
    with serving() as server, connect(server) as sock:
        for byte in b"\r\n\nGET /-/healthy HTTP/1.1\nHost: x\n\n":
            sock.sendall(bytes([byte]))
        assert read_answer(sock).status == 200


BAD = {
    "no request": (b"hello\r\n\r\n", 400),
    "http2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "space before colon": (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
    "folded header": (b"GET / HTTP/1.1\r\nHost: a\r\n b\r\n\r\n", 400),
    "asterisk": (b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "bad length": (b"POST /-/reload HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
    "two lengths": (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    "huge body": (b"POST /-/reload HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n", 413),
    "endless length": (b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 40 + b"\r\n\r\n", 413),
    "chunked": (b"POST /-/reload HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
    "long header": (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 20_000 + b"\r\n\r\n", 431),
    "megabyte": (b"GET / HTTP/1.1\r\nX: " + b"y" * 1_000_000, 431),
    "only newlines": (b"\r\n" * 10_000, 431),
}


@pytest.mark.parametrize(("raw", "status"), BAD.values(), ids=BAD)
def test_bad_requests_get_their_status_and_the_answer_arrives(raw: bytes, status: int) -> None:
    """Each bad request gets its own status, readable although we stopped reading, and then the end."""
    with serving() as server, connect(server) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(raw)
        answer = read_answer(sock)
        assert answer.status == status
        assert answer.headers["connection"] == "close"
        assert until_closed(sock) == b""


def test_a_body_is_read_and_forgotten() -> None:
    """A body within the cap does not become the next request."""
    with serving(enable_lifecycle=True) as server, connect(server) as sock:
        sock.sendall(request("/-/reload", method="POST", Content_Length="18") + b"GET /a HTT")
        sock.sendall(b"P/1.1\r\n\r" + request("/-/healthy"))
        assert read_answer(sock).status == 200
        assert read_answer(sock).body == b"kvwatch is healthy.\n"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=300) | st.sampled_from([raw for raw, _ in BAD.values()][:9]), max_size=4))
def test_no_bytes_kill_it(fuzzed: WebServer, pieces: list[bytes]) -> None:
    """Whatever a client sends, the next client is answered."""
    with connect(fuzzed) as sock, contextlib.suppress(OSError):
        for piece in pieces:
            sock.sendall(piece)

    assert ask(fuzzed, "/-/healthy").status == 200


@pytest.fixture(scope="module")
def fuzzed():
    """One server for all examples."""
    with serving() as server:
        yield server


def test_half_a_request_is_timed_out() -> None:
    """A request that does not come in time gets 408; a connection that says nothing is just closed."""
    with serving(limits=Limits(request_s=0.2)) as server, connect(server) as half, connect(server) as silent:
        half.sendall(b"GET /metrics HT")
        assert until_closed(half).startswith(b"HTTP/1.1 408")
        assert until_closed(silent) == b""


def test_dripping_does_not_extend_the_deadline() -> None:
    """One byte now and then does not keep a request alive for ever."""
    with serving(limits=Limits(request_s=0.3)) as server, connect(server) as sock:
        started = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while time.monotonic() - started < 10 and not _readable(sock, 0.02):
                sock.sendall(b"x")
        assert time.monotonic() - started < 5


def _readable(sock: socket.socket, timeout_s: float) -> bool:
    import select

    return bool(select.select([sock], [], [], timeout_s)[0])


def test_scrapes_go_on_beside_idle_and_dripping_clients() -> None:
    """200 idle, 50 dripping and a megabyte of header do not delay a scrape."""
    with serving() as server, contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(connect(server))
        drips = [stack.enter_context(connect(server)) for _ in range(50)]
        for sock in drips:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        big = stack.enter_context(connect(server))
        with contextlib.suppress(OSError):
            big.sendall(b"GET / HTTP/1.1\r\nX: " + b"y" * 1_000_000)
        for sock in drips:
            with contextlib.suppress(OSError):
                sock.sendall(b"z")
        assert ask(server, "/metrics", **SCRAPE).status == 200


def test_at_the_cap_the_one_that_got_nowhere_longest_gives_way() -> None:
    """A full house of idle clients makes room for a new one; a client that was answered lately stays."""
    with serving(limits=Limits(connections=20)) as server, contextlib.ExitStack() as stack:
        first = stack.enter_context(connect(server))
        crowd = [stack.enter_context(connect(server)) for _ in range(19)]
        first.sendall(request("/-/healthy"))
        assert read_answer(first).status == 200
        assert ask(server, "/metrics").status == 200  # the 21st
        assert until_closed(crowd[0]) == b""
        first.sendall(request("/-/healthy"))
        assert read_answer(first).status == 200


def test_a_flood_of_silent_clients_pushes_out_its_own() -> None:
    """A client inside its first request, and one between two, outlive many times the cap of others."""
    with serving(limits=Limits(connections=20)) as server, contextlib.ExitStack() as stack:
        known, slow = (stack.enter_context(connect(server)) for _ in range(2))
        known.sendall(request("/-/healthy"))
        assert read_answer(known).status == 200
        slow.sendall(request("/-/healthy")[:20])
        for _ in range(100):
            stack.enter_context(connect(server))
        assert ask(server, "/-/healthy").status == 200  # all of them have been accepted
        slow.sendall(request("/-/healthy")[20:])
        assert read_answer(slow).status == 200
        known.sendall(request("/-/healthy"))
        assert read_answer(known).status == 200


def test_case_E21_slow_readers_do_not_block_a_scrape() -> None:
    """Clients that ask for a big page and read nothing cost no thread: the next scrape is answered."""
    provider = FixedProvider()
    provider.log = _long_log()
    with serving(provider) as server, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(_narrow(server)) for _ in range(8)]
        for sock in slow:
            sock.sendall(request("/api/v1/events"))
        assert ask(server, "/metrics", **SCRAPE).status == 200
        rest = slow[0]
        rest.settimeout(20)
        assert len(json.loads(read_answer(rest).body)["events"]) == 2000


def _long_log():
    from kvwatch.exporters.events import EventLog

    log = EventLog()
    log.add(Event(seq=i, wall_s=float(i), kind="level", message="m" * 3000) for i in range(2000))
    return log


def _narrow(server: WebServer) -> socket.socket:
    """A client with hardly any room for what it does not read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(10)
    sock.connect(("127.0.0.1", server.port))
    return sock


def test_an_answer_that_nobody_reads_is_given_up() -> None:
    """A client that never reads is cut off at the deadline for writing."""
    provider = FixedProvider()
    provider.log = _long_log()
    with serving(provider, limits=Limits(write_s=0.3)) as server, _narrow(server) as sock:
        sock.sendall(request("/api/v1/events"))
        deadline = time.monotonic() + 10
        while server._count and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server._count == 0


def test_the_page_is_locked_down() -> None:
    """The status page allows nothing but its own files, and brings no script of its own inline."""
    with serving() as server:
        page = ask(server, "/")
        parts = [ask(server, p) for p in ("/assets/status.css", "/assets/status.js", "/favicon.ico")]

    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["x-frame-options"] == "DENY"
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert b"<script>" not in page.body
    assert b"style=" not in page.body
    assert [p.status for p in parts] == [200, 200, 200]
    assert b"innerHTML" not in parts[1].body


def test_a_taken_port_is_an_error_at_start() -> None:
    """start() raises OSError when somebody else listens there, and leaves nothing open."""
    with serving() as server:
        second = WebServer("127.0.0.1", server.port, FixedProvider())
        with pytest.raises(OSError, match="in use"):
            second.start()
        second.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", ""])
def test_addresses(host: str) -> None:
    """Names, wildcards and the empty host listen, and the URL works on this host."""
    server = WebServer(host, 0, FixedProvider())
    server.start()
    try:
        assert server.url.startswith("http://")
        assert ask(server, "/-/healthy").status == 200
    finally:
        server.close()


def _open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_close_leaves_no_thread_and_no_descriptor() -> None:
    """Closing takes at most a second, with clients in every state, and everything is given back."""
    threads, fds = threading.active_count(), _open_fds()
    provider = FixedProvider()
    provider.log = _long_log()
    with contextlib.ExitStack() as stack:
        server = WebServer("127.0.0.1", 0, provider)
        server.start()
        clients = [stack.enter_context(connect(server)) for _ in range(6)]
        clients[0].sendall(b"GET /metr")
        clients[1].sendall(request("/metrics"))
        clients[2].sendall(b"nonsense\r\n\r\n")
        stack.enter_context(_narrow(server)).sendall(request("/api/v1/events"))
        assert ask(server, "/-/healthy").status == 200
        started = time.monotonic()
        server.close()
        server.close()
        assert time.monotonic() - started < 1.5

    assert threading.active_count() == threads
    assert _open_fds() == fds


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_ours_costs_one_request() -> None:
    """When an answer cannot be made the client gets 500, and the workers are as many as before."""

    class Broken(FixedProvider):
        def healthy(self) -> bool:
            raise RuntimeError("a fault for the test")

    with serving(Broken()) as server:
        statuses = [ask(server, "/-/healthy").status for _ in range(5)]
        assert ask(server, "/metrics").status == 200

    assert statuses == [500] * 5


def test_many_clients_at_once() -> None:
    """Scrapers in parallel all get whole, equal pages."""
    found: list[bytes] = []
    with serving() as server:

        def scrape() -> None:
            for _ in range(10):
                found.append(ask(server, "/metrics").body)

        threads = [threading.Thread(target=scrape) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(found) == 80
    assert len(set(found)) == 1


def test_what_follows_a_scrape_on_its_connection_is_left_to_a_worker() -> None:
    """A reload pipelined behind a scrape does not run where connections are accepted."""

    class Slow(FixedProvider):
        thread = ""

        def reload(self) -> list[str]:
            self.thread = threading.current_thread().name
            return []

    provider = Slow(sample.report())
    with (
        serving(provider, enable_lifecycle=True) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=5) as client,
    ):
        client.sendall(
            b"GET /metrics HTTP/1.1\r\nHost: l\r\n\r\n"
            b"POST /-/reload HTTP/1.1\r\nHost: l\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
        while client.recv(65536):
            pass

    assert provider.thread.startswith("web-")
