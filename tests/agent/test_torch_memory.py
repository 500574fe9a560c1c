"""What is read of PyTorch, how often, and what a compaction may cost."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from kvwatch.agent import torch_memory
from kvwatch.agent.torch_memory import SnapshotGuard, TorchMemory
from kvwatch.model.server import AllocatorState
from tests.agent.build import GIB, MIB, segment, told


class Cuda:
    """torch.cuda as far as the agent uses it, with costs on a clock of its own."""

    def __init__(self, segments: list[dict[str, Any]], *, free: int = 2 * GIB, cost_s: float = 0.001) -> None:
        self.segments, self.free, self.cost_s = segments, free, cost_s
        self.now_s = 100.0
        self.initialised = True
        self.snapshots = 0
        self.fraction = 1.0
        self.broken = False

    def clock(self) -> float:
        return self.now_s

    def is_initialized(self) -> bool:
        return self.initialised

    def device_count(self) -> int:
        return 2

    def memory_stats(self, device: int) -> dict[str, int]:
        here = [one for one in self.segments if one["device"] == device]
        return {
            "reserved_bytes.all.current": sum(one["total_size"] for one in here),
            "allocated_bytes.all.current": sum(one["allocated_size"] for one in here),
            "active_bytes.all.current": sum(one["active_size"] for one in here),
            "requested_bytes.all.current": sum(one["requested_size"] for one in here),
            "inactive_split_bytes.all.current": 7,
            "num_alloc_retries": 1,
            "num_ooms": 0,
            "active.all.current": sum(len(one["blocks"]) for one in here),
            "inactive_split.all.current": 0,
            "segment.all.current": len(here),
        }

    def memory_snapshot(self, mempool_id: object = None, include_traces: bool = True) -> list[dict[str, Any]]:
        assert not include_traces, "traces cost far more"
        self.snapshots += 1
        self.now_s += self.cost_s
        if self.broken:
            raise RuntimeError("no snapshot today")
        return self.segments

    def mem_get_info(self, device: int) -> tuple[int, int]:
        assert any(one["device"] == device for one in self.segments), "would wake CUDA on an unused GPU"
        return self.free, 80 * GIB

    def get_per_process_memory_fraction(self, device: int) -> float:
        return self.fraction

    def get_device_properties(self, device: int) -> Any:
        return type("Properties", (), {"uuid": f"0000-{device}"})()

    def empty_cache(self) -> None:
        self.now_s += 0.25
        self.segments = [
            one for one in self.segments if any(block["state"] != "inactive" for block in one["blocks"])
        ]


def checkerboard(*, expandable: bool = False) -> list[dict[str, Any]]:
    return [
        segment(
            [(40 * MIB, "active_allocated" if number % 2 else "inactive")],
            address=number << 34,
            expandable=expandable,
        )
        for number in range(100)
    ]


def memory(cuda: Cuda) -> TorchMemory:
    return TorchMemory(cuda=cuda, clock=cuda.clock)


def read(reader: TorchMemory) -> tuple[str, AllocatorState]:
    """The one GPU that is used, as the daemon gets to know it."""
    [(uuid, found)] = reader.read()
    return uuid, told(found)


def test_figures() -> None:
    """Counters and block-level figures come together, for GPUs that hold something only."""
    cuda = Cuda(checkerboard())
    uuid, found = read(memory(cuda))

    assert uuid == "GPU-0000-0"
    assert found.reserved_bytes == 4000 * MIB
    assert found.allocated_bytes == 2000 * MIB
    assert found.releasable_bytes == 2000 * MIB
    assert found.fragmentation_soft_ratio == 0.5
    assert found.fragmentation_hard_ratio == 0.0
    assert found.largest_allocatable_bytes == 2 * GIB - 64 * MIB + 2000 * MIB
    assert found.inactive_bytes == 7


def test_case_J1_counter_is_absent_with_expandable_segments() -> None:
    """Inactive_split is not told where it is blind."""
    _, found = read(memory(Cuda(checkerboard(expandable=True))))

    assert found.inactive_bytes is None
    assert found.releasable_bytes == 2000 * MIB


def test_case_J1_counter_is_absent_where_no_snapshot_was_taken() -> None:
    """With too many blocks to look at, nobody knows whether segments are expandable: not told, not 0."""
    blocks = [(512, "active_allocated")] * (torch_memory.SNAPSHOT_MAX_BLOCKS + 1)
    cuda = Cuda([segment(blocks, expandable=True)])
    _, found = read(memory(cuda))

    assert cuda.snapshots == 0
    assert found.inactive_bytes is None
    assert found.reserved_bytes == 512 * len(blocks)


def test_case_J1_counter_stays_absent_when_the_snapshot_is_old() -> None:
    """Once segments were seen to be expandable, the counter is not told again with the blocks' age."""
    cuda = Cuda(checkerboard(expandable=True))
    reader = memory(cuda)
    reader.read()
    cuda.segments += [segment([(512, "active_allocated")] * 20_000, address=1 << 50, expandable=True)]
    cuda.now_s += torch_memory.SNAPSHOT_STALE_S + 1
    _, found = read(reader)

    assert found.largest_allocatable_bytes is None
    assert found.inactive_bytes is None


