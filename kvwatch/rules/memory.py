"""What must rules remember between ticks? Recent Xid events, allocator retries, sample counts; bounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvwatch.model.gpu import GpuHealth, GpuState
from kvwatch.model.report import Snapshot
from kvwatch.model.sample import Sample
from kvwatch.model.server import AgentState

XID_WINDOW_S = 600.0  # an Xid event counts for ten minutes
RETRY_WINDOW_S = 60.0
RETRY_STEP_S = 1.0  # retry counts are kept once a second at most, so a window holds about sixty
MAX_XIDS_KEPT = 64  # newest (time, code, count) entries per GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class XidEvents:
    """`count` events of one code that were first seen at `seen_s` (monotonic)."""

    seen_s: float
    xid: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHistory:
    """One GPU: good samples since start or since it came back, Xid totals, and the events of the window."""

    observed_s: float = -1.0
    samples: int = 0
    totals: Mapping[int, int] = field(default_factory=dict)
    recent: tuple[XidEvents, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentMemory:
    """One agent: samples since it (re)started, and (time, allocator retries) over the window."""

    observed_s: float = -1.0
    samples: int = 0
    pid: int = 0
    seq: int = -1
    retries: tuple[tuple[float, int], ...] = ()

    @property
    def retries_in_window(self) -> int | None:
        """Allocator retries in the last minute; None before two samples told a count."""
        if len(self.retries) < 2:
            return None
        return self.retries[-1][1] - self.retries[0][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Everything rules remember. It grows with the GPUs, agents and sources of the host, not with time."""

    gpus: Mapping[str, GpuHistory] = field(default_factory=dict)
    agents: Mapping[str, AgentMemory] = field(default_factory=dict)
    gpu_passes: Mapping[str, tuple[float, int]] = field(default_factory=dict)  # source: (newest, count)


def remember(
    memory: Memory, snapshot: Snapshot, states: Mapping[str, tuple[str, GpuState]], now_s: float
) -> Memory:
    """Take in the newest samples. What left the snapshot is forgotten."""
    gpus = {
        uuid: _gpu(memory.gpus.get(uuid, GpuHistory()), state, snapshot.gpus[source].observed_s, now_s)
        for uuid, (source, state) in states.items()
    }
    agents = {
        key: _agent(memory.agents.get(key, AgentMemory()), sample)
        for key, sample in snapshot.agents.items()
        if sample.value is not None
    }
    passes = {
        source: _counted(memory.gpu_passes.get(source, (-1.0, 0)), sample.observed_s)
        for source, sample in snapshot.gpus.items()
        if sample.value is not None
    }
    return Memory(gpus=gpus, agents=agents, gpu_passes=passes)


def _counted(before: tuple[float, int], observed_s: float) -> tuple[float, int]:
    return before if before[0] == observed_s else (observed_s, before[1] + 1)


def _gpu(before: GpuHistory, state: GpuState, observed_s: float, now_s: float) -> GpuHistory:
    recent = before.recent
    if recent and now_s - recent[0].seen_s > XID_WINDOW_S:
        recent = tuple(event for event in recent if now_s - event.seen_s <= XID_WINDOW_S)
    if observed_s == before.observed_s:
        return before if recent is before.recent else replace(before, recent=recent)
    healthy = state.health is GpuHealth.OK
    totals = before.totals
    if state.xid_events_total != tuple(totals.items()):
        recent = (*recent, *_new_events(before, state, now_s))[-MAX_XIDS_KEPT:]
        totals = dict(state.xid_events_total)
    return GpuHistory(
        observed_s=observed_s, samples=before.samples + 1 if healthy else 0, totals=totals, recent=recent
    )


def _new_events(before: GpuHistory, state: GpuState, now_s: float) -> list[XidEvents]:
    """Return what the totals gained. At first sight only an event with a recent time of its own counts."""
    if before.observed_s < 0:
        seen_s = state.last_xid_s
        if state.last_xid is None or seen_s is None or now_s - seen_s > XID_WINDOW_S:
            return []
        return [XidEvents(seen_s=seen_s, xid=state.last_xid, count=1)]
    gained = [(xid, count - before.totals.get(xid, 0)) for xid, count in state.xid_events_total]
    return [XidEvents(seen_s=now_s, xid=xid, count=count) for xid, count in gained if count > 0]


def _agent(before: AgentMemory, sample: Sample[AgentState]) -> AgentMemory:
    state = sample.value
    if state is None or sample.observed_s == before.observed_s:
        return before
    retries = state.allocator.num_alloc_retries if state.allocator is not None else None
    restarted = state.pid != before.pid or state.seq < before.seq
    dropped = bool(before.retries) and retries is not None and retries < before.retries[-1][1]
    if restarted or dropped:
        before = AgentMemory()
    return AgentMemory(
        observed_s=sample.observed_s,
        samples=before.samples + 1,
        pid=state.pid,
        seq=state.seq,
        retries=_window(before.retries, sample.observed_s, retries),
    )


def _window(
    points: tuple[tuple[float, int], ...], observed_s: float, retries: int | None
) -> tuple[tuple[float, int], ...]:
    """Add a point, keeping one a second and the last one that is older than the window as its base."""
    if retries is None:
        return points
    if len(points) > 1 and points[-1][0] - points[-2][0] < RETRY_STEP_S:
        points = points[:-1]
    points = (*points, (observed_s, retries))
    first = 0
    while first + 1 < len(points) and points[first + 1][0] <= observed_s - RETRY_WINDOW_S:
        first += 1
    return points[first:]
