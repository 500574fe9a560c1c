"""What is in a piece of evidence (`evidence/<id>.json`)? The moment of red, and the minutes around it.

Everything of `/api/v1/state` that concerns the rule's scope, under the same names; the curve of the ten
minutes before; the last events; one sentence of cause and the next command. `after` is added a minute
later. Fields are added, never renamed, while `schema` is 1. Secrets are cut out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from kvwatch.exporters import redact
from kvwatch.exporters.events import event_json
from kvwatch.exporters.state import Json, dumps, plain, state
from kvwatch.model.level import Scope, Verdict
from kvwatch.model.report import Event, TickReport

SCHEMA = 1
MAX_EVENTS = 50
MAX_RULES = 100
MAX_HOLDERS = 64  # per GPU, the largest
MAX_SERVERS = 8
MAX_BYTES = 1 << 20  # of one piece; curves of other places go first
_FACTS = ("headline", "maintenance", "gpus", "servers", "rules", "limits", "sources")
# What was decided or done, as events tell it.
DEEDS = ("action", "decision", "lease")


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What people read first. `alert` and `runbook` are "" where there is none."""

    cause: str
    command: str
    command_why: str
    alert: str = ""
    runbook: str = ""


def document(
    *,
    name: str,
    report: TickReport,
    verdict: Verdict,
    words: Words,
    curve: Mapping[str, object],
    uuids: Collection[str],
    events: Iterable[Event],
) -> Json:
    """The evidence at the moment of red. `uuids` are the GPUs it is about; `curve` is ready for JSON."""
    scope = verdict.scope
    return {
        "schema": SCHEMA,
        "id": name,
        "wall_s": report.clock.wall_s,
        "version": report.version,
        "mode": report.mode.value,
        "demo": report.shell.demo,
        "rule": verdict.rule.value,
        "server": scope.server,
        "engine": scope.engine,
        "uuid": scope.uuid,
        "gpu": scope.gpu,
        "value": plain(verdict.value),
        "yellow": plain(verdict.yellow),
        "red": plain(verdict.red),
        "cause": redact.text(words.cause),
        "next": {"command": redact.text(words.command), "why": words.command_why},
        "alert": words.alert,
        "runbook": words.runbook,
        "curve": dict(curve),
        "facts": _facts(report, scope, uuids),
        "events": [event_json(event) for event in list(events)[-MAX_EVENTS:]],
        "after": None,
    }


def after(
    report: TickReport, scope: Scope, rule: str, curve: Mapping[str, object], events: Iterable[Event]
) -> Json:
    """What came in the minute after: the curve, the deeds, and the level at its end."""
    level = next((v.level for v in report.verdicts if v.rule.value == rule and v.scope == scope), None)
    return {
        "wall_s": report.clock.wall_s,
        "level": "unknown" if level is None else level.name.lower(),
        "curve": dict(curve),
        "limits": state_of(report, "limits"),
        "events": [event_json(event) for event in list(events)[-MAX_EVENTS:]],
    }


def state_of(report: TickReport, name: str) -> object:
    """One part of `/api/v1/state`."""
    return state(report)[name]


def encoded(found: Json) -> bytes:
    """The document as bytes, of MAX_BYTES at most: curves of other places and other GPUs give way."""
    data = dumps(found)
    if len(data) > MAX_BYTES:
        curve, facts = found.get("curve"), found.get("facts")
        if isinstance(curve, dict):
            curve["tracks"] = list(curve.get("tracks", ()))[:1]
        if isinstance(facts, dict):
            facts["gpus"] = list(facts.get("gpus", ()))[:2]
            facts["servers"] = list(facts.get("servers", ()))[:1]
        found = {**found, "events": [], "after": None, "cut_short": True}
        data = dumps(found)
    return data


def _facts(report: TickReport, scope: Scope, uuids: Collection[str]) -> Json:
    whole = state(report)
    facts: Json = {name: whole[name] for name in _FACTS}
    gpus = [gpu for gpu in _rows(whole["gpus"]) if gpu["uuid"] in uuids]
    for gpu in gpus:
        holders = sorted(_rows(gpu["holders"]), key=lambda h: _number(h["used_bytes"]), reverse=True)
        gpu["holders_left_out"] = max(0, len(holders) - MAX_HOLDERS)
        gpu["holders"] = None if gpu["holders"] is None else holders[:MAX_HOLDERS]
    facts["gpus"] = gpus
    facts["servers"] = [
        each
        for each in _rows(whole["servers"])
        if each["server"] == scope.server or set(_texts(each["gpu_uuids"])) & set(uuids)
    ][:MAX_SERVERS]
    facts["rules"] = [each for each in _rows(whole["rules"]) if each["level"] != "green"][:MAX_RULES]
    facts["sources"] = [each for each in _rows(whole["sources"]) if each["state"] != "up"][:MAX_RULES]
    return facts


def _rows(found: object) -> list[Json]:
    return found if isinstance(found, list) else []


def _texts(found: object) -> list[str]:
    return [str(each) for each in found] if isinstance(found, list) else []


def _number(found: object) -> float:
    return float(found) if isinstance(found, int | float) else 0.0
