"""The publisher: what is sent, and that nothing it meets reaches its host."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvwatch.agent.environment import Place, PlaceError, place
from kvwatch.agent.publisher import Publisher, Sender
from kvwatch.sources import agents
from kvwatch.wire_datagram import decode
from kvwatch.wire_record import Record
from tests.agent.build import agent, allocator, allocator_record, record


@pytest.fixture
def here(tmp_path: Path) -> Place:
    return Place(server="chat", socket=str(tmp_path / "agent.sock"), lease=str(tmp_path / "chat.json"))


@pytest.fixture
def ears(here: Place) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(here.socket)
        found.settimeout(5)
        yield found


@pytest.fixture
def make(here: Place) -> Iterator[Callable[..., Publisher]]:
    made: list[Publisher] = []

    def publisher(**parts: object) -> Publisher:
        made.append(Publisher(here, **parts))  # type: ignore[arg-type]
        return made[-1]

    yield publisher
    for one in made:
        one.stop()


def own(**change: object) -> Record:
    return record(agent(**{"pid": os.getpid(), "allocator": None, "gpu_uuid": ""} | change))


def held(*uuids: str) -> list[tuple[str, Record]]:
    return [(uuid, allocator_record(allocator())) for uuid in uuids]


def test_engine_and_memory_are_one_datagram(make: Callable[..., Publisher], ears: socket.socket) -> None:
    """A process that has both tells both at once."""
    publisher = make(engine=own, memory=lambda: held("GPU-1"))
    publisher.publish()
    found = decode(ears.recv(20_000)).state

    assert found.allocator == allocator()
    assert found.kv == agent().kv
    assert found.gpu_uuid == "GPU-1"


def test_a_rank_for_each_gpu(make: Callable[..., Publisher], ears: socket.socket) -> None:
    """A program on three GPUs speaks as three ranks, with numbers that grow."""
    publisher = make(memory=lambda: held("GPU-0", "GPU-1", "GPU-2"), rank=4)
    publisher.publish()
    found = [decode(ears.recv(20_000)).state for _ in range(3)]

    assert [one.rank for one in found] == [4, 5, 6]
    assert [one.gpu_uuid for one in found] == ["GPU-0", "GPU-1", "GPU-2"]
    assert found[0].seq < found[1].seq < found[2].seq
    assert {one.pid for one in found} == {os.getpid()}


def test_accepted_by_the_daemons_side(make: Callable[..., Publisher], here: Place) -> None:
    """What the agent sends is what the daemon takes."""
    listening = agents.create(Path(here.socket))
    try:
        publisher = make(engine=own)
        for _ in range(3):
            publisher.publish()
        assert len(listening.receive(1.0)) == 3
    finally:
        listening.close()


def test_nobody_listens(make: Callable[..., Publisher], here: Place) -> None:
    """No socket, no directory, a full socket: a dropped datagram, and quickly."""
    publisher = make(engine=own)
    began_s = time.monotonic()
    publisher.publish()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(here.socket)
        sender = Sender(here.socket)
        sent = 0
        while sender.send(b"x"):
            sent += 1
        assert 0 < sent < 10_000
        publisher.publish()
        sender.close()

    assert publisher.counters.dropped == 2
    assert time.monotonic() - began_s < 5


def test_restarted_daemon_is_found(make: Callable[..., Publisher], here: Place) -> None:
    """A daemon that binds the socket anew is heard from the next datagram on."""
    publisher = make(engine=own)
    for _ in range(3):
        listening = agents.create(Path(here.socket))
        publisher.publish()
        assert len(listening.receive(1.0)) == 1
        listening.close()


def test_faults_stay_inside(
    make: Callable[..., Publisher], ears: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that cannot be read is said once; the other half is still sent."""

    def broken() -> None:
        raise KeyError("moved in this release")

    publisher = make(engine=broken, memory=lambda: held("GPU-1"))
    for _ in range(5):
        publisher.publish()

    assert publisher.guard.faults == 5
    assert publisher.counters.sent == 5
    assert len(caplog.records) == 1
    assert decode(ears.recv(20_000)).state.kv is None


def test_thread_is_no_hindrance(make: Callable[..., Publisher], ears: socket.socket) -> None:
    """The thread is a daemon, starts once, sends at once, and ends when asked."""
    publisher = make(engine=own)
    publisher.start()
    publisher.start()
    ears.recv(20_000)
    named = [thread for thread in threading.enumerate() if thread.name == "kvwatch-agent"]

    assert len(named) == 1
    assert named[0].daemon
    publisher.stop()
    assert not named[0].is_alive()


def test_place() -> None:
    """The environment names the server, the socket and the lease; without a name there is no agent."""
    assert place(environ={}) is None
    assert place(environ={"KVWATCH_SERVER": "chat"}) == Place(
        server="chat", socket="/run/kvwatch/agent.sock", lease="/run/kvwatch/limits/chat.json"
    )
    moved = place(environ={"KVWATCH_SERVER": "a", "KVWATCH_RUNTIME": "/x", "KVWATCH_SOCKET": "/y/s"})
    assert moved == Place(server="a", socket="/y/s", lease="/x/limits/a.json")
    for name in ("../x", "Chat", "a/b", "a" * 80):
        with pytest.raises(PlaceError, match="KVWATCH_SERVER"):
            place(environ={"KVWATCH_SERVER": name})
