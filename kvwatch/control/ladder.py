"""One target, one tick: hold, shrink, stop admission, restore, within bounds, and each step told. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from kvwatch.control import compaction, fixed, target, threshold
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
BY_USAGE = ("threshold",)


def advance(
    state: TargetState, view: View, mode: Mode, now_s: float, wall_s: float
) -> tuple[TargetState, ActionRequest | None, tuple[PlannedEvent, ...]]:
    """Decide, bound the decision, and hand out at most one request."""
    before = state
    state, judged = _judge(target.lapse(state, now_s), view, now_s)
    state = _follow(state, view, now_s)
    unknown = view.why_not_fresh or _stop_unknown(state, view)
    refused = _refusal(state, view, mode)
    if refused:
        state, decision = target.let_go(state, refused), refused
    elif _restarted(before, view):
        decision = "the server restarted: what was decided before is void"
        state = target.let_go(state, decision, quiet_until_s=now_s + target.QUIET_S)
    elif unknown:
        state, decision = target.expire(state, now_s), f"unknown: {unknown}"
    else:
        state, decision = _decide(state, view, now_s, wall_s)
    void = refused or unknown or (decision if _restarted(before, view) else "")
    state, compacted = compaction.advance(state, view, now_s, refused=void)
    told = _told(before, state, view, decision, mode)
    events = (*_lapsed(before, state, now_s), *judged, *told, *compacted)
    state = replace(state, decision=decision)
    age_s = view.age_s or 0.0
    state, due = target.carry_out(state, now_s, view.evidence(), fresh=not unknown, age_s=age_s)
    return state, due, events


def _follow(state: TargetState, view: View, now_s: float) -> TargetState:
    """Note the server's restarts, and since when the limit has held nobody back."""
    restarts = state.restarts if view.restarts is None else view.restarts
    cap = None if state.limit is None else state.limit.max_running
    binding = None if cap is None or view.engine is None else threshold.binds(view.engine, cap)
    since_s = state.unbound_since_s if state.unbound_since_s is not None else now_s
    return replace(
        state, restarts=restarts, unbound_since_s=since_s if view.fresh and binding is False else None
    )


def _restarted(before: TargetState, view: View) -> bool:
    counted = view.restarts is not None and before.restarts is not None
    return before.limit is not None and counted and (view.restarts or 0) > (before.restarts or 0)


def _stop_unknown(state: TargetState, view: View) -> str:
    """Admission that a rule stopped opens on knowledge, not because the rule can no longer tell."""
    if state.limit is None or state.limit.admit or state.rule is None or view.stopping is not None:
        return ""
    return "" if state.rule in view.known_rules else f"{state.rule.value}, which stopped admission"


def _refusal(state: TargetState, view: View, mode: Mode) -> str:
    """Why this target may not act at all, or ""."""
    settings = state.settings
    if mode is Mode.OBSERVE:
        return "mode observe: nothing is decided"
    if mode is Mode.ACT and settings.policy in COSTLY and not settings.accept_goodput_loss:
        return f"refused: policy {settings.policy} needs accept_goodput_loss: true to act"
    if settings.policy not in POLICIES:
        return f"refused: policy {settings.policy} is not built yet"
    if settings.policy in BY_USAGE and view.misleading:
        return f"refused: policy {settings.policy} goes by the usage, and {view.misleading}"
    if mode is Mode.ACT and settings.ceiling is None and view.fresh and view.ceiling is None:
        return "refused: ceiling auto, but the server does not tell its own limit; set a number"
    return ""


