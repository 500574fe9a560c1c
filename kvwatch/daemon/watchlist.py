"""Which sources run: made from the settings, kept over a reload where nothing about them changed."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvwatch.daemon.board import Board
from kvwatch.daemon.chores import Chores
from kvwatch.daemon.clock import RealClock
from kvwatch.daemon.poller import Poller
from kvwatch.model.sample import Failure, FailureKind, Sample
from kvwatch.model.settings import GpuSettings, GpuSourceKind, ServerSettings, Settings
from kvwatch.sources.base import Source, SourceError

log = logging.getLogger("kvwatch.watchlist")

# An age at which everything is stale.
LONG_AGO_S = -1e9
RETRY_S = 5.0
# Polls fall into groups this far apart: a processor that wakes up for one server alone takes nearly twice as
# long over it as over one of a group.
GROUP_S = 0.5

GpuFactory = Callable[[GpuSettings, float], Source[Any] | None]


class Watchlist:
    """Owns every poller. Called from the loop's thread only."""

    def __init__(self, board: Board, clock: RealClock, gpu_factory: GpuFactory) -> None:
        self._board = board
        self._clock = clock
        self._gpu_factory = gpu_factory
        self._running: dict[str, tuple[object, Poller]] = {}
        self._chores = Chores()  # of GPU sources: ending a worker takes seconds where a driver hangs
        self._released = False
        self._retry_s = 0.0
        self._unmade: dict[str, tuple[object, Callable[[], Source[Any] | None]]] = {}
        self._jitter = random.Random()  # noqa: S311 - spreads polls, guards nothing
        self._first_group_s = clock.mono_s() + self._jitter.uniform(0.0, GROUP_S)
        self._groups = itertools.count()

    def apply(self, settings: Settings) -> None:
        """Start, keep or stop pollers so that exactly the configured sources run."""
        wanted: dict[str, tuple[object, Callable[[], Source[Any] | None]]] = {}
        if settings.gpus.source is not GpuSourceKind.NONE:
            gpus, tick_s = settings.gpus, settings.tick_s
            wanted["gpus"] = ((gpus, tick_s), lambda: self._gpu_factory(gpus, tick_s))
        for server in settings.servers:
            wanted[f"server/{server.name}"] = (server, _server_factory(server))
        for key in self._unmade:
            self._board.forget(key)
        self._unmade = {}
        for key, (identity, _) in list(self._running.items()):
            if key not in wanted or wanted[key][0] != identity:
                self._stop(key)
        for key, (identity, factory) in wanted.items():
            if key not in self._running:
                self._start(key, identity, factory)

    def retry(self) -> None:
        """Try again, now and then, to make what could not be made."""
        if not self._unmade or self._clock.mono_s() < self._retry_s:
            return
        put_off, self._unmade = self._unmade, {}
        for key, (identity, factory) in put_off.items():
            self._board.forget(key)
            self._start(key, identity, factory)

    def _put_off(
        self, key: str, identity: object, factory: Callable[[], Source[Any] | None], why: str
    ) -> None:
        """Show the reason where the source would be."""
        self._unmade[key] = (identity, factory)
        self._retry_s = self._clock.mono_s() + RETRY_S
        self._board.register(key, 1.0, 1.0)
        failure = Failure(kind=FailureKind.CRASHED, message=why)
        sample: Sample[Any] = Sample(
            source=key, observed_s=self._clock.mono_s(), wall_s=self._clock.wall_s(), failure=failure
        )
        self._board.put(sample)

    def release_gpus(self, released: bool) -> None:
        """Let go of the GPUs for maintenance, or take them back; returns at once."""
        self._released = released
        entry = self._running.get("gpus")
        switch = None if entry is None else _switch(entry[1].source, released)
        if switch is not None:
            self._chores.add(switch)

    def _start(self, key: str, identity: object, factory: Callable[[], Source[Any] | None]) -> None:
        try:
            source = factory()
        except (OSError, ImportError) as error:  # no descriptor left, for one
            self._put_off(key, identity, factory, f"this source cannot be made now: {error}")
            return
        if source is None:
            return
        delay_s = self._delay_s(source.period_s)
        poller = Poller(source, self._board, self._clock, start_delay_s=delay_s)
        self._running[key] = (identity, poller)
        self._seed(source)
        if key != "gpus":
            poller.start()
            return
        pause = _switch(source, released=True) if self._released else None
        if pause is not None:
            self._chores.add(pause)
        self._chores.add(poller.start)  # not before the source in its place has ended its worker

    def _delay_s(self, period_s: float) -> float:
        """Seconds until a source's first poll: within its period, and within a second."""
        span_s = min(max(period_s, 0.0), 1.0)
        if span_s < 2 * GROUP_S:
            return self._jitter.uniform(0.0, span_s)
        return turn_s(self._clock.mono_s() - self._first_group_s, next(self._groups))

    def _seed(self, source: Source[Any]) -> None:
        """GPUs of the inventory are shown as gone until they answer, also where no driver ever does."""
        known = getattr(source, "known", None)
        if known is None:
            return
        remembered = Sample(source=source.name, observed_s=LONG_AGO_S, wall_s=0.0, value=known())
        self._board.seed(remembered)

    def _stop(self, key: str) -> None:
        _, poller = self._running.pop(key)
        poller.stop()
        self._board.forget(poller.source.name)
        if poller.paces_itself:
            self._chores.add(poller.source.close)

    def names(self) -> list[str]:
        """Names of the sources that run."""
        return [poller.source.name for _, poller in self._running.values()]

    def stop(self) -> None:
        """Ask every source to end; returns at once."""
        for key in list(self._running):
            self._stop(key)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the ends that take time; one inside a call that hangs is left behind (False)."""
        return self._chores.wait(timeout_s)


def turn_s(since_first_s: float, number: int) -> float:
    """Seconds until the next turn of group `number`, as seen so long after a turn of the first group.

    There are as many groups as fit into a second; with periods of whole seconds they stay together.
    """
    groups = int(1.0 / GROUP_S)
    return (number % groups * GROUP_S - since_first_s) % (groups * GROUP_S)


def _switch(source: Source[Any], released: bool) -> Callable[[], object] | None:
    switch: Callable[[], object] | None = getattr(source, "pause" if released else "resume", None)
    return switch


class _Later:
    """Stands in for a source that cannot be made yet: says why where the source would be, and tries again.

    `make` raises SourceError, or OSError and ImportError where there is no descriptor left to read files.
    """

    def __init__(self, name: str, period_s: float, make: Callable[[], Source[Any]]) -> None:
        self.name = name
        self.period_s = period_s
        self.expected_period_s = period_s
        self.deadline_s = period_s
        self._make = make
        self._source: Source[Any] | None = None

    def poll(self) -> object:
        """A reading of the source, made first where there is none."""
        if self._source is None:
            try:
                self._source = self._make()
            except (OSError, ImportError) as error:
                raise SourceError(FailureKind.CRASHED, f"this source cannot be made now: {error}") from error
            self.deadline_s = self._source.deadline_s
        return self._source.poll()

    def close(self) -> None:
        """Release the source, if there is one."""
        if self._source is not None:
            self._source.close()


def _server_factory(settings: ServerSettings) -> Callable[[], Source[Any]]:
    def make() -> Source[Any]:
        from kvwatch.sources.servers import registry

        return registry.create(settings)

    def now_or_later() -> Source[Any]:
        try:
            return make()
        except (SourceError, OSError, ImportError):
            return _Later(f"server/{settings.name}", settings.period_s, make)

    return now_or_later


def gpu_factory(runtime_dir: Path, state_dir: Path) -> GpuFactory:
    """The factory that the daemon uses; the demo brings its own. Xid events outlive the sources."""
    xids: dict[str, Any] = {}

    def make(settings: GpuSettings, tick_s: float) -> Source[Any] | None:
        from kvwatch.sources.gpu import choose

        return choose.create(settings, runtime_dir=runtime_dir, state_dir=state_dir, tick_s=tick_s, xids=xids)

    return make
