"""The snapshot that goes into a tick and the report that comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvwatch.model.action import ActionRequest, Limit
from kvwatch.model.gpu import GpuState, HostGpus
from kvwatch.model.level import Level, Scope, Verdict
from kvwatch.model.sample import Sample, SourceStatus
from kvwatch.model.server import AgentState, ServerState
from kvwatch.model.settings import Mode
from kvwatch.model.signal import GpuSignals, ServerSignals, Signals


@dataclass(frozen=True, slots=True, kw_only=True)
class TickClock:
    """Time as one tick sees it: monotonic seconds, Unix seconds, and the zone's name for display."""

    mono_s: float
    wall_s: float
    tz: str = "UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellStatus:
    """What the shell knows of itself; the core only passes it on."""

    started_wall_s: float = 0.0
    ticks_missed_total: int = 0
    config_last_reload_successful: bool = True
    config_last_reload_success_wall_s: float = 0.0
    config_error: str = ""
    maintenance_until_wall_s: float | None = None  # None: not in maintenance
    dropped_actions_total: int = 0
    clamped_total: int = 0
    demo: str = ""  # scenario name when simulated
    agent_datagrams_total: tuple[tuple[str, int], ...] = ()  # (outcome, count); none without a socket
    evidence_total: tuple[tuple[str, int], ...] = ()  # (outcome, count) of pieces kept about a red
    agents_error: str = ""  # why nothing listens for agents, and the fix


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Newest good sample per source, and every source's status.

    `gpus` maps source name ("nvml", "dcgm", ...) to its newest good sample; `servers` maps server
    name; `agents` maps "agent/<server>/<engine>/<rank>". A source whose newest attempt failed keeps its
    last good sample here (its age says how old); `sources` has the failure.
    """

    gpus: Mapping[str, Sample[HostGpus]] = field(default_factory=dict)
    servers: Mapping[str, Sample[ServerState]] = field(default_factory=dict)
    agents: Mapping[str, Sample[AgentState]] = field(default_factory=dict)
    sources: Mapping[str, SourceStatus] = field(default_factory=dict)
    shell: ShellStatus = ShellStatus()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of the audit log: what changed, why, and on what evidence."""

    seq: int
    wall_s: float
    kind: str  # level, source, action, decision, lease, config, lifecycle, gpu, server
    message: str
    rule: str = ""
    scope: Scope = Scope()
    level_from: Level | None = None
    level_to: Level | None = None
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """One GPU in a report. `state` keeps identity and health; memory and rates are None when stale."""

    state: GpuState
    signals: GpuSignals | None
    up: bool
    age_s: float | None
    stale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    """One server in a report. `state` is None when nothing current is known."""

    server: str
    kind: str
    url: str
    state: ServerState | None
    signals: ServerSignals
    up: bool
    age_s: float | None
    stale: bool = False
    stalled: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitReport:
    """What is imposed on one server now."""

    server: str
    configured: int | None = None  # the server's own limit, where it tells
    active: Limit | None = None  # None: nothing is imposed
    expires_wall_s: float | None = None
    since_wall_s: float | None = None
    imposed_by: str = ""
    reason: str = ""
    dry_run: bool = False
    would_be: Limit | None = None  # what act would have imposed (advise)
    wanted: Limit | None = None  # what the next request asks for; a worker re-reads it just before acting
    outstanding: bool = False  # a lever that does not expire by itself still has to be given back


@dataclass(frozen=True, slots=True, kw_only=True)
class TickReport:
    """Everything one tick found, decided and knows: the only thing that exporters read."""

    tick: int
    clock: TickClock
    version: str
    mode: Mode
    headline: Level
    headline_detail: str = ""
    period_s: float = 0.2
    gpus: tuple[GpuReport, ...] = ()
    servers: tuple[ServerReport, ...] = ()
    agents: tuple[AgentState, ...] = ()
    signals: Signals = Signals()
    verdicts: tuple[Verdict, ...] = ()
    events: tuple[Event, ...] = ()  # new in this tick
    sources: tuple[SourceStatus, ...] = ()
    limits: tuple[LimitReport, ...] = ()
    due: tuple[ActionRequest, ...] = ()
    actions_total: tuple[tuple[str, str, int], ...] = ()  # (action, outcome, count)
    shell: ShellStatus = ShellStatus()
