"""All rules at once: shortcuts change nothing, scopes come and go, the order is stable."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch.model.level import Level, Reason, RuleId, Scope
from kvwatch.model.settings import RuleSettings
from kvwatch.rules import hysteresis, staleness
from kvwatch.rules.shipped import BY_RULE
from kvwatch.rules.spec import Reading
from tests.rules.build import World, clock, device, engine

TAX = RuleSettings(yellow=0.02, red=0.05, for_s=2.0, hold_s=5.0)
STEPS = st.lists(
    st.tuples(
        st.floats(0.1, 5.0),
        st.sampled_from([0.0, 0.0, 0.001, 0.012, 0.02, 0.03, 0.05, 0.2]),
        st.booleans(),
        st.sampled_from([True, True, True, False]),
    ),
    min_size=1,
    max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(STEPS)
def test_shortcuts_change_nothing(steps: list[tuple[float, float, bool, bool]]) -> None:
    """Skipping what cannot change leads where judging every reading anew leads."""
    world = World(rules={RuleId.RECOMPUTE_TAX: TAX})
    band = hysteresis.bands(BY_RULE[RuleId.RECOMPUTE_TAX], TAX)
    state, now_s = hysteresis.start(clock(steps[0][0])), 0.0
    for gap_s, value, waiting, fresh in steps:
        now_s += gap_s
        world.engine, world.server_fresh = engine(recompute_tax_ratio=value, waiting=int(waiting)), fresh
        verdict = world.tick(now_s)[RuleId.RECOMPUTE_TAX]
        absent = None if fresh else Reason.STALE
        reading = Reading(scope=Scope(), value=value, absent=absent, red_allowed=waiting)
        state = staleness.judge(state, reading, clock(now_s), TAX, band)
        assert (verdict.level, verdict.reason, verdict.since_s) == (state.level, state.reason, state.since_s)
        told = tuple(spent for _, spent in hysteresis.seconds_by_level(state, now_s))
        assert verdict.seconds_at(now_s) == told


def test_new_thresholds_are_judged_at_once() -> None:
    """A reload that moves a threshold moves the level with the next tick, without a new value."""
    world = World(engine=engine(kv_usage_ratio=0.8))
    assert world.run(10)[RuleId.KV_USAGE].level is Level.YELLOW
    world.rules = {RuleId.KV_USAGE: RuleSettings(yellow=0.9, red=0.95, hold_s=0.0)}
    assert world.tick(11)[RuleId.KV_USAGE].level is Level.GREEN


def test_a_scope_that_goes_and_comes_back_starts_anew() -> None:
    """A GPU that leaves the host takes its verdicts with it."""
    world = World(device=device(headroom_bytes=1))
    gpus = world.gpus
    assert world.run(10)[RuleId.DEVICE_HEADROOM].level is Level.YELLOW
    world.gpus = ()
    assert RuleId.DEVICE_HEADROOM not in world.tick(11)
    world.gpus = gpus
    assert world.tick(12)[RuleId.DEVICE_HEADROOM].reason is Reason.TOO_FEW


def test_order_of_verdicts_is_that_of_the_table() -> None:
    """Verdicts come in the order of the rules, so that two reports can be compared line by line."""
    rules = [verdict.rule for verdict in World().verdicts(1.0)]

    assert rules == sorted(rules, key=list(RuleId).index)
