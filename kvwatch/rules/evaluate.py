"""How bad is everything now? All rules over all scopes, state in and state out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvwatch.model.level import Level, Reason, RuleId, Scope, Verdict
from kvwatch.model.report import TickClock
from kvwatch.model.settings import RuleSettings
from kvwatch.rules import hysteresis, staleness
from kvwatch.rules.hysteresis import LevelState
from kvwatch.rules.shipped import BY_RULE, DEFAULTS, SPECS
from kvwatch.rules.spec import Reading, RuleSpec
from kvwatch.rules.views import Inputs

_SHOWN = {None, Reason.STALE}  # a stale value is not shown, a missing one cannot be


@dataclass(frozen=True, slots=True, kw_only=True)
class RulesState:
    """The level of every rule in every scope; a scope that is no longer read is gone."""

    levels: Mapping[RuleId, Mapping[Scope, LevelState]] = field(default_factory=dict)


def complete(settings: Mapping[RuleId, RuleSettings]) -> dict[RuleId, RuleSettings]:
    """Return settings for every rule, the shipped ones where none are given."""
    return {rule: settings.get(rule, default) for rule, default in DEFAULTS.items()}


def evaluate(state: RulesState, inputs: Inputs) -> tuple[RulesState, tuple[Verdict, ...]]:
    """Advance every rule by one tick. The order of verdicts is that of the table, then of the scopes read."""
    levels: dict[RuleId, dict[Scope, LevelState]] = {}
    verdicts: list[Verdict] = []
    for spec in SPECS:
        settings = inputs.rules[spec.rule]
        before = state.levels.get(spec.rule, {})
        after: dict[Scope, LevelState] = {}
        for reading in spec.read(inputs):
            band = hysteresis.bands(spec, settings, reading.yellow, reading.red)
            start = before.get(reading.scope) or hysteresis.start(inputs.clock)
            moved = _judge(start, reading, inputs.clock, settings, band)
            after[reading.scope] = moved
            verdicts.append(_verdict(spec, reading, moved, band, inputs.clock))
        levels[spec.rule] = after
    return RulesState(levels=levels), tuple(verdicts)


def pages(rule: RuleId) -> bool:
    """Whether red of this rule pages."""
    return BY_RULE[rule].pages


def _judge(
    state: LevelState,
    reading: Reading,
    clock: TickClock,
    settings: RuleSettings,
    band: hysteresis.Bands,
) -> LevelState:
    if not settings.enabled:
        return hysteresis.unknown(state, Reason.DISABLED, clock)
    return staleness.judge(state, reading, clock, settings, band)


def _verdict(
    spec: RuleSpec, reading: Reading, state: LevelState, band: hysteresis.Bands, clock: TickClock
) -> Verdict:
    return Verdict(
        rule=spec.rule,
        scope=reading.scope,
        level=state.level,
        since_s=state.since_s,
        since_wall_s=state.since_wall_s,
        value=reading.value if reading.absent is None else None,
        yellow=band.yellow,
        red=band.red,
        reason=state.reason,
        pages=spec.pages,
        detail=reading.detail,
        seconds_by_level=hysteresis.seconds_by_level(state, clock.mono_s),
    )


def worst(verdicts: tuple[Verdict, ...]) -> Level:
    """Return the worst level among verdicts; UNKNOWN where there are none."""
    return max((verdict.level for verdict in verdicts), default=Level.UNKNOWN)
