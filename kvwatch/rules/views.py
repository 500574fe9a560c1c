"""Who is there to be judged? Servers, engines, GPUs and agents, each with its signals and their freshness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from kvwatch.model.gpu import GpuState, HostGpus
from kvwatch.model.level import RuleId, Scope
from kvwatch.model.report import Snapshot, TickClock
from kvwatch.model.sample import Sample, SourceStatus
from kvwatch.model.server import AgentState, Semantics
from kvwatch.model.settings import RuleSettings, ServerSettings, Settings
from kvwatch.model.signal import EngineSignals, GpuSignals, ServerSignals, Signals
from kvwatch.rules.memory import AgentMemory, Memory

if TYPE_CHECKING:
    from kvwatch.rules.spec import Reading

AGENT_FORGOTTEN_S = 600.0  # an agent silent for this long is no longer a scope of any rule


@lru_cache(maxsize=4096)
def scope_of(server: str = "", engine: str = "", uuid: str = "", gpu: str = "", source: str = "") -> Scope:
    """Return the scope with these parts; remembered, since the same few are asked for every tick."""
    return Scope(server=server, engine=engine, uuid=uuid, gpu=gpu, source=source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """Which samples are current: GPU sources, servers by name, agents by key."""

    gpu_sources: frozenset[str] = frozenset()
    servers: frozenset[str] = frozenset()
    agents: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """One watched server. `seen` says that a good sample has ever come.

    The same object as in the tick before while nothing about the server has changed; `readings` keeps
    what rules have read from it meanwhile.
    """

    settings: ServerSettings
    signals: ServerSignals | None
    status: SourceStatus | None
    fresh: bool
    seen: bool
    readings: dict[RuleId, Reading | None] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """One engine of one server, named by the newest good sample (engine "0" before the first).

    Kept from tick to tick with its server, and so are its `readings`.
    """

    scope: Scope
    server: ServerView
    signals: EngineSignals | None
    semantics: Semantics | None
    readings: dict[RuleId, Reading | None] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """One GPU or MIG instance. `samples` counts good readings since start or since it came back."""

    scope: Scope
    source: str
    state: GpuState
    signals: GpuSignals | None
    fresh: bool
    paused: bool
    samples: int
    period_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """One rank that reports from inside a server."""

    scope: Scope
    state: AgentState
    memory: AgentMemory
    fresh: bool
    period_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Everything a rule may read in one tick."""

    signals: Signals
    snapshot: Snapshot
    settings: Settings
    clock: TickClock
    memory: Memory
    rules: Mapping[RuleId, RuleSettings]
    servers: tuple[ServerView, ...] = ()
    engines: tuple[EngineView, ...] = ()
    gpus: tuple[GpuView, ...] = ()
    agents: tuple[AgentView, ...] = ()


def gpu_states(snapshot: Snapshot, fresh: frozenset[str]) -> dict[str, tuple[str, GpuState]]:
    """Return the newest state of each GPU by UUID with its source; a fresh source wins over a stale one."""
    found: dict[str, tuple[str, GpuState]] = {}
    ranked = sorted(
        snapshot.gpus.items(), key=lambda item: (item[0] not in fresh, item[0] != "nvml", item[0])
    )
    for source, sample in ranked:
        for state in _gpus(sample):
            found.setdefault(state.uuid, (source, state))
    return found


def look(
    signals: Signals,
    snapshot: Snapshot,
    settings: Settings,
    clock: TickClock,
    memory: Memory,
    fresh: Freshness,
    rules: Mapping[RuleId, RuleSettings],
    before: Inputs | None = None,
) -> Inputs:
    """Put everything that rules read side by side, once a tick; `before` is what the last tick saw."""
    if before is not None and before.rules is not rules:
        before = None
    servers = tuple(_server_views(signals, snapshot, settings, fresh, before))
    gpus = tuple(_gpu_views(signals, snapshot, memory, fresh))
    return Inputs(
        signals=signals,
        snapshot=snapshot,
        settings=settings,
        clock=clock,
        memory=memory,
        rules=rules,
        servers=servers,
        engines=tuple(_engine_views(servers, snapshot, before)),
        gpus=gpus,
        agents=tuple(_agent_views(snapshot, settings, clock, memory, fresh, gpus)),
    )


