"""The demo's GPUs add up, in every scenario and at every moment."""

from __future__ import annotations

import threading

import pytest

from kvwatch.lab.demo_gpus import MIB, UUIDS, DemoGpus
from kvwatch.lab.demo_script import SCENARIOS
from kvwatch.lab.demo_world import World
from kvwatch.model.gpu import GpuHealth, HostGpus


class Stage:
    """A world and its GPUs on a clock that only the test moves."""

    def __init__(self, scenario: str) -> None:
        self.now_s = 1000.0
        self.world = World(SCENARIOS[scenario], lambda: self.now_s, lambda: 1.8e9 + self.now_s)
        self.gpus = DemoGpus(self.world, 8000, lambda: self.now_s)
        self.world.page()  # the script's clock begins with the first reading

    def at(self, elapsed_s: float) -> HostGpus:
        self.now_s = 1000.0 + elapsed_s
        return self.gpus.poll()


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "faults"])
def test_memory_adds_up_in_one_pass(scenario: str) -> None:
    """Total = reserved + used + free, used = what the processes hold, and the extremes enclose both."""
    stage = Stage(scenario)
    for tick in range(600):
        for gpu in stage.at(tick / 4).gpus:
            memory, seen = gpu.memory, gpu.ledger_pass
            assert memory is not None
            assert seen is not None
            assert memory.total_bytes == (memory.reserved_bytes or 0) + memory.used_bytes + memory.free_bytes
            assert memory.free_bytes > 0
            assert seen.memory == memory
            assert seen.observed_s == stage.now_s
            assert sum(process.used_bytes or 0 for process in seen.processes or ()) == memory.used_bytes
            assert gpu.used_peak_bytes is not None
            assert gpu.free_low_bytes is not None
            assert gpu.used_peak_bytes >= memory.used_bytes
            assert gpu.free_low_bytes <= memory.free_bytes
            assert gpu.used_peak_bytes + gpu.free_low_bytes == memory.used_bytes + memory.free_bytes
            assert 0.0 <= (gpu.utilization_ratio or 0.0) <= 1.0


def test_the_engine_s_own_memory_is_level_under_load() -> None:
    """Load moves the engine's process by less than a change of level, so that it counts as settled."""
    stage = Stage("overload")
    held = [stage.at(second).gpus[0].ledger_pass.processes[0].used_bytes for second in range(60)]
    assert 0 < max(held) - min(held) < 64 * MIB


def test_the_leak_runs_through_both_headroom_thresholds_slowly_enough_to_see() -> None:
    """GPU 0 stays below 2 GiB free for 10 s before 512 MiB, stays there for 10 s, and comes back."""
    stage = Stage("leak")
    free = {second: stage.at(second).gpus[0].memory.free_bytes for second in range(120)}
    assert all(free[second] > 30 * 1024 * MIB for second in range(12))
    yellow = [second for second, size in free.items() if 512 * MIB < size <= 2048 * MIB]
    red = [second for second, size in free.items() if size <= 512 * MIB]
    assert len(yellow) >= 10
    assert len(red) >= 10
    assert yellow[-1] < red[0]
    assert free[119] > 30 * 1024 * MIB


def test_faults_come_in_turn() -> None:
    """The engine's process goes with the server and comes back as another; a lost GPU only says so."""
    stage = Stage("faults")
    before = stage.at(10.0).gpus
    down = stage.at(20.0).gpus
    back = stage.at(45.0).gpus
    assert len(before[0].ledger_pass.processes) == len(back[0].ledger_pass.processes) == 2
    assert len(down[0].ledger_pass.processes) == 1
    assert before[0].ledger_pass.processes[0].pid != back[0].ledger_pass.processes[0].pid
    lost = stage.at(60.0).gpus[1]
    assert (lost.health, lost.memory, lost.uuid) == (GpuHealth.LOST, None, UUIDS[1])
    assert lost.xid_events_total == ((79, 1),)
    again = stage.at(85.0).gpus[1]
    assert again.health is GpuHealth.OK
    assert again.xid_events_total == ((79, 1),)


def test_a_hang_lasts_until_the_script_ends_it_or_the_source_is_closed() -> None:
    """`poll` does not return while NVML hangs; closing the source lets its thread go."""
    stage = Stage("faults")
    stage.now_s = 1000.0 + 100.0
    done = threading.Event()
    thread = threading.Thread(target=lambda: (stage.gpus.poll(), done.set()))
    thread.start()
    assert not done.wait(0.3)
    stage.gpus.close()
    assert done.wait(5.0)
    thread.join()
