"""State of one target, and the requests that carry its limit out: leases, retries, give-backs. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvwatch.control.ranks import Compaction
from kvwatch.model.action import ActionRequest, ActionResult, EventKind, Limit, Outcome
from kvwatch.model.level import Level, RuleId, Scope
from kvwatch.model.settings import ActionSettings, TargetSettings

# After a limit ended because its data went unknown, nothing is imposed for this long (the contract).
QUIET_S = 120.0
# A lease is renewed this many times in its length, so that one lost renewal does not end it. Levers
# without an end of their own are told as often: they may have been restarted and have forgotten.
RENEWALS = 3
RETRY_FIRST_S = 2.0
RETRY_LONGEST_S = 60.0
# A lever that failed may hold something all the same; it is given back this often until it succeeds.
STRAY_RETRY_S = 60.0
HOOK_DEADLINE_S = 5.0
_GOOD = (Outcome.APPLIED, Outcome.NOOP, Outcome.DRY_RUN)


class Rung(enum.StrEnum):
    """Where a target stands on its ladder."""

    HOLD = "hold"
    SHRINK = "shrink"
    STOP_ADMISSION = "stop_admission"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A request that has been handed out and not come back."""

    request_id: str
    event: EventKind
    limit: Limit
    expires_in_s: float | None = None
    renewal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetState:
    """One target between two ticks. Times are monotonic seconds.

    `limit` is what should be in force, `in_force` what the lever confirmed. `touched` are the
    levers that may hold something of ours; each is given back before the target is done.
    `unbound_since_s` is since when the limit has held nobody back. `restarts` is the server's count.
    """

    settings: TargetSettings
    rung: Rung = Rung.HOLD
    limit: Limit | None = None
    in_force: Limit | None = None
    dry_run: bool = False
    via: int = 0
    touched: tuple[int, ...] = ()
    pending: Pending | None = None
    expires_s: float | None = None
    renewed_s: float | None = None
    self_expiring: bool = True  # of the lever in use, as its last result said
    moved_s: float | None = None
    moves: tuple[float, ...] = ()  # times of the moves that tightened
    quiet_until_s: float = 0.0
    retry_at_s: float = 0.0
    failures: int = 0
    stray_at_s: float = 0.0
    unbound_since_s: float | None = None
    restarts: int | None = None
    since_wall_s: float | None = None
    reason: str = ""
    rule: RuleId | None = None
    decision: str = ""  # the last decision that was logged, so that only changes are
    before: Mapping[str, float] = field(default_factory=dict)  # figures at the last move, to judge it by
    judged: bool = True
    compaction: Compaction = Compaction()
    number: int = 0  # of the next request

    @property
    def server(self) -> str:
        """The server this target limits."""
        return self.settings.server

    @property
    def holds_something(self) -> bool:
        """Whether anything of ours may be in force."""
        return self.in_force is not None or bool(self.touched) or self.pending is not None


def wanted(state: TargetState) -> Limit | None:
    """What the lever should carry now: the limit, and the counter of compactions with it.

    While the effect of a compaction is waited for, that counter alone is reason enough for a lease.
    """
    count = state.compaction.count if carries_compactions(state) else 0
    if state.limit is not None:
        return replace(state.limit, compact=count) if count else state.limit
    return (
        Limit(server=state.server, compact=count) if count and state.compaction.asked_s is not None else None
    )


def carries_compactions(state: TargetState) -> bool:
    """Whether the lever in use is one that tells the server to compact."""
    return state.settings.via[state.via].kind == "lease"


def close(state: TargetState) -> TargetState:
    """Wait for no effect of a compaction any more: what was asked is void."""
    return replace(state, compaction=replace(state.compaction, asked_s=None, before=()))


