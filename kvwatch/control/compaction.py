"""When is an allocator asked to return its unused memory, and was that worth it? Pure.

Compacting waits for the device and makes the next allocations dearer, so it is asked for only where the
device runs short, only for an amount that matters, rarely, and ever more rarely while it does not help.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from kvwatch.control.planned import PlannedEvent
from kvwatch.control.ranks import Compaction, Inside, Rank
from kvwatch.control.target import TargetState, carries_compactions
from kvwatch.control.view import View
from kvwatch.model.level import Level, Reason, RuleId, Scope, Verdict
from kvwatch.model.settings import MIB

# What the returned memory must come to on one GPU. It is the red of `device_headroom`: less would not lift
# a device off red by itself (vllm#5907 and its kin: out of memory with 218 MiB free and 304 MiB wanted).
LEAST_BYTES = 512 * MIB
# The agent itself compacts once a minute at most.
SPACING_S = 60.0
# Requests that brought little wait twice as long each time, up to this. A convention.
LONGEST_WAIT_S = 3600.0
# At least this share of what was claimed must come back. A convention: less means that the figures were
# old or that the server took it again at once.
ENOUGH_RATIO = 0.5
# An agent looks at the lease at every step and tells once a second; a long prefill is a step of seconds.
JUDGED_AFTER_S = 15.0
_SHORT = (RuleId.DEVICE_HEADROOM, RuleId.LARGEST_ALLOCATABLE)
_NOW = (Reason.CROSSED, Reason.CAPPED)  # not held, pending or stale: it is so at this moment

Told = tuple[PlannedEvent, ...]


def advance(state: TargetState, view: View, now_s: float, *, refused: str) -> tuple[TargetState, Told]:
    """Judge what was asked, and ask again where it is needed. `refused`: why nothing may be asked now."""
    told: Told = ()
    if state.compaction.asked_s is not None:
        state, told = _judged(state, view.inside, now_s)
    if not state.settings.compact or refused:
        return replace(state, compaction=replace(state.compaction, offered=False)), told
    return _asked(state, view, now_s, told)


def _asked(state: TargetState, view: View, now_s: float, told: Told) -> tuple[TargetState, Told]:
    done = state.compaction
    needs = list(_needs(view))
    offer = _offer(view) if not needs and done.asked_s is None else None
    if not needs:
        state = replace(state, compaction=replace(done, offered=offer is not None))
        return state, told if offer is None or done.offered else (*told, offer)
    if not _may(state, now_s):
        return state, told
    verdict = needs[0][0]
    before = tuple({rank.key: rank for _, rank in needs}.values())
    claimed = sum(rank.releasable_bytes for rank in before)
    reason = (
        f"compact: {verdict.rule.value} is {verdict.level.name.lower()}, and the allocator can return memory"
    )
    fields = {"claimed_bytes": claimed, "ranks": len(before), "value": verdict.value, "taken": True}
    asked = Compaction(
        # Above every number that an earlier daemon of this boot has used, as a lease's own number is:
        # a reader takes only growth for a request.
        count=done.count + 1 if done.count else max(1, int(now_s)),
        asked_s=now_s,
        next_s=now_s + (done.wait_s or SPACING_S),
        wait_s=done.wait_s or SPACING_S,
        before=before,
        reason=reason,
        rule=verdict.rule,
    )
    return replace(state, compaction=asked), (*told, _event(state, reason, verdict.rule, fields))


def _may(state: TargetState, now_s: float) -> bool:
    """Whether a request can go out now, on the lever that carries it, and long enough after the last."""
    return (
        state.compaction.asked_s is None
        and now_s >= state.compaction.next_s
        and now_s >= state.quiet_until_s
        and state.pending is None
        and now_s >= state.retry_at_s
        and carries_compactions(state)
    )


def _needs(view: View) -> Iterator[tuple[Verdict, Rank]]:
    """Ranks whose device is short now, and which can return enough; never more than rules have judged."""
    if not view.inside.obeys:
        return
    for rank in view.inside.ranks.values():
        if rank.releasable_bytes < LEAST_BYTES or not _is_judged(view, rank):
            continue
        for verdict in view.device:
            if verdict.rule in _SHORT and _is_short(verdict) and _is_about(verdict, view.server, rank):
                yield verdict, rank
                break


def _is_short(verdict: Verdict) -> bool:
    return verdict.level >= Level.YELLOW and verdict.reason in _NOW


def _is_about(verdict: Verdict, server: str, rank: Rank) -> bool:
    scope = verdict.scope
    if scope.server:
        return (scope.server, scope.engine, scope.uuid) == (server, rank.engine, rank.uuid)
    return bool(scope.uuid) and scope.uuid == rank.uuid


def _is_judged(view: View, rank: Rank) -> bool:
    """Whether the agent's own rule is current for it: two samples since its start, none of them old."""
    return any(
        verdict.rule is RuleId.LARGEST_ALLOCATABLE and _is_about(verdict, view.server, rank)
        for verdict in view.device
    )


