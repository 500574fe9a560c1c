"""How does the server's state reach kvwatch? One daemon thread, one datagram a second, never in the way.

Nothing here waits for anybody: no listener, a full socket or a missing directory cost one dropped
datagram. A fault in reading the server is counted, told once in the log, and ends nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from kvwatch.agent.environment import Place
from kvwatch.model.server import AgentState, AllocatorState
from kvwatch.wire_datagram import address, encode

log = logging.getLogger("kvwatch.agent")

PERIOD_S = 1.0
RETRIES = 3
RETRY_S = 0.03

T = TypeVar("T")
Reader = Callable[[], AgentState | None]
Memory = Callable[[], list[tuple[str, AllocatorState]]]


@dataclass(slots=True)
class Counters:
    """What became of the datagrams, and how often reading the server failed."""

    sent: int = 0
    dropped: int = 0
    faults: int = 0


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
    ) -> None:
        self.counters = Counters()
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
        self._told: set[str] = set()

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
            try:
                self.publish()
            except Exception as error:  # noqa: BLE001 - the guard: nothing may reach the host
                self._fault(error)
            due_s = max(due_s + PERIOD_S, time.monotonic())
            self._stop.wait(due_s - time.monotonic())

    def publish(self) -> None:
        """Read the server once and send what there is."""
        mono_s = time.monotonic()
        for state in self._states():
            self._seq += 1
            self._send(encode(replace(state, seq=self._seq), mono_s))

    def _states(self) -> list[AgentState]:
        told = None if self.engine is None else self._guarded(self.engine)
        found = [] if self._memory is None else self._guarded(self._memory) or []
        base = told or AgentState(
            server=self._place.server,
            engine=str(self._index),
            rank=self._rank,
            pid=os.getpid(),
            seq=0,
            host=self._host,
        )
        if not found:
            return [] if told is None else [told]
        first = replace(base, gpu_uuid=found[0][0], allocator=found[0][1])
        others = [
            replace(
                base,
                rank=base.rank + offset,
                gpu_uuid=uuid,
                allocator=allocator,
                kv=None,
                scheduler=None,
                effective_max_running=None,
                blocks_held=None,
            )
            for offset, (uuid, allocator) in enumerate(found[1:], 1)
        ]
        return [first, *others]

    def _guarded(self, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - the guard: nothing may reach the host
            self._fault(error)
            return None

    def _fault(self, error: Exception) -> None:
        """Count, and say each kind of fault once."""
        self.counters.faults += 1
        text = f"{type(error).__name__}: {error}"[:200]
        if len(self._told) < 20 and text not in self._told:
            self._told.add(text)
            with contextlib.suppress(Exception):
                log.warning("kvwatch agent: cannot read this server: %s", text)

    def _send(self, content: bytes) -> None:
        """Send; where the listener is just busy, try again a few times within the second."""
        for attempt in range(RETRIES):
            if self._sender.send(content):
                self.counters.sent += 1
                return
            if attempt + 1 < RETRIES and self._stop.wait(RETRY_S):
                break
        self.counters.dropped += 1
