"""Agents are joined to GPUs by UUID, also where CUDA was given only the beginning of one."""

from __future__ import annotations

import pytest

from kvwatch.core.naming import with_whole_uuids
from kvwatch.model.gpu import GpuState, HostGpus
from kvwatch.model.report import Snapshot
from kvwatch.model.sample import Sample
from kvwatch.model.server import AgentState, AllocatorState
from kvwatch.model.settings import GIB
from tests.core.host import Host

INSTANCES = ("MIG-aaaa1111-2222", "MIG-aaab1111-2222", "GPU-1")


def agents(uuid: str, observed_s: float = 0.0, releasable: int = 0) -> dict[str, Sample[AgentState]]:
    """One agent that says it is on this GPU."""
    state = AgentState(
        server="chat",
        engine="0",
        rank=0,
        pid=1,
        seq=1,
        gpu_uuid=uuid,
        allocator=AllocatorState(releasable_bytes=releasable),
    )
    sample = Sample(source="agent/chat/0/0", observed_s=observed_s, wall_s=0.0, value=state)
    return {sample.source: sample}


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("MIG-aaaa", "MIG-aaaa1111-2222"),
        ("MIG-AAAB1", "MIG-aaab1111-2222"),
        ("MIG-aaa", "MIG-aaa"),  # of two: CUDA would see none
        ("MIG-bbbb", "MIG-bbbb"),
        ("GPU-1", "GPU-1"),
        ("", ""),
    ],
)
def test_case_C8_short_uuids_are_joined_as_cuda_reads_them(said: str, meant: str) -> None:
    """A prefix of one UUID means that one; a prefix of several, or of none, means nothing."""
    host = HostGpus(gpus=tuple(GpuState(uuid=uuid, index=0) for uuid in INSTANCES))
    gpus = {"nvml": Sample(source="nvml", observed_s=0.0, wall_s=0.0, value=host)}
    (sample,) = with_whole_uuids(Snapshot(gpus=gpus, agents=agents(said))).agents.values()

    assert sample.value is not None
    assert sample.value.gpu_uuid == meant


@pytest.mark.parametrize("said", ["GPU-1", "gpu-", "GPU"])
def test_case_C8_an_agents_memory_counts_on_its_gpu(said: str) -> None:
    """What an allocator could return is headroom of the GPU that it means, however it was named."""
    host = Host()
    for _ in range(3):
        host.agents = agents(said, host.now_s + 1.0, releasable=2 * GIB)
        report = host.tick()

    gpu = report.gpus[0]
    assert gpu.signals is not None
    assert gpu.state.memory is not None
    assert gpu.signals.headroom_bytes == gpu.state.memory.free_bytes + 2 * GIB
