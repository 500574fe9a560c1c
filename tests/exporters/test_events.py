"""The ring of events, and the journal."""

from __future__ import annotations

import json
import os
import threading

from kvwatch.exporters.events import EventLog, JournalWriter, journal_line
from kvwatch.model.level import Level
from kvwatch.model.report import Event
from tests.exporters import sample


def event(seq: int, level: Level | None = None) -> Event:
    """A plain event; its time is its number."""
    return Event(seq=seq, wall_s=float(seq), kind="level", message=f"event {seq}", level_to=level)


def test_the_ring_keeps_the_newest() -> None:
    """Beyond its capacity the oldest events go; `since` includes its own moment."""
    log = EventLog(capacity=3)
    log.add(event(i) for i in range(5))

    assert [e.seq for e in log.since(0)] == [2, 3, 4]
    assert [e.seq for e in log.since(4.0)] == [4]
    assert log.since(4.5) == []


def test_reading_while_adding_is_safe() -> None:
    """A reader never sees the ring change under it."""
    log = EventLog(capacity=50)
    stop = threading.Event()

    def add() -> None:
        for i in range(20_000):
            log.add([event(i)])
        stop.set()

    adder = threading.Thread(target=add)
    adder.start()
    while not stop.is_set():
        found = [e.seq for e in log.since(0)]
        assert found == sorted(found)
    adder.join()


def test_a_journal_line_is_one_line_of_json() -> None:
    """Newlines in process names stay inside the JSON; levels are words; infinities null; secrets hidden."""
    line = journal_line(sample.events()[0])
    found = json.loads(line)

    assert line.count(b"\n") == 1
    assert (found["level_from"], found["level_to"], found["gpu"]) == ("yellow", "red", "0")
    assert found["fields"]["threshold"] is None
    assert found["fields"]["password"] == "[hidden]"
    assert "server" not in found


def test_journal_priorities_follow_the_level() -> None:
    """With `prefix`, red is an error to systemd, yellow a warning, green a notice, the rest information."""
    levels = (Level.RED, Level.YELLOW, Level.GREEN, Level.UNKNOWN, None)

    assert [journal_line(event(1, lv), prefix=True)[:3] for lv in levels] == [
        b"<3>",
        b"<4>",
        b"<5>",
        b"<4>",
        b"<6>",
    ]


def test_the_writer_writes_everything_in_order() -> None:
    """What is offered reaches the descriptor in order, and close waits for it."""
    read_fd, write_fd = os.pipe()
    writer = JournalWriter(write_fd)
    writer.offer(event(i) for i in range(100))
    writer.close()
    os.close(write_fd)

    with os.fdopen(read_fd, "rb") as pipe:
        assert [json.loads(line)["seq"] for line in pipe] == list(range(100))
    assert writer.dropped_total == 0


def test_a_reader_that_never_reads_holds_nothing_up() -> None:
    """When nobody reads the pipe, `offer` still returns at once and what does not fit is counted."""
    read_fd, write_fd = os.pipe()
    writer = JournalWriter(write_fd, capacity=10)
    for i in range(5000):
        writer.offer([event(i)])

    assert writer.dropped_total > 3000
    os.close(read_fd)  # lets the writing thread go: it sees a broken pipe
    writer.close(timeout_s=5)
    os.close(write_fd)
    assert not [t for t in threading.enumerate() if t.name == "journal"]
