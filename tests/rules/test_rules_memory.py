"""Truth tables of the rules about memory: the device's, and that of an allocator with an agent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvwatch.model.gpu import GpuMemory
from kvwatch.model.level import Level, Reason, RuleId
from kvwatch.model.settings import GIB, MIB, RuleSettings
from kvwatch.model.signal import Forecast, ForecastState, Phase
from tests.rules.build import G, R, U, World, Y, agent, device, engine, gpu

INF = float("inf")


@pytest.mark.parametrize(
    ("fields", "level"),
    [
        ({"headroom_bytes": 3 * GIB, "headroom_falling": True}, G),
        ({"headroom_bytes": 2 * GIB}, Y),
        ({"headroom_bytes": 512 * MIB}, Y),
        ({"headroom_bytes": 512 * MIB, "headroom_falling": False, "below_learned_floor": False}, Y),
        ({"headroom_bytes": 512 * MIB, "headroom_falling": True}, R),
        ({"headroom_bytes": 512 * MIB, "below_learned_floor": True}, R),
        ({"headroom_bytes": 600 * MIB, "headroom_falling": True, "below_learned_floor": True}, Y),
        ({"headroom_bytes": 1 * MIB, "headroom_falling": True, "phase": Phase.STARTING}, U),
        ({"headroom_bytes": 1 * MIB, "headroom_falling": True, "phase": Phase.MAINTENANCE}, U),
        ({"headroom_bytes": 1 * MIB, "headroom_falling": True, "phase": Phase.DOWN}, R),
        ({"headroom_bytes": 1 * MIB, "headroom_falling": True, "phase": Phase.UNKNOWN}, R),
        ({"headroom_bytes": None}, U),
    ],
)
def test_device_headroom(fields: dict[str, object], level: Level) -> None:
    """Low headroom is red only where something says that it is not the normal state."""
    assert World(device=device(**fields)).run(10)[RuleId.DEVICE_HEADROOM].level is level


def test_device_headroom_confirmed_by_the_agent() -> None:
    """An allocator on this GPU that had to retry in the last minute confirms low headroom."""
    world = World(device=device(headroom_bytes=400 * MIB), agent=agent(1, retries=0))
    assert world.run(9)[RuleId.DEVICE_HEADROOM].level is Y
    world.agent = agent(2, retries=1)
    assert world.run(10)[RuleId.DEVICE_HEADROOM].level is R


@pytest.mark.parametrize(
    ("total", "yellow"), [(140 * GIB, 2 * GIB), (20 * GIB, 1 * GIB), (8 * GIB, 0.4 * GIB)]
)
def test_device_headroom_yellow_is_the_smaller_of_the_two(total: int, yellow: float) -> None:
    """The exported threshold is 5 % of the device or 2 GiB, whichever is smaller in this scope."""
    memory = GpuMemory(total_bytes=total, used_bytes=0, free_bytes=total)
    verdict = World(gpus=(gpu(memory),)).run(10)[RuleId.DEVICE_HEADROOM]

    assert verdict.yellow == pytest.approx(yellow)
    assert verdict.red == 512 * MIB


def test_device_headroom_threshold_that_is_configured_is_kept() -> None:
    """Who sets a yellow threshold gets that one."""
    rules = {RuleId.DEVICE_HEADROOM: RuleSettings(yellow=8 * GIB, red=512 * MIB)}

    assert World(rules=rules).run(10)[RuleId.DEVICE_HEADROOM].yellow == 8 * GIB


def test_case_I1_headroom_is_judged_in_bytes_and_without_the_pool() -> None:
    """I1: 218 MiB free and shrinking is red although the KV pool is nearly empty."""
    world = World(
        engine=engine(kv_usage_ratio=0.05), device=device(headroom_bytes=218 * MIB, headroom_falling=True)
    )
    verdicts = world.run(10)

    assert (verdicts[RuleId.DEVICE_HEADROOM].level, verdicts[RuleId.DEVICE_HEADROOM].pages) == (R, True)
    assert verdicts[RuleId.KV_USAGE].level is G


@pytest.mark.parametrize(
    ("central_s", "step_s", "level"),
    [
        (INF, None, G),
        (3600.0, None, G),
        (1800.0, None, Y),
        (300.0, None, R),
        (300.0, 500.0, U),  # a step change 500 s before
        (300.0, 399.0, R),
        (None, None, U),
    ],
)
def test_device_exhaustion(central_s: float | None, step_s: float | None, level: Level) -> None:
    """Time to exhaustion is judged by its central estimate, ten minutes after a step at the earliest."""
    forecast = Forecast(state=ForecastState.RISING, central_s=central_s)
    world = World(device=device(device_forecast=forecast, last_step_change_s=step_s))

    assert world.run(1000)[RuleId.DEVICE_EXHAUSTION].level is level


def test_case_I3_slow_drift_is_told_before_it_ends() -> None:
    """I3: memory that drifts for hours is yellow half an hour before, red five minutes before the end."""
    seen = []
    for left_s in (7200.0, 1500.0, 200.0):
        forecast = Forecast(state=ForecastState.RISING, central_s=left_s)
        seen.append(World(device=device(device_forecast=forecast)).run(9000)[RuleId.DEVICE_EXHAUSTION].level)

    assert seen == [G, Y, R]


def test_a_mig_parent_has_no_memory_rules_of_its_own() -> None:
    """Its memory is that of its instances; its health is its own."""
    verdicts = World(gpus=(gpu(is_mig_parent=True),)).run(10)

    assert RuleId.DEVICE_HEADROOM not in verdicts
    assert verdicts[RuleId.GPU_LOST].level is G


def test_alloc_retries() -> None:
    """Retries are counted over the last minute: one is yellow, more than six red, none for a minute green."""
    world = World(agent=agent(1, retries=5))
    assert world.run(0)[RuleId.ALLOC_RETRIES].level is G
    world.agent = agent(2, retries=6)
    assert world.tick(10)[RuleId.ALLOC_RETRIES].level is Y
    world.agent = agent(3, retries=12)
    verdict = world.tick(20)[RuleId.ALLOC_RETRIES]
    assert (verdict.level, verdict.value) == (R, 7)
    for now_s in range(21, 130):
        world.agent = agent(now_s, retries=12)
        verdict = world.tick(now_s)[RuleId.ALLOC_RETRIES]
    assert (verdict.level, verdict.value) == (G, 0)


def test_alloc_retries_of_a_restarted_process_start_anew() -> None:
    """A new process or a counter that fell begins with two samples of its own."""
    world = World(agent=agent(5, retries=90))
    world.run(0)
    world.agent = replace(agent(1, retries=0), pid=8)
    assert world.tick(1)[RuleId.ALLOC_RETRIES].reason is Reason.TOO_FEW
    assert world.tick(2)[RuleId.ALLOC_RETRIES].level is G


@pytest.mark.parametrize(("largest", "level"), [(3 * GIB, G), (2 * GIB, Y), (1 * GIB, R), (0, R), (None, U)])
def test_largest_allocatable(largest: int | None, level: Level) -> None:
    """The largest allocation that would succeed, in bytes; not reported is unknown."""
    world = World(agent=agent(largest_allocatable_bytes=largest))

    assert world.run(10)[RuleId.LARGEST_ALLOCATABLE].level is level


def test_case_L1_largest_block_is_never_judged_without_an_allocator_source() -> None:
    """L1: with device counters alone there is no such verdict, and a stale or single datagram makes none."""
    nearly_full = GpuMemory(total_bytes=80 * GIB, used_bytes=80 * GIB - 9, free_bytes=9)
    assert RuleId.LARGEST_ALLOCATABLE not in World(gpus=(gpu(nearly_full),)).run(10)
    single = World(agent=agent(largest_allocatable_bytes=1)).tick(0)[RuleId.LARGEST_ALLOCATABLE]
    assert (single.level, single.reason) == (U, Reason.TOO_FEW)
    stale = World(agent=agent(largest_allocatable_bytes=1), agent_fresh=False).run(10)
    assert stale[RuleId.LARGEST_ALLOCATABLE].level is U


@pytest.mark.parametrize(("hard", "level"), [(0.1, G), (0.30, Y), (0.99, Y), (None, U)])
def test_allocator_fragmentation(hard: float | None, level: Level) -> None:
    """Hard fragmentation is yellow at most; soft fragmentation does not count."""
    world = World(agent=agent(fragmentation_hard_ratio=hard, fragmentation_soft_ratio=0.99))

    assert world.run(10)[RuleId.ALLOCATOR_FRAGMENTATION].level is level


def test_dead_process_memory_needs_two_minutes() -> None:
    """A gibibyte held by the dead for two minutes is yellow; a driver that is slow to clean up is not."""
    world = World(device=device(dead_process_bytes=0))
    world.run(0)
    world.device = device(dead_process_bytes=GIB)
    assert world.tick(1)[RuleId.DEAD_PROCESS_MEMORY].reason is Reason.PENDING
    assert world.tick(120)[RuleId.DEAD_PROCESS_MEMORY].level is G
    assert world.tick(121)[RuleId.DEAD_PROCESS_MEMORY].level is Y
