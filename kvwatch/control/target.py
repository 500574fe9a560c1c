"""State of one target, and the requests that carry its limit out: leases, retries, give-backs. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvwatch.model.action import ActionRequest, ActionResult, EventKind, Limit, Outcome
from kvwatch.model.level import Level, RuleId, Scope
from kvwatch.model.settings import ActionSettings, TargetSettings

# After a limit ended because its data went unknown, nothing is imposed for this long (the contract).
QUIET_S = 120.0
# A lease is renewed this many times in its length, so that one lost renewal does not end it.
RENEWALS = 3
RETRY_FIRST_S = 2.0
RETRY_LONGEST_S = 60.0
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
    renewal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetState:
    """One target between two ticks. Times are monotonic seconds.

    `limit` is what should be in force, `in_force` what the lever confirmed. `touched` are the
    levers that may hold something of ours; each is given back before the target is done.
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
    moves: tuple[float, ...] = ()
    quiet_until_s: float = 0.0
    retry_at_s: float = 0.0
    failures: int = 0
    since_wall_s: float | None = None
    reason: str = ""
    rule: RuleId | None = None
    decision: str = ""  # the last decision that was logged, so that only changes are
    before: Mapping[str, float] = field(default_factory=dict)  # figures at the last move, to judge it by
    judged: bool = True
    number: int = 0  # of the next request

    @property
    def server(self) -> str:
        """The server this target limits."""
        return self.settings.server

    @property
    def holds_something(self) -> bool:
        """Whether anything of ours may be in force."""
        return self.in_force is not None or bool(self.touched) or self.pending is not None


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
        return replace(state, touched=touched, in_force=None if not touched else state.in_force)
    expires_s = result.started_s + state.settings.lease_s
    return replace(
        state,
        in_force=pending.limit,
        expires_s=expires_s,
        self_expiring=result.self_expiring or state.dry_run,
    )


def _failed(state: TargetState, pending: Pending, result: ActionResult, now_s: float) -> TargetState:
    """Try the next lever at once; when none is left, begin again after a growing pause."""
    if pending.event is EventKind.LIMIT and result.step + 1 < len(state.settings.via):
        return replace(state, via=result.step + 1)
    pause_s = min(RETRY_FIRST_S * 2.0 ** min(state.failures, 10), RETRY_LONGEST_S)
    return replace(
        state,
        via=0 if pending.event is EventKind.LIMIT else state.via,
        failures=state.failures + 1,
        retry_at_s=now_s + pause_s,
    )


def request(
    state: TargetState,
    *,
    event: EventKind,
    limit: Limit,
    now_s: float,
    step: int,
    evidence: Mapping[str, object],
    renewal: bool = False,
) -> tuple[TargetState, ActionRequest]:
    """Hand out one request and remember that it is out.

    Numbers are unique within a process; the limit is absolute, so a lost answer does no harm.
    """
    action: ActionSettings = state.settings.via[step]
    made = ActionRequest(
        request_id=f"{state.server}-{int(now_s * 1000)}-{state.number}",
        target=f"limit/{state.server}",
        action=action.kind,
        params=action.params,
        event=event,
        rule=state.rule,
        scope=Scope(server=state.server),
        level=Level.UNKNOWN,
        limit=limit,
        expires_in_s=state.settings.lease_s if event is EventKind.LIMIT else None,
        deadline_s=deadline_s(action),
        reason=state.reason,
        evidence=evidence,
        decided_s=now_s,
        dry_run=state.dry_run,
        step=step,
    )
    touched = state.touched
    if event is EventKind.LIMIT and not state.dry_run and step not in touched:
        touched = (*touched, step)
    pending = Pending(request_id=made.request_id, event=event, limit=limit, renewal=renewal)
    state = replace(
        state,
        pending=pending,
        number=state.number + 1,
        touched=touched,
        renewed_s=now_s if event is EventKind.LIMIT else state.renewed_s,
    )
    return state, made


def deadline_s(action: ActionSettings) -> float:
    """How long one attempt may take: the action's own `deadline`, else the hook contract's default."""
    told = action.params.get("deadline_s")
    return float(told) if isinstance(told, int | float) else HOOK_DEADLINE_S


def carry_out(
    state: TargetState, now_s: float, evidence: Mapping[str, object], *, fresh: bool
) -> tuple[TargetState, ActionRequest | None]:
    """The one request, if any, that brings what is in force to what should be.

    Limits are only imposed and renewed on fresh input; giving back needs none.
    """
    if state.pending is not None or now_s < state.retry_at_s:
        return state, None
    if state.limit is None:
        return _give_back(state, now_s, evidence)
    if not fresh:
        return state, None
    renewal = state.limit == state.in_force
    if renewal and not _renewal_due(state, now_s):
        return _extended(state, now_s), None
    return request(
        state,
        event=EventKind.LIMIT,
        limit=state.limit,
        now_s=now_s,
        step=state.via,
        evidence=evidence,
        renewal=renewal,
    )


def _renewal_due(state: TargetState, now_s: float) -> bool:
    """A lease is renewed well within its length; a lever that keeps what it was told is only told
    again now and then, in case it was restarted and has forgotten."""
    settings = state.settings
    every_s = (
        settings.lease_s / RENEWALS if state.self_expiring else max(settings.lease_s, settings.cooldown_s)
    )
    return state.renewed_s is None or now_s - state.renewed_s >= every_s


def _extended(state: TargetState, now_s: float) -> TargetState:
    """Fresh data prolongs what a lever without an end of its own may go on holding."""
    if state.self_expiring:
        return state
    return replace(state, expires_s=now_s + state.settings.lease_s)


def _give_back(
    state: TargetState, now_s: float, evidence: Mapping[str, object]
) -> tuple[TargetState, ActionRequest | None]:
    if state.dry_run:
        return replace(state, in_force=None, touched=(), expires_s=None), None
    if not state.touched:
        return replace(state, in_force=None, expires_s=None), None
    return request(
        state,
        event=EventKind.RESTORE,
        limit=Limit(server=state.server),
        now_s=now_s,
        step=state.touched[0],
        evidence=evidence,
    )


def expire(state: TargetState, now_s: float) -> TargetState:
    """End a limit on unknown data once its time has passed, and one that was never confirmed at once.

    Nothing is imposed for a while afterwards.
    """
    if state.limit is None or (state.expires_s is not None and now_s < state.expires_s):
        return state
    return replace(
        state,
        limit=None,
        rung=Rung.HOLD,
        quiet_until_s=now_s + QUIET_S,
        reason="expired",
        judged=True,
    )
