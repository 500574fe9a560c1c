"""Signals in, one orderly stop out."""

from __future__ import annotations

import signal
from types import FrameType

from kvwatch.daemon.wake import Wake


class Lifecycle:
    """Turns signals into two flags that the loop reads at every tick.

    The handlers set plain attributes and wake the loop without a lock: taking one in a handler
    that interrupted its holder would hang.
    """

    def __init__(self) -> None:
        self.stopping = False
        self.reload_requested = False
        self.wake: Wake | None = None  # the loop's, once there is one

    def install(self) -> None:
        """SIGTERM and SIGINT stop, SIGHUP reloads. Main thread only."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGHUP, self._reload)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stopping = True
        self._wake()

    def _reload(self, _number: int, _frame: FrameType | None) -> None:
        self.reload_requested = True
        self._wake()

    def _wake(self) -> None:
        if self.wake is not None:
            self.wake.set()
