"""How much device memory is left before CUDA runs out, how low has it been, and is that new?

Headroom = free memory + what the allocators could give back (only where an agent tells). It says nothing
about the KV pool, which is allocated once: a CUDA out-of-memory comes from everything else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvwatch.model.gpu import GpuProcess
from kvwatch.model.settings import MIB
from kvwatch.signals.series import Points, due, halves_rise, push

FALLING_WINDOW_S = 60.0
HOUR_S = 3600.0
PROCESS_BYTES = 16 * MIB
NOISE_BYTES = 64 * 1024
"""Means that differ by less are equal: a slow leak moves about 2 MiB in half a minute."""

CUSUM_SLACK_BYTES_PER_S = 4 * MIB
CUSUM_ALARM_BYTES = 128 * MIB
CUSUM_MEMORY_S = 60.0
"""A step is 128 MiB that the last minute's trend does not explain: a process, a LoRA, a graph capture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The lowest headroom lived with, an hour at a time; `learned` is None before one full hour."""

    learned: int | None = None
    hour_low: int | None = None
    hour_s: float = 0.0  # seconds of steady life in the present hour
    last_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Two-sided CUSUM of used memory against its recent trend, and the processes seen last."""

    last_s: float | None = None
    used_bytes: int = 0
    trend_per_s: float = 0.0
    up: float = 0.0
    down: float = 0.0
    pids: frozenset[int] | None = None
    changed_s: float | None = None


def falling(points: Points) -> bool | None:
    """Whether headroom is lower in the newer half of the last minute than in the older; None with too little.

    While less than a minute has been seen, the halves are of what there is.
    """
    rise = halves_rise(points)
    return None if rise is None else rise < -NOISE_BYTES


def remember(points: Points, now_s: float, headroom: int) -> Points:
    """Add a reading for `falling`; a gap of 10 s starts anew."""
    if points and now_s - points[-1][0] > 10.0:
        points = ()
    kept = push(points, now_s, float(headroom), spacing_s=1.0, window_s=FALLING_WINDOW_S)
    return kept[1:] if kept[0][0] < now_s - FALLING_WINDOW_S else kept


def low(points: Points, now_s: float, headroom: int, spacing_s: float, window_s: float) -> Points:
    """Lows of `spacing_s` each over a window: the newest bin takes the lower of its own and this reading."""
    start_s = now_s - window_s
    kept = points
    while kept and kept[0][0] + spacing_s <= start_s:
        kept = kept[1:]
    if not kept or due(kept[-1][0], now_s, spacing_s):
        return (*kept, (now_s, float(headroom)))
    if headroom >= kept[-1][1]:
        return kept
    return (*kept[:-1], (kept[-1][0], float(headroom)))


def below(floor: Floor, headroom: int) -> bool | None:
    """Whether headroom is under everything that was lived with; None before one steady hour."""
    return None if floor.learned is None else headroom < floor.learned


def learn(floor: Floor, now_s: float, headroom: int, *, steady: bool) -> Floor:
    """Count one reading; only steady time counts, and an hour's low is learned when the hour is over."""
    if not steady:
        return floor if floor.last_s is None else replace(floor, last_s=None)
    if floor.last_s is not None and not due(floor.last_s, now_s, 1.0) and headroom >= (floor.hour_low or 0):
        return floor
    # Time that nobody watched is not time lived with.
    lived_s = 0.0 if floor.last_s is None else min(10.0, now_s - floor.last_s)
    lowest = headroom if floor.hour_low is None else min(floor.hour_low, headroom)
    hour_s = floor.hour_s + lived_s
    if hour_s < HOUR_S:
        return Floor(learned=floor.learned, hour_low=lowest, hour_s=hour_s, last_s=now_s)
    learned = lowest if floor.learned is None else min(floor.learned, lowest)
    return Floor(learned=learned, last_s=now_s)


def large(processes: Iterable[GpuProcess]) -> frozenset[int]:
    """Pids that matter for step changes: not the passing monitor that holds next to nothing."""
    return frozenset(
        one.pid for one in processes if one.used_bytes is None or one.used_bytes >= PROCESS_BYTES
    )


def watch_processes(steps: Steps, now_s: float, pids: frozenset[int]) -> Steps:
    """Note a process that came or went; the first list is no change."""
    if pids == steps.pids:
        return steps
    changed_s = steps.changed_s if steps.pids is None else now_s
    return replace(steps, pids=pids, changed_s=changed_s)


def watch_used(steps: Steps, now_s: float, used_bytes: int) -> Steps:
    """One step of the CUSUM, at most once a second; a gap of 10 s starts it anew."""
    if steps.last_s is None or now_s - steps.last_s > 10.0:
        return replace(steps, last_s=now_s, used_bytes=used_bytes, trend_per_s=0.0, up=0.0, down=0.0)
    if not due(steps.last_s, now_s, 1.0):
        return steps
    took_s = now_s - steps.last_s
    surprise = (used_bytes - steps.used_bytes) - steps.trend_per_s * took_s
    slack = CUSUM_SLACK_BYTES_PER_S * took_s
    up, down = max(0.0, steps.up + surprise - slack), max(0.0, steps.down - surprise - slack)
    jumped = max(up, down) > CUSUM_ALARM_BYTES
    weight = min(1.0, took_s / CUSUM_MEMORY_S)
    return Steps(
        last_s=now_s,
        used_bytes=used_bytes,
        trend_per_s=steps.trend_per_s + weight * surprise / took_s,
        up=0.0 if jumped else up,
        down=0.0 if jumped else down,
        pids=steps.pids,
        changed_s=now_s if jumped else steps.changed_s,
    )
