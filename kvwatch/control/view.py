"""What a policy may look at: one server, this tick, already judged fresh or not. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvwatch.control import ranks
from kvwatch.control.ranks import Inside
from kvwatch.control.target import Rung
from kvwatch.model.action import Limit
from kvwatch.model.level import Level, Reason, RuleId, Verdict
from kvwatch.model.report import Snapshot, TickClock
from kvwatch.model.sample import Sample
from kvwatch.model.server import Basis, Evictable, ServerState
from kvwatch.model.settings import Settings, TargetSettings
from kvwatch.model.signal import EngineSignals, ServerSignals, Signals

# An action needs two good samples since start, restart or reset (the contract's single-sample rule).
MIN_SAMPLES = 2
# Rules whose red means that the device itself may run out: no new request may start.
STOPPING_RULES = (RuleId.DEVICE_HEADROOM, RuleId.LARGEST_ALLOCATABLE)
# A rule that offers to compact, without need of its own.
OFFERING_RULES = (RuleId.ALLOCATOR_FRAGMENTATION,)
# A level that is only held, or said to be red, because its input is stale is no ground to act on.
_CURRENT = (Reason.BELOW, Reason.CROSSED, Reason.CAPPED, Reason.HOLDING, Reason.PENDING)
FRESH_PERIODS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a policy wants: an absolute limit (None: none), and why in a few words."""

    limit: Limit | None
    rung: Rung
    reason: str
    rule: RuleId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One server as its policy sees it.

    `fresh` is false when any input is unknown, stale or single-sample: then nothing may be
    decided. `ceiling` is the highest limit allowed (None: the server does not tell its own).
    `known_rules` are the stopping rules whose level is current, `device` their verdicts and `fragmented`
    those on the allocator; `inside` is what agents tell; `restarts` counts the server's. `misleading` says
    why the usage does not tell that the pool is short ("": it does).
    """

    server: str
    fresh: bool
    why_not_fresh: str = ""
    misleading: str = ""
    engine: EngineSignals | None = None  # the engine with the highest usage: limits are per engine
    ceiling: int | None = None
    stopping: Verdict | None = None
    known_rules: frozenset[RuleId] = frozenset()
    device: tuple[Verdict, ...] = ()
    fragmented: tuple[Verdict, ...] = ()
    inside: Inside = Inside()
    restarts: int | None = None
    age_s: float | None = None

    def evidence(self) -> Mapping[str, object]:
        """The figures behind a decision, for the audit log and for hooks."""
        found: dict[str, object] = {"age_s": None if self.age_s is None else round(self.age_s, 3)}
        engine = self.engine
        if engine is not None:
            found |= {
                "engine": engine.engine,
                "kv_usage_ratio": engine.kv_usage_ratio,
                "running": engine.running,
                "waiting": engine.waiting,
                "recompute_tax_ratio": engine.recompute_tax_ratio,
                "preemptions_per_s": engine.preemptions_per_s,
                "generation_tokens_per_s": engine.generation_tokens_per_s,
                "queue_p95_s": p95(engine.queue),
                "ttft_p95_s": p95(engine.ttft),
            }
        if self.stopping is not None:
            found["stopping_rule"] = self.stopping.rule.value
            found["stopping_value"] = self.stopping.value
        return {key: value for key, value in found.items() if value is not None}


def p95(quantiles: object) -> float | None:
    """The 95th percentile of a latency, in seconds, if there is one."""
    for quantile, value in getattr(quantiles, "values", ()):
        if quantile == 0.95:
            return float(value)
    return None


def look(
    target: TargetSettings,
    signals: Signals,
    verdicts: tuple[Verdict, ...],
    snapshot: Snapshot,
    settings: Settings,
    clock: TickClock,
) -> View:
    """Gather one target's view."""
    server = next((found for found in signals.servers if found.server == target.server), None)
    sample = snapshot.servers.get(target.server)
    age_s = None if sample is None else sample.age_s(clock.mono_s)
    problem = _problem(target.server, server, age_s, snapshot, settings)
    engines = () if server is None else server.engines
    known = [engine for engine in engines if engine.kv_usage_ratio is not None]
    stopping = _current(STOPPING_RULES, target.server, server, verdicts)
    return View(
        server=target.server,
        fresh=problem == "",
        why_not_fresh=problem,
        misleading=_misleading(sample),
        engine=max(known, key=lambda engine: engine.kv_usage_ratio or 0.0, default=None),
        ceiling=min(
            (bound for bound in (target.ceiling, own_limit(target.server, snapshot)) if bound is not None),
            default=None,
        ),
        stopping=next((verdict for verdict in stopping if verdict.level is Level.RED), None),
        known_rules=frozenset(verdict.rule for verdict in stopping),
        device=tuple(stopping) if target.compact else (),
        fragmented=tuple(_current(OFFERING_RULES, target.server, server, verdicts)) if target.compact else (),
        inside=ranks.look(target.server, snapshot, clock.mono_s) if _has_lease(target) else Inside(),
        restarts=sum(engine.restarts_total for engine in engines) if engines else None,
        age_s=age_s,
    )


