"""What does kvwatch ask of this server now? The lease file, looked at ten times a second at the most."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvwatch.wire import LeaseReader, clock_s

LOOK_PERIOD_S = 0.1
NO_ADMISSION_S = 120.0
"""`admit: false` ends after this long without a new number, whatever the lease says (contract)."""


class Wish(NamedTuple):
    """What is asked for now. The defaults are: nothing."""

    max_running: int | None = None
    admit: bool = True
    compact: int = 0


NOTHING = Wish()


class Limits:
    """Follows one lease file for one scheduler. `look` is cheap; it may be called at every step.

    `due_s` is when the next look may find something new, on the caller's clock, so that a step can
    skip even the call.
    """

    def __init__(
        self,
        path: str,
        server: str,
        *,
        clock: Callable[[], float] = clock_s,
        reader: LeaseReader | None = None,
    ) -> None:
        self._reader = reader or LeaseReader(path, server=server, clock=clock)
        self._clock = clock
        self._seq = -1
        self._seq_since_s = 0.0
        self._compact = 0
        self.due_s = 0.0
        self.wish = NOTHING

    def look(self, now_s: float) -> Wish:
        """What is asked for now; the file is looked at only when it is time."""
        if now_s >= self.due_s:
            self.due_s = now_s + LOOK_PERIOD_S
            self.wish = self._read()
        return self.wish

    def _read(self) -> Wish:
        lease = self._reader.current()
        if lease is None:
            return NOTHING
        if lease.seq != self._seq:
            self._seq, self._seq_since_s = lease.seq, self._clock()
        admit = lease.admit or self._clock() - self._seq_since_s >= NO_ADMISSION_S
        return Wish(lease.max_running, admit, lease.compact)

    def take_compaction(self) -> bool:
        """Whether `compact` has grown since the last lease that was seen: true once for each growth."""
        asked = self.wish.compact
        if self.wish is NOTHING or asked == self._compact:
            return False
        grew = asked > self._compact
        self._compact = asked
        return grew
