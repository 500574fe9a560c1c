"""What holds for every rule: its row in the table, its pages, and what may not trigger it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvwatch.model.level import Level, Reason, RuleId
from kvwatch.model.sample import SourceStatus
from kvwatch.model.settings import GIB, MIB, RuleSettings
from kvwatch.model.signal import Phase
from kvwatch.rules.shipped import BY_RULE, DEFAULTS, SPECS
from tests.rules.build import LOST, G, R, U, World, Y, agent, device, engine, gpu, quantiles


def test_the_table_is_complete() -> None:
    """Every rule has one row, defaults, a sentence and a provenance for each threshold it has."""
    assert [spec.rule for spec in SPECS] == list(RuleId)
    assert set(DEFAULTS) == set(BY_RULE) == set(RuleId)
    for spec in SPECS:
        named = {name for name, _ in spec.provenance}
        has = {name for name in ("yellow", "red") if getattr(spec.defaults, name) is not None}
        assert named == has, spec.rule
        assert spec.sentence


def test_pages_are_those_of_the_contract() -> None:
    """Usage, fragmentation, waste, dead processes and staleness never page; the others do when red."""
    silent = {spec.rule for spec in SPECS if not spec.pages}

    assert silent == {
        RuleId.KV_USAGE,
        RuleId.ALLOCATOR_FRAGMENTATION,
        RuleId.KV_BLOCK_WASTE,
        RuleId.DEAD_PROCESS_MEMORY,
        RuleId.SOURCE_STALE,
    }


def test_starting_server_has_no_device_rule_but_all_others() -> None:
    """A start suspends the device rules alone."""
    starting = device(phase=Phase.STARTING, headroom_bytes=MIB, headroom_falling=True)
    verdicts = World(device=starting, engine=engine(recompute_tax_ratio=0.2, waiting=4)).run(10)

    assert verdicts[RuleId.DEVICE_HEADROOM].reason is Reason.STARTING
    assert verdicts[RuleId.DEVICE_EXHAUSTION].reason is Reason.STARTING
    assert verdicts[RuleId.RECOMPUTE_TAX].level is R


def test_maintenance_suspends_everything_about_the_gpu() -> None:
    """A GPU that was released for maintenance is neither lost, missing nor short of memory."""
    world = World(gpus=(LOST,))
    world.run(9)
    world.gpu_status = replace(world.gpu_status, paused=True)
    verdicts = world.run(10)

    for rule in (RuleId.GPU_LOST, RuleId.GPU_MISSING, RuleId.GPU_XID, RuleId.DEVICE_HEADROOM):
        assert (verdicts[rule].level, verdicts[rule].reason) == (U, Reason.MAINTENANCE), rule


@pytest.mark.parametrize(("age_s", "level"), [(0.5, G), (2.9, G), (3.0, Y), (100.0, Y)])
def test_source_stale(age_s: float, level: Level) -> None:
    """Three periods without a good sample are yellow."""
    world = World()
    world.server_status = replace(world.server_status, last_success_s=100.0 - age_s)
    found = {verdict.scope.source: verdict for verdict in world.verdicts(100.0)}

    verdict = found["server/chat"]
    assert (verdict.level, verdict.scope.server) == (level, "chat")
    assert verdict.value == pytest.approx(age_s)


def test_a_source_that_never_answered_is_not_stale() -> None:
    """No driver is no error: a source without a first sample is unknown, not yellow."""
    world = World()
    world.gpu_status = SourceStatus(source="nvml", period_s=0.2, errors_total=99)
    found = {verdict.scope.source: verdict for verdict in world.verdicts(100.0)}

    assert found["nvml"].level is U


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.rule.value)
def test_nothing_is_triggered_by_stale_or_single_samples(spec: object) -> None:
    """With everything at its worst, one sample or stale ones leave every rule unknown or untouched."""
    worst = World(
        engine=engine(
            samples=1,
            kv_usage_ratio=1.0,
            waiting=9,
            recompute_tax_ratio=1.0,
            ttft=quantiles(99),
            stalled=True,
        ),
        device=device(headroom_bytes=0, headroom_falling=True, dead_process_bytes=9 * GIB),
        gpus=(gpu(xid_events_total=((79, 1),), last_xid=79, last_xid_s=0.0),),
        agent=agent(retries=99, largest_allocatable_bytes=0, fragmentation_hard_ratio=1.0),
    )
    first = [verdict for verdict in worst.verdicts(0.0) if verdict.rule is spec.rule]  # type: ignore[attr-defined]
    assert all(verdict.level <= G for verdict in first)

    stale = replace_freshness(worst)
    later = [verdict for verdict in stale.verdicts(50.0) if verdict.rule is spec.rule]  # type: ignore[attr-defined]
    skip = {RuleId.SERVER_DOWN, RuleId.SOURCE_STALE}  # these judge the silence itself
    assert all(verdict.level is U for verdict in later if verdict.rule not in skip)


def replace_freshness(world: World) -> World:
    """Let every source of this world fall silent."""
    world.server_fresh = world.gpu_fresh = world.agent_fresh = world.gpu_samples = False
    return world


def test_two_risks_are_kept_apart() -> None:
    """A full KV pool raises no device rule; an exhausted device raises no KV rule."""
    full = engine(kv_usage_ratio=1.0, waiting=50, recompute_tax_ratio=0.5, ttft=quantiles(50))
    on_pool = World(engine=full).run(10)
    on_device = World(device=device(headroom_bytes=0, headroom_falling=True, below_learned_floor=True)).run(
        10
    )
    device_rules = {RuleId.DEVICE_HEADROOM, RuleId.DEVICE_EXHAUSTION, RuleId.DEAD_PROCESS_MEMORY}
    kv_rules = {RuleId.KV_USAGE, RuleId.RECOMPUTE_TAX, RuleId.LATENCY_SLO, RuleId.KV_BLOCK_WASTE}

    assert all(on_pool[rule].level <= G for rule in device_rules)
    assert all(on_device[rule].level <= G for rule in kv_rules)
    assert on_pool[RuleId.RECOMPUTE_TAX].level is on_device[RuleId.DEVICE_HEADROOM].level is R


def test_disabled_rule_is_unknown_and_says_so() -> None:
    """A rule that is switched off judges nothing."""
    rules = {RuleId.RECOMPUTE_TAX: RuleSettings(enabled=False, yellow=0.02, red=0.05)}
    verdict = World(rules=rules, engine=engine(recompute_tax_ratio=1.0, waiting=1)).run(10)[
        RuleId.RECOMPUTE_TAX
    ]

    assert (verdict.level, verdict.reason) == (U, Reason.DISABLED)
