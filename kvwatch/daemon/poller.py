"""One daemon thread per source: period, jittered start, and a guard so that no source can end its thread."""

from __future__ import annotations

import logging
import threading
from typing import Any, TypeVar

from kvwatch.daemon.board import Board
from kvwatch.daemon.clock import RealClock
from kvwatch.model.sample import Failure, FailureKind, Sample
from kvwatch.sources.base import Source, SourceError

log = logging.getLogger("kvwatch.poller")

# A self-paced source that fails at once would spin; this is its slowest retry.
FAILED_PAUSE_S = 0.25
BUG = "bug in this source"
T = TypeVar("T")


def poll_once(source: Source[T], told: str = "") -> tuple[T | None, Failure | None]:
    """One poll: a value, or why there is none. Raises nothing; a bug that was `told` is not logged again."""
    try:
        return source.poll(), None
    except SourceError as error:
        return None, error.failure
    except Exception as error:  # a bug in one source must not silence the others
        failure = Failure(kind=FailureKind.MALFORMED, message=f"{BUG}: {error!r}")
        if failure.message != told:
            log.exception("bug in a source", extra={"source": source.name})
        return None, failure


class Poller:
    """Polls one source for ever and puts every outcome on the board.

    A daemon thread of our own, never an executor: a call that hangs must not keep the process
    from exiting.
    """

    def __init__(self, source: Source[Any], board: Board, clock: RealClock, *, start_delay_s: float) -> None:
        self.source = source
        self._board = board
        self._clock = clock
        self._first_s = clock.mono_s() + start_delay_s
        self._stopped = False
        self._gate = threading.Lock()  # held until it is stopped: cheaper to wait for than an Event
        self._gate.acquire()
        self._writing = threading.Lock()  # so that nothing reaches the board once `stop` has returned
        self._last_bug = ""
        self._thread = threading.Thread(target=self._run, name=f"poll-{source.name}", daemon=True)
        board.register(source.name, source.expected_period_s, source.deadline_s)

    @property
    def paces_itself(self) -> bool:
        """Whether the source says when there is news: its polls wait, and only its `close` ends one."""
        return self.source.period_s <= 0

    def start(self) -> None:
        """Begin polling after the start delay; only close the source where it was stopped meanwhile."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end after the call that is under way; returns at once.

        Whatever that call brings is thrown away: a new source may have the same name by then. The
        thread closes a source with a period itself; one that paces itself is the caller's to close.
        """
        with self._writing:
            if not self._stopped:
                self._stopped = True
                self._gate.release()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; False when it is still inside a call."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._poll_until_stopped()
        finally:
            if not self.paces_itself:
                self.source.close()

    def _poll_until_stopped(self) -> None:
        due_s = self._first_s
        if self._wait(max(0.0, due_s - self._clock.mono_s())):
            return
        while not self._stopped:
            failed = self._once()
            now_s = self._clock.mono_s()
            if self.paces_itself:
                wait_s = FAILED_PAUSE_S if failed else 0.0
            else:
                due_s = max(due_s + self.source.period_s, now_s)
                wait_s = due_s - now_s
            if wait_s > 0 and self._wait(wait_s):
                return

    def _wait(self, seconds: float) -> bool:
        """Wait for the stop, at most this long; whether it has come."""
        return self._gate.acquire(timeout=seconds)

    def _once(self) -> bool:
        """One poll onto the board; True when it failed."""
        started_s = self._clock.mono_s()
        with self._writing:
            if not self._stopped:
                self._board.begin(self.source.name, started_s)
        value, failure = poll_once(self.source, told=self._last_bug)
        if failure is not None and failure.message.startswith(BUG):
            self._last_bug = failure.message
        now_s = self._clock.mono_s()
        sample: Sample[Any] = Sample(
            source=self.source.name,
            observed_s=now_s,
            wall_s=self._clock.wall_s(),
            took_s=now_s - started_s,
            value=value,
            failure=failure,
        )
        quiet = failure is None and bool(getattr(self.source, "quiet", False))
        with self._writing:
            if not self._stopped:
                self._board.put(sample, quiet=quiet)
        return failure is not None
