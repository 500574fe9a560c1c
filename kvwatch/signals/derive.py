"""What do the newest samples mean, given what came before? One pure step per tick.

Only samples that are newer than the last ones seen are looked at; everything else is carried over as it
is, so that a tick without news costs next to nothing. Monotonic time alone counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TypeVar

from kvwatch.model.gpu import GpuState, HostGpus
from kvwatch.model.report import Snapshot, TickClock
from kvwatch.model.sample import Sample
from kvwatch.model.server import AgentState, ServerState
from kvwatch.model.settings import ServerSettings, Settings
from kvwatch.model.signal import Signals
from kvwatch.signals import attribution, gpus, servers
from kvwatch.signals.freshness import agent_fresh, gpu_fresh

T = TypeVar("T")

GPU_SOURCES = ("nvml", "dcgm", "dcgm_exporter")
"""Which source is believed when several current ones report the same GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """One GPU with the sample it was taken from."""

    state: GpuState
    observed_s: float
    fresh: bool
    host_pids: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalState:
    """What derive() carries from tick to tick. Opaque, immutable, and of a size that time does not change."""

    settings: Settings | None = None
    patterns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gpu_samples: Mapping[str, Sample[HostGpus]] = field(default_factory=dict)
    server_samples: Mapping[str, Sample[ServerState]] = field(default_factory=dict)
    agent_samples: Mapping[str, Sample[AgentState]] = field(default_factory=dict)
    picked_key: tuple[object, ...] = ()
    picked: tuple[Picked, ...] = ()
    attribution_key: tuple[object, ...] | None = None
    attribution: attribution.Attribution = attribution.Attribution()
    version: int = 0
    places: Mapping[str, servers.Place] = field(default_factory=dict)
    servers: Mapping[str, servers.ServerTrack] = field(default_factory=dict)
    gpus: Mapping[str, gpus.GpuTrack] = field(default_factory=dict)
    signals: Signals = Signals()

    @staticmethod
    def initial() -> SignalState:
        """The state before the first tick."""
        return SignalState()


def derive(
    state: SignalState,
    snapshot: Snapshot,
    settings: Settings,
    patterns: Mapping[str, tuple[str, ...]],
    clock: TickClock,
) -> tuple[SignalState, Signals]:
    """Advance one tick: the new state, and everything derived from the snapshot.

    `patterns` maps an engine kind to regular expressions that recognise its processes' command lines.
    Never raises, whatever the samples hold; what is unknown or stale is None.
    """
    state = _configured(state, settings, patterns)
    state = _newest(state, snapshot)
    configured = _servers(state, settings)
    agents = _fresh_agents(state, snapshot, clock)
    state = _pick(state, snapshot, clock)
    state = _attribute(state, configured, agents)
    state = _advance_servers(state, snapshot, configured, settings.gpus.settle_s, agents, clock)
    state = _advance_gpus(state, snapshot, settings, agents, clock)
    return state, state.signals


def _configured(
    state: SignalState, settings: Settings, patterns: Mapping[str, tuple[str, ...]]
) -> SignalState:
    """Notice a reload: processes are attributed anew then."""
    if state.settings is settings and (state.patterns is patterns or state.patterns == patterns):
        return state
    if state.settings == settings and state.patterns == patterns:
        return replace(state, settings=settings)
    facts = attribution.Attribution()
    return replace(state, settings=settings, patterns=patterns, attribution_key=None, attribution=facts)


def _newest(state: SignalState, snapshot: Snapshot) -> SignalState:
    found_gpus = _newer(state.gpu_samples, snapshot.gpus)
    found_servers = _newer(state.server_samples, snapshot.servers)
    found_agents = _newer(state.agent_samples, snapshot.agents)
    if (
        found_gpus is state.gpu_samples
        and found_servers is state.server_samples
        and found_agents is state.agent_samples
    ):
        return state
    return replace(state, gpu_samples=found_gpus, server_samples=found_servers, agent_samples=found_agents)


def _newer(seen: Mapping[str, Sample[T]], now: Mapping[str, Sample[T]]) -> Mapping[str, Sample[T]]:
    """The newest good sample of each source; the same mapping when nothing is new."""
    if len(seen) == len(now) and all(seen.get(name) is sample for name, sample in now.items()):
        return seen
    newest: dict[str, Sample[T]] = {}
    for name, sample in now.items():
        old = seen.get(name)
        usable = sample.value is not None and isfinite(sample.observed_s)
        if usable and (old is None or sample.observed_s > old.observed_s):
            newest[name] = sample
        elif old is not None:
            newest[name] = old
    if len(newest) == len(seen) and all(seen.get(name) is sample for name, sample in newest.items()):
        return seen
    return newest


def _servers(state: SignalState, settings: Settings) -> Sequence[ServerSettings]:
    """The configured servers, and any that a sample names without being configured."""
    names = {server.name for server in settings.servers}
    extra = [name for name in sorted(state.server_samples) if name not in names]
    if not extra:
        return settings.servers
    return (*settings.servers, *(ServerSettings(name=name, configured=False) for name in extra))


def _fresh_agents(state: SignalState, snapshot: Snapshot, clock: TickClock) -> Sequence[AgentState]:
    return [
        sample.value
        for source, sample in state.agent_samples.items()
        if sample.value is not None and agent_fresh(sample, snapshot.sources.get(source), clock)
    ]


