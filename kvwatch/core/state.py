"""What does the core remember between ticks? What is not in the samples, and nothing that grows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvwatch.control import plan
from kvwatch.control.plan import ControlState
from kvwatch.model.action import ActionResult, Limit, Outcome
from kvwatch.model.level import RuleId
from kvwatch.model.report import Event, TickReport
from kvwatch.model.settings import RuleSettings, Settings
from kvwatch.rules.evaluate import RulesState, complete
from kvwatch.rules.memory import Memory
from kvwatch.rules.views import Inputs
from kvwatch.signals.derive import SignalState

ActionCounts = Mapping[tuple[str, str], int]  # (action, outcome): count


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreState:
    """One tick's memory. `rules` is complete; `last` is the newest report, against which changes are told.

    `patterns` recognise server processes by kind. `seen_limits` are limits that were found in force at
    start. `told` is the newest outcome per limit lane, so that renewals are not logged one by one.
    `inputs` is what rules read last: what has not changed since is not looked at again.
    """

    settings: Settings
    version: str
    patterns: Mapping[str, tuple[str, ...]]
    rules: Mapping[RuleId, RuleSettings]
    seen_limits: tuple[Limit, ...] = ()
    tick: int = 0
    event_seq: int = 0
    signals: SignalState
    levels: RulesState = RulesState()
    memory: Memory = Memory()
    control: ControlState
    actions_total: ActionCounts = field(default_factory=dict)
    told: Mapping[tuple[str, str], tuple[Outcome, Limit | None]] = field(default_factory=dict)
    inputs: Inputs | None = None
    last: TickReport | None = None


def initial(
    settings: Settings,
    *,
    version: str,
    patterns: Mapping[str, tuple[str, ...]],
    seen_limits: Iterable[Limit] = (),
) -> CoreState:
    """Return the state of a fresh start: nothing is known, every level is unknown."""
    return CoreState(
        settings=settings,
        version=version,
        patterns=patterns,
        rules=complete(settings.rules),
        seen_limits=tuple(seen_limits),
        signals=SignalState.initial(),
        control=plan.initial(),
        actions_total=with_zeros({}, settings),
    )


def reconfigure(
    state: CoreState, settings: Settings, *, patterns: Mapping[str, tuple[str, ...]] | None = None
) -> CoreState:
    """Take on new settings; histories, levels and counters of what still exists are kept.

    What the new settings no longer name vanishes with the next tick, since it is no longer read.
    """
    return replace(
        state,
        settings=settings,
        patterns=state.patterns if patterns is None else patterns,
        rules=complete(settings.rules),
        actions_total=with_zeros(state.actions_total, settings),
    )


def numbered(state: CoreState, event: Event) -> tuple[CoreState, Event]:
    """Give an event of the shell's own the next number."""
    seq = state.event_seq + 1
    return replace(state, event_seq=seq), replace(event, seq=seq)


def with_zeros(counts: ActionCounts, settings: Settings) -> ActionCounts:
    """Return counts in which every outcome of every configured action stands, at 0 before its first."""
    actions = {action.kind for target in settings.control.targets for action in target.via}
    actions |= {notify.action.kind for notify in settings.notify}
    zeros = {(action, outcome.value): 0 for action in sorted(actions) for outcome in Outcome}
    return {**zeros, **counts}


def counted(counts: ActionCounts, results: tuple[ActionResult, ...]) -> ActionCounts:
    """Return counts with these results added; the same object where there are none."""
    if not results:
        return counts
    after = dict(counts)
    for result in results:
        key = (result.action, result.outcome.value)
        after[key] = after.get(key, 0) + 1
    return after
