"""SGLang's knob, against a server that answers as recorded ones do: 200 either way, and sometimes a lie."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvwatch.actions.base import ActionError, Attempt, create, is_self_expiring
from kvwatch.model.action import ActionRequest, Limit, Outcome
from tests.actions.build import context, limit_request, restore_request


class Sglang:
    """Two data-parallel ranks; `mode` is how it treats a request to change its batch."""

    def __init__(self) -> None:
        self.key, self.value, self.mode, self.asked = "pp_max_micro_batch_size", 32, "obeys", 0
        self.token = ""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                state = {"max_running_requests": 32, "pp_size": 1, server.key: server.value}
                self._answer({"version": "0.5.23", server.key: None, "internal_states": [state, state]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked += 1
                wanted = body["server_args"].get(server.key)
                good = isinstance(wanted, int) and 1 <= wanted <= 32 and server.mode == "obeys"
                if good:
                    server.value = wanted
                self._answer([good or server.mode == "lies"] * 2)

            def _answer(self, found: object) -> None:
                allowed = not server.token or self.headers.get("Authorization") == f"Bearer {server.token}"
                content = json.dumps(found).encode() if server.mode != "broken" else b"<html>"
                self.send_response(200 if allowed else 401)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Sglang]:
    found = Sglang()
    yield found
    found.close()


@pytest.fixture
def act(server: Sglang, tmp_path: Path) -> Callable[..., Attempt]:
    def perform(request: ActionRequest | None = None, **params: Any) -> Attempt:
        action = create("sglang", {"url": server.url} | params, context(tmp_path))
        return action.perform(request or limit_request())

    return perform


def test_limit_and_restore(server: Sglang, act: Callable[..., Attempt]) -> None:
    """A limit is set and read back on every rank; a restore gives the server its own again."""
    found = act()
    assert (found.outcome, server.value) == (Outcome.APPLIED, 24)
    assert found.read_back == Limit(server="chat", max_running=24)
    assert act().outcome is Outcome.NOOP
    assert server.asked == 1
    assert act(restore_request()).outcome is Outcome.APPLIED
    assert server.value == 32


def test_never_above_the_servers_own(server: Sglang, act: Callable[..., Attempt]) -> None:
    """A limit above the server's own is the server's own."""
    assert act(limit_request(limit=Limit(server="chat", max_running=500))).outcome is Outcome.NOOP
    assert server.value == 32


@pytest.mark.parametrize("mode", ["refuses", "lies"])
def test_answer_alone_is_not_believed(server: Sglang, act: Callable[..., Attempt], mode: str) -> None:
    """Status 200 and even `true` are no proof: what the server says afterwards is."""
    server.mode = mode
    with pytest.raises(ActionError, match="still says") as error:
        act()
    assert error.value.outcome is Outcome.FAILED


def test_old_key(server: Sglang, act: Callable[..., Attempt]) -> None:
    """Releases up to 0.5.2 call it by its old name."""
    server.key = "max_micro_batch_size"

    assert act().outcome is Outcome.APPLIED
    assert server.value == 24


def test_admission_cannot_be_stopped(server: Sglang, act: Callable[..., Attempt]) -> None:
    """The least that SGLang takes is one request at a time, and that is said."""
    found = act(limit_request(limit=Limit(server="chat", admit=False)))

    assert server.value == 1
    assert "cannot stop admission" in found.detail


def test_admin_key(server: Sglang, act: Callable[..., Attempt], tmp_path: Path) -> None:
    """The key comes from its file; without it the error says what to give."""
    server.token = "s3cret"
    with pytest.raises(ActionError, match="bearer_file"):
        act()
    (tmp_path / "key").write_text("s3cret\n")

    assert act(bearer_file=str(tmp_path / "key")).outcome is Outcome.APPLIED


def test_not_sglang(server: Sglang, act: Callable[..., Attempt]) -> None:
    """Another kind of server is refused or fails in one clear sentence."""
    server.key = "something_else"
    with pytest.raises(ActionError, match="cannot be limited so"):
        act()
    server.mode = "broken"
    with pytest.raises(ActionError, match="not an answer of SGLang"):
        act()


def test_nobody_there(tmp_path: Path) -> None:
    """A refused connection is a failure that names the address; a missing address is refused."""
    with pytest.raises(ActionError, match=r"127\.0\.0\.1:9"):
        create("sglang", {"url": "http://127.0.0.1:9"}, context(tmp_path)).perform(limit_request())
    with pytest.raises(ActionError, match="url"):
        create("sglang", {}, context(tmp_path))


def test_does_not_expire() -> None:
    """It promises nothing about its end, so kvwatch gives back what it imposed."""
    assert not is_self_expiring("sglang")