def let_go(state: TargetState, reason: str, *, quiet_until_s: float | None = None) -> TargetState:
    """Want no limit any more. Giving back starts at once, whatever pause a failed limit had earned."""
    if state.limit is None:
        return state
    return replace(
        state,
        limit=None,
        rung=Rung.HOLD,
        reason=reason,
        judged=True,
        retry_at_s=0.0,
        failures=0,
        unbound_since_s=None,
        quiet_until_s=state.quiet_until_s if quiet_until_s is None else quiet_until_s,
    )


def expire(state: TargetState, now_s: float) -> TargetState:
    """End a limit on unknown data once its time has passed, and one that was never confirmed at once.

    Nothing is imposed for a while afterwards.
    """
    if state.expires_s is not None and now_s < state.expires_s:
        return state
    return let_go(state, "expired: its data is unknown", quiet_until_s=now_s + QUIET_S)


def lapse(state: TargetState, now_s: float) -> TargetState:
    """A lease that was not renewed in time has ended by itself: it is no longer in force."""
    if not state.self_expiring or state.in_force is None or state.expires_s is None:
        return state
    return replace(state, in_force=None) if now_s >= state.expires_s else state


def absorb(state: TargetState, result: ActionResult, now_s: float) -> TargetState:
    """Take in what came of the pending request; results of other requests change nothing."""
    pending = state.pending
    if pending is None or pending.request_id != result.request_id:
        return state
    state = replace(state, pending=None)
    if result.outcome is Outcome.SKIPPED_RECOVERED:
        return state
    if result.outcome in _GOOD:
        return _succeeded(state, pending, result)
    return _failed(state, pending, result, now_s)


def _succeeded(state: TargetState, pending: Pending, result: ActionResult) -> TargetState:
    state = replace(state, failures=0, retry_at_s=0.0)
    if pending.event is EventKind.RESTORE:
        touched = tuple(step for step in state.touched if step != result.step)
        in_force = None if result.step == state.via or not touched else state.in_force
        return replace(state, touched=touched, in_force=in_force)
    return replace(
        state,
        in_force=pending.limit,
        expires_s=result.started_s + (pending.expires_in_s or 0.0),
        self_expiring=result.self_expiring,
    )


def _failed(state: TargetState, pending: Pending, result: ActionResult, now_s: float) -> TargetState:
    """Try the next lever at once; when none is left, begin again after a growing pause.

    A renewal that still has time is first tried again on its own lever: one hiccup moves no second one.
    """
    if pending.event is EventKind.RESTORE:
        return _restore_failed(state, result, now_s)
    if not pending.limit.restricts:
        return close(state)  # a compaction alone is worth no other lever and no retry
    paused = _paused(state, now_s)
    if pending.renewal and state.expires_s is not None and paused.retry_at_s < state.expires_s:
        return paused
    if result.step + 1 < len(state.settings.via):
        return replace(state, via=result.step + 1)
    return replace(paused, via=0)


def _restore_failed(state: TargetState, result: ActionResult, now_s: float) -> TargetState:
    """The others are given back first. A stray's failure does not hold up the limit that stands."""
    others = tuple(step for step in state.touched if step != result.step)
    state = replace(state, touched=(*others, result.step))
    if state.limit is not None:
        return state
    return _paused(state, now_s)


def _paused(state: TargetState, now_s: float) -> TargetState:
    """Nothing is tried for a while: twice as long after each failure."""
    pause_s = min(RETRY_FIRST_S * 2.0 ** min(state.failures, 10), RETRY_LONGEST_S)
    return replace(state, failures=state.failures + 1, retry_at_s=now_s + pause_s)


