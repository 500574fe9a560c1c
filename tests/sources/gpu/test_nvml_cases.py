"""Public bug reports about MIG, unified memory and Xid events, played out on the fake NVML library."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwatch.model.gpu import Accounting, GpuHealth, GpuState, HostGpus
from tests.fakes.nvml import ANY, uuid_of
from tests.sources.gpu.rig import GIB, Rig, after, by_index, read, until

pytestmark = pytest.mark.needs("gcc")
V2, V1 = "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"
MIG_HANDLE = "nvmlDeviceGetMigDeviceHandleByIndex"
INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND, FUNCTION_NOT_FOUND, LOST = 2, 3, 6, 13, 15


@pytest.fixture
def host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 120 GiB of memory, of which 100 are available."""
    monkeypatch.setenv("KVWATCH_HOST_ROOT", str(tmp_path / "host"))
    path = tmp_path / "host/proc/meminfo"
    path.parent.mkdir(parents=True)
    rows = {"MemTotal": 120, "MemFree": 7, "MemAvailable": 100}
    path.write_text("".join(f"{name}: {size * 1024**2} kB\n" for name, size in rows.items()))


def instances(host: HostGpus) -> list[GpuState]:
    """The MIG instances of the host."""
    return [gpu for gpu in host.gpus if gpu.parent_uuid]


@pytest.mark.usefixtures("host_memory")
def test_case_B2_integrated_gpu_behind_an_older_library_has_the_hosts_memory(rig: Rig) -> None:
    """A library without version 2 whose version 1 says NOT_SUPPORTED: the host's memory all the same."""
    rig.scenario.gpu(0, name="Orin (nvgpu)").error(0, V2, FUNCTION_NOT_FOUND).error(0, V1, NOT_SUPPORTED)

    gpu = by_index(until(rig.start(), lambda host: by_index(host, 0).memory is not None), 0)

    assert gpu.memory is not None
    assert (gpu.memory.total_bytes, gpu.memory.accounting) == (120 * GIB, Accounting.UNIFIED)


@pytest.mark.usefixtures("host_memory")
def test_case_B3_mig_never_gets_the_hosts_memory(rig: Rig) -> None:
    """An integrated device in MIG mode: neither it nor its instances are given the host's memory."""
    rig.scenario.gpu(0, name="NVIDIA Thor").mig(0, 0, "MIG-a", total=60 * GIB, used=GIB)
    rig.scenario.error(0, V2, NOT_SUPPORTED).error("0:0", V2, NOT_SUPPORTED)

    def refused(host: HostGpus) -> bool:
        return len(host.gpus) == 2 and all(V2 in gpu.capabilities_missing for gpu in host.gpus)

    host = until(rig.start(), refused)

    assert [gpu.memory for gpu in host.gpus] == [None, None]
    assert [gpu.memory_note for gpu in host.gpus] == ["", ""]


def test_case_C4_profile_follows_the_attributes_under_one_uuid(rig: Rig) -> None:
    """Older drivers give a rebuilt instance the UUID of the one before: its profile is the new one's."""
    rig.scenario.mig(0, 0, "MIG-GPU-x/1/0", total=35 * GIB // 2, used=GIB)
    source = rig.start()
    before = instances(until(source, lambda host: len(instances(host)) == 1))[0].mig_profile
    rig.scenario.statements.clear()
    rig.scenario.mig(0, 0, "MIG-GPU-x/1/0", total=35 * GIB, used=GIB).write()

    host = until(source, lambda host: instances(host)[0].mig_profile != before)

    assert (before, instances(host)[0].mig_profile) == ("1g.18gb", "1g.35gb")


@pytest.mark.parametrize("code", [NOT_FOUND, INVALID_ARGUMENT])
def test_case_C5_handles_that_are_refused_meanwhile_stop_nothing(rig: Rig, code: int) -> None:
    """While MIG is reconfigured instances are refused: they go and come, the worker and the parent stay."""
    rig.scenario.gpus = 2
    rig.scenario.mig(0, 0, "MIG-a", total=18 * GIB, used=GIB)
    source = rig.start()
    until(source, lambda host: len(instances(host)) == 1 and instances(host)[0].memory is not None)
    pid = source.worker_pid
    rig.scenario.error(0, MIG_HANDLE, code).write()
    host = until(source, lambda host: not instances(host))
    assert by_index(host, 0).health is GpuHealth.OK
    assert by_index(host, 1).memory is not None
    rig.scenario.healed().write()

    until(source, lambda host: len(instances(host)) == 1 and instances(host)[0].memory is not None)
    assert source.worker_pid == pid


def test_case_C5_an_instance_whose_handle_is_void_has_no_values(rig: Rig) -> None:
    """An instance that NVML no longer knows loses its memory at once; its sister keeps hers."""
    rig.scenario.mig(0, 0, "MIG-a", total=18 * GIB, used=GIB).mig(0, 1, "MIG-b", total=18 * GIB, used=2 * GIB)
    source = rig.start()
    until(source, lambda host: len(instances(host)) == 2 and all(gpu.memory for gpu in instances(host)))
    pid = source.worker_pid
    rig.scenario.error("0:0", ANY, INVALID_ARGUMENT).write()

    until(source, lambda host: [gpu.uuid for gpu in instances(host) if gpu.memory] == ["MIG-b"])
    assert source.worker_pid == pid


def test_case_G5_the_same_xid_again_counts_again(rig: Rig) -> None:
    """Events are counted, so a second Xid of the same code is seen, and without a new one nothing moves."""
    source = rig.start()
    until(source, read)
    rig.scenario.xid(0, 31).write()
    until(source, lambda host: host.gpus[0].xid_events_total == ((31, 1),))
    rig.scenario.xid(0, 31).write()

    until(source, lambda host: host.gpus[0].xid_events_total == ((31, 2),))
    assert after(source, 12).gpus[0].xid_events_total == ((31, 2),)


def test_case_G6_every_event_counts_although_the_gpu_is_lost_with_them(rig: Rig) -> None:
    """Three Xids within one interval, the last of which takes the GPU with it: all three are counted."""
    rig.scenario.gpus = 2
    source = rig.start()
    until(source, read)
    rig.scenario.error(1, ANY, LOST).write()
    until(source, lambda host: by_index(host, 1).health is GpuHealth.LOST)
    rig.scenario.xid(1, 62).xid(1, 45).xid(1, 79).write()

    gpu = by_index(until(source, lambda host: bool(by_index(host, 1).xid_events_total)), 1)

    assert (gpu.uuid, gpu.health) == (uuid_of(1), GpuHealth.LOST)
    assert gpu.xid_events_total == ((45, 1), (62, 1), (79, 1))


def test_case_G6_no_event_is_lost_when_devices_are_listed_anew(rig: Rig) -> None:
    """Events that wait while a MIG instance appears are taken before the old subscription goes."""
    rig.scenario.mig(0, 0, "MIG-a", total=18 * GIB, used=GIB)
    source = rig.start()
    until(source, lambda host: len(instances(host)) == 1 and host.gpus[0].power_watts is not None)
    rig.scenario.xid(0, 63).mig(0, 1, "MIG-b", total=18 * GIB, used=GIB).write()

    host = until(source, lambda host: len(instances(host)) == 2 and bool(host.gpus[0].xid_events_total))

    assert host.gpus[0].xid_events_total == ((63, 1),)
