"""What wakes the loop: a counter of the kernel's, safe to raise from any thread and from signal handlers."""

from __future__ import annotations

import contextlib
import os
import select


class Wake:
    """Like threading.Event, but without a lock that an interrupting handler could wait for for ever."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def set(self) -> None:
        """Wake whoever waits, now or next."""
        with contextlib.suppress(BlockingIOError):  # raised 2^64 times already: set it is
            os.eventfd_write(self._descriptor, 1)

    def wait(self, seconds: float) -> bool:
        """Until it is set, for at most this long; whether it is."""
        return bool(self._poll.poll(max(0.0, seconds) * 1000))

    def clear(self) -> None:
        """Wait anew from now on."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Give the descriptor back; nothing may use it any more."""
        os.close(self._descriptor)
