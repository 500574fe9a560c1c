"""GPUs that share memory with the host, through the real bindings on the fake library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvwatch.model.gpu import Accounting, GpuHealth, GpuState, HostGpus
from tests.sources.gpu.rig import GIB, Rig, by_index, read, until

pytestmark = pytest.mark.needs("gcc")
V2, V1 = "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"
NOT_SUPPORTED, LOST, NO_PERMISSION = 3, 15, 4
TOTAL, AVAILABLE, FREE = 120 * GIB, 100 * GIB, 7 * GIB
GB10 = "NVIDIA GB10"


class Memory:
    """The memory figures of a made-up host."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def host(self, *, available: int = AVAILABLE, total: int = TOTAL) -> None:
        """Write /proc/meminfo."""
        path = self.root / "proc/meminfo"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = {"MemTotal": total, "MemFree": FREE, "MemAvailable": available, "Cached": 93 * GIB}
        scratch = path.with_name("meminfo.new")
        scratch.write_text("".join(f"{name}:   {size // 1024} kB\n" for name, size in rows.items()))
        scratch.replace(path)

    def node(self, number: int, *, file: int, anonymous: int, slab: int) -> None:
        """Write one NUMA node's meminfo."""
        path = self.root / f"sys/devices/system/node/node{number}/meminfo"
        path.parent.mkdir(parents=True)
        rows = {"MemTotal": 96 * GIB, "FilePages": file, "AnonPages": anonymous, "Slab": slab}
        path.write_text("".join(f"Node {number} {name}:  {size // 1024} kB\n" for name, size in rows.items()))


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Memory:
    """A host with 120 GiB, 100 of them available and 7 free."""
    monkeypatch.setenv("KVWATCH_HOST_ROOT", str(tmp_path / "host"))
    memory = Memory(tmp_path / "host")
    memory.host()
    return memory


def no_framebuffer(rig: Rig, name: str) -> Rig:
    """GPU 0 as a device of this name, of whose memory NVML tells nothing."""
    rig.scenario.gpu(0, name=name).error(0, V2, NOT_SUPPORTED).error(0, V1, NOT_SUPPORTED)
    return rig


def has_memory(host: HostGpus) -> bool:
    return by_index(host, 0).memory is not None


def settled(condition: Callable[[GpuState], bool]) -> Callable[[HostGpus], bool]:
    """GPU 0 has its slow values and meets the condition."""
    return lambda host: by_index(host, 0).power_watts is not None and condition(by_index(host, 0))


@pytest.mark.parametrize("name", [GB10, "Orin (nvgpu)", "NVIDIA Thor"])
def test_case_B2_integrated_gpu_has_the_hosts_memory(rig: Rig, memory: Memory, name: str) -> None:
    """MemTotal and MemAvailable, marked as host memory, adding up, for devices known by name."""
    source = no_framebuffer(rig, name).start()
    gpu = by_index(until(source, has_memory), 0)

    assert gpu.memory is not None
    assert (gpu.memory.total_bytes, gpu.memory.free_bytes) == (TOTAL, AVAILABLE)
    assert gpu.memory.used_bytes == TOTAL - AVAILABLE
    assert gpu.memory.reserved_bytes is None
    assert gpu.memory.accounting is Accounting.UNIFIED
    assert gpu.health is GpuHealth.OK
    assert "host" in gpu.memory_note


def test_case_B1_missing_framebuffer_is_a_capability_not_a_failure(rig: Rig, memory: Memory) -> None:
    """The worker lives on, the device stays well, and all that it does support is read."""
    source = no_framebuffer(rig, GB10).start()
    gpu = by_index(until(source, settled(lambda gpu: gpu.memory is not None)), 0)

    assert gpu.health is GpuHealth.OK
    assert gpu.temperature_celsius is not None
    assert V2 in gpu.capabilities_missing


