"""Where do audit events go? Into a ring for `/api/v1/events`, and to the journal as JSON lines."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from kvwatch.exporters.lines import LineWriter
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


def events_page(events: Iterable[Event]) -> bytes:
    """All of these as one JSON document; made one by one, as 2,000 at once would grow the heap for good."""
    return b'{"schema":1,"events":[' + b",".join(dumps(event_json(event)) for event in events) + b"]}"


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


class JournalWriter(LineWriter[Event]):
    """Events as lines of JSON; with `prefix` each begins with its syslog priority."""

    def __init__(self, fd: int, *, prefix: bool = False, capacity: int = 1000) -> None:
        self._prefix = prefix
        super().__init__(fd, name="journal", capacity=capacity)

    def line(self, item: Event) -> bytes:
        """The event's line."""
        return journal_line(item, prefix=self._prefix)
