"""Every scenario shows what it promises, judged by the real core on the real page."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from kvwatch.lab.demo import SERVER
from kvwatch.model.level import Level, RuleId
from tests.lab.story import Story, play

GREEN, YELLOW, RED, UNKNOWN = Level.GREEN, Level.YELLOW, Level.RED, Level.UNKNOWN


@cache
def story(scenario: str, seconds: float) -> Story:
    return play(scenario, seconds)


@pytest.mark.parametrize("rule", [RuleId.KV_USAGE, RuleId.RECOMPUTE_TAX])
def test_the_tour_goes_green_yellow_red_green_within_ninety_seconds(rule: RuleId) -> None:
    """Each level lasts for at least one reading of the server, and red is crossed by a wide margin."""
    tour = story("tour", 118.0)
    changes = tour.levels(rule, server=SERVER, engine="0")
    settled = changes[-1]
    assert settled[1] is GREEN
    assert settled[0] < 88.0
    levels = [level for _, level in changes]
    assert levels[:4] == [UNKNOWN, GREEN, YELLOW, RED]
    assert levels[4:] in ([GREEN], [YELLOW, GREEN])
    starts = [at_s for at_s, _ in changes]
    assert all(later - sooner >= 1.0 for sooner, later in pairwise(starts))
    assert max(value for value in _values(tour, rule)) >= (0.99 if rule is RuleId.KV_USAGE else 0.075)


def test_the_tour_s_headline_follows_and_ends_green() -> None:
    """What a glance at the status page shows is the story that the terminal tells."""
    assert [level for _, level in story("tour", 118.0).headline] == [
        UNKNOWN,
        GREEN,
        YELLOW,
        RED,
        YELLOW,
        GREEN,
    ]


def test_calm_stays_green() -> None:
    """After the first two readings no rule of the calm scenario ever leaves green."""
    calm = story("calm", 300.0)
    for (rule, _), changes in calm.changes.items():
        assert changes[-1][1] in (GREEN, UNKNOWN), rule
        assert max(level for _, level in changes) <= GREEN
    assert calm.headline[-1][1] is GREEN


def test_overload_is_red_until_the_burst_ends_and_hurts_latency() -> None:
    """kv_usage, the tax and the latency objective are red before 40 s and stay so until about 55 s."""
    overload = story("overload", 148.0)
    for rule in (RuleId.KV_USAGE, RuleId.RECOMPUTE_TAX, RuleId.LATENCY_SLO):
        changes = overload.levels(rule, server=SERVER)
        reached = next(at_s for at_s, level in changes if level is RED)
        left = next(at_s for at_s, level in changes if at_s > reached and level is not RED)
        assert reached < 40.0
        assert left > 54.0
        assert changes[-1][1] is GREEN
    assert next(at_s for at_s, level in overload.headline if level is RED) < 30.0


def test_the_leak_turns_headroom_yellow_then_red_then_green() -> None:
    """Only GPU 0 is short of memory, and only while the neighbour leaks."""
    leak = story("leak", 118.0)
    levels = [level for _, level in leak.levels(RuleId.DEVICE_HEADROOM, gpu="0")]
    assert levels[-4:] == [GREEN, YELLOW, RED, GREEN]
    assert leak.levels(RuleId.DEVICE_HEADROOM, gpu="1")[-1][1] is GREEN
    assert RED in [level for _, level in leak.headline]


def test_faults_raise_the_rule_that_names_each_of_them() -> None:
    """Server down, GPU lost with its Xid, a stuck source and a hung engine: each seen while it lasts."""
    faults = story("faults", 178.0)
    for rule, begin_s, end_s in (
        (RuleId.SERVER_DOWN, 15.0, 40.0),
        (RuleId.GPU_LOST, 55.0, 80.0),
        (RuleId.SERVER_STALLED, 125.0, 150.0),
    ):
        (reds,) = [changes for (each, _), changes in faults.changes.items() if each is rule and _red(changes)]
        (reached,) = [at_s for at_s, level in reds if level is RED]
        left = next(at_s for at_s, level in reds if at_s > reached)
        assert begin_s <= reached < begin_s + 8.0, rule
        assert end_s <= left < end_s + 8.0, rule
    assert faults.worst(RuleId.GPU_XID) is RED
    stuck = [at_s for at_s, report in faults.reports for each in report.sources if each.stuck]
    assert 95.0 < min(stuck) < 100.0
    assert 108.0 < max(stuck) <= 110.2


@pytest.mark.parametrize("scenario", ["calm", "tour", "overload", "leak", "faults"])
def test_the_ledger_of_both_gpus_adds_up_throughout(scenario: str) -> None:
    """Parts of the ledger sum to the GPU's total, the pool is seen, and nothing was clamped."""
    told = story(
        scenario, {"calm": 300.0, "tour": 118.0, "overload": 148.0, "leak": 118.0, "faults": 178.0}[scenario]
    )
    seen = 0
    for _, report in told.reports[::25]:
        for gpu in report.gpus:
            if gpu.signals is None or gpu.signals.ledger is None or gpu.state.memory is None:
                continue
            seen += 1
            assert sum(part.bytes for part in gpu.signals.ledger) == gpu.state.memory.total_bytes
            assert not gpu.signals.ledger_clamped
    assert seen > 20
    parts = {part.part: part.bytes for part in told.reports[40][1].signals.gpus[0].ledger or ()}
    assert parts["kv_used"] > 0
    assert parts["kv_used"] + parts["kv_free"] == 16 * 2**30
    assert parts["other_process"] == 24 * 2**30


def _red(changes: list[tuple[float, Level]]) -> bool:
    return any(level is RED for _, level in changes)


def _values(told: Story, rule: RuleId) -> list[float]:
    return [
        verdict.value
        for _, report in told.reports
        for verdict in report.verdicts
        if verdict.rule is rule and verdict.value is not None
    ]
