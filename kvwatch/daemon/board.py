"""The board: the newest good sample of every source and how every source is doing."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from kvwatch.daemon.wake import Wake
from kvwatch.model.report import ShellStatus, Snapshot
from kvwatch.model.sample import Failure, FailureKind, Sample, SourceStatus

# A poll that runs this much longer than its deadline is called stuck: the deadline itself is kept by
# the source, so only a call that ignores it (a driver, a resolver) gets here.
STUCK_GRACE_S = 1.0


@dataclass(slots=True)
class _Entry:
    source: str
    expected_period_s: float
    deadline_s: float
    busy_since_s: float | None = None
    good: Sample[Any] | None = None
    good_total: int = 0
    good_streak: int = 0
    errors_total: int = 0
    failure: Failure | None = None
    last_took_s: float | None = None
    status: SourceStatus | None = None  # as told last; the same object until something about it changes


class Board:
    """Written by one thread per source, read by the loop. Every method returns at once.

    The lock protects the entries; nothing is computed or called out to while it is held.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self.version = 0  # grows with every change, so that a look at the board can be saved
        self.changed = Wake()

    def register(self, source: str, expected_period_s: float, deadline_s: float) -> None:
        """Announce a source, so that it is listed before its first answer."""
        with self._lock:
            self._entries[source] = _Entry(source, expected_period_s, deadline_s)
            self.version += 1

    def forget(self, source: str) -> None:
        """Drop a source that is no longer configured."""
        with self._lock:
            self._entries.pop(source, None)
            self.version += 1

    def seed(self, sample: Sample[Any]) -> None:
        """Put what is remembered from an earlier run: shown as stale, never counted as a reading."""
        with self._lock:
            entry = self._entries.get(sample.source)
            if entry is not None and entry.good is None:
                entry.good = sample
                entry.status = None
                self.version += 1

    def begin(self, source: str, now_s: float) -> None:
        """A poll of this source starts."""
        with self._lock:
            entry = self._entries.get(source)
            if entry is not None:
                entry.busy_since_s = now_s

    def put(self, sample: Sample[Any], *, quiet: bool = False) -> None:
        """A poll has ended, well or not. A quiet sample waits for the next tick instead of causing one,
        and so does a failure that is told once more."""
        with self._lock:
            entry = self._entries.get(sample.source)
            if entry is None:
                return
            quiet = _says_nothing_new(entry, sample, quiet=quiet)
            self.version += not quiet
            entry.busy_since_s = None
            entry.status = None
            entry.last_took_s = sample.took_s
            entry.failure = sample.failure
            if sample.failure is None:
                entry.good = sample
                entry.good_total += 1
                entry.good_streak += 1
            else:
                entry.good_streak = 0
                if sample.failure.kind is not FailureKind.PAUSED:
                    entry.errors_total += 1
        if not quiet:
            self.changed.set()

    def snapshot(self, now_s: float, shell: ShellStatus) -> Snapshot:
        """Everything known, as immutable values."""
        with self._lock:
            good = {name: entry.good for name, entry in self._entries.items() if entry.good is not None}
            sources = {name: _status(entry, now_s) for name, entry in self._entries.items()}
        return Snapshot(
            gpus={name: sample for name, sample in good.items() if "/" not in name},
            servers={
                name.removeprefix("server/"): sample
                for name, sample in good.items()
                if name.startswith("server/")
            },
            agents={name: sample for name, sample in good.items() if name.startswith("agent/")},
            sources=sources,
            shell=shell,
        )


def _says_nothing_new(entry: _Entry, sample: Sample[Any], *, quiet: bool) -> bool:
    """Whether nothing can be decided on this sample that could not before: two failures make a fact."""
    if sample.failure is not None:
        return sample.failure == entry.failure and entry.errors_total >= 2
    return quiet and entry.failure is None and entry.good_total > 0


def _status(entry: _Entry, now_s: float) -> SourceStatus:
    overdue = entry.busy_since_s is not None and now_s - entry.busy_since_s > entry.deadline_s + STUCK_GRACE_S
    failure = entry.failure
    read = entry.good if entry.good_total > 0 else None
    stuck = overdue or (failure is not None and failure.kind is FailureKind.STUCK)
    if entry.status is not None and entry.status.stuck == stuck:
        return entry.status
    entry.status = SourceStatus(
        source=entry.source,
        period_s=entry.expected_period_s,
        up=failure is None and entry.good_total > 0 and not stuck,
        stuck=stuck,
        good_total=entry.good_total,
        good_streak=entry.good_streak,
        errors_total=entry.errors_total,
        last_success_s=None if read is None else read.observed_s,
        last_success_wall_s=None if read is None else read.wall_s,
        last_took_s=entry.last_took_s,
        failure=failure,
        paused=failure is not None and failure.kind is FailureKind.PAUSED,
    )
    return entry.status
