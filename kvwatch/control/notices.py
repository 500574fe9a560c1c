"""Notify hooks: a request for every level change that somebody asked to hear of. Pure."""

from __future__ import annotations

from kvwatch.control.target import deadline_s
from kvwatch.model.action import ActionRequest, EventKind
from kvwatch.model.level import Level, Verdict
from kvwatch.model.settings import NotifySettings, Settings

_EVENTS = {Level.RED: EventKind.RED, Level.YELLOW: EventKind.YELLOW, Level.GREEN: EventKind.GREEN}


def due(verdicts: tuple[Verdict, ...], settings: Settings, now_s: float) -> tuple[ActionRequest, ...]:
    """Requests for the verdicts that changed level in this tick. A first GREEN is no news."""
    if not settings.notify:
        return ()
    changed = [verdict for verdict in verdicts if verdict.since_s == now_s and _is_news(verdict)]
    return tuple(
        _request(notify, number, verdict, now_s)
        for verdict in changed
        for number, notify in enumerate(settings.notify)
        if _wants(notify, verdict)
    )


def _is_news(verdict: Verdict) -> bool:
    """Becoming green is news only after something else."""
    if verdict.level is not Level.GREEN:
        return verdict.level in _EVENTS
    return any(
        seconds > 0 for level, seconds in verdict.seconds_by_level if level in (Level.YELLOW, Level.RED)
    )


def _wants(notify: NotifySettings, verdict: Verdict) -> bool:
    if "*" not in notify.rules and verdict.rule.value not in notify.rules:
        return False
    asked = set(notify.on)
    if _EVENTS[verdict.level].value in asked:
        return True
    return verdict.level is Level.GREEN and "restore" in asked


def _request(notify: NotifySettings, number: int, verdict: Verdict, now_s: float) -> ActionRequest:
    scope = verdict.scope
    place = "-".join(part for part in (scope.server, scope.engine, scope.gpu, scope.source) if part) or "host"
    return ActionRequest(
        request_id=f"notify-{number}-{verdict.rule.value}-{place}-{int(now_s * 1000)}",
        target=f"notify/{number}",
        action=notify.action.kind,
        params=notify.action.params,
        event=_EVENTS[verdict.level],
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
