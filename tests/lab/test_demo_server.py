"""The demo's server answers like one, dies like one, and comes back on its port."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvwatch.lab.demo_server import DemoServer


class Stage:
    """A server whose life the test decides."""

    def __init__(self) -> None:
        self.up = True
        self.server = DemoServer(lambda: "vllm:x 1.0\n", lambda: self.up)

    def get(self, connection: http.client.HTTPConnection, path: str) -> tuple[int, bytes]:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=5)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.server.close()
    stage.server.close()  # twice is once


def test_the_three_paths_answer_over_one_connection(stage: Stage) -> None:
    """A watcher's keep-alive connection gets the page, the version and the health, and 404 elsewhere."""
    with closing(stage.connect()) as connection:
        assert stage.get(connection, "/metrics") == (200, b"vllm:x 1.0\n")
        status, body = stage.get(connection, "/version")
        assert (status, json.loads(body)) == (200, {"version": "0.32.0"})
        assert stage.get(connection, "/health") == (200, b"")
        assert stage.get(connection, "/nope")[0] == 404


def test_a_dead_server_refuses_and_breaks_what_was_open_then_returns_on_its_port(stage: Stage) -> None:
    """Down means refused, also for clients that were connected; up again means the same address."""
    with closing(stage.connect()) as connection:
        assert stage.get(connection, "/health")[0] == 200
        stage.up = False
        _until(lambda: _refused(stage))
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            stage.get(connection, "/health")
    stage.up = True
    _until(lambda: not _refused(stage))


def test_closing_leaves_no_thread_behind() -> None:
    """After `close` neither the listener's thread nor a connection's thread is alive."""
    before = set(threading.enumerate())
    stage = Stage()
    with closing(stage.connect()) as connection:
        assert stage.get(connection, "/health")[0] == 200
        stage.server.close()
        for thread in set(threading.enumerate()) - before:
            thread.join(5.0)
        assert set(threading.enumerate()) <= before


def _refused(stage: Stage) -> bool:
    with closing(stage.connect()) as connection:
        try:
            return stage.get(connection, "/health")[0] != 200
        except (ConnectionError, http.client.HTTPException):
            return True


def _until(holds: object) -> None:
    waiter = threading.Event()
    for _ in range(100):
        if holds():
            return
        waiter.wait(0.05)
    pytest.fail("did not come about within 5 s")
