"""How long do requests wait, over the last minute? Quantiles of histogram increases."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from kvwatch.model.server import Histogram
from kvwatch.model.signal import Quantiles
from kvwatch.signals.series import due

WINDOW_S = 60.0
SPACING_S = 5.0
"""A base every 5 s: the window is 60 to 65 s long, and 13 histograms per series are kept."""

QUANTILES = (0.5, 0.95, 0.99)

History = tuple[tuple[float, Histogram], ...]


def remember(history: History, now_s: float, histogram: Histogram | None, last: Histogram | None) -> History:
    """Add one reading. A reset or another bucket layout starts a new history; so does an absent one, or one
    that counts less than nothing."""
    if histogram is None or not _counts(histogram):
        return ()
    if not history or last is None or _broke(histogram, last):
        return ((now_s, histogram),)
    if not due(history[-1][0], now_s, SPACING_S):
        return history
    kept = history
    while len(kept) > 1 and kept[1][0] <= now_s - WINDOW_S:
        kept = kept[1:]
    # An unchanged histogram is kept once, so that an idle server costs no memory.
    return (*kept, (now_s, kept[-1][1] if kept[-1][1] == histogram else histogram))


def _counts(histogram: Histogram) -> bool:
    """Whether it can have been counted at all."""
    counts = histogram.counts
    return len(counts) == len(histogram.bounds) and histogram.count >= 0 and min(counts, default=0.0) >= 0


def _broke(histogram: Histogram, last: Histogram) -> bool:
    return histogram.count < last.count or histogram.bounds != last.bounds


def quantiles(history: History, now_s: float, histogram: Histogram | None) -> Quantiles | None:
    """Quantiles of what fell between the start of the window and now; None when nothing did."""
    if histogram is None or not history:
        return None
    base_s, base = history[0]
    for time_s, older in history[1:]:
        if time_s > now_s - WINDOW_S:
            break
        base_s, base = time_s, older
    return between(base, histogram, now_s - base_s)


def between(base: Histogram, newest: Histogram, window_s: float) -> Quantiles | None:
    """Quantiles of the observations between two readings of one cumulative histogram.

    Linear within a bucket, the first bucket starting at 0, as PromQL's histogram_quantile does.
    A quantile in the open bucket is the highest finite bound, flagged by `beyond`. None without
    observations, without finite buckets, or when the two cannot be compared.
    """
    count = newest.count - base.count
    if not 0 < count < float("inf") or not newest.bounds or window_s <= 0:
        return None
    if len(newest.counts) != len(newest.bounds) or newest.bounds != base.bounds:
        return None
    grown = [new - old for new, old in zip(newest.counts, base.counts, strict=False)]
    if grown != sorted(grown):
        # Pages are not written at one instant: force the increases to be cumulative, like PromQL does.
        grown = list(accumulate(grown, max))
    values, beyond = [], False
    for quantile in QUANTILES:
        value, open_bucket = _at(quantile * count, newest.bounds, grown)
        values.append((quantile, value))
        beyond = beyond or open_bucket
    return Quantiles(values=tuple(values), count=count, window_s=window_s, beyond=beyond)


def _at(rank: float, bounds: tuple[float, ...], cumulative: list[float]) -> tuple[float, bool]:
    """The value at a rank, and whether it lies in the open last bucket."""
    bucket = bisect_left(cumulative, rank)
    if bucket >= len(bounds):
        return bounds[-1], True
    upper = bounds[bucket]
    if bucket == 0:
        lower, below = 0.0, 0.0
        if upper <= 0:
            return upper, False
    else:
        lower, below = bounds[bucket - 1], max(0.0, cumulative[bucket - 1])
    inside = cumulative[bucket] - below
    share = (rank - below) / inside if inside > 0 else 1.0
    return min(upper, max(lower, lower + (upper - lower) * share)), False
