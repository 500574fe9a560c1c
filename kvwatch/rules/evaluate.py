"""How bad is everything now? All rules over all scopes, state in and state out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvwatch.model.level import Level, Reason, RuleId, Scope, Verdict
from kvwatch.model.report import TickClock
from kvwatch.model.settings import RuleSettings
from kvwatch.rules import hysteresis, staleness
from kvwatch.rules.hysteresis import Bands, LevelState
from kvwatch.rules.shipped import DEFAULTS, SPECS
from kvwatch.rules.spec import Reading, RuleSpec
from kvwatch.rules.views import Inputs


@dataclass(slots=True, kw_only=True)
class Judged:
    """One rule in one scope: what was read last, under which settings, and where that has led.

    Never changed once made; not frozen only because that makes it slow to make.
    """

    reading: Reading
    settings: RuleSettings
    band: Bands
    state: LevelState
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class RulesState:
    """Every rule's scopes in the order they are read; a scope that is no longer read is gone."""

    judged: Mapping[RuleId, Sequence[Judged]] = field(default_factory=dict)

    def level(self, rule: RuleId, scope: Scope) -> Level:
        """Return the level that a rule had in a scope; UNKNOWN where it had none."""
        found = (each.state.level for each in self.judged.get(rule, ()) if each.reading.scope == scope)
        return next(found, Level.UNKNOWN)


def complete(settings: Mapping[RuleId, RuleSettings]) -> dict[RuleId, RuleSettings]:
    """Return settings for every rule, the shipped ones where none are given."""
    return {rule: settings.get(rule, default) for rule, default in DEFAULTS.items()}


def evaluate(state: RulesState, inputs: Inputs) -> tuple[RulesState, tuple[Verdict, ...]]:
    """Advance every rule by one tick. The order of verdicts is that of the table, then of the scopes read."""
    judged: dict[RuleId, Sequence[Judged]] = {}
    verdicts: list[Verdict] = []
    for spec in SPECS:
        before, settings = state.judged.get(spec.rule, ()), inputs.rules[spec.rule]
        after = []
        for place, reading in enumerate(spec.read(inputs)):
            last = _last(before, place, reading.scope)
            if last is None or last.reading is not reading or not _final(last, settings):
                last = _judge(spec, last, reading, settings, inputs.clock)
            after.append(last)
            verdicts.append(last.verdict)
        judged[spec.rule] = after
    return RulesState(judged=judged), tuple(verdicts)


def _final(last: Judged, settings: RuleSettings) -> bool:
    """Whether judging the very same reading again would change nothing."""
    return last.settings is settings and hysteresis.settled(last.state)


def _last(before: Sequence[Judged], place: int, scope: Scope) -> Judged | None:
    """Find a scope's last state: nearly always where it was."""
    if place < len(before) and before[place].reading.scope is scope:
        return before[place]
    return next((each for each in before if each.reading.scope == scope), None)


def _judge(
    spec: RuleSpec, last: Judged | None, reading: Reading, settings: RuleSettings, clock: TickClock
) -> Judged:
    if last is None:
        band = hysteresis.bands(spec, settings, reading.yellow, reading.red)
        state = hysteresis.start(clock)
    elif last.settings is settings and _same_thresholds(last.reading, reading):
        band, state = last.band, last.state
        if _nothing_new(last, reading, state, band):
            verdict = last.verdict if last.reading == reading else _verdict(spec, reading, band, state)
            return Judged(reading=reading, settings=settings, band=band, state=state, verdict=verdict)
    else:
        band, state = hysteresis.bands(spec, settings, reading.yellow, reading.red), last.state
    if settings.enabled:
        state = staleness.judge(state, reading, clock, settings, band)
    else:
        state = hysteresis.unknown(state, Reason.DISABLED, clock)
    verdict = _verdict(spec, reading, band, state)
    return Judged(reading=reading, settings=settings, band=band, state=state, verdict=verdict)


def _same_thresholds(last: Reading, reading: Reading) -> bool:
    return last.yellow == reading.yellow and last.red == reading.red


def _nothing_new(last: Judged, reading: Reading, state: LevelState, band: Bands) -> bool:
    """Whether judging would lead where it led last time; most readings of most ticks are like that."""
    before = last.reading
    if reading.absent is not None:
        return before.absent is reading.absent and hysteresis.settled(state)
    if before.absent is not None or reading.value is None:
        return False
    if hysteresis.at_rest(state, reading.value, band):
        return True
    same = before.value == reading.value and before.red_allowed == reading.red_allowed
    return same and hysteresis.settled(state)


def _verdict(spec: RuleSpec, reading: Reading, band: Bands, state: LevelState) -> Verdict:
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
        seconds_before=state.seconds_before,
    )