def _misleading(sample: Sample[ServerState] | None) -> str:
    """As the rule kv_usage judges it: a warm cache or a reservation at 1.0 is no shortage."""
    if sample is None or sample.value is None:
        return ""
    meaning = sample.value.semantics
    if meaning.basis is not Basis.OCCUPANCY:
        return f"the usage of this server is not block occupancy but {meaning.basis.value}"
    if meaning.evictable is not Evictable.FREE:
        return "the usage of this server may count cached blocks that can be evicted"
    return ""


def _has_lease(target: TargetSettings) -> bool:
    return any(lever.kind == "lease" for lever in target.via)


def own_limit(server: str, snapshot: Snapshot) -> int | None:
    """The server's own limit per engine, where its pages or its agents tell (the lowest of its engines).

    An agent's last word counts however old: the limit is fixed while a server runs, and an agent that
    falls silent must not turn a limit in force into a refusal.
    """
    sample = snapshot.servers.get(server)
    engines = () if sample is None or sample.value is None else sample.value.engines
    inside = (agent.value for agent in snapshot.agents.values())
    told = [engine.scheduler.max_running for engine in engines]
    told += [one.scheduler.max_running for one in inside if one and one.server == server and one.scheduler]
    return min((limit for limit in told if limit is not None), default=None)


def _problem(
    name: str, server: ServerSignals | None, age_s: float | None, snapshot: Snapshot, settings: Settings
) -> str:
    """Why nothing may be decided for this server, or "" when it may."""
    status = snapshot.sources.get(f"server/{name}")
    configured = next((found for found in settings.servers if found.name == name), None)
    if configured is None:
        return "the server is not configured"
    if server is None or age_s is None or status is None:
        return "no sample yet"
    if age_s > FRESH_PERIODS * configured.period_s:
        return "the last good page is too old"
    if not status.up:
        return "the last poll failed"
    if not server.engines or any(engine.samples < MIN_SAMPLES for engine in server.engines):
        return "fewer than two good samples since start, restart or reset"
    if all(engine.kv_usage_ratio is None for engine in server.engines):
        return "the server does not report its KV usage"
    return ""


def _current(
    rules: tuple[RuleId, ...], name: str, server: ServerSignals | None, verdicts: tuple[Verdict, ...]
) -> list[Verdict]:
    """Current verdicts of these rules, for this server or one of its GPUs."""
    uuids = () if server is None else server.gpu_uuids
    return [
        verdict
        for verdict in verdicts
        if verdict.rule in rules
        and verdict.level is not Level.UNKNOWN
        and verdict.reason in _CURRENT
        and (verdict.scope.server == name or (verdict.scope.uuid and verdict.scope.uuid in uuids))
    ]
