"""The board tells the loop what is news, and the same status until something about a source changes."""

from __future__ import annotations

from kvwatch.daemon.board import Board
from kvwatch.model.report import ShellStatus
from kvwatch.model.sample import Failure, FailureKind, Sample

NAME = "server/a"
BROKEN = Failure(kind=FailureKind.BROKEN, message="cut")
OTHER = Failure(kind=FailureKind.REFUSED, message="nobody there")


def board() -> Board:
    made = Board()
    made.register(NAME, 1.0, 1.0)
    made.changed.clear()
    return made


def news(board: Board, now_s: float, failure: Failure | None = None) -> bool:
    """Whether putting this sample wakes the loop."""
    value = None if failure is not None else "value"
    board.put(Sample(source=NAME, observed_s=now_s, wall_s=now_s, value=value, failure=failure))
    woken = board.changed.wait(0)
    board.changed.clear()
    return woken


def test_a_failure_told_once_more_is_no_news() -> None:
    """Two failures make a fact and wake the loop; the same again waits for the next tick."""
    told = board()

    assert [news(told, at, BROKEN) for at in (1.0, 2.0, 3.0, 4.0)] == [True, True, False, False]
    assert news(told, 5.0, OTHER)
    assert not news(told, 6.0, OTHER)
    assert news(told, 7.0)
    assert news(told, 8.0, OTHER)
    status = told.snapshot(9.0, ShellStatus()).sources[NAME]
    assert (status.errors_total, status.good_total, status.failure) == (7, 1, OTHER)


def test_status_is_the_same_object_while_nothing_has_changed() -> None:
    """Statuses may be compared by identity; a new sample or a poll that is stuck makes a new one."""
    told = board()
    news(told, 1.0)
    told.begin(NAME, 2.0)
    first, second, stuck = (told.snapshot(at, ShellStatus()).sources[NAME] for at in (2.1, 2.9, 9.0))

    assert first is second
    assert (first.stuck, stuck.stuck) == (False, True)
    news(told, 9.5)
    assert told.snapshot(9.6, ShellStatus()).sources[NAME] is not first
