"""One thread per source: what it puts on the board, and what it must not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvwatch.daemon.board import Board
from kvwatch.daemon.chores import Chores
from kvwatch.daemon.clock import RealClock
from kvwatch.daemon.poller import Poller
from kvwatch.model.report import ShellStatus
from kvwatch.model.sample import FailureKind, SourceStatus
from kvwatch.sources.base import SourceError

WAIT_S = 30.0


class Slow:
    """A source whose poll is held until `go` is set, then gives or raises what it was made with."""

    def __init__(self, outcome: object, period_s: float = 0.05) -> None:
        self.name = "server/a"
        self.period_s = self.expected_period_s = self.deadline_s = period_s
        self.polling, self.go, self.closed = threading.Event(), threading.Event(), threading.Event()
        self.closed_by = ""
        self._outcome = outcome

    def poll(self) -> object:
        self.polling.set()
        self.go.wait(WAIT_S)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def close(self) -> None:
        self.closed_by = threading.current_thread().name
        self.closed.set()


def status(board: Board) -> SourceStatus:
    """The status of the one source."""
    return board.snapshot(time.monotonic(), ShellStatus()).sources["server/a"]


def wait(look: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def poller_of(source: Slow, board: Board) -> Poller:
    return Poller(source, board, RealClock(), start_delay_s=0.0)


def test_what_a_stopped_source_brings_is_thrown_away() -> None:
    """A poll under way when its source is replaced puts nothing on the board under the new one's name."""
    for outcome in ("old value", SourceError(FailureKind.BROKEN, "old failure")):
        board = Board()
        old = Slow(outcome)
        poller = poller_of(old, board)
        poller.start()
        assert old.polling.wait(WAIT_S)
        poller.stop()
        board.forget(old.name)
        poller_of(Slow("new value"), board)  # registers the name anew
        old.go.set()
        assert poller.join(WAIT_S)

        found = status(board)
        assert (found.good_total, found.errors_total, found.failure) == (0, 0, None)


def test_a_polled_source_is_closed_by_its_own_thread() -> None:
    """Nobody closes a connection under a poll: the thread does it when its last poll has ended."""
    source = Slow("value")
    poller = poller_of(source, Board())
    poller.start()
    assert source.polling.wait(WAIT_S)
    poller.stop()
    assert not source.closed.is_set()
    source.go.set()
    assert source.closed.wait(WAIT_S)
    assert source.closed_by == "poll-server/a"


def test_a_bug_in_a_source_is_an_error_of_that_source() -> None:
    """An exception that no source should raise becomes a failure, and polling goes on."""
    board = Board()
    source = Slow(ZeroDivisionError("oops"))
    source.go.set()
    poller = poller_of(source, board)
    poller.start()
    wait(lambda: status(board).errors_total >= 2)
    poller.stop()
    assert poller.join(WAIT_S)
    failure = status(board).failure
    assert failure is not None
    assert "oops" in failure.message


def test_chores_run_in_order_and_never_hold_up_who_adds_them() -> None:
    """One that hangs delays those behind it, and nobody else."""
    chores, go, done = Chores(), threading.Event(), list[int]()
    assert chores.wait(0.0)
    chores.add(lambda: go.wait(WAIT_S))
    for number in range(5):
        chores.add(lambda number=number: done.append(number))  # type: ignore[misc]
    assert (chores.wait(0.01), done) == (False, [])
    go.set()
    assert chores.wait(WAIT_S)
    assert done == [0, 1, 2, 3, 4]
