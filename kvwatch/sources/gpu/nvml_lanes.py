"""How often may each kind of NVML call be made? Pure pacing, measured on the calls themselves."""

from __future__ import annotations

from collections import deque

MIB = 1024 * 1024
FLAT_S = 0.1  # while device memory is level
FAST_S = 0.01  # while it moves
SLOWEST_MEMORY_S = 1.0
MOVE_BYTES = 16 * MIB
MOVE_FOR_S = 10.0
BUDGET = 0.05  # of an interval may be spent inside NVML: some drivers serialise it with the GPU's own work
MEDIAN_OVER_S = 1.0


class Cost:
    """Median seconds of a call over the last second (of the last three calls where they are rarer)."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()
        self._next_s = 0.0
        self.median_s = 0.0

    def took(self, now_s: float, seconds: float) -> None:
        """Note one measurement; the median is renewed four times a second, and 0 before the third one.

        The first call of each NVML function is 10 to 1,000 times dearer than the following ones.
        """
        seen = self._seen
        seen.append((now_s, seconds))
        while len(seen) > 3 and seen[0][0] < now_s - MEDIAN_OVER_S:
            seen.popleft()
        if now_s >= self._next_s or len(seen) <= 3:
            self._next_s = now_s + MEDIAN_OVER_S / 4
            ordered = sorted(cost for _, cost in seen)
            self.median_s = ordered[len(ordered) // 2] if len(ordered) >= 3 else 0.0


class Pace:
    """Interval of one lane in seconds: as wanted, longer while its calls would exceed the budget."""

    def __init__(self, wanted_s: float, slowest_s: float) -> None:
        self.wanted_s = wanted_s
        self.slowest_s = slowest_s
        self.cost = Cost()
        self.due_s = 0.0

    def done(self, started_s: float, ended_s: float) -> None:
        """Note a whole pass of the lane and when the next one is due."""
        self.cost.took(ended_s, ended_s - started_s)
        self.due_s = max(started_s + self.interval_s, ended_s)

    @property
    def interval_s(self) -> float:
        """Seconds from one pass to the next."""
        return stretched(self.cost.median_s, self.wanted_s, self.slowest_s)


def stretched(cost_s: float, wanted_s: float, slowest_s: float) -> float:
    """The wanted interval, or the shortest one of which `cost_s` is at most 5 %, up to the slowest."""
    return min(slowest_s, max(wanted_s, cost_s / BUDGET))


class Motion:
    """Whether one GPU's memory moves: by 16 MiB since the last move, within the last ten seconds."""

    __slots__ = ("_anchor_bytes", "until_s")

    def __init__(self) -> None:
        self._anchor_bytes: int | None = None
        self.until_s = 0.0

    def seen(self, now_s: float, used_bytes: int) -> None:
        """Note a reading."""
        anchor = self._anchor_bytes
        if anchor is None:
            self._anchor_bytes = used_bytes
        elif abs(used_bytes - anchor) >= MOVE_BYTES:
            self._anchor_bytes = used_bytes
            self.until_s = now_s + MOVE_FOR_S