def _decide(state: TargetState, view: View, now_s: float, wall_s: float) -> tuple[TargetState, str]:
    """The policy's wish (or the stop of admission), cut down to what is allowed now."""
    if now_s < state.quiet_until_s:
        return state, "quiet after unknown data"
    wish = _bounded(_wish(state, view, now_s), state, view)
    if wish.limit == state.limit:
        return state, wish.reason
    held = _held(state, wish, view, now_s)
    if held:
        return state, f"{held}; would {_direction(state.limit, wish.limit)}"
    recent = _recent(state, now_s)
    moved = replace(
        state if wish.limit is not None else target.let_go(state, wish.reason),
        limit=wish.limit,
        rung=wish.rung if wish.limit is not None else Rung.HOLD,
        rule=wish.rule,
        reason=wish.reason,
        moved_s=now_s,
        moves=(*recent, now_s) if _tightens(state.limit, wish.limit) else recent,
        since_wall_s=wall_s if state.limit is None else state.since_wall_s,
        unbound_since_s=None,
        before=_figures(view),
        judged=False,
    )
    return moved, f"{_say(wish.limit)}: {wish.reason}"


def _bounded(wish: Decision, state: TargetState, view: View) -> Decision:
    """Never below the floor and never above the ceiling; the server's own limit wins over the floor."""
    if wish.limit is None or wish.limit.max_running is None:
        return wish
    number = max(wish.limit.max_running, state.settings.floor)
    number = number if view.ceiling is None else min(number, view.ceiling)
    return replace(wish, limit=replace(wish.limit, max_running=number))


def _tightens(before: Limit | None, after: Limit | None) -> bool:
    """Whether fewer requests may run or start than before."""
    if after is None or before is None:
        return after is not None
    if before.admit != after.admit:
        return before.admit
    if after.max_running is None or before.max_running is None:
        return after.max_running is not None
    return after.max_running < before.max_running


def _direction(before: Limit | None, after: Limit | None) -> str:
    """What a move would do, without its figures: those change with every page."""
    if after is None:
        return "give the limit back"
    if not after.admit:
        return "stop admission"
    return "tighten" if _tightens(before, after) else "loosen"


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
    return Decision(
        limit=Limit(server=view.server, max_running=max(state.settings.floor, running)),
        rung=Rung.RESTORE,
        reason="the device has room again: opening step by step",
        rule=state.rule,
    )


def _held(state: TargetState, wish: Decision, view: View, now_s: float) -> str:
    """Why a wish has to wait, or "". Stopping admission waits for nothing: the device would not either.

    Only moves that tighten are rationed: a release goes on, a step per cooldown.
    """
    if wish.rung is Rung.STOP_ADMISSION:
        return ""
    if state.pending is not None:
        return "waiting for the last request"
    if state.moved_s is not None:
        if now_s - state.moved_s < state.settings.cooldown_s:
            return "cooldown"
        if view.age_s is None or now_s - view.age_s <= state.moved_s:
            return "no page since the last move"
    if _tightens(state.limit, wish.limit) and len(_recent(state, now_s)) >= state.settings.max_moves:
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


def _lapsed(before: TargetState, after: TargetState, now_s: float) -> tuple[PlannedEvent, ...]:
    """Say that a lease ran out, by itself or because its data is unknown."""
    if before.in_force is None or before.expires_s is None or now_s < before.expires_s:
        return ()
    if not before.in_force.restricts:
        return ()  # it carried a compaction, which is over
    if after.in_force is not None and (before.limit is None or after.limit is not None):
        return ()
    message = f"{before.server}: the limit has run out ({_say(before.in_force)})"
    return (PlannedEvent(kind="lease", message=message, scope=Scope(server=before.server)),)


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


def _unread(state: TargetState, view: View) -> str:
    """A lease is written whether or not anybody reads it; only an agent says that it does."""
    if state.in_force is None or state.dry_run or state.settings.via[state.via].kind != "lease":
        return ""
    return "" if view.inside.obeys else f"; no agent of {view.server} says that it obeys leases"


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
        message=f"{view.server}: what the last move did, {state.settings.cooldown_s:g} s later"
        + _unread(state, view),
        scope=Scope(server=view.server),
        fields=fields,
    )
    return replace(state, judged=True), (event,)
