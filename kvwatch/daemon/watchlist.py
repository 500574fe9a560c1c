"""Which sources run: made from the settings, kept over a reload where nothing about them changed."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvwatch.daemon.board import Board
from kvwatch.daemon.clock import RealClock
from kvwatch.daemon.poller import Poller
from kvwatch.model.sample import Failure, Sample
from kvwatch.model.settings import GpuSettings, GpuSourceKind, ServerSettings, Settings
from kvwatch.sources.base import Source, SourceError

log = logging.getLogger("kvwatch.watchlist")

# An age at which everything is stale.
LONG_AGO_S = -1e9

GpuFactory = Callable[[GpuSettings, float], Source[Any] | None]


class Watchlist:
    """Owns every poller. Called from the loop's thread only."""

    def __init__(self, board: Board, clock: RealClock, gpu_factory: GpuFactory) -> None:
        self._board = board
        self._clock = clock
        self._gpu_factory = gpu_factory
        self._running: dict[str, tuple[object, Poller]] = {}
        self._jitter = random.Random()  # noqa: S311 - spreads polls, guards nothing

    def apply(self, settings: Settings) -> None:
        """Start, keep or stop pollers so that exactly the configured sources run."""
        wanted: dict[str, tuple[object, Callable[[], Source[Any] | None]]] = {}
        if settings.gpus.source is not GpuSourceKind.NONE:
            gpus, tick_s = settings.gpus, settings.tick_s
            wanted["gpus"] = ((gpus, tick_s), lambda: self._gpu_factory(gpus, tick_s))
        for server in settings.servers:
            wanted[f"server/{server.name}"] = (server, _server_factory(server))
        for key, (identity, _) in list(self._running.items()):
            if key not in wanted or wanted[key][0] != identity:
                self._stop(key)
        for key, (identity, factory) in wanted.items():
            if key not in self._running:
                self._start(key, identity, factory)

    def _start(self, key: str, identity: object, factory: Callable[[], Source[Any] | None]) -> None:
        source = factory()
        if source is None:
            return
        delay_s = self._jitter.uniform(0.0, min(max(source.period_s, 0.0), 1.0))
        poller = Poller(source, self._board, self._clock, start_delay_s=delay_s)
        self._running[key] = (identity, poller)
        self._seed(source)
        poller.start()

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
        poller.source.close()
        self._board.forget(poller.source.name)

    def gpu_source(self) -> Source[Any] | None:
        """The running GPU source, if there is one."""
        entry = self._running.get("gpus")
        return None if entry is None else entry[1].source

    def names(self) -> list[str]:
        """Names of the sources that run."""
        return [poller.source.name for _, poller in self._running.values()]

    def close(self) -> None:
        """Stop everything; a source inside a call that hangs is left behind."""
        for _, poller in self._running.values():
            poller.stop()
        for key in list(self._running):
            self._stop(key)


class _Failing:
    """Stands in for a source that cannot be made, so that the reason is seen where the source would be."""

    def __init__(self, name: str, period_s: float, failure: Failure) -> None:
        self.name = name
        self.period_s = period_s
        self.expected_period_s = period_s
        self.deadline_s = period_s
        self._failure = failure

    def poll(self) -> None:
        """Fail with the reason."""
        raise SourceError(self._failure.kind, self._failure.message)

    def close(self) -> None:
        """Nothing to release."""


def _server_factory(settings: ServerSettings) -> Callable[[], Source[Any]]:
    def make() -> Source[Any]:
        from kvwatch.sources.servers import registry

        try:
            return registry.create(settings)
        except SourceError as error:
            return _Failing(f"server/{settings.name}", settings.period_s, error.failure)

    return make


def gpu_factory(runtime_dir: Path, state_dir: Path) -> GpuFactory:
    """The factory that the daemon uses; the demo brings its own."""

    def make(settings: GpuSettings, tick_s: float) -> Source[Any] | None:
        from kvwatch.sources.gpu import choose

        return choose.create(settings, runtime_dir=runtime_dir, state_dir=state_dir, tick_s=tick_s)

    return make
