"""Signals in, one orderly stop out."""

from __future__ import annotations

import signal
from types import FrameType


class Lifecycle:
    """Turns signals into two flags that the loop reads at every tick.

    The handlers set plain attributes and nothing else: taking a lock in a handler that
    interrupted its holder would hang the loop.
    """

    def __init__(self) -> None:
        self.stopping = False
        self.reload_requested = False

    def install(self) -> None:
        """SIGTERM and SIGINT stop, SIGHUP reloads. Main thread only."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGHUP, self._reload)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stopping = True

    def _reload(self, _number: int, _frame: FrameType | None) -> None:
        self.reload_requested = True
