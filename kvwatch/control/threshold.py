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
# A limit that has held nobody back for this long, and with nobody waiting, goes altogether.
UNBOUND_S = 60.0


def decide(state: TargetState, view: View, now_s: float) -> Decision:
    """The next limit from usage, queue and what is imposed now."""
    engine = view.engine
    if engine is None or engine.kv_usage_ratio is None:
        return _keep(state, "usage unknown")
    if engine.running is None:
        return _keep(state, "running requests unknown")
    params = state.settings.params
    current = None if state.limit is None else state.limit.max_running
    if engine.kv_usage_ratio > params["shrink_above"] and (engine.waiting or 0) > 0:
        return _shrink(state, view, engine.running, current)
    if current is not None and engine.kv_usage_ratio < params["regrow_below"]:
        return _grow(state, view, current, now_s)
    return _keep(state, "between the bounds")


def binds(engine: EngineSignals, limit: int) -> bool | None:
    """Whether a limit holds anybody back: enough run, or somebody waits. None: not known."""
    if engine.running is None:
        return None
    return engine.running >= BINDING_RATIO * limit or (engine.waiting or 0) > 0


def step_up(current: int) -> int:
    """One step of a planned release."""
    return max(current + 1, math.floor(current * RAMP))


def _keep(state: TargetState, reason: str) -> Decision:
    return Decision(limit=state.limit, rung=state.rung, reason=reason, rule=state.rule)


def _shrink(state: TargetState, view: View, running: int, current: int | None) -> Decision:
    """max(floor, ⌊factor × running⌋), never above the present limit (the ladder adds the ceiling)."""
    if current is not None and running > current:
        return _keep(state, "the last move has not taken effect yet")
    wanted = max(state.settings.floor, math.floor(state.settings.params["factor"] * running))
    if current is not None and wanted >= current:
        return _keep(state, "as low as it may be")
    return Decision(
        limit=Limit(server=view.server, max_running=wanted),
        rung=Rung.SHRINK,
        reason="kv_usage above shrink_above with requests waiting",
        rule=RuleId.KV_USAGE,
    )


def _grow(state: TargetState, view: View, current: int, now_s: float) -> Decision:
    """A limit that binds is raised a step, at the ceiling given back; one that does not stays, and in
    the end goes: nobody is behind it."""
    since_s = state.unbound_since_s
    if since_s is not None:
        if now_s - since_s >= max(UNBOUND_S, state.settings.cooldown_s):
            return Decision(limit=None, rung=Rung.RESTORE, reason="the limit does not bind", rule=state.rule)
        return _keep(state, "no growth: the limit does not bind")
    running = view.engine.running if view.engine is not None else None
    if running is None or running < BINDING_RATIO * current:
        return _keep(state, "no growth: the limit does not bind")
    reason = "usage below regrow_below"
    if view.ceiling is not None and current >= view.ceiling:
        return Decision(limit=None, rung=Rung.RESTORE, reason=reason, rule=state.rule)
    limit = Limit(server=view.server, max_running=step_up(current))
    return Decision(limit=limit, rung=Rung.RESTORE, reason=reason, rule=state.rule)
