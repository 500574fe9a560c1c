"""Notify hooks: a request for every level change that somebody asked to hear of. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvwatch.control.target import deadline_s
from kvwatch.model.action import ActionRequest, EventKind
from kvwatch.model.level import Level, RuleId, Scope, Verdict
from kvwatch.model.settings import NotifySettings, Settings

_EVENTS = {Level.RED: EventKind.RED, Level.YELLOW: EventKind.YELLOW, Level.GREEN: EventKind.GREEN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One rule in one scope: its last known level, and the worst since it was last green."""

    level: Level
    worst: Level


Worst = Mapping[tuple[RuleId, Scope], Seen]


def due(
    before: Worst, verdicts: tuple[Verdict, ...], settings: Settings, now_s: float
) -> tuple[Worst, tuple[ActionRequest, ...]]:
    """Requests for the verdicts whose known level changed. A first GREEN is no news.

    UNKNOWN is passed over: red, unknown, red is told once, and unknown never ends anything.
    """
    if not settings.notify:
        return {}, ()
    after: dict[tuple[RuleId, Scope], Seen] = {}
    requests: list[ActionRequest] = []
    for verdict in verdicts:
        key = (verdict.rule, verdict.scope)
        seen = before.get(key, Seen(level=Level.GREEN, worst=Level.GREEN))
        if verdict.level is not Level.UNKNOWN:
            if verdict.level is not seen.level:
                requests += _for(verdict, seen.worst, settings, now_s)
            worst = Level.GREEN if verdict.level is Level.GREEN else max(seen.worst, verdict.level)
            seen = Seen(level=verdict.level, worst=worst)
        if seen.level is not Level.GREEN:
            after[key] = seen
    return after, tuple(requests)


def _for(verdict: Verdict, worst: Level, settings: Settings, now_s: float) -> list[ActionRequest]:
    found = []
    for number, notify in enumerate(settings.notify):
        event = _event(notify, verdict, worst)
        if event is not None:
            found.append(_request(notify, number, verdict, event, now_s))
    return found


def _event(notify: NotifySettings, verdict: Verdict, worst: Level) -> EventKind | None:
    """What this entry is told, or None. `restore` is the end of what the same entry was told of."""
    if "*" not in notify.rules and verdict.rule.value not in notify.rules:
        return None
    asked = set(notify.on)
    if _EVENTS[verdict.level].value in asked:
        return _EVENTS[verdict.level]
    if verdict.level is not Level.GREEN or "restore" not in asked:
        return None
    told_of = {"red"} if "yellow" not in asked and "red" in asked else {"yellow", "red"}
    return EventKind.RESTORE if _EVENTS[worst].value in told_of else None


def _request(
    notify: NotifySettings, number: int, verdict: Verdict, event: EventKind, now_s: float
) -> ActionRequest:
    scope = verdict.scope
    place = "-".join(part for part in (scope.server, scope.engine, scope.gpu, scope.source) if part) or "host"
    return ActionRequest(
        request_id=f"notify-{number}-{verdict.rule.value}-{place}-{int(now_s * 1000)}",
        target=f"notify/{number}",
        action=notify.action.kind,
        params=notify.action.params,
        event=event,
        rule=verdict.rule,
        scope=scope,
        level=verdict.level,
        deadline_s=deadline_s(notify.action),
        reason=verdict.detail or verdict.reason.value,
        evidence={
            key: value
            for key, value in (
                ("value", verdict.value), ("yellow", verdict.yellow), ("red", verdict.red),
            )
            if value is not None
        },
        decided_s=now_s,
    )  # fmt: skip
