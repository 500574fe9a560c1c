"""One target, one tick: hold, shrink, stop admission, restore, within bounds, and each step told. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from kvwatch.control import fixed, target, threshold
from kvwatch.control.planned import PlannedEvent
from kvwatch.control.target import Rung, TargetState
from kvwatch.control.view import Decision, View
from kvwatch.model.action import ActionRequest, Limit
from kvwatch.model.level import Scope
from kvwatch.model.settings import Mode

Policy = Callable[[TargetState, View, float], Decision]
POLICIES: Mapping[str, Policy] = {"fixed": fixed.decide, "threshold": threshold.decide}
# Policies that can cost throughput: without the operator's consent they advise but never act.
COSTLY = ("threshold", "aimd")


def advance(
    state: TargetState, view: View, mode: Mode, now_s: float, wall_s: float
) -> tuple[TargetState, ActionRequest | None, tuple[PlannedEvent, ...]]:
    """Decide, bound the decision, and hand out at most one request."""
    before = state
    refused = _refusal(state, view, mode)
    if refused:
        state = _let_go(state, refused)
        decision = refused
    elif not view.fresh:
        state = target.expire(state, now_s)
        decision = f"unknown: {view.why_not_fresh}"
    else:
        state, decision = _decide(state, view, now_s, wall_s)
    events = _told(before, state, view, decision, mode)
    state = replace(state, decision=decision)
    state, judged = _judge(state, view, now_s)
    state, due = target.carry_out(state, now_s, view.evidence(), fresh=view.fresh)
    return state, due, (*events, *judged)


def _refusal(state: TargetState, view: View, mode: Mode) -> str:
    """Why this target may not act at all, or ""."""
    settings = state.settings
    if mode is Mode.OBSERVE:
        return "mode observe: nothing is decided"
    if mode is Mode.ACT and settings.policy in COSTLY and not settings.accept_goodput_loss:
        return f"refused: policy {settings.policy} needs accept_goodput_loss: true to act"
    if settings.policy not in POLICIES:
        return f"refused: policy {settings.policy} is not built yet"
    if mode is Mode.ACT and settings.ceiling is None and view.fresh and view.ceiling is None:
        return "refused: ceiling auto, but the server does not tell its own limit; set a number"
    return ""


def _let_go(state: TargetState, reason: str) -> TargetState:
    """Whatever was imposed is given back: no rule of this target holds any more."""
    if state.limit is None:
        return state
    return replace(state, limit=None, rung=Rung.HOLD, reason=reason, judged=True)


def _decide(state: TargetState, view: View, now_s: float, wall_s: float) -> tuple[TargetState, str]:
    """The policy's wish (or the stop of admission), cut down to what is allowed now."""
    if now_s < state.quiet_until_s:
        return state, "quiet after unknown data"
    wish = _wish(state, view, now_s)
    if wish.limit == state.limit:
        return state, wish.reason
    held = _held(state, wish, now_s)
    if held:
        return state, f"{held}; would {_say(wish.limit)}"
    moves = (*_recent(state, now_s), now_s)
    state = replace(
        state,
        limit=wish.limit,
        rung=wish.rung if wish.limit is not None else Rung.HOLD,
        rule=wish.rule,
        reason=wish.reason,
        moved_s=now_s,
        moves=moves,
        since_wall_s=wall_s if state.limit is None else state.since_wall_s,
        before=_figures(view),
        judged=False,
    )
    return state, f"{_say(wish.limit)}: {wish.reason}"


def _wish(state: TargetState, view: View, now_s: float) -> Decision:
    """Stopping admission comes before every policy; opening again is a planned release."""
    if view.stopping is not None:
        running = state.limit.max_running if state.limit is not None else None
        return Decision(
            limit=Limit(server=view.server, max_running=running, admit=False),
            rung=Rung.STOP_ADMISSION,
            reason=f"{view.stopping.rule.value} is red: no new request may start",
            rule=view.stopping.rule,
        )
    if state.limit is not None and not state.limit.admit:
        return _reopen(state, view)
    return POLICIES[state.settings.policy](state, view, now_s)


def _reopen(state: TargetState, view: View) -> Decision:
    """Admission opens at what runs now (at least the floor), not at once for the whole queue."""
    running = (view.engine.running if view.engine is not None else None) or 0
    wanted = max(state.settings.floor, running)
    if view.ceiling is not None:
        wanted = min(wanted, view.ceiling)
    return Decision(
        limit=Limit(server=view.server, max_running=wanted),
        rung=Rung.RESTORE,
        reason="the device has room again: opening step by step",
        rule=state.rule,
    )


def _held(state: TargetState, wish: Decision, now_s: float) -> str:
    """Why a wish has to wait, or "". Stopping admission waits for nothing: the device would not either."""
    if wish.rung is Rung.STOP_ADMISSION:
        return ""
    if state.pending is not None:
        return "waiting for the last request"
    if state.moved_s is not None and now_s - state.moved_s < state.settings.cooldown_s:
        return "cooldown"
    if wish.limit is not None and len(_recent(state, now_s)) >= state.settings.max_moves:
        return f"{state.settings.max_moves} moves in {state.settings.moves_window_s:g} s already"
    return ""


def _recent(state: TargetState, now_s: float) -> tuple[float, ...]:
    return tuple(at_s for at_s in state.moves if now_s - at_s < state.settings.moves_window_s)


def _say(limit: Limit | None) -> str:
    if limit is None:
        return "give the limit back"
    parts = [] if limit.max_running is None else [f"limit running to {limit.max_running}"]
    if not limit.admit:
        parts.append("stop admission")
    return " and ".join(parts) or "no limit"


def _told(
    before: TargetState, after: TargetState, view: View, decision: str, mode: Mode
) -> tuple[PlannedEvent, ...]:
    """One event per changed decision, taken or not, with the evidence it stands on."""
    if decision == before.decision:
        return ()
    taken = before.limit != after.limit
    advice = " (advice only)" if taken and mode is Mode.ADVISE else ""
    event = PlannedEvent(
        kind="decision",
        message=f"{view.server}: {decision}{advice}",
        rule=after.rule.value if after.rule else "",
        scope=Scope(server=view.server),
        fields={
            **view.evidence(),
            "taken": taken,
            "mode": mode.value,
            "policy": after.settings.policy,
            "rung": after.rung.value,
            "limit_before": None if before.limit is None else before.limit.max_running,
            "limit_after": None if after.limit is None else after.limit.max_running,
            "admit": after.limit is None or after.limit.admit,
        },
    )
    return (event,)


def _figures(view: View) -> Mapping[str, float]:
    """What a move is judged by later."""
    names = ("kv_usage_ratio", "running", "waiting", "generation_tokens_per_s", "queue_p95_s", "ttft_p95_s")
    return {name: value for name in names if isinstance(value := view.evidence().get(name), int | float)}


def _judge(state: TargetState, view: View, now_s: float) -> tuple[TargetState, tuple[PlannedEvent, ...]]:
    """After the cooldown, say what the last move did and what it cost."""
    if state.judged or state.moved_s is None or not view.fresh:
        return state, ()
    if now_s - state.moved_s < state.settings.cooldown_s:
        return state, ()
    after = _figures(view)
    fields: dict[str, object] = {}
    for name in sorted(set(state.before) & set(after)):
        fields[f"{name}_before"] = state.before[name]
        fields[f"{name}_after"] = after[name]
    event = PlannedEvent(
        kind="decision",
        message=f"{view.server}: what the last move did, {state.settings.cooldown_s:g} s later",
        scope=Scope(server=view.server),
        fields=fields,
    )
    return replace(state, judged=True), (event,)