def test_case_I4_private_pools_reach_the_daemon_apart() -> None:
    """Free, reserved and what graphs keep in pools of their own arrive as three figures."""
    cuda = Cuda([*checkerboard(), segment([(3 * GIB, "inactive")], address=1 << 50, pool=(0, 1))])
    _, found = read(memory(cuda))

    assert found.reserved_bytes == 4000 * MIB + 3 * GIB
    assert found.private_bytes == 3 * GIB
    assert found.releasable_bytes == 2000 * MIB


@pytest.mark.parametrize("visible", ["3", "GPU-ab", "2,-1,0", "-1", ""])
def test_case_C8_gpus_are_named_by_the_drivers_uuid_whatever_is_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    """Indices, short UUIDs and -1 in CUDA_VISIBLE_DEVICES are CUDA's to read: no sums with them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    uuid, _ = read(memory(Cuda(checkerboard())))

    assert uuid == "GPU-0000-0"


def test_fraction_caps() -> None:
    """A memory fraction set in the process bounds what can still be allocated."""
    cuda = Cuda(checkerboard(), free=70 * GIB)
    cuda.fraction = 0.1
    _, found = read(memory(cuda))

    assert found.largest_allocatable_bytes == 8 * GIB - 4000 * MIB + 2000 * MIB


def test_fresh_counters_bound_old_blocks() -> None:
    """Between snapshots the figures never promise more than the counters of this second leave."""
    cuda = Cuda(checkerboard())
    reader = memory(cuda)
    reader.read()
    cuda.segments = [segment([(4000 * MIB, "active_allocated")])]
    cuda.now_s += 1
    _, found = read(reader)

    assert cuda.snapshots == 1
    assert found.releasable_bytes == 0
    assert found.largest_allocatable_bytes == 2 * GIB - 64 * MIB
    assert found.snapshot_age_s == pytest.approx(1.001)


def test_snapshot_spacing() -> None:
    """A cheap snapshot is taken every ten seconds, however often the counters are read."""
    cuda = Cuda(checkerboard())
    reader = memory(cuda)
    for _ in range(100):
        reader.read()
        cuda.now_s += 1

    assert 9 <= cuda.snapshots <= 10


def test_dear_snapshot_backs_off() -> None:
    """A snapshot of 50 ms comes every 100 s: never more than 1/2000 of the time."""
    cuda = Cuda(checkerboard(), cost_s=0.05)
    reader = memory(cuda)
    for _ in range(1000):
        reader.read()
        cuda.now_s += 1

    assert cuda.snapshots <= 11


def test_guard_refuses_many_blocks() -> None:
    """Of very many blocks none is ever taken."""
    guard = SnapshotGuard()

    assert not guard.allows(torch_memory.SNAPSHOT_MAX_BLOCKS + 1, 1e9)
    assert guard.allows(torch_memory.SNAPSHOT_MAX_BLOCKS, 1e9)


def test_failing_snapshot_is_not_repeated_at_once() -> None:
    """A snapshot that fails costs no more often than a good one."""
    cuda = Cuda(checkerboard())
    cuda.broken = True
    reader = memory(cuda)
    failures = 0
    for _ in range(30):
        try:
            reader.read()
        except RuntimeError:
            failures += 1
        cuda.now_s += 1

    assert failures == cuda.snapshots <= 3


def test_old_blocks_are_dropped() -> None:
    """Block-level figures that are too old are not told any more; the counters are."""
    cuda = Cuda(checkerboard())
    reader = memory(cuda)
    reader.read()
    cuda.segments += [segment([(512, "active_allocated")] * 20_000, address=1 << 50)]
    cuda.now_s += torch_memory.SNAPSHOT_STALE_S + 1
    _, found = read(reader)

    assert found.reserved_bytes is not None
    assert found.largest_allocatable_bytes is None
    assert found.fragmentation_hard_ratio is None


def test_compaction_is_rare_and_counted() -> None:
    """Unused memory goes back once a minute at most; the cost is told; the next figures are fresh."""
    cuda = Cuda(checkerboard())
    reader = memory(cuda)
    reader.read()

    assert reader.compact()
    assert not reader.compact()
    _, found = read(reader)
    assert found.compactions_total == 1
    assert found.compact_seconds_total == pytest.approx(0.25)
    assert found.releasable_bytes == 0
    assert found.reserved_bytes == 2000 * MIB
    cuda.now_s += torch_memory.COMPACT_SPACING_S
    assert reader.compact()


def test_sleeping_cuda_is_left_alone() -> None:
    """A process that has not begun to use CUDA is not made to."""
    cuda = Cuda(checkerboard())
    cuda.initialised = False

    assert memory(cuda).read() == []
    assert not memory(cuda).compact()


def test_mig_instance_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a MIG instance the UUID is the one the process was given."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-abc, GPU-x")
    uuid, _ = read(memory(Cuda(checkerboard())))

    assert uuid == "MIG-abc"


def test_torch_is_never_imported() -> None:
    """The agent starts and reads without importing torch, numpy or anything else heavy."""
    code = (
        "import sys, kvwatch.agent; assert kvwatch.agent.start('x'); "
        "from kvwatch.agent.torch_memory import TorchMemory; assert TorchMemory().read() == []; "
        "bad = {'torch', 'numpy', 'ssl', 'http', 'asyncio', 'subprocess', 'yaml', 'vllm'}; "
        "assert not bad & set(sys.modules), bad & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-S", "-c", code],
        check=True,
        timeout=30,
        cwd=torch_memory.__file__.split("/kvwatch/")[0],
    )