def _pick(state: SignalState, snapshot: Snapshot, clock: TickClock) -> SignalState:
    """Choose one source per GPU: a current one before a stale one, then in the order of GPU_SOURCES."""
    samples = state.gpu_samples
    status = snapshot.sources
    key = tuple(
        (name, one.observed_s, gpu_fresh(one, clock, status.get(name))) for name, one in samples.items()
    )
    if key == state.picked_key:
        return state
    picked: dict[str, Picked] = {}
    for name, observed_s, fresh in sorted(key, key=_preference):
        host = samples[name].value
        for gpu in () if host is None else host.gpus:
            one = Picked(
                state=gpu,
                observed_s=observed_s,
                fresh=fresh,
                host_pids=bool(host and host.host_pid_namespace),
            )
            picked.setdefault(gpu.uuid, one)
    ordered = sorted(picked.values(), key=lambda one: (one.state.index, one.state.uuid))
    return replace(state, picked_key=key, picked=tuple(ordered))


def _preference(row: tuple[str, float, bool]) -> tuple[bool, int, str]:
    name, _, fresh = row
    return not fresh, GPU_SOURCES.index(name) if name in GPU_SOURCES else len(GPU_SOURCES), name


def _attribute(
    state: SignalState, configured: Sequence[ServerSettings], agents: Sequence[AgentState]
) -> SignalState:
    """Attribute processes when a new pass came in, or anything else that decides whose they are changed."""
    kinds = _kinds(state, configured)
    told: dict[str, frozenset[str]] = {}
    for agent in agents:
        if agent.gpu_uuid:
            told[agent.server] = told.get(agent.server, frozenset()) | {agent.gpu_uuid}
    names = tuple(server.name for server in configured)
    key = (tuple(_pass_key(one) for one in state.picked), tuple(kinds.items()), tuple(told.items()), names)
    if key == state.attribution_key:
        return state
    found = attribution.attribute(
        attribution.candidates(configured, kinds),
        state.patterns,
        [one.state for one in state.picked],
        state.attribution.facts,
        told,
    )
    version = state.version + 1
    places = {name: _place(state.picked, found, name, version) for name in names}
    return replace(state, attribution_key=key, attribution=found, version=version, places=places)


def _kinds(state: SignalState, configured: Sequence[ServerSettings]) -> dict[str, str]:
    """What each server of kind `auto` turned out to be."""
    kinds = {}
    for server in configured:
        sample = state.server_samples.get(server.name) if server.kind == "auto" else None
        if sample is not None and sample.value is not None:
            kinds[server.name] = sample.value.kind
    return kinds


def _pass_key(one: Picked) -> tuple[str, float, bool]:
    newest = one.state.ledger_pass
    return one.state.uuid, one.observed_s if newest is None else newest.observed_s, one.fresh


def _place(
    picked: Sequence[Picked], found: attribution.Attribution, server: str, version: int
) -> servers.Place:
    """Where a server is, and what is visible of its memory there on current GPUs."""
    uuids = found.uuids.get(server, ())
    here = [one for one in picked if one.state.uuid in uuids] if uuids else []
    memory = [_visible(one, found, server) for one in here if one.fresh]
    known = [amount for amount in memory if amount is not None]
    held = [attribution.held_bytes(found.gpus[one.state.uuid], server) for one in here if one.fresh]
    sizes = [amount for amount in held if amount is not None]
    readable = any(one.fresh and found.gpus[one.state.uuid].processes is not None for one in picked)
    return servers.Place(
        version=version,
        uuids=uuids,
        memory_bytes=sum(known) if known else None,
        held_bytes=sum(sizes) if readable and len(sizes) == len(here) else None,
    )


def _visible(one: Picked, found: attribution.Attribution, server: str) -> int | None:
    """A server's processes' memory on one GPU; the whole GPU's where those are not visible."""
    held = attribution.held_bytes(found.gpus[one.state.uuid], server)
    if held:
        return held
    newest = one.state.ledger_pass
    memory = one.state.memory if newest is None else newest.memory
    return None if memory is None else memory.used_bytes


def _advance_servers(
    state: SignalState,
    snapshot: Snapshot,
    configured: Sequence[ServerSettings],
    settle_s: float,
    agents: Sequence[AgentState],
    clock: TickClock,
) -> SignalState:
    tracks = {
        server.name: servers.advance(
            state.servers.get(server.name) or servers.begin(server.name),
            server,
            state.server_samples.get(server.name),
            snapshot.sources.get(f"server/{server.name}"),
            clock,
            state.places[server.name],
            [agent for agent in agents if agent.server == server.name],
            settle_s,
        )
        for server in configured
    }
    if _same(tracks, state.servers):
        return state
    shown = tuple(track.shown for track in tracks.values())
    return replace(state, servers=tracks, signals=replace(state.signals, servers=shown))


def _same(new: Mapping[str, object], old: Mapping[str, object]) -> bool:
    return len(new) == len(old) and all(old.get(name) is track for name, track in new.items())


def _advance_gpus(
    state: SignalState,
    snapshot: Snapshot,
    settings: Settings,
    agents: Sequence[AgentState],
    clock: TickClock,
) -> SignalState:
    counts = {name: len(place.uuids) for name, place in state.places.items()}
    tracks = {}
    for one in state.picked:
        uuid = one.state.uuid
        view = gpus.GpuView(
            state=one.state,
            observed_s=one.observed_s,
            fresh=one.fresh,
            host_pids=one.host_pids,
            owners=state.attribution.gpus[uuid],
            version=state.version,
            servers=state.servers,
            gpu_counts=counts,
            agents=[agent for agent in agents if agent.gpu_uuid == uuid],
            peak_window_s=settings.gpus.peak_window_s,
            maintenance=snapshot.shell.maintenance_until_wall_s is not None,
            now_s=clock.mono_s,
        )
        tracks[uuid] = gpus.advance(state.gpus.get(uuid) or gpus.begin(view), view)
    if _same(tracks, state.gpus):
        return state
    shown = tuple(track.shown for track in tracks.values())
    return replace(state, gpus=tracks, signals=replace(state.signals, gpus=shown))
