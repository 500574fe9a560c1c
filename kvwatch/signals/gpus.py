"""One GPU from pass to pass: ledger, headroom, what changed, and when it will be full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvwatch.model.gpu import GpuMemory, GpuState
from kvwatch.model.server import AgentState
from kvwatch.model.signal import Forecast, GpuSignals, Holder, Phase
from kvwatch.signals import forecast, headroom
from kvwatch.signals.attribution import GpuOwners
from kvwatch.signals.ledger import Ledger, Share, holders, ledger, share_of
from kvwatch.signals.series import Points, due
from kvwatch.signals.servers import ServerTrack

PASS_MAX_AGE_S = 5.0
"""Processes are read at 1 Hz; a ledger older than a few passes is not shown."""

LOW_SPACING_S = 2.0
DEVICE_GAP_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """One GPU as this tick sees it, with everything that bears on it.

    `servers` are those on this GPU, `uuids` how many GPUs each has; `agents` are the fresh ones that
    run on it. `version` grows with each attribution.
    """

    state: GpuState
    observed_s: float
    fresh: bool
    host_pids: bool
    owners: GpuOwners
    version: int
    servers: Mapping[str, ServerTrack]
    gpu_counts: Mapping[str, int]
    agents: Sequence[AgentState]
    peak_window_s: float
    maintenance: bool
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTrack:
    """Everything remembered of one GPU; its size does not grow with time."""

    observed_s: float = float("-inf")
    version: int = 0
    ledger: Ledger | None = None
    pass_s: float = float("-inf")
    holders: tuple[Holder, ...] | None = None
    steps: headroom.Steps = headroom.Steps()
    recent: Points = ()
    falling: bool | None = None
    lows: Points = ()
    floor: headroom.Floor = headroom.Floor()
    restarts: int = 0
    device: forecast.ForecastTrack = forecast.ForecastTrack()
    fastest_growth_per_s: float | None = None
    key: tuple[object, ...] = ()
    shown: GpuSignals


def begin(view: GpuView) -> GpuTrack:
    """A GPU of which nothing is known yet."""
    return GpuTrack(shown=GpuSignals(uuid=view.state.uuid, index=view.state.index))


def advance(track: GpuTrack, view: GpuView) -> GpuTrack:
    """One tick. Returns the same object when nothing changed."""
    phase, detail = _phase(view)
    newer = view.fresh and view.observed_s > track.observed_s
    current = _current(track, view)
    key = (view.fresh, phase, detail, view.owners.servers, current)
    if not newer and view.version == track.version and key == track.key:
        return track
    if view.version != track.version:
        track = _take_pass(track, view)
    memory = view.state.memory
    room = None
    if memory is not None and view.fresh:
        room = max(0, memory.free_bytes) + _releasable(view.agents)
        if newer:
            track = _take_memory(track, view, memory, room, phase)
    current = _current(track, view)
    key = (view.fresh, phase, detail, view.owners.servers, current)
    return replace(
        track,
        observed_s=view.observed_s if newer else track.observed_s,
        version=view.version,
        key=key,
        shown=_shown(track, view, (phase, detail), room, current=current),
    )


def _current(track: GpuTrack, view: GpuView) -> bool:
    """Whether the last pass may be shown: it is recent, and the GPU still tells its memory (a lost one does
    not: a ledger without a total would be left of it)."""
    known = view.fresh and view.state.memory is not None
    return known and view.now_s - track.pass_s <= PASS_MAX_AGE_S


def _phase(view: GpuView) -> tuple[Phase, str]:
    """The phase that device rules go by: only maintenance and a starting server suspend them."""
    if view.maintenance:
        return Phase.MAINTENANCE, ""
    if not view.fresh or view.state.memory is None:
        return Phase.UNKNOWN, "no current memory reading"
    lives = [(name, view.servers[name].phase) for name in view.owners.servers if name in view.servers]
    for name, life in lives:
        if life.phase is Phase.STARTING:
            return Phase.STARTING, f"{name}: {life.detail}"
    down = [name for name, life in lives if life.phase is Phase.DOWN]
    return Phase.STEADY, f"down: {', '.join(down)}" if down else ""


def _releasable(agents: Sequence[AgentState]) -> int:
    return sum(max(0, one.allocator.releasable_bytes or 0) for one in agents if one.allocator is not None)


def _take_pass(track: GpuTrack, view: GpuView) -> GpuTrack:
    """Enter a new pass (or a new attribution of it) into the ledger; none on a MIG parent."""
    newest = view.state.ledger_pass
    if newest is None or view.state.is_mig_parent:
        return replace(track, ledger=None, holders=None)
    owned = view.owners.processes
    shares = {name: _share(view, name) for name in view.owners.servers}
    steps = track.steps
    if owned is not None:
        steps = headroom.watch_processes(steps, newest.observed_s, headroom.large(one for one, _ in owned))
    return replace(
        track,
        ledger=ledger(newest.memory, owned, shares, host_pids=view.host_pids),
        pass_s=newest.observed_s,
        holders=None if owned is None else holders(owned),
        steps=steps,
        device=track.device if steps.changed_s == track.steps.changed_s else forecast.broken(track.device),
    )


def _share(view: GpuView, name: str) -> Share:
    server = view.servers.get(name)
    if server is None or not server.fresh or server.sample is None or server.sample.value is None:
        return Share()
    agents = [agent for agent in view.agents if agent.server == name]
    return share_of(server.sample.value, view.gpu_counts.get(name, 0), view.state.uuid, agents)


def _take_memory(track: GpuTrack, view: GpuView, memory: GpuMemory, room: int, phase: Phase) -> GpuTrack:
    """Enter one reading of memory into every history."""
    now_s, steps = view.observed_s, track.steps
    seen = headroom.watch_used(steps, now_s, memory.used_bytes)
    recent = headroom.remember(track.recent, now_s, room)
    lows = headroom.low(track.lows, now_s, room, LOW_SPACING_S, view.peak_window_s)
    restarts = sum(view.servers[name].restarts for name in view.owners.servers if name in view.servers)
    floor = track.floor
    if restarts != track.restarts or phase is Phase.STARTING:
        floor = headroom.Floor()
    steady = phase is Phase.STEADY and bool(view.owners.servers)
    device = track.device if seen.changed_s == steps.changed_s else forecast.broken(track.device)
    lowest = _lowest(view, lows, room)
    return replace(
        track,
        steps=seen,
        recent=recent,
        falling=track.falling if recent is track.recent else headroom.falling(recent),
        lows=lows,
        floor=headroom.learn(floor, now_s, lowest, steady=steady),
        restarts=restarts,
        device=forecast.observe(device, forecast.DEVICE, now_s, float(-lowest), gap_s=DEVICE_GAP_S),
        fastest_growth_per_s=_fastest(track, seen, steady=steady),
    )


def _lowest(view: GpuView, lows: Points, room: int) -> int:
    """Low of headroom over the peak window: the worker's own fast low where no agent adds to it."""
    fast = view.state.free_low_bytes
    if fast is not None and _releasable(view.agents) == 0:
        return max(0, min(fast, room))
    return min(room, int(min(value for _, value in lows)))


