"""One server from tick to tick: its engines, its phase, and what it holds while it is down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvwatch.model.report import TickClock
from kvwatch.model.sample import FailureKind, Sample, SourceStatus
from kvwatch.model.server import AgentState, ServerState
from kvwatch.model.settings import ServerSettings
from kvwatch.model.signal import EngineSignals, Phase, ServerSignals
from kvwatch.signals import engines, phase
from kvwatch.signals.freshness import server_fresh, server_limit_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a server is on the GPUs: `memory_bytes` of its processes (of the whole GPU where those are not
    visible; None: nothing visible), `held_bytes` of its processes alone. `version` grows with each pass."""

    version: int = 0
    uuids: tuple[str, ...] = ()
    memory_bytes: int | None = None
    held_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTrack:
    """Everything remembered of one server, and the signals shown last."""

    sample: Sample[ServerState] | None = None
    fresh: bool = False
    engines: Mapping[str, engines.EngineTrack] = field(default_factory=dict)
    engine_signals: tuple[EngineSignals, ...] = ()
    phase: phase.PhaseTrack = phase.PhaseTrack()
    place_version: int = 0
    key: tuple[object, ...] = ()
    shown: ServerSignals

    @property
    def restarts(self) -> int:
        """Restarts of all its engines together."""
        return sum(track.restarts for track in self.engines.values())


def begin(name: str) -> ServerTrack:
    """A server of which nothing is known yet."""
    return ServerTrack(shown=ServerSignals(server=name))


def advance(
    track: ServerTrack,
    settings: ServerSettings,
    sample: Sample[ServerState] | None,
    status: SourceStatus | None,
    clock: TickClock,
    place: Place,
    agents: Sequence[AgentState],
    settle_s: float,
) -> ServerTrack:
    """One tick. Returns the same object when nothing changed."""
    fresh = server_fresh(sample, settings, clock)
    is_up = phase.up(status, seen=sample is not None, fresh=fresh)
    if is_up and _quiet(track, sample, place):
        return track
    newer = sample is not None and sample is not track.sample and sample.value is not None
    tracks, current, restarted = track.engines, track.engine_signals, False
    if newer and sample is not None and sample.value is not None:
        reading = _reading(track, settings, sample, sample.value, agents)
        tracks = {
            one.engine: engines.advance(tracks.get(one.engine), one, reading) for one in sample.value.engines
        }
        current = tuple(engines.signals(one, reading) for one in tracks.values())
        restarted = _restarted(track.engines, tracks)
    life = track.phase
    if place.version != track.place_version:
        life = phase.watch_memory(life, clock.mono_s, place.memory_bytes)
    life = phase.advance(
        life,
        is_up,
        _failure(status),
        clock.mono_s,
        read=newer,
        restarted=restarted,
        settle_s=settle_s,
        long_ago=newer and _long_ago(track, sample, clock),
    )
    key = (fresh, is_up, life.phase, life.detail, place.uuids, place.held_bytes)
    same = not newer and key == track.key and is_up is not False
    if same and life is track.phase and place.version == track.place_version:
        return track
    shown = current if fresh else tuple(engines.stale_signals(settings.name, one) for one in tracks.values())
    return ServerTrack(
        sample=sample,
        fresh=fresh,
        engines=tracks,
        engine_signals=current,
        phase=life,
        place_version=place.version,
        key=key,
        shown=track.shown if same else _shown(settings.name, is_up, life, shown, place, clock),
    )


def _quiet(track: ServerTrack, sample: Sample[ServerState] | None, place: Place) -> bool:
    """Whether a server that is up has settled before and given no news since: time alone moves nothing."""
    return (
        sample is track.sample
        and track.fresh
        and track.phase.phase is Phase.STEADY
        and place.version == track.place_version
    )


def _long_ago(track: ServerTrack, sample: Sample[ServerState] | None, clock: TickClock) -> bool:
    """Whether the very first good page comes from a process that started long ago (Unix seconds: the
    only thing the page tells; a wrong wall clock costs at most the settling time)."""
    if (
        track.sample is not None
        or track.phase.down_since_s is not None
        or sample is None
        or sample.value is None
    ):
        return False
    starts = [engine.started_wall_s for engine in sample.value.engines]
    told = [start for start in starts if start is not None]
    return bool(told) and clock.wall_s - max(told) >= phase.LONG_AGO_S


def _failure(status: SourceStatus | None) -> FailureKind | None:
    return None if status is None or status.up or status.failure is None else status.failure.kind


def _restarted(before: Mapping[str, engines.EngineTrack], now: Mapping[str, engines.EngineTrack]) -> bool:
    return any(name in before and one.restarts > before[name].restarts for name, one in now.items())


def _reading(
    track: ServerTrack,
    settings: ServerSettings,
    sample: Sample[ServerState],
    state: ServerState,
    agents: Sequence[AgentState],
) -> engines.Reading:
    return engines.Reading(
        server=settings.name,
        observed_s=sample.observed_s,
        gap_s=server_limit_s(settings),
        period_s=settings.period_s,
        semantics=state.semantics,
        model=state.model,
        agents=agents,
        restarted=track.phase.was_refused,
    )


def _shown(
    name: str,
    is_up: bool | None,
    life: phase.PhaseTrack,
    shown: tuple[EngineSignals, ...],
    place: Place,
    clock: TickClock,
) -> ServerSignals:
    return ServerSignals(
        server=name,
        phase=life.phase,
        phase_detail=life.detail,
        up=is_up,
        down_for_s=None if life.down_since_s is None else clock.mono_s - life.down_since_s,
        engines=shown,
        gpu_uuids=place.uuids,
        memory_held_while_down_bytes=place.held_bytes if is_up is False else None,
    )
