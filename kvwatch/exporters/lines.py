"""How does text leave the process when nobody may be reading? By a thread that may wait for a reader."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class LineWriter(Generic[T]):
    """Writes items as lines to a file descriptor from a thread of its own; `offer` never waits.

    When the reader of the descriptor is slower than the lines, the newest are dropped and
    counted in `dropped_total`. The descriptor stays the caller's. A subclass says how an item
    becomes a line (`line`, called in the thread).
    """

    def __init__(self, fd: int, *, name: str, capacity: int = 1000) -> None:
        self._fd = fd
        self._capacity = capacity
        self._waiting: deque[T] = deque()
        self._news = threading.Condition()  # guards the fields above it and below
        self._closing = False
        self.dropped_total = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def line(self, item: T) -> bytes:
        """The bytes to write for one item, its line end included."""
        raise NotImplementedError

    def offer(self, items: Iterable[T]) -> None:
        """Queue these for writing, or drop and count them."""
        with self._news:
            for item in items:
                if len(self._waiting) >= self._capacity or self._closing:
                    self.dropped_total += 1
                else:
                    self._waiting.append(item)
            self._news.notify()

    def close(self, timeout_s: float = 0.5) -> None:
        """Write what is queued, for at most this long."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                item = self._waiting.popleft()
            self._write(self.line(item))

    def _write(self, line: bytes) -> None:
        while line:
            try:
                line = line[os.write(self._fd, line) :]
            except BlockingIOError:  # a pipe that is full for now; whole lines or none
                select.select([], [self._fd], [], 1.0)
            except OSError:  # nobody reads any more
                with self._news:
                    self.dropped_total += 1
                return


class TextWriter(LineWriter[str]):
    """Lines of text, each without its line end; what no encoding can carry becomes "?"."""

    def line(self, item: str) -> bytes:
        """The text in UTF-8."""
        return f"{item}\n".encode("utf-8", "replace")
