"""Policy `threshold`: shrink above one KV usage with requests waiting, grow again below another.

Known to cost throughput where recomputation is cheap (docs/policies.md), which is why it needs
`accept_goodput_loss`. Limits are absolute and per engine.
"""

from __future__ import annotations

import math

from kvwatch.control.target import Rung, TargetState
from kvwatch.control.view import Decision, View
from kvwatch.model.action import Limit
from kvwatch.model.level import RuleId
from kvwatch.model.signal import EngineSignals

# A limit that this share of running requests does not reach holds nobody back (Netflix's
# concurrency-limits: no growth while the limit does not bind).
BINDING_RATIO = 0.9
# One step of a planned release (the contract: +25 % per cooldown).
RAMP = 1.25


def decide(state: TargetState, view: View, _now_s: float) -> Decision:
    """The next limit from usage, queue and what is imposed now."""
    engine = view.engine
    if engine is None or engine.kv_usage_ratio is None:
        return _keep(state, "usage unknown")
    params = state.settings.params
    current = None if state.limit is None else state.limit.max_running
    if engine.kv_usage_ratio > params["shrink_above"] and (engine.waiting or 0) > 0:
        return _shrink(state, view, engine, current)
    if current is not None and engine.kv_usage_ratio < params["regrow_below"]:
        return _grow(state, view, engine, current)
    return _keep(state, "between the bounds")


def _keep(state: TargetState, reason: str) -> Decision:
    return Decision(limit=state.limit, rung=state.rung, reason=reason, rule=state.rule)


def _shrink(state: TargetState, view: View, engine: EngineSignals, current: int | None) -> Decision:
    """max(floor, ⌊factor × running⌋), never above the ceiling or the present limit."""
    running = engine.running
    if running is None:
        return _keep(state, "running requests unknown")
    if current is not None and running > current:
        return _keep(state, "the last move has not taken effect yet")
    wanted = max(state.settings.floor, math.floor(state.settings.params["factor"] * running))
    bounds = [bound for bound in (view.ceiling, current) if bound is not None]
    wanted = min([wanted, *bounds])
    if current is not None and wanted == current:
        return _keep(state, "at the floor")
    return Decision(
        limit=Limit(server=view.server, max_running=wanted),
        rung=Rung.SHRINK,
        reason="kv_usage above shrink_above with requests waiting",
        rule=RuleId.KV_USAGE,
    )


def _grow(state: TargetState, view: View, engine: EngineSignals, current: int) -> Decision:
    """A limit that holds nobody back goes; one that binds is raised a step."""
    running = engine.running
    if running is None:
        return _keep(state, "running requests unknown")
    if running < BINDING_RATIO * current:
        return Decision(limit=None, rung=Rung.RESTORE, reason="the limit does not bind", rule=state.rule)
    return ramp(state, view, current, "usage below regrow_below")


def ramp(state: TargetState, view: View, current: int, reason: str) -> Decision:
    """One step of a planned release; past the ceiling the limit goes altogether."""
    wanted = max(current + 1, math.ceil(current * RAMP))
    if view.ceiling is not None and wanted >= view.ceiling:
        return Decision(limit=None, rung=Rung.RESTORE, reason=reason, rule=state.rule)
    return Decision(
        limit=Limit(server=view.server, max_running=wanted), rung=Rung.RESTORE, reason=reason, rule=state.rule
    )
