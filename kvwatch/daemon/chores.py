"""What may take seconds and must not hold up the loop: done in order, beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Chores:
    """Runs one thing after another, each in a daemon thread of its own; `add` never waits.

    A thread each, so that a chore that fails or hangs leaves no worker to repair. Called from one thread.
    """

    def __init__(self) -> None:
        self._last: threading.Thread | None = None

    def add(self, chore: Callable[[], object]) -> None:
        """Do this once everything added before has ended."""
        before = self._last

        def run() -> None:
            if before is not None:
                before.join()
            chore()

        self._last = threading.Thread(target=run, name="chore", daemon=True)
        self._last.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for all of them; False when the time is over first."""
        if self._last is None:
            return True
        self._last.join(timeout_s)
        return not self._last.is_alive()
