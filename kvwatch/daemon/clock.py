"""The one place that reads clocks."""

from __future__ import annotations

import time

from kvwatch.model.report import TickClock


class RealClock:
    """Monotonic seconds for every duration, Unix seconds for display only."""

    def mono_s(self) -> float:
        """Seconds on CLOCK_MONOTONIC."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()

    def read(self) -> TickClock:
        """Both clocks as one tick sees them."""
        return TickClock(mono_s=self.mono_s(), wall_s=self.wall_s(), tz=time.tzname[0])
