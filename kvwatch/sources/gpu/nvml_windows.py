"""What was the highest value of the last so many seconds? A sliding maximum in constant time."""

from __future__ import annotations

from collections import deque

READER_PERIOD_S = 15.0  # the usual scrape interval of a reader of last values


class SlidingMax:
    """Maximum of the values noted within the last `window_s` seconds."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._falling: deque[tuple[float, int]] = deque()  # times rise, values fall: the front is the maximum

    def add(self, now_s: float, value: int) -> None:
        """Note a value; times must not fall."""
        falling = self._falling
        while falling and falling[-1][1] <= value:
            falling.pop()
        falling.append((now_s, value))

    def value(self, now_s: float) -> int | None:
        """The maximum, None where nothing was noted within the window."""
        falling = self._falling
        while falling and falling[0][0] < now_s - self.window_s:
            falling.popleft()
        return falling[0][1] if falling else None


class MemoryWindows:
    """Extremes of one GPU's memory over the peak window, and what a 15 s reader would not see."""

    def __init__(self, peak_window_s: float) -> None:
        self._used = SlidingMax(peak_window_s)
        self._free = SlidingMax(peak_window_s)  # of the negated value
        self._reader = SlidingMax(READER_PERIOD_S)

    def add(self, now_s: float, used_peak_bytes: int, free_low_bytes: int) -> None:
        """Note the extremes of one message."""
        self._used.add(now_s, used_peak_bytes)
        self._free.add(now_s, -free_low_bytes)
        self._reader.add(now_s, used_peak_bytes)

    def used_peak_bytes(self, now_s: float) -> int | None:
        """Highest use within the peak window."""
        return self._used.value(now_s)

    def free_low_bytes(self, now_s: float) -> int | None:
        """Lowest free within the peak window."""
        low = self._free.value(now_s)
        return None if low is None else -low

    def hidden_bytes(self, now_s: float, used_bytes: int) -> int | None:
        """The peak of the last 15 s less the value that a 15 s reader would take now."""
        peak = self._reader.value(now_s)
        return None if peak is None else max(0, peak - used_bytes)
