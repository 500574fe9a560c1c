"""Small histories: decimated points in immutable tuples, and counter increases that notice a reset."""

from __future__ import annotations

import math

Point = tuple[float, float]
Points = tuple[Point, ...]

JITTER = 0.9
"""A point is due a little early, so that a 1 s poller with jitter still gives one point a second."""


def due(last_s: float, now_s: float, spacing_s: float) -> bool:
    """Whether the next point of a series with this spacing should be kept."""
    return now_s - last_s >= JITTER * spacing_s


def push(points: Points, now_s: float, value: float, *, spacing_s: float, window_s: float) -> Points:
    """Append a point if one is due; keep at least `window_s` seconds, never much more.

    The point that is just older than the window stays, as the base of an increase over the window.
    Returns the same object when nothing was kept.
    """
    if not points:
        return ((now_s, value),)
    if not due(points[-1][0], now_s, spacing_s):
        return points
    first, start_s = 0, now_s - window_s
    while first + 1 < len(points) and points[first + 1][0] <= start_s:
        first += 1
    return (*points[first:], (now_s, value))


def thin(points: Points, most: int) -> Points:
    """At most `most` of the points, evenly spread, the newest always among them."""
    stride = -(-len(points) // most)
    return points if stride <= 1 else points[::-1][::stride][::-1]


MOST_GROWN = 1e12
"""Between two readings no counter of tokens or requests grows by more: 10⁷ a second would take a day."""


def increase(new: float | None, old: float | None) -> float | None:
    """How far a counter grew; None when either end is unknown, it went back (a reset) or leapt."""
    if new is None or old is None or not 0.0 <= new - old < MOST_GROWN:
        return None
    return new - old


def fell(new: float | None, old: float | None) -> bool:
    """Whether a counter went back, which only a restart does."""
    return new is not None and old is not None and new < old


def halves_rise(points: Points, min_points: int = 4) -> float | None:
    """Mean of the newer half of the time span less the mean of the older half; None with too few points."""
    if len(points) < min_points:
        return None
    middle_s = (points[0][0] + points[-1][0]) / 2
    older = [value for time_s, value in points if time_s <= middle_s]
    newer = [value for time_s, value in points if time_s > middle_s]
    if not older or not newer:
        return None
    return math.fsum(newer) / len(newer) - math.fsum(older) / len(older)
