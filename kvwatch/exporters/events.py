"""Where do audit events go? Into a ring for `/api/v1/events`, and to the journal as JSON lines."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Iterable

from kvwatch.exporters.state import Json, dumps, plain
from kvwatch.model.level import Level
from kvwatch.model.report import Event

# syslog priorities as systemd reads them from the start of a line (sd-daemon(3))
_PRIORITIES = {Level.RED: 3, Level.YELLOW: 4, Level.GREEN: 5, Level.UNKNOWN: 4}
_DEFAULT_PRIORITY = 6


def event_json(event: Event) -> Json:
    """One event as JSON-ready values, secrets hidden; empty scope fields are left out."""
    scope = event.scope
    places = {
        "rule": event.rule,
        "server": scope.server,
        "engine": scope.engine,
        "uuid": scope.uuid,
        "gpu": scope.gpu,
        "source": scope.source,
    }
    made: Json = {"seq": event.seq, "wall_s": plain(event.wall_s), "kind": event.kind}
    made["message"] = plain(event.message)
    made |= {name: value for name, value in places.items() if value}
    for name, level in (("level_from", event.level_from), ("level_to", event.level_to)):
        if level is not None:
            made[name] = level.name.lower()
    if event.fields:
        made["fields"] = plain(event.fields)
    return made


def journal_line(event: Event, *, prefix: bool = False) -> bytes:
    """One line of JSON for the journal; with `prefix` its syslog priority stands in front (`<3>`)."""
    line = dumps(event_json(event))
    if not prefix:
        return line + b"\n"
    priority = _DEFAULT_PRIORITY if event.level_to is None else _PRIORITIES[event.level_to]
    return b"<%d>%s\n" % (priority, line)


class EventLog:
    """The newest events, kept in memory; any thread may add and read."""

    def __init__(self, capacity: int = 2000) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self._lock = threading.Lock()  # a deque must not change while it is being read

    def add(self, events: Iterable[Event]) -> None:
        """Keep these; the oldest beyond the capacity go."""
        with self._lock:
            self._events.extend(events)

    def since(self, wall_s: float) -> list[Event]:
        """Events at or after this Unix time, oldest first."""
        with self._lock:
            return [event for event in self._events if event.wall_s >= wall_s]


class JournalWriter:
    """Writes events to a file descriptor from a thread of its own; `offer` never waits.

    When the reader of the descriptor is slower than the events, the newest are dropped and
    counted in `dropped_total`. The descriptor stays the caller's.
    """

    def __init__(self, fd: int, *, prefix: bool = False, capacity: int = 1000) -> None:
        self._fd = fd
        self._prefix = prefix
        self._capacity = capacity
        self._waiting: deque[Event] = deque()
        self._news = threading.Condition()  # guards the fields above it and below
        self._closing = False
        self.dropped_total = 0
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def offer(self, events: Iterable[Event]) -> None:
        """Queue these for writing, or drop and count them."""
        with self._news:
            for event in events:
                if len(self._waiting) >= self._capacity or self._closing:
                    self.dropped_total += 1
                else:
                    self._waiting.append(event)
            self._news.notify()

    def close(self, timeout_s: float = 0.5) -> None:
        """Write what is queued, for at most this long."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                event = self._waiting.popleft()
            self._write(journal_line(event, prefix=self._prefix))

    def _write(self, line: bytes) -> None:
        while line:
            try:
                line = line[os.write(self._fd, line) :]
            except BlockingIOError:  # a pipe that is full for now; whole lines or none
                select.select([], [self._fd], [], 1.0)
            except OSError:  # nobody reads any more
                with self._news:
                    self.dropped_total += 1
                return