def request(
    state: TargetState,
    *,
    event: EventKind,
    limit: Limit,
    now_s: float,
    step: int,
    evidence: Mapping[str, object],
    expires_in_s: float | None = None,
    renewal: bool = False,
) -> tuple[TargetState, ActionRequest]:
    """Hand out one request and remember that it is out.

    Numbers are unique within a process; the limit is absolute, so a lost answer does no harm.
    """
    action: ActionSettings = state.settings.via[step]
    why: TargetState | Compaction = state if limit.restricts or not limit.compact else state.compaction
    made = ActionRequest(
        request_id=f"{state.server}-{int(now_s * 1000)}-{state.number}",
        target=f"limit/{state.server}",
        action=action.kind,
        params=action.params,
        event=event,
        rule=why.rule,
        scope=Scope(server=state.server),
        level=Level.UNKNOWN,
        limit=limit,
        expires_in_s=expires_in_s,
        deadline_s=deadline_s(action),
        reason=why.reason,
        evidence=evidence,
        decided_s=now_s,
        dry_run=state.dry_run,
        step=step,
    )
    pending = Pending(
        request_id=made.request_id, event=event, limit=limit, expires_in_s=expires_in_s, renewal=renewal
    )
    return _sent(state, pending, step, now_s), made


def _sent(state: TargetState, pending: Pending, step: int, now_s: float) -> TargetState:
    imposing = pending.event is EventKind.LIMIT
    return replace(
        state,
        pending=pending,
        number=state.number + 1,
        touched=(*state.touched, step) if imposing and step not in state.touched else state.touched,
        renewed_s=now_s if imposing else state.renewed_s,
    )


def deadline_s(action: ActionSettings) -> float:
    """How long one attempt may take: the action's own `deadline`, else the hook contract's default."""
    told = action.params.get("deadline_s")
    return float(told) if isinstance(told, int | float) else HOOK_DEADLINE_S


def carry_out(
    state: TargetState, now_s: float, evidence: Mapping[str, object], *, fresh: bool, age_s: float = 0.0
) -> tuple[TargetState, ActionRequest | None]:
    """The one request, if any, that brings what is in force to what should be.

    Limits are only imposed and renewed on fresh input, `age_s` old; giving back needs none.
    """
    if state.pending is not None or now_s < state.retry_at_s:
        return state, None
    asked = wanted(state)
    if asked is None:
        return _give_back(state, now_s, evidence)
    if not fresh:
        return state, None
    if asked == state.in_force and not _renewal_due(state, now_s):
        return _give_back_stray(state, now_s, evidence)
    renewal = state.in_force is not None and replace(state.in_force, compact=asked.compact) == asked
    return request(
        state,
        event=EventKind.LIMIT,
        limit=asked,
        now_s=now_s,
        step=state.via,
        evidence=evidence,
        expires_in_s=_lease_s(state, age_s),
        renewal=renewal,
    )


def _lease_s(state: TargetState, age_s: float) -> float:
    """A limit ends a lease after the page it stands on, not after the request: data that is lost at once
    is outlived by no more than that. Half a lease is kept for servers that are polled very slowly."""
    lease_s = state.settings.lease_s
    return round(max(lease_s - age_s, lease_s / 2), 3)


def _renewal_due(state: TargetState, now_s: float) -> bool:
    return state.renewed_s is None or now_s - state.renewed_s >= state.settings.lease_s / RENEWALS


def _give_back(
    state: TargetState, now_s: float, evidence: Mapping[str, object]
) -> tuple[TargetState, ActionRequest | None]:
    if not state.touched:
        return replace(state, in_force=None, expires_s=None, via=0), None
    return _restore(state, state.touched[0], now_s, evidence)


def _give_back_stray(
    state: TargetState, now_s: float, evidence: Mapping[str, object]
) -> tuple[TargetState, ActionRequest | None]:
    """A lever that failed before another one worked may hold an older, lower limit: only one may limit."""
    stray = next((step for step in state.touched if step != state.via), None)
    if stray is None or now_s < state.stray_at_s:
        return state, None
    return _restore(replace(state, stray_at_s=now_s + STRAY_RETRY_S), stray, now_s, evidence)


def _restore(
    state: TargetState, step: int, now_s: float, evidence: Mapping[str, object]
) -> tuple[TargetState, ActionRequest]:
    nothing = Limit(server=state.server)
    return request(state, event=EventKind.RESTORE, limit=nothing, now_s=now_s, step=step, evidence=evidence)