def _fastest(track: GpuTrack, seen: headroom.Steps, *, steady: bool) -> float | None:
    """Highest growth of used memory over a second, in steady life."""
    before, fastest = track.steps, track.fastest_growth_per_s
    if not steady or before.last_s is None or seen.last_s is None or not due(before.last_s, seen.last_s, 1.0):
        return fastest
    growth = (seen.used_bytes - before.used_bytes) / (seen.last_s - before.last_s)
    return max(fastest or 0.0, growth) if growth > 0 else fastest


def _shown(
    track: GpuTrack, view: GpuView, phase: tuple[Phase, str], room: int | None, *, current: bool
) -> GpuSignals:
    book = track.ledger if current else None
    lowest = None if room is None or not track.lows else _lowest(view, track.lows, room)
    return GpuSignals(
        uuid=view.state.uuid,
        index=view.state.index,
        phase=phase[0],
        phase_detail=phase[1],
        ledger=None if book is None else book.parts,
        ledger_clamped=book is not None and book.clamped,
        holders=track.holders if current else None,
        unattributed_bytes=None if book is None else book.bytes_of("unattributed"),
        dead_process_bytes=None if book is None else book.bytes_of("dead_process"),
        headroom_bytes=room,
        headroom_low_bytes=lowest,
        headroom_falling=None if room is None else track.falling,
        below_learned_floor=None if room is None else headroom.below(track.floor, room),
        last_step_change_s=track.steps.changed_s,
        device_forecast=_device(track, room),
        servers=view.owners.servers,
    )


def _device(track: GpuTrack, room: int | None) -> Forecast:
    level = None if room is None else float(-room)
    return forecast.forecast(track.device, forecast.DEVICE, level, track.fastest_growth_per_s)
