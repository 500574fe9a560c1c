"""What should change? Signals and verdicts in, limits and requests out; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvwatch.control import ladder, notices, target, view
from kvwatch.control.planned import PlannedEvent
from kvwatch.control.target import TargetState
from kvwatch.model.action import ActionRequest, ActionResult
from kvwatch.model.level import Verdict
from kvwatch.model.report import LimitReport, Snapshot, TickClock
from kvwatch.model.settings import Mode, Settings, TargetSettings
from kvwatch.model.signal import Signals

__all__ = ["ControlState", "Planned", "PlannedEvent", "initial", "plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlState:
    """What control remembers: a state per limited server, and the worst level told per rule and scope."""

    targets: Mapping[str, TargetState] = field(default_factory=dict)
    worst: notices.Worst = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What one tick decided: what is imposed, what is to be done now, what to write down."""

    state: ControlState
    limits: tuple[LimitReport, ...] = ()
    due: tuple[ActionRequest, ...] = ()
    events: tuple[PlannedEvent, ...] = ()


def initial() -> ControlState:
    """Return the state of a fresh start: nothing is imposed, nothing is known."""
    return ControlState()


def plan(
    state: ControlState,
    signals: Signals,
    verdicts: tuple[Verdict, ...],
    snapshot: Snapshot,
    results: tuple[ActionResult, ...],
    settings: Settings,
    clock: TickClock,
) -> Planned:
    """Advance every target by one tick and add the notices that are due."""
    mode = settings.control.mode
    targets = _reconciled(state.targets, settings)
    staying = {found.server: found for found in settings.control.targets}
    kept: dict[str, TargetState] = {}
    due: list[ActionRequest] = []
    events: list[PlannedEvent] = []
    for server, current in targets.items():
        for result in results:
            current = target.absorb(current, result, clock.mono_s)
        if not _as_configured(current, staying.get(server), settings):
            current, request = _leave(current, clock.mono_s)
        else:
            seen = view.look(current.settings, signals, verdicts, snapshot, settings, clock)
            current, request, told = ladder.advance(current, seen, mode, clock.mono_s, clock.wall_s)
            events += told
        if request is not None:
            due.append(request)
        if server in staying or current.holds_something:
            kept[server] = current
    worst, told_of = notices.due(state.worst, verdicts, settings, clock.mono_s)
    due += told_of
    limits = tuple(_report(kept[server], snapshot, clock) for server in kept)
    return Planned(
        state=ControlState(targets=kept, worst=worst), limits=limits, due=tuple(due), events=tuple(events)
    )


def _reconciled(targets: Mapping[str, TargetState], settings: Settings) -> Mapping[str, TargetState]:
    """States for the configured targets. New levers or another mode begin anew, but only after
    the old levers have given back what they hold."""
    found = dict(targets)
    for configured in settings.control.targets:
        current = found.get(configured.server)
        if current is not None and _as_configured(current, configured, settings):
            if current.settings != configured:
                found[configured.server] = replace(current, settings=configured)
        elif current is None or current.dry_run or not current.holds_something:
            fresh = TargetState(settings=configured, dry_run=settings.control.mode is not Mode.ACT)
            if current is not None:
                fresh = replace(fresh, number=current.number, compaction=target.close(current).compaction)
            found[configured.server] = fresh
    return found


def _as_configured(current: TargetState, configured: TargetSettings | None, settings: Settings) -> bool:
    """Whether this state's levers and mode are those of the configuration."""
    if configured is None:
        return False
    return current.settings.via == configured.via and current.dry_run == (
        settings.control.mode is not Mode.ACT
    )


def _leave(current: TargetState, now_s: float) -> tuple[TargetState, ActionRequest | None]:
    """A target that is no longer configured as it was gives everything back."""
    current = target.let_go(target.close(current), "the configuration changed")
    return target.carry_out(current, now_s, {}, fresh=False)


def _report(state: TargetState, snapshot: Snapshot, clock: TickClock) -> LimitReport:
    active = state.in_force if not state.dry_run else None
    expires_wall_s = None
    if active is not None and state.expires_s is not None:
        expires_wall_s = clock.wall_s + (state.expires_s - clock.mono_s)
    return LimitReport(
        server=state.server,
        configured=view.own_limit(state.server, snapshot),
        active=active,
        expires_wall_s=expires_wall_s,
        since_wall_s=state.since_wall_s if state.limit is not None else None,
        imposed_by=f"{state.settings.policy} via {state.settings.via[state.via].kind}",
        reason=state.reason,
        dry_run=state.dry_run,
        would_be=target.wanted(state) if state.dry_run else None,
        wanted=target.wanted(state),
        outstanding=bool(state.touched) and not state.dry_run and not state.self_expiring,
    )
