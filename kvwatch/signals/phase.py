"""Where is a server in its life, and did it restart? Device rules wait until it has settled.

A server is starting until it is up and its device memory has been level (moved by less than 64 MiB) for
5 min; where no device memory is visible, until its first good page.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvwatch.model.sample import FailureKind, SourceStatus
from kvwatch.model.server import EngineState, Histogram, SchedulerState
from kvwatch.model.settings import MIB
from kvwatch.model.signal import Phase
from kvwatch.signals.series import fell

LEVEL_BYTES = 64 * MIB
LONGEST_START_S = 1800.0
"""A server that is up and never levels is leaking, not starting: its device rules hold after 30 min."""

LONG_AGO_S = 900.0
"""A process that has run for longer when kvwatch first sees it answer has its start behind it."""

MEMORY_GAP_S = 10.0
"""Without a reading for longer, memory is not known to have been level."""

_CANNOT_TELL = {FailureKind.STUCK, FailureKind.PAUSED}
"""Failures that say something about the watcher only; every other one means that no good page came."""


def counters_fell(last: EngineState, new: EngineState) -> bool:
    """Whether any counter went back, or the process start time changed: a restart in between."""
    return (
        _scheduler_fell(last.scheduler, new.scheduler)
        or _start_moved(last, new)
        or _histograms_fell(last, new)
    )


def _scheduler_fell(last: SchedulerState, new: SchedulerState) -> bool:
    return (
        fell(new.prompt_tokens_total, last.prompt_tokens_total)
        or fell(new.generation_tokens_total, last.generation_tokens_total)
        or fell(new.preemptions_total, last.preemptions_total)
        or fell(new.steps_total, last.steps_total)
        or fell(new.finished_total, last.finished_total)
        or fell(new.recomputed_tokens_total, last.recomputed_tokens_total)
    )


def _histograms_fell(last: EngineState, new: EngineState) -> bool:
    return _count_fell(last.ttft, new.ttft) or _count_fell(last.queue, new.queue)


def _count_fell(last: Histogram | None, new: Histogram | None) -> bool:
    return last is not None and new is not None and new.count < last.count


def _start_moved(last: EngineState, new: EngineState) -> bool:
    before, after = last.started_wall_s, new.started_wall_s
    return before is not None and after is not None and abs(after - before) > 1.0


def same_process(last: EngineState, new: EngineState) -> bool:
    """Whether the page proves that this is still the same process."""
    return new.started_wall_s is not None and last.started_wall_s is not None and not _start_moved(last, new)


def up(status: SourceStatus | None, *, seen: bool, fresh: bool) -> bool | None:
    """Whether the server is up: True with a current page, False after a failed attempt, None if unknown."""
    if status is None or status.up:
        return True if fresh else None
    if status.failure is None:
        return False if seen else None
    return None if status.failure.kind in _CANNOT_TELL else False


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTrack:
    """Life of one server so far. Memory is the sum of its processes' device memory."""

    phase: Phase = Phase.UNKNOWN
    detail: str = "not polled yet"
    settled: bool = False
    up_since_s: float | None = None
    down_since_s: float | None = None
    was_refused: bool = False
    level_low: int | None = None
    level_high: int | None = None
    level_since_s: float = 0.0
    memory_s: float | None = None


def watch_memory(track: PhaseTrack, now_s: float, memory_bytes: int | None) -> PhaseTrack:
    """Take in one reading of the server's device memory (None: not visible)."""
    if not memory_bytes:
        return _with_level(track, None, None, now_s, None) if track.memory_s is not None else track
    low, high = track.level_low, track.level_high
    gap = track.memory_s is None or now_s - track.memory_s > MEMORY_GAP_S
    if gap or low is None or high is None:
        return _with_level(track, memory_bytes, memory_bytes, now_s, now_s)
    low, high = min(low, memory_bytes), max(high, memory_bytes)
    if high - low >= LEVEL_BYTES:
        return _with_level(track, memory_bytes, memory_bytes, now_s, now_s)
    return _with_level(track, low, high, track.level_since_s, now_s)


def _with_level(
    track: PhaseTrack, low: int | None, high: int | None, since_s: float, memory_s: float | None
) -> PhaseTrack:
    return PhaseTrack(
        phase=track.phase,
        detail=track.detail,
        settled=track.settled,
        up_since_s=track.up_since_s,
        down_since_s=track.down_since_s,
        was_refused=track.was_refused,
        level_low=low,
        level_high=high,
        level_since_s=since_s,
        memory_s=memory_s,
    )


def advance(
    track: PhaseTrack,
    is_up: bool | None,
    failure: FailureKind | None,
    now_s: float,
    *,
    read: bool,
    restarted: bool,
    settle_s: float,
    long_ago: bool = False,
) -> PhaseTrack:
    """One tick of a server's life. Returns the same object when nothing changed.

    `read` says that this tick brought a good page, `restarted` that it came from a new process,
    `long_ago` that kvwatch's first page of this server came from a process with its start long behind
    it: a restart of kvwatch must not blind the device rules for minutes.
    """
    settled = (track.settled and not restarted) or long_ago
    level_since_s = now_s if restarted else track.level_since_s
    up_since_s = None if is_up is False else track.up_since_s
    if is_up and (up_since_s is None or restarted):
        up_since_s = now_s
    down_since_s = None
    if is_up is False:
        down_since_s = now_s if track.down_since_s is None else track.down_since_s
    was_refused = (track.was_refused and not read) or failure is FailureKind.REFUSED
    level_s = None if track.memory_s is None else now_s - level_since_s
    up_s = 0.0 if up_since_s is None else now_s - up_since_s
    phase, detail = _phase(is_up, failure, level_s, up_s, settled=settled, settle_s=settle_s)
    settled = settled or (phase is Phase.STEADY and level_s is not None)
    new = PhaseTrack(
        phase=phase,
        detail=detail,
        settled=settled,
        up_since_s=up_since_s,
        down_since_s=down_since_s,
        was_refused=was_refused,
        level_low=track.level_low,
        level_high=track.level_high,
        level_since_s=level_since_s,
        memory_s=track.memory_s,
    )
    return track if new == track else new


def _phase(
    is_up: bool | None,
    failure: FailureKind | None,
    level_s: float | None,
    up_s: float,
    *,
    settled: bool,
    settle_s: float,
) -> tuple[Phase, str]:
    if is_up is None:
        return Phase.UNKNOWN, "no current page"
    if not is_up:
        return _phase_down(failure, level_s, settle_s)
    if settled:
        return Phase.STEADY, ""
    if level_s is None:
        return Phase.STEADY, "no device memory visible"
    if level_s >= settle_s or up_s >= LONGEST_START_S:
        return Phase.STEADY, ""
    return Phase.STARTING, f"device memory not level for {settle_s / 60:g} min yet"


def _phase_down(failure: FailureKind | None, level_s: float | None, settle_s: float) -> tuple[Phase, str]:
    """Not up: loading (it says so, or its processes' memory still moves), or down."""
    if failure is FailureKind.LOADING:
        return Phase.STARTING, "loading"
    if level_s is not None and level_s < settle_s:
        return Phase.STARTING, "not up yet, and its processes' device memory is still moving"
    return Phase.DOWN, "" if failure is None else failure.value
