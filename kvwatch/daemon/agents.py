"""The thread that listens for agents: every accepted datagram becomes a sample of its own source."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from kvwatch.daemon.board import Board
from kvwatch.daemon.clock import RealClock
from kvwatch.model.sample import Sample
from kvwatch.model.server import AgentState
from kvwatch.model.settings import Settings
from kvwatch.sources.agents import PERIOD_S, AgentSocket, Heard, counts, create
from kvwatch.sources.base import SourceError

log = logging.getLogger("kvwatch.agents")

WAIT_S = 0.5
RETRY_S = 30.0


class Agents:
    """Owns the socket and its thread. `apply` and `close` are called from the loop's thread only.

    A socket that cannot be made is said once and tried again: a daemon without agents is a whole daemon.
    """

    def __init__(self, board: Board, clock: RealClock, default: Path) -> None:
        self._board = board
        self._clock = clock
        self._default = default
        self._path: Path | None = None
        self._servers: frozenset[str] = frozenset()
        self._socket: AgentSocket | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._known: dict[str, int | None] = {}  # key: allocator retries last told
        self.error = ""
        self._totals: tuple[tuple[str, int], ...] = ()

    def apply(self, settings: Settings) -> None:
        """Listen where the settings say; a reload that moves nothing keeps the socket."""
        path = Path(settings.agents_socket) if settings.agents_socket else self._default
        self._servers = frozenset(server.name for server in settings.servers)
        if path == self._path:
            return
        self._end()
        self._path, self._stop = path, threading.Event()
        self._thread = threading.Thread(target=self._run, args=(path, self._stop), name="agents", daemon=True)
        self._thread.start()

    def totals(self) -> tuple[tuple[str, int], ...]:
        """Datagrams by outcome, of this run; empty while nothing listens."""
        listening = self._socket
        found: Mapping[str, int] = {} if listening is None else counts(listening.registry)
        if found:
            self._totals = tuple(found.items())
        return self._totals

    def close(self) -> None:
        """Stop listening."""
        self._end()

    def _end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(WAIT_S * 4)
            self._thread = None

    def _run(self, path: Path, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                listening = create(path)
            except (SourceError, OSError) as error:  # OSError: no descriptor left
                self._complain(str(error))
                stop.wait(RETRY_S)
                continue
            self._complain("")
            self._socket = listening
            try:
                self._listen(listening, stop)
            except OSError as error:
                self._complain(f"{path}: {error.strerror}")
                stop.wait(WAIT_S)
            finally:
                listening.close()

    def _listen(self, listening: AgentSocket, stop: threading.Event) -> None:
        tidied_s = time.monotonic()
        while not stop.is_set():
            listening.registry.servers = self._servers
            for heard in listening.receive(WAIT_S):
                self._put(heard)
            now_s = self._clock.mono_s()
            if now_s - tidied_s > RETRY_S:
                tidied_s = now_s
                for key in listening.registry.forget(now_s):
                    self._known.pop(key, None)
                    self._board.forget(key)

    def _put(self, heard: Heard) -> None:
        """One sample; it wakes the loop only when the allocator has just run short."""
        allocator = heard.state.allocator
        retries = None if allocator is None else allocator.num_alloc_retries
        if heard.key not in self._known:
            self._board.register(heard.key, PERIOD_S, PERIOD_S)
            log.info("agent heard", extra={"agent": heard.key, "pid": heard.state.pid})
        quiet = self._known.get(heard.key, retries) == retries
        self._known[heard.key] = retries
        sample: Sample[AgentState] = Sample(
            source=heard.key, observed_s=heard.observed_s, wall_s=self._clock.wall_s(), value=heard.state
        )
        self._board.put(sample, quiet=quiet)

    def _complain(self, message: str) -> None:
        if message and message != self.error:
            log.error("no agent can be heard: %s", message)
        self.error = message