def agent_period_s(snapshot: Snapshot, key: str) -> float:
    """Seconds between datagrams of one agent, as its source expects them."""
    status = snapshot.sources.get(key)
    return status.period_s if status is not None and status.period_s > 0 else 1.0


def _gpus(sample: Sample[HostGpus]) -> tuple[GpuState, ...]:
    return sample.value.gpus if sample.value is not None else ()


def _server_views(
    signals: Signals, snapshot: Snapshot, settings: Settings, fresh: Freshness, before: Inputs | None
) -> Iterator[ServerView]:
    by_name = {server.server: server for server in signals.servers}
    old = {view.settings.name: view for view in before.servers} if before is not None else {}
    for server in settings.servers:
        sample = snapshot.servers.get(server.name)
        last = old.get(server.name)
        told = by_name.get(server.name)
        status = snapshot.sources.get(f"server/{server.name}")
        is_fresh = server.name in fresh.servers
        seen = sample is not None and sample.value is not None
        if (
            last is not None
            and last.signals is told
            and last.status is status
            and last.settings is server
            and last.fresh is is_fresh
            and last.seen is seen
        ):
            yield last
            continue
        yield ServerView(settings=server, signals=told, status=status, fresh=is_fresh, seen=seen)


def _engine_views(
    servers: tuple[ServerView, ...], snapshot: Snapshot, before: Inputs | None
) -> Iterator[EngineView]:
    old: dict[int, list[EngineView]] = {}
    for engine_view in before.engines if before is not None else ():
        old.setdefault(id(engine_view.server), []).append(engine_view)
    for view in servers:
        name = view.settings.name
        sample = snapshot.servers.get(name)
        if before is not None and id(view) in old and before.snapshot.servers.get(name) is sample:
            yield from old[id(view)]
            continue
        state = sample.value if sample is not None else None
        engines = [engine.engine for engine in state.engines] if state is not None else []
        found = {engine.engine: engine for engine in view.signals.engines} if view.signals else {}
        for engine in engines or ["0"]:
            yield EngineView(
                scope=scope_of(name, engine),
                server=view,
                signals=found.get(engine),
                semantics=state.semantics if state is not None else None,
            )


def _gpu_views(signals: Signals, snapshot: Snapshot, memory: Memory, fresh: Freshness) -> Iterator[GpuView]:
    by_uuid = {gpu.uuid: gpu for gpu in signals.gpus}
    for uuid, (source, state) in gpu_states(snapshot, fresh.gpu_sources).items():
        status = snapshot.sources.get(source)
        seen = memory.gpus.get(uuid)
        yield GpuView(
            scope=scope_of("", "", uuid, str(state.index)),
            source=source,
            state=state,
            signals=by_uuid.get(uuid),
            fresh=source in fresh.gpu_sources,
            paused=status is not None and status.paused,
            samples=seen.samples if seen is not None else 0,
            period_s=status.period_s if status is not None else 1.0,
        )


def _agent_views(
    snapshot: Snapshot,
    settings: Settings,
    clock: TickClock,
    memory: Memory,
    fresh: Freshness,
    gpus: tuple[GpuView, ...],
) -> Iterator[AgentView]:
    index = {gpu.state.uuid: gpu.scope.gpu for gpu in gpus}
    watched = {server.name for server in settings.servers}
    for key, sample in snapshot.agents.items():
        state = sample.value
        seen = memory.agents.get(key)
        if state is None or seen is None or state.server not in watched:
            continue
        if sample.age_s(clock.mono_s) > AGENT_FORGOTTEN_S:
            continue
        yield AgentView(
            scope=scope_of(state.server, state.engine, state.gpu_uuid, index.get(state.gpu_uuid, "")),
            state=state,
            memory=seen,
            fresh=key in fresh.agents,
            period_s=agent_period_s(snapshot, key),
        )