def test_case_B3_unknown_device_without_memory_stays_absent(rig: Rig, memory: Memory) -> None:
    """NOT_SUPPORTED from a device that is not known to be integrated: no memory, never the host's."""
    source = no_framebuffer(rig, "NVIDIA B999").start()
    gpu = by_index(until(source, settled(lambda gpu: V2 in gpu.capabilities_missing)), 0)

    assert gpu.memory is None
    assert gpu.memory_note == ""


@pytest.mark.parametrize(
    ("code", "health"), [(LOST, GpuHealth.LOST), (NO_PERMISSION, GpuHealth.DENIED)], ids=["lost", "denied"]
)
def test_case_B3_integrated_gpu_that_fails_gets_no_host_memory(
    rig: Rig, memory: Memory, code: int, health: GpuHealth
) -> None:
    """A known integrated device that is lost or denied has no memory: NOT_SUPPORTED alone leads there."""
    rig.scenario.gpu(0, name=GB10).error(0, V2, code)
    gpu = by_index(until(rig.start(), lambda host: by_index(host, 0).health is health), 0)

    assert gpu.memory is None


def test_case_B4_one_driver_refuses_and_another_answers(rig: Rig, memory: Memory) -> None:
    """Whether NVML answers with figures of its own or refuses, a known integrated device has the host's."""
    rig.scenario.gpus = 2
    rig.scenario.gpu(0, name=GB10, total=8 * GIB, used=1 * GIB, free=2 * GIB)
    rig.scenario.gpu(1, name=GB10).error(1, V2, NOT_SUPPORTED).error(1, V1, NOT_SUPPORTED)
    host = until(rig.start(), lambda host: all(gpu.memory is not None for gpu in host.gpus))

    assert by_index(host, 0).memory == by_index(host, 1).memory
    assert by_index(host, 0).memory is not None


def test_case_B6_headroom_is_what_the_host_could_give_and_both_are_shown(rig: Rig, memory: Memory) -> None:
    """Free is MemAvailable, not MemFree, and the page cache in it is told apart; it follows the host."""
    source = no_framebuffer(rig, GB10).start()
    gpu = by_index(until(source, settled(lambda gpu: gpu.reclaimable_bytes is not None)), 0)
    assert gpu.memory is not None
    assert gpu.memory.free_bytes - (gpu.reclaimable_bytes or 0) == FREE

    memory.host(available=20 * GIB)
    until(source, lambda host: has_memory(host) and by_index(host, 0).memory.free_bytes == 20 * GIB)  # type: ignore[union-attr]


def test_case_A10_parts_add_up_whatever_the_kernel_says(rig: Rig, memory: Memory) -> None:
    """A kernel that says more is available than there is gives no memory rather than a contradiction."""
    memory.host(available=TOTAL + GIB)
    source = no_framebuffer(rig, GB10).start()
    until(source, settled(lambda gpu: gpu.memory is None))

    memory.host()
    gpu = by_index(until(source, has_memory), 0)
    assert gpu.memory is not None
    assert gpu.memory.used_bytes + gpu.memory.free_bytes == gpu.memory.total_bytes


def test_coherent_gpu_counts_the_hosts_pages_and_says_so(rig: Rig, memory: Memory) -> None:
    """GH200: NVML's memory as it is, and beside it what the operating system keeps there."""
    memory.node(1, file=5 * GIB, anonymous=2 * GIB, slab=GIB)
    rig.scenario.gpus = 2
    rig.scenario.gpu(0, name="NVIDIA GH200 144G HBM3e", numa=1).memory(0, used=30 * GIB)
    host = until(rig.start(), lambda host: read(host) and by_index(host, 0).os_pages_bytes is not None)
    coherent, discrete = by_index(host, 0), by_index(host, 1)

    assert coherent.memory is not None
    assert coherent.memory.used_bytes == 30 * GIB
    assert coherent.memory.accounting is Accounting.V2
    assert coherent.os_pages_bytes == 8 * GIB
    assert "operating system" in coherent.memory_note
    assert (discrete.os_pages_bytes, discrete.memory_note) == (None, "")