def _offer(view: View) -> PlannedEvent | None:
    """`allocator_fragmentation` is a ticket that offers to compact: told once, asked for only in need."""
    for verdict in view.fragmented:
        able = [
            rank
            for rank in view.inside.ranks.values()
            if rank.releasable_bytes >= LEAST_BYTES and _is_about(verdict, view.server, rank)
        ]
        if able and _is_short(verdict):
            message = f"{view.server}: could compact: {verdict.rule.value} is yellow; nothing needs it now"
            fields = {"claimed_bytes": sum(rank.releasable_bytes for rank in able), "taken": False}
            scope = Scope(server=view.server)
            return PlannedEvent(
                kind="decision", message=message, rule=verdict.rule.value, scope=scope, fields=fields
            )
    return None


def _judged(state: TargetState, inside: Inside, now_s: float) -> tuple[TargetState, Told]:
    """Once every claimed rank has compacted, or the time is up: what came back, at what cost."""
    asked = state.compaction
    pairs = [(rank, inside.ranks.get(rank.key)) for rank in asked.before]
    done = [
        (was, now)
        for was, now in pairs
        if now is not None and now.pid == was.pid and now.compactions_total > was.compactions_total
    ]
    if len(done) < len(pairs) and now_s - (asked.asked_s or 0.0) < JUDGED_AFTER_S:
        return state, ()
    claimed = sum(was.releasable_bytes for was, _ in pairs)
    returned = sum(max(0, was.reserved_bytes - now.reserved_bytes) for was, now in done)
    enough = returned >= ENOUGH_RATIO * claimed
    wait_s = SPACING_S if enough else min(LONGEST_WAIT_S, 2.0 * asked.wait_s)
    fields = {
        "claimed_bytes": claimed,
        "returned_bytes": returned,
        "cost_s": round(sum(now.compact_seconds_total - was.compact_seconds_total for was, now in done), 3),
        "ranks": len(pairs),
        "compacted": len(done),
        "next_in_s": max(0.0, round((asked.asked_s or 0.0) + wait_s - now_s, 1)),
    }
    text = "brought enough" if enough else f"brought too little: not again for {wait_s:g} s"
    closed = replace(asked, asked_s=None, before=(), wait_s=wait_s, next_s=(asked.asked_s or 0.0) + wait_s)
    event = _event(state, f"compact: {text}", asked.rule, fields)
    return replace(state, compaction=closed), (event,)


def _event(state: TargetState, text: str, rule: RuleId | None, fields: Mapping[str, object]) -> PlannedEvent:
    advice = " (advice only)" if state.dry_run else ""
    return PlannedEvent(
        kind="decision",
        message=f"{state.server}: {text}{advice}",
        rule="" if rule is None else rule.value,
        scope=Scope(server=state.server),
        fields=fields,
    )
