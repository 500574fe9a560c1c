"""Device headroom: how much, how low, falling, and lower than ever lived with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvwatch.model.report import Snapshot
from kvwatch.model.server import AgentState, AllocatorState
from kvwatch.model.settings import GIB, MIB
from kvwatch.model.signal import GpuSignals, Phase
from kvwatch.signals.headroom import Floor, below, learn
from tests.signals.build import GPU, Run, agent, engine, gpu, host, memory, page, process

ROOM = 80 * GIB - 512 * MIB


def _free(run: Run, second: float, free: int, **more: object) -> GpuSignals:
    now_s = 1000.0 + second
    return run.gpu(now_s, gpu(now_s, ROOM - free, **more))  # type: ignore[arg-type]


def _inside(releasable: int | None) -> AgentState:
    allocator = AllocatorState(releasable_bytes=releasable)
    return AgentState(server="chat", engine="0", rank=0, pid=1, seq=1, gpu_uuid=GPU, allocator=allocator)


def test_headroom_is_free_memory_without_an_agent() -> None:
    """Without an agent nothing is added to what is free."""
    assert _free(Run(), 0, 3 * GIB).headroom_bytes == 3 * GIB


def test_headroom_counts_what_the_allocator_could_return() -> None:
    """With an agent, releasable memory counts as headroom; an agent that does not report it adds nothing."""
    run = Run()
    with_agent = _free_with(run, 1000.0, 3 * GIB, 2 * GIB)
    silent = _free_with(run, 1001.0, 3 * GIB, None)

    assert with_agent.headroom_bytes == 5 * GIB
    assert silent.headroom_bytes == 3 * GIB


def _free_with(run: Run, now_s: float, free: int, releasable: int | None) -> GpuSignals:
    run.tick(
        Snapshot(gpus=host(now_s, gpu(now_s, ROOM - free)), agents=agent(now_s, _inside(releasable))), now_s
    )
    return run.signals.gpus[0]


def test_low_is_the_workers_own_where_it_is_lower() -> None:
    """A dip between two sends, seen only by the fast lane, is in the low."""
    shown = _free(Run(), 0, 3 * GIB, free_low_bytes=1 * GIB)

    assert shown.headroom_low_bytes == 1 * GIB


def test_low_over_the_window_is_remembered_and_forgotten() -> None:
    """Without a fast low, a dip stays the low for the peak window and then goes."""
    run = Run()
    _free(run, 0, 3 * GIB)
    _free(run, 1, 1 * GIB)
    for second in range(2, 50):
        inside = _free(run, second, 3 * GIB)
    for second in range(50, 70):
        outside = _free(run, second, 3 * GIB)

    assert inside.headroom_low_bytes == 1 * GIB
    assert outside.headroom_low_bytes == 3 * GIB


@pytest.mark.parametrize(
    ("free_at", "expected"),
    [
        (lambda second: 4 * GIB - second * 10 * MIB, True),
        (lambda second: 2 * GIB, False),
        (lambda second: 1 * GIB + second * 10 * MIB, False),
        (lambda second: 2 * GIB - second * 2 * MIB // 30 // 2 * 2, True),
    ],
    ids=["falls", "flat", "rises", "falls slowly"],
)
def test_falling(free_at: object, expected: bool) -> None:
    """Falling compares the newer half of the last minute with the older."""
    run = Run()
    for second in range(90):
        last = _free(run, second, free_at(second))  # type: ignore[operator]

    assert last.headroom_falling is expected


def test_falling_is_unknown_at_first() -> None:
    """Two readings are no trend."""
    run = Run()
    _free(run, 0, 3 * GIB)

    assert _free(run, 1, 1 * GIB).headroom_falling is None


def test_floor_is_learned_in_one_steady_hour() -> None:
    """Before an hour nothing is known; then less than ever lived with is new, and as much is not."""
    floor = Floor()
    for second in range(3600):
        floor = learn(floor, float(second), 300 * MIB + second % 7, steady=True)
    assert below(floor, 1) is None
    floor = learn(floor, 3601.0, 400 * MIB, steady=True)

    assert below(floor, 299 * MIB) is True
    assert below(floor, 300 * MIB) is False


def test_new_low_stays_new_until_it_was_lived_with() -> None:
    """A drop is reported for as long as an hour, not for one reading only."""
    floor = Floor()
    for second in range(3602):
        floor = learn(floor, float(second), 300 * MIB, steady=True)
    for second in range(3602, 3602 + 1800):
        floor = learn(floor, float(second), 200 * MIB, steady=True)
    assert below(floor, 200 * MIB) is True
    for second in range(3602 + 1800, 3602 + 3700):
        floor = learn(floor, float(second), 200 * MIB, steady=True)

    assert below(floor, 200 * MIB) is False


def test_time_that_nobody_watched_is_not_lived_with() -> None:
    """A pause of two hours does not make an hour of steady life."""
    floor = learn(Floor(), 0.0, GIB, steady=True)

    assert learn(floor, 7200.0, GIB, steady=True).learned is None
    assert learn(learn(floor, 1.0, GIB, steady=False), 2.0, GIB, steady=True).hour_s == 0.0


def test_restart_forgets_the_floor() -> None:
    """After the server restarted, the floor is learned anew."""
    run = Run()
    for second in range(0, 4300, 2):
        _steady(run, second, generation=second)
    assert run.signals.gpus[0].below_learned_floor is False
    _steady(run, 4302, generation=0)

    assert run.signals.gpus[0].below_learned_floor is None


def _steady(run: Run, second: int, generation: int) -> None:
    now_s = 1000.0 + second
    state = gpu(now_s, 70 * GIB, [process(1, 70 * GIB)])
    one = page(now_s, engine(0.5, generation=generation))
    run.tick(Snapshot(servers={"chat": one}, gpus=host(now_s, state)), now_s)


@pytest.mark.parametrize("jump", [512 * MIB, -512 * MIB], ids=["up", "down"])
def test_jump_is_a_step_change(jump: int) -> None:
    """Half a GiB within a second, in either direction, is a step; its time is known."""
    run = Run()
    for second in range(60):
        _free(run, second, 4 * GIB)
    shown = _free(run, 60, 4 * GIB - jump)

    assert shown.last_step_change_s == 1060.0


def test_steady_growth_is_no_step_change() -> None:
    """A leak of 1 MiB a second is a trend."""
    run = Run()
    for second in range(600):
        last = _free(run, second, 4 * GIB - second * MIB)

    assert last.last_step_change_s is None


def test_process_that_comes_or_goes_is_a_step_change() -> None:
    """A process of a GiB is a step; a passing monitor of a few MiB is none."""
    run = Run()
    server = process(1, 10 * GIB, "x")
    run.gpu(1000.0, gpu(1000.0, 10 * GIB, [server]))
    monitor = run.gpu(1001.0, gpu(1001.0, 10 * GIB, [server, process(2, 4 * MIB, "nvidia-smi")]))
    assert monitor.last_step_change_s is None
    came = run.gpu(1002.0, gpu(1002.0, 10 * GIB, [server, process(3, GIB, "y")]))
    assert came.last_step_change_s == 1002.0

    assert run.gpu(1003.0, gpu(1003.0, 10 * GIB, [server])).last_step_change_s == 1003.0


def test_stale_gpu_says_nothing() -> None:
    """A reading older than 2.5 s is not shown as current."""
    run = Run()
    old = Snapshot(gpus=host(1000.0, gpu(1000.0, GIB, [process(1, GIB)])))
    run.tick(old, 1002.4)
    assert run.signals.gpus[0].headroom_bytes is not None
    run.tick(old, 1002.6)
    shown = run.signals.gpus[0]

    assert (shown.phase, shown.headroom_bytes, shown.ledger, shown.holders) == (
        Phase.UNKNOWN,
        None,
        None,
        None,
    )
    assert shown.device_forecast.floor_s is None


def test_case_I1_memory_is_short_although_the_pool_is_not() -> None:
    """218 MiB are free while the KV pool is a third full: headroom says it, whatever the pool says."""
    run = Run()
    now_s = 1000.0
    state = gpu(now_s, ROOM - 218 * MIB, [process(1, 70 * GIB)])
    run.tick(Snapshot(servers={"chat": page(now_s, engine(0.33))}, gpus=host(now_s, state)), now_s)

    assert run.chat.engines[0].kv_usage_ratio == 0.33
    assert run.signals.gpus[0].headroom_bytes == 218 * MIB


def test_case_I2_token_budget_is_not_memory() -> None:
    """A server within its token budget changes nothing in the headroom of its GPU."""
    for usage in (0.0, 0.2, 1.0):
        run = Run()
        state = gpu(1000.0, ROOM - 300 * MIB, [process(1, 70 * GIB)])
        run.tick(Snapshot(servers={"chat": page(1000.0, engine(usage))}, gpus=host(1000.0, state)), 1000.0)

        assert run.signals.gpus[0].headroom_bytes == 300 * MIB


def test_case_I5_no_cause_is_claimed() -> None:
    """8.36 GiB free and 64 MiB not to be had: headroom states what is free, and no reason is made up."""
    run = Run()
    free = int(8.36 * GIB)
    state = gpu(1000.0, ROOM - free)
    stuck = replace(
        _inside(0), allocator=AllocatorState(releasable_bytes=0, largest_allocatable_bytes=64 * MIB)
    )
    run.tick(Snapshot(gpus=host(1000.0, state), agents=agent(1000.0, stuck)), 1000.0)
    shown = run.signals.gpus[0]

    assert shown.headroom_bytes == free
    assert shown.phase_detail == ""


def test_case_I8_a_servers_memory_setting_is_not_a_cap() -> None:
    """A server that outgrew its share (graphics memory beyond 0.9 of the total) is shown as it is."""
    run = Run()
    state = gpu(1000.0, 78 * GIB, [process(1, 78 * GIB, "vllm serve m --gpu-memory-utilization 0.9")])
    run.tick(Snapshot(servers={"chat": page(1000.0, engine(0.5))}, gpus=host(1000.0, state)), 1000.0)
    shown = run.signals.gpus[0]

    assert shown.headroom_bytes == ROOM - 78 * GIB
    assert sum(part.bytes for part in shown.ledger or () if part.part == "engine_other") == 78 * GIB


def test_case_L1_no_agent_no_allocator_claim() -> None:
    """Without an agent nothing about fragments or releasable memory enters the headroom or its floor."""
    run = Run()
    for second in range(120):
        shown = _free(run, second, 700 * MIB, mem=memory(ROOM - 700 * MIB))

    assert shown.headroom_bytes == 700 * MIB
    assert shown.below_learned_floor is None
    assert shown.headroom_falling is False
