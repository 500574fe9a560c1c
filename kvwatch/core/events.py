"""What has changed since the last tick? Told once per change, with the evidence for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvwatch.control.plan import Planned
from kvwatch.core.headline import scope_text
from kvwatch.core.state import CoreState
from kvwatch.core.wording import why
from kvwatch.model.action import ActionResult, EventKind, Limit, Outcome
from kvwatch.model.level import Level, Scope, Verdict
from kvwatch.model.report import Event, GpuReport, ServerReport, TickReport
from kvwatch.model.sample import SourceStatus
from kvwatch.model.signal import EngineSignals, Signals
from kvwatch.rules.sources import source_scope

Told = Mapping[tuple[str, str], tuple[Outcome, Limit | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    kind: str
    message: str
    rule: str = ""
    scope: Scope = Scope()
    level_from: Level | None = None
    level_to: Level | None = None
    fields: Mapping[str, object] = field(default_factory=dict)


def found(
    state: CoreState, report: TickReport, results: tuple[ActionResult, ...], planned: Planned
) -> tuple[Event, ...]:
    """Return the tick's events, numbered on from the state's last."""
    news = [
        *_sources(state.last, report),
        *_gpus(state.last, report),
        *_servers(state.last, report),
        *_levels(state, report),
        *_results(state.told, results),
        *(
            _Found(kind=e.kind, message=e.message, rule=e.rule, scope=e.scope, fields=e.fields)
            for e in planned.events
        ),
    ]
    return tuple(
        Event(
            seq=state.event_seq + place,
            wall_s=report.clock.wall_s,
            kind=each.kind,
            message=each.message,
            rule=each.rule,
            scope=each.scope,
            level_from=each.level_from,
            level_to=each.level_to,
            fields=each.fields,
        )
        for place, each in enumerate(news, start=1)
    )


def told(before: Told, results: tuple[ActionResult, ...]) -> Told:
    """Return the newest outcome per limit lane; the same object where no limit was acted on."""
    limits = [result for result in results if result.event is EventKind.LIMIT]
    if not limits:
        return before
    return {**before, **{_lane(result): (result.outcome, result.limit) for result in limits}}


def _lane(result: ActionResult) -> tuple[str, str]:
    return (result.target, result.action)


def _results(before: Told, results: tuple[ActionResult, ...]) -> Iterator[_Found]:
    for result in results:
        same = before.get(_lane(result)) == (result.outcome, result.limit)
        if result.event is EventKind.LIMIT and same:
            continue
        yield _Found(
            kind="action",
            message=f"{result.action} for {result.target}: {result.event.value} {result.outcome.value}",
            fields={"request_id": result.request_id, "took_s": result.took_s, "detail": result.detail},
        )


def _levels(state: CoreState, report: TickReport) -> Iterator[_Found]:
    for verdict in report.verdicts:
        if verdict.since_s != report.clock.mono_s:
            continue
        level = state.levels.level(verdict.rule, verdict.scope)
        if level is not verdict.level:
            yield _level(verdict, level, report.signals)


def _level(verdict: Verdict, before: Level, signals: Signals) -> _Found:
    said = f"{verdict.rule.value} of {scope_text(verdict.scope)} is {verdict.level.name.lower()}"
    return _Found(
        kind="level",
        message=f"{said} (was {before.name.lower()}): {why(verdict)}",
        rule=verdict.rule.value,
        scope=verdict.scope,
        level_from=before,
        level_to=verdict.level,
        fields=_known(
            {
                "value": verdict.value,
                "yellow": verdict.yellow,
                "red": verdict.red,
                "reason": verdict.reason.value,
                **_evidence(verdict.scope, signals),
            }
        ),
    )


def _known(fields: dict[str, object]) -> dict[str, object]:
    """Leave out what is not known or not finite, so that every field is plain JSON."""
    return {
        name: value
        for name, value in fields.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }


def _evidence(scope: Scope, signals: Signals) -> dict[str, object]:
    found: dict[str, object] = {}
    for server in signals.servers:
        for engine in server.engines:
            if (engine.server, engine.engine) == (scope.server, scope.engine):
                found |= _engine_evidence(engine)
    for gpu in signals.gpus:
        if scope.uuid and gpu.uuid == scope.uuid:
            found |= {
                "phase": gpu.phase.value,
                "headroom_bytes": gpu.headroom_bytes,
                "headroom_low_bytes": gpu.headroom_low_bytes,
                "headroom_falling": gpu.headroom_falling,
                "exhaustion_central_s": gpu.device_forecast.central_s,
            }
    return found


def _engine_evidence(engine: EngineSignals) -> dict[str, object]:
    return {
        "kv_usage_ratio": engine.kv_usage_ratio,
        "running": engine.running,
        "waiting": engine.waiting,
        "preemptions_per_s": engine.preemptions_per_s,
        "recompute_tax_ratio": engine.recompute_tax_ratio,
    }


def _sources(last: TickReport | None, report: TickReport) -> Iterator[_Found]:
    before = {status.source: status for status in last.sources} if last is not None else {}
    for status in report.sources:
        old = before.get(status.source)
        if old is status:
            continue
        word = _word(status)
        if word == (_word(old) if old is not None else "untried"):
            continue
        failure = status.failure
        why = f": {failure.message}" if failure is not None and word not in ("up", "untried") else ""
        yield _Found(
            kind="source",
            message=f"source {status.source} is {word}{why}",
            scope=source_scope(status.source),
            fields={"state": word, "failure": failure.kind.value if failure is not None else ""},
        )


def _word(status: SourceStatus) -> str:
    if status.paused:
        return "paused"
    if status.stuck:
        return "stuck"
    if status.up:
        return "up"
    return "down" if status.errors_total or status.good_total else "untried"


def _gpus(last: TickReport | None, report: TickReport) -> Iterator[_Found]:
    before = {gpu.state.uuid: gpu for gpu in last.gpus} if last is not None else {}
    for gpu in report.gpus:
        yield from _gpu(before.get(gpu.state.uuid), gpu)


def _gpu(before: GpuReport | None, gpu: GpuReport) -> Iterator[_Found]:
    state = gpu.state
    scope = Scope(uuid=state.uuid, gpu=str(state.index))
    if before is None or before.state.health is not state.health:
        why = f": {state.health_detail}" if state.health_detail else ""
        yield _Found(
            kind="gpu",
            message=f"GPU {state.index} ({state.uuid}) is {state.health.value}{why}",
            scope=scope,
            fields={"health": state.health.value},
        )
    if before is None or before.state.xid_events_total == state.xid_events_total:
        return
    totals = dict(before.state.xid_events_total)
    for xid, count in state.xid_events_total:
        if count > totals.get(xid, 0):
            message = f"GPU {state.index} ({state.uuid}) reported Xid {xid}"
            yield _Found(kind="gpu", message=message, scope=scope, fields={"xid": xid, "total": count})


def _servers(last: TickReport | None, report: TickReport) -> Iterator[_Found]:
    before = {server.server: server for server in last.servers} if last is not None else {}
    for server in report.servers:
        yield from _server(before.get(server.server), server)
    watched = {server.server for server in report.servers}
    for name in sorted(before.keys() - watched):
        yield _Found(kind="server", message=f"server {name} is no longer watched", scope=Scope(server=name))


def _server(before: ServerReport | None, server: ServerReport) -> Iterator[_Found]:
    if before is not None and before.signals is server.signals and before.up is server.up:
        return
    name, scope = server.server, Scope(server=server.server)
    if server.up != (before.up if before is not None else False):
        yield _Found(kind="server", message=f"server {name} is {'up' if server.up else 'down'}", scope=scope)
    if before is None:
        return
    if bool(server.stalled) != bool(before.stalled):
        word = "stalled" if server.stalled else "no longer stalled"
        yield _Found(kind="server", message=f"server {name} is {word}", scope=scope)
    if server.signals.phase is not before.signals.phase:
        was, now = before.signals.phase.value, server.signals.phase.value
        fields = {"phase": now, "detail": server.signals.phase_detail}
        yield _Found(kind="server", message=f"server {name} is {now} (was {was})", scope=scope, fields=fields)
    restarts = {engine.engine: engine.restarts_total for engine in before.signals.engines}
    for engine in server.signals.engines:
        if engine.restarts_total > restarts.get(engine.engine, engine.restarts_total):
            yield _Found(
                kind="server",
                message=f"engine {engine.engine} of {name} has restarted",
                scope=Scope(server=name, engine=engine.engine),
                fields={"restarts_total": engine.restarts_total},
            )
