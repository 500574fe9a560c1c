"""Every rule's truth table: what makes it yellow, what makes it red, what makes it unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvwatch.model.gpu import GpuHealth, GpuMemory
from kvwatch.model.level import Level, Reason, RuleId
from kvwatch.model.sample import Failure, FailureKind, SourceStatus
from kvwatch.model.server import Basis, Evictable, Semantics
from kvwatch.model.settings import GIB, MIB, GpuSettings, RuleSettings, ServerSettings, Settings
from kvwatch.model.signal import Forecast, ForecastState, Phase, Waste
from kvwatch.rules.shipped import BY_RULE, DEFAULTS, SPECS
from tests.rules.build import FREE, LOST, UUID, World, agent, device, engine, gpu, quantiles

G, Y, R, U = Level.GREEN, Level.YELLOW, Level.RED, Level.UNKNOWN
INF = float("inf")


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


HARM = {"waiting": 3, "recompute_tax_ratio": 0.03}


@pytest.mark.parametrize(
    ("semantics", "fields", "level"),
    [
        (FREE, {"kv_usage_ratio": 0.5}, G),
        (FREE, {"kv_usage_ratio": 0.8}, Y),
        (FREE, {"kv_usage_ratio": 0.99}, Y),
        (FREE, {"kv_usage_ratio": 0.99, "waiting": 9}, Y),
        (FREE, {"kv_usage_ratio": 0.99, "waiting": 9, "recompute_tax_ratio": 0.01}, Y),
        (FREE, {"kv_usage_ratio": 0.99, "waiting": 0, "recompute_tax_ratio": 0.2}, Y),
        (FREE, {"kv_usage_ratio": 0.99, "waiting": None, "recompute_tax_ratio": 0.2}, Y),
        (FREE, {"kv_usage_ratio": 0.99, **HARM}, R),
        (FREE, {"kv_usage_ratio": 0.99, "waiting": 1, "ttft": quantiles(2.1)}, R),
        (FREE, {"kv_usage_ratio": 0.99, "waiting": 1, "ttft": quantiles(2.1, count=19)}, Y),
        (FREE, {"kv_usage_ratio": 0.99, "waiting": 1, "ttft": quantiles(1.9)}, Y),
        (replace(FREE, evictable=Evictable.USED), {"kv_usage_ratio": 0.99, **HARM}, Y),
        (replace(FREE, evictable=Evictable.UNKNOWN), {"kv_usage_ratio": 0.99, **HARM}, Y),
        (replace(FREE, basis=Basis.SLOTS), {"kv_usage_ratio": 0.99, **HARM}, Y),
        (replace(FREE, basis=Basis.RESERVATION), {"kv_usage_ratio": 0.99, **HARM}, Y),
        (FREE, {"kv_usage_ratio": None}, U),
    ],
)
def test_kv_usage(semantics: Semantics, fields: dict[str, object], level: Level) -> None:
    """Usage is red only for true occupancy, with requests waiting and a sign of harm."""
    verdict = World(semantics=semantics, engine=engine(**fields)).run(10)[RuleId.KV_USAGE]

    assert verdict.level is level
    assert not verdict.pages


def test_capped_usage_says_why() -> None:
    """A person sees which condition keeps a full pool from being red."""
    verdict = World(engine=engine(kv_usage_ratio=1.0)).run(10)[RuleId.KV_USAGE]

    assert verdict.reason is Reason.CAPPED
    assert verdict.detail == "no requests are waiting"


def test_case_L2_usage_alone_is_no_alarm() -> None:
    """L2: a pool that is 70 % or 100 % full is a healthy busy server; nothing pages."""
    for usage in (0.75, 0.97, 1.0):
        verdicts = World(engine=engine(kv_usage_ratio=usage, waiting=50, running=60)).run(10).values()
        assert not [verdict.rule for verdict in verdicts if verdict.level is R]
    world = World(engine=engine(kv_usage_ratio=0.75), rules={RuleId.KV_USAGE: RuleSettings(yellow=0.9)})
    assert world.run(10)[RuleId.KV_USAGE].level is G


def test_case_H10_preemption_thrash_pages() -> None:
    """H10: a full pool with requests waiting and a high tax is red, and it is the tax that pages."""
    thrash = engine(
        kv_usage_ratio=0.99, waiting=20, running=40, preemptions_per_s=2.0, recompute_tax_ratio=0.12
    )
    verdicts = World(engine=thrash).run(10)

    assert verdicts[RuleId.KV_USAGE].level is R
    assert (verdicts[RuleId.RECOMPUTE_TAX].level, verdicts[RuleId.RECOMPUTE_TAX].pages) == (R, True)


@pytest.mark.parametrize(
    ("tax", "waiting", "level"),
    [(0.0, 5, G), (0.019, 5, G), (0.02, 0, Y), (0.05, 0, Y), (0.05, None, Y), (0.05, 1, R), (None, 5, U)],
)
def test_recompute_tax(tax: float | None, waiting: int | None, level: Level) -> None:
    """The tax is red only while requests wait."""
    world = World(engine=engine(recompute_tax_ratio=tax, waiting=waiting))

    assert world.run(10)[RuleId.RECOMPUTE_TAX].level is level


@pytest.mark.parametrize(
    ("fields", "level", "value"),
    [
        ({"ttft": quantiles(1.0)}, G, 0.5),
        ({"ttft": quantiles(2.0)}, Y, 1.0),
        ({"ttft": quantiles(3.0)}, R, 1.5),
        ({"ttft": quantiles(1.0), "tpot": quantiles(0.12)}, R, 2.0),
        ({"ttft": quantiles(9.0, count=19)}, U, None),
        ({"ttft": quantiles(9.0, count=20)}, R, 4.5),
        ({"queue": quantiles(900.0)}, U, None),  # no objective for it
        ({}, U, None),
    ],
)
def test_latency_slo(fields: dict[str, object], level: Level, value: float | None) -> None:
    """The worst p95 against its objective counts; under 20 observations nothing is known."""
    verdict = World(engine=engine(**fields)).run(10)[RuleId.LATENCY_SLO]

    assert verdict.level is level
    assert verdict.value == (None if value is None else pytest.approx(value))


def test_no_objective_no_latency_rule() -> None:
    """A server without objectives has no latency verdict at all."""
    world = World(settings=Settings(servers=(ServerSettings(name="chat"),)))

    assert RuleId.LATENCY_SLO not in world.run(10)


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


@pytest.mark.parametrize(("ratio", "level"), [(0.04, G), (0.3, Y), (1.0, Y), (None, U)])
def test_kv_block_waste(ratio: float | None, level: Level) -> None:
    """Waste is yellow at most."""
    waste = None if ratio is None else Waste(ratio=ratio, low=ratio, high=ratio, method="exact")

    assert World(engine=engine(waste=waste)).run(10)[RuleId.KV_BLOCK_WASTE].level is level


def test_dead_process_memory_needs_two_minutes() -> None:
    """A gibibyte held by the dead for two minutes is yellow; a driver that is slow to clean up is not."""
    world = World(device=device(dead_process_bytes=0))
    world.run(0)
    world.device = device(dead_process_bytes=GIB)
    assert world.tick(1)[RuleId.DEAD_PROCESS_MEMORY].reason is Reason.PENDING
    assert world.tick(120)[RuleId.DEAD_PROCESS_MEMORY].level is G
    assert world.tick(121)[RuleId.DEAD_PROCESS_MEMORY].level is Y


@pytest.mark.parametrize(("stalled", "level"), [(False, G), (True, R), (None, U)])
def test_server_stalled(stalled: bool | None, level: Level) -> None:
    """A stalled engine is red at once; one that cannot tell is unknown."""
    assert World(engine=engine(stalled=stalled)).run(10)[RuleId.SERVER_STALLED].level is level


REFUSED = SourceStatus(
    source="server/chat",
    period_s=1.0,
    errors_total=5,
    failure=Failure(kind=FailureKind.REFUSED, message="nobody listens at http://127.0.0.1:8000"),
)


def test_case_H4_server_down_pages_after_two_minutes_whatever_its_exit_code() -> None:
    """H4: an endpoint that does not answer for two minutes is red, also when its process ended cleanly."""
    world = World()
    world.run(0)
    world.up, world.server_fresh, world.server_status = False, False, REFUSED
    assert world.tick(1)[RuleId.SERVER_DOWN].level is G
    assert world.tick(120)[RuleId.SERVER_DOWN].reason is Reason.PENDING
    verdict = world.tick(121)[RuleId.SERVER_DOWN]
    assert (verdict.level, verdict.pages, verdict.detail) == (R, True, REFUSED.failure.message)  # type: ignore[union-attr]


def test_server_that_never_came_up_is_down() -> None:
    """A configured server that has never answered pages after two minutes, and was never green."""
    world = World(up=False, server_fresh=False, server_seen=False, server_status=REFUSED)

    assert [world.tick(now_s)[RuleId.SERVER_DOWN].level for now_s in (0, 60, 119.9, 120)] == [U, U, U, R]


def test_server_down_is_for_configured_servers() -> None:
    """A server that was merely discovered may go as it came."""
    settings = Settings(servers=(ServerSettings(name="chat", configured=False),))
    world = World(settings=settings, up=False, server_fresh=False, server_status=REFUSED)

    assert RuleId.SERVER_DOWN not in world.run(500)
    assert "server/chat" not in {verdict.scope.source for verdict in world.verdicts(501)}


def test_a_loading_server_is_not_down() -> None:
    """A server that answers that it is loading is not down while it says so."""
    failure = Failure(kind=FailureKind.LOADING, message="loading")
    world = World(up=False, server_fresh=False, server_status=replace(REFUSED, failure=failure))

    assert [world.tick(now_s)[RuleId.SERVER_DOWN].level for now_s in (0, 200, 600)] == [G, G, G]


def test_a_watcher_that_cannot_tell_is_not_a_server_down() -> None:
    """Where the poll itself is stuck, nothing is known of the server."""
    world = World()
    world.run(0)
    world.up, world.server_fresh = None, False

    assert world.tick(300)[RuleId.SERVER_DOWN].level is U


@pytest.mark.parametrize("health", [GpuHealth.LOST, GpuHealth.RESET_REQUIRED])
def test_gpu_lost(health: GpuHealth) -> None:
    """A GPU that fell off the bus or needs a reset is red at once, from the second pass on."""
    world = World(gpus=(gpu(health=health, health_detail="GPU is lost"),))

    assert world.tick(0)[RuleId.GPU_LOST].reason is Reason.TOO_FEW
    verdict = world.tick(1)[RuleId.GPU_LOST]
    assert (verdict.level, verdict.detail) == (R, "GPU is lost")


@pytest.mark.parametrize("health", [GpuHealth.DENIED, GpuHealth.UNKNOWN])
def test_a_gpu_that_cannot_be_read_is_unknown(health: GpuHealth) -> None:
    """Denied or unknown is neither lost nor fine."""
    assert World(gpus=(gpu(health=health),)).run(10)[RuleId.GPU_LOST].level is U


def test_gpu_missing() -> None:
    """A GPU that was there and is gone is red in its own scope."""
    verdict = World(gpus=(gpu(health=GpuHealth.MISSING),)).run(10)[RuleId.GPU_MISSING]

    assert (verdict.level, verdict.scope.uuid) == (R, UUID)


def test_fewer_gpus_than_expected() -> None:
    """A count that is not reached is red for the host, a UUID that nobody has seen in its own scope."""
    world = World(settings=Settings(gpus=GpuSettings(expect_count=2)))
    verdict = world.run(10)[RuleId.GPU_MISSING]
    assert (verdict.level, verdict.value, verdict.scope.uuid) == (R, 1.0, "")
    assert World(settings=Settings(gpus=GpuSettings(expect_count=1))).run(10)[RuleId.GPU_MISSING].level is G
    named = World(settings=Settings(gpus=GpuSettings(expect_uuids=("GPU-1", "GPU-9")))).run(10)
    assert (named[RuleId.GPU_MISSING].level, named[RuleId.GPU_MISSING].scope.uuid) == (R, "GPU-9")


def test_expected_gpus_without_a_driver() -> None:
    """GPUs that are expected on a host without a driver are missing, once that was said twice."""
    no_driver = Failure(kind=FailureKind.NO_DRIVER, message="no driver")
    world = World(
        settings=Settings(gpus=GpuSettings(expect_count=8)),
        gpus=(),
        gpu_samples=False,
        gpu_status=SourceStatus(source="nvml", period_s=1.0, errors_total=2, failure=no_driver),
    )
    assert world.run(10)[RuleId.GPU_MISSING].level is R


@pytest.mark.parametrize(("xid", "level"), [(13, G), (63, Y), (94, Y), (79, R), (119, R)])
def test_gpu_xid(xid: int, level: Level) -> None:
    """Listed events raise yellow or red; others leave it green."""
    world = World(gpus=(gpu(),))
    world.run(0)
    world.gpus = (gpu(xid_events_total=((xid, 1),)),)

    assert world.tick(1)[RuleId.GPU_XID].level is level


def test_gpu_xid_counts_for_ten_minutes() -> None:
    """An event is over after ten minutes and `hold`; a later one counts again; old totals never do."""
    world = World(gpus=(gpu(xid_events_total=((79, 3),)),))
    assert world.run(0)[RuleId.GPU_XID].level is G  # what was there before is history
    world.gpus = (gpu(xid_events_total=((79, 4),)),)
    assert world.tick(1)[RuleId.GPU_XID].level is R
    assert world.tick(600)[RuleId.GPU_XID].level is R
    world.tick(602)
    assert world.tick(632)[RuleId.GPU_XID].level is G
    world.gpus = (gpu(xid_events_total=((79, 5),)),)
    assert world.tick(700)[RuleId.GPU_XID].level is R


def test_gpu_xid_before_the_first_sample_counts_when_it_is_recent() -> None:
    """An event with a time of its own within the window counts although it came before the first sample."""
    state = gpu(xid_events_total=((79, 1),), last_xid=79, last_xid_s=995.0)

    assert World(gpus=(state,)).run(1000)[RuleId.GPU_XID].level is R


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
