"""How does the server's state reach kvwatch? One daemon thread, one datagram a second, never in the way.

Nothing here waits for anybody: no listener, a full socket or a missing directory cost one dropped
datagram. A fault in reading the server is counted, told in the log, and ends nothing.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

from kvwatch.agent.environment import Place
from kvwatch.agent.guard import Guard
from kvwatch.wire_record import Record, address, encode

PERIOD_S = 1.0
RETRIES = 3
RETRY_S = 0.03
_OF_THE_ENGINE = ("kv", "scheduler")  # told once, with the first GPU

Reader = Callable[[], Record | None]
Memory = Callable[[], list[tuple[str, Record]]]


class Counters:
    """What became of the datagrams."""

    def __init__(self) -> None:
        self.sent = 0
        self.dropped = 0


class Sender:
    """Sends to a path that may be missing, replaced or full; drops then. Not thread-safe."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None

    def send(self, content: bytes) -> bool:
        """One datagram; a socket that was replaced (kvwatch restarted) is found again at once."""
        for _ in range(2):
            try:
                self._connected().send(content)
                return True
            except BlockingIOError:
                return False
            except OSError:
                self.close()
        return False

    def _connected(self) -> socket.socket:
        if self._socket is None:
            fresh = socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            )
            try:
                with address(self._path) as name:
                    fresh.connect(name)
            except OSError:
                fresh.close()
                raise
            self._socket = fresh
        return self._socket

    def close(self) -> None:
        """Forget the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Publisher:
    """One per process. `engine` and `memory` are read by its thread; both may be None or fail.

    A process that holds memory on several GPUs sends one datagram for each, with ranks from `rank` on.
    """

    def __init__(
        self,
        place: Place,
        *,
        engine: Reader | None = None,
        memory: Memory | None = None,
        rank: int = 0,
        engine_index: int = 0,
        host: str = "",
        guard: Guard | None = None,
    ) -> None:
        self.counters = Counters()
        self.guard = guard or Guard()
        self.engine = engine  # may be set later: vLLM makes its worker before its scheduler
        self._place = place
        self._memory = memory
        self._rank = rank
        self._index = engine_index
        self._host = host
        self._sender = Sender(place.socket)
        # A process that is replaced by exec keeps its pid and start: its numbers must go on.
        self._seq = int(time.monotonic() * 1000)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; a second call does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvwatch-agent", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread (tests and embedding programs; a server just exits)."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)
        self._sender.close()

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stop.is_set():
            self.guard.run("publish", self.publish, otherwise=None)
            due_s = max(due_s + PERIOD_S, time.monotonic())
            self._stop.wait(due_s - time.monotonic())

    def publish(self) -> None:
        """Read the server once and send what there is."""
        mono_s = time.monotonic()
        for record in self._records():
            self._seq += 1
            self._send(encode(record, seq=self._seq, mono_s=mono_s))

    def _records(self) -> list[Record]:
        told = self._told()
        found = self._held()
        base = told or {
            "server": self._place.server,
            "engine": self._index,
            "rank": self._rank,
            "pid": os.getpid(),
            "host": self._host,
        }
        if not found:
            return [] if told is None else [told]
        alone = {key: value for key, value in base.items() if key not in _OF_THE_ENGINE}
        return [
            (alone if offset else base)
            | {"rank": base["rank"] + offset, "gpu_uuid": uuid, "allocator": allocator}
            for offset, (uuid, allocator) in enumerate(found)
        ]

    def _told(self) -> Record | None:
        read = self.engine
        return None if read is None else self.guard.run("read this server", read, otherwise=None)

    def _held(self) -> list[tuple[str, Record]]:
        read = self._memory
        return [] if read is None else self.guard.run("read its memory", read, otherwise=[])

    def _send(self, content: bytes) -> None:
        """Send; where the listener is just busy, try again a few times within the second."""
        for attempt in range(RETRIES):
            if self._sender.send(content):
                self.counters.sent += 1
                return
            if attempt + 1 < RETRIES and self._stop.wait(RETRY_S):
                break
        self.counters.dropped += 1
