"""Is anybody answering? Servers that are down and sources that have gone quiet."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from kvwatch.model.level import Reason, RuleId, Scope
from kvwatch.model.sample import FailureKind, SourceStatus
from kvwatch.rules.kv import MIN_SAMPLES
from kvwatch.rules.spec import Reading
from kvwatch.rules.views import AGENT_FORGOTTEN_S, Inputs, ServerView, scope_of

LOADING_LIMIT_S = 1800.0  # a server that says that it is loading is not down for this long
PERIOD_FLOOR_S = 1.0  # periods under a second count as one, or a busy host would raise tickets


def server_down(inputs: Inputs) -> Iterator[Reading]:
    """1 while a configured server gives no good page, 0 while it does; discovered servers have no rule."""
    for view in inputs.servers:
        if not view.settings.configured:
            continue
        reading = view.readings.get(RuleId.SERVER_DOWN)
        if reading is None:
            reading = view.readings[RuleId.SERVER_DOWN] = _down_reading(view)
        yield reading


def source_stale(inputs: Inputs) -> Iterator[Reading]:
    """Periods since a source's last good sample."""
    unjudged = {server.settings.name for server in inputs.servers if not server.settings.configured}
    watched = {server.settings.name for server in inputs.servers}
    for name, status in inputs.snapshot.sources.items():
        scope = source_scope(name)
        if scope.server and (scope.server in unjudged or scope.server not in watched):
            continue
        age_s = None if status.last_success_s is None else inputs.clock.mono_s - status.last_success_s
        if age_s is not None and name.startswith("agent/") and age_s > AGENT_FORGOTTEN_S:
            continue
        yield _stale_reading(scope, status, age_s)


@functools.lru_cache(maxsize=4096)
def source_scope(name: str) -> Scope:
    """Return the scope of a source: its name, with the server and engine that it is about."""
    parts = name.split("/")
    server = parts[1] if len(parts) > 1 else ""
    engine = parts[2] if len(parts) > 2 else ""
    return scope_of(server, engine, "", "", name)


def _down_reading(view: ServerView) -> Reading:
    down = _down(view)
    return Reading(
        scope=scope_of(view.settings.name),
        value=None if down is None else float(down),
        absent=_down_absent(view, down),
        period_s=view.settings.period_s,
        detail=_failure_text(view.status) if down else "",
    )


def _stale_reading(scope: Scope, status: SourceStatus, age_s: float | None) -> Reading:
    absent = None
    if age_s is None:
        absent = Reason.NOT_REPORTED
    elif status.paused:
        absent = Reason.MAINTENANCE
    elif status.good_total < MIN_SAMPLES:
        absent = Reason.TOO_FEW
    period_s = max(PERIOD_FLOOR_S, status.period_s)
    value = None if age_s is None else max(0.0, age_s) / period_s
    detail = _failure_text(status) if value is not None and value > 1.0 else ""
    return Reading(scope=scope, value=value, absent=absent, period_s=period_s, detail=detail)


def _down(view: ServerView) -> bool | None:
    up = view.signals.up if view.signals is not None else None
    return None if up is None else not up and not _loading(view)


def _loading(view: ServerView) -> bool:
    failure = view.status.failure if view.status is not None else None
    if failure is None or failure.kind is not FailureKind.LOADING:
        return False
    down_for_s = view.signals.down_for_s if view.signals is not None else None
    return (down_for_s or 0.0) < LOADING_LIMIT_S


def _down_absent(view: ServerView, down: bool | None) -> Reason | None:
    if down is None or view.status is None:
        return Reason.STALE if view.seen else Reason.NOT_REPORTED
    # Two attempts make a fact, whether they failed or not: a server that never came up is down too.
    tries = view.status.good_total + view.status.errors_total
    return Reason.TOO_FEW if tries < MIN_SAMPLES else None


def _failure_text(status: SourceStatus | None) -> str:
    return status.failure.message if status is not None and status.failure is not None else ""
