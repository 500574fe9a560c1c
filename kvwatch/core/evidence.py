"""When is evidence taken, and of what? When a paging rule turns red, once per ten minutes, rule and scope."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvwatch.catalogue.alert_evidence import subject
from kvwatch.core.curves import Place, place_of
from kvwatch.model.level import Level, Scope, Verdict
from kvwatch.model.report import GpuReport, TickReport

QUIET_S = 600.0  # at most one file per rule and scope in this time
RELATED = 9  # so many places' curves at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """When evidence of each subject (rule and scope, as in its name) was taken last, in monotonic seconds."""

    at_s: Mapping[str, float] = field(default_factory=dict)


def due(taken: Taken, report: TickReport) -> tuple[Taken, tuple[Verdict, ...]]:
    """Return the verdicts of which evidence must be taken now: paging rules that turned red in this tick.

    The rules judge nothing on a single sample, so nothing is taken on one either.
    """
    reds = {(e.rule, e.scope) for e in report.events if e.kind == "level" and e.level_to is Level.RED}
    if not reds:
        return taken, ()
    now_s = report.clock.mono_s
    at_s = {key: when_s for key, when_s in taken.at_s.items() if now_s - when_s < QUIET_S}
    found = []
    for verdict in report.verdicts:
        if not verdict.pages or (verdict.rule.value, verdict.scope) not in reds:
            continue
        about = subject(verdict.rule.value, verdict.scope)
        if about not in at_s:
            at_s[about] = now_s
            found.append(verdict)
    return Taken(at_s=at_s), tuple(found)


def related(report: TickReport, scope: Scope) -> tuple[Place, ...]:
    """Return the places whose curves tell the story: the scope, its server's GPUs, its GPU's servers."""
    places = [place_of(scope)]
    for server in report.servers:
        mine = server.server == scope.server or (scope.uuid and scope.uuid in server.signals.gpu_uuids)
        if mine:
            places += [(server.server, engine.engine, "") for engine in server.signals.engines]
            places += [("", "", uuid) for uuid in server.signals.gpu_uuids]
    return tuple(dict.fromkeys(places))[:RELATED]


def gpus_of(report: TickReport, scope: Scope) -> tuple[GpuReport, ...]:
    """Return the GPUs a scope is about; all where nobody knows which."""
    uuids = {scope.uuid} if scope.uuid else _uuids(report, scope.server)
    return tuple(gpu for gpu in report.gpus if gpu.state.uuid in uuids) or report.gpus


def _uuids(report: TickReport, server: str) -> set[str]:
    return {uuid for each in report.servers if each.server == server for uuid in each.signals.gpu_uuids}
