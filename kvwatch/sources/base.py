"""What a source is, and the errors it may raise."""

from __future__ import annotations

from typing import Protocol, TypeVar

from kvwatch.model.sample import Failure, FailureKind

T_co = TypeVar("T_co", covariant=True)


class SourceError(Exception):
    """A reading failed in a declared way: a kind for machines, a sentence with the fix for people."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(kind=kind, message=message)


class Source(Protocol[T_co]):
    """One thing that is polled by one thread of its own.

    `poll` blocks for at most `deadline_s` plus a little and raises nothing but SourceError.
    With `period_s` 0 the source paces itself: `poll` returns when there is news.
    `expected_period_s` is the interval at which good samples are expected (for staleness).
    A source may have `quiet`: true when its last reading brought nothing that cannot wait a second.
    """

    name: str
    period_s: float
    expected_period_s: float
    deadline_s: float

    def poll(self) -> T_co:
        """Take one reading."""
        ...

    def close(self) -> None:
        """Release everything; called once, from the polling thread or at exit."""
        ...
