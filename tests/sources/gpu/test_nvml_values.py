"""What NVML says arrives unchanged: real bindings, real worker process, fake library."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pynvml
import pytest

from kvwatch.model.gpu import Accounting, GpuHealth
from kvwatch.model.settings import GpuSettings
from tests.fakes.nvml import ANY, SENTINEL, build, uuid_of
from tests.sources.gpu.rig import GIB, Rig, after, read, until

pytestmark = pytest.mark.needs("gcc")
V2 = "nvmlDeviceGetMemoryInfo_v2"


def recorded(fixtures: Path, name: str) -> dict[str, dict[str, object]]:
    """A recording of one H200: call -> value."""
    return json.loads((fixtures / "h200" / name).read_text())


def test_recorded_idle_h200_is_reported_as_it_was(rig: Rig, fixtures: Path) -> None:
    """The values of an idle H200 come out in base units, with ratios from 0 to 1."""
    idle = recorded(fixtures, "nvml_idle.json")
    memory = idle["nvmlDeviceGetMemoryInfo:v2"]["value"]
    rig.scenario.gpu(0, **{part: memory[part] for part in ("total", "used", "free", "reserved")})
    rig.scenario.gpu(0, power=idle["nvmlDeviceGetPowerUsage"]["value"], temp=37)
    rig.scenario.gpu(0, energy=idle["nvmlDeviceGetTotalEnergyConsumption"]["value"], ecc_corrected=3)

    gpu = until(rig.start(), lambda host: read(host) and host.gpus[0].energy_joules is not None).gpus[0]

    assert (gpu.uuid, gpu.index, gpu.name, gpu.health) == (uuid_of(0), 0, "NVIDIA H200", GpuHealth.OK)
    assert gpu.driver_version == "580.159.04"
    assert gpu.memory is not None
    assert gpu.memory.used_bytes == 0
    assert gpu.memory.reserved_bytes == 644_939_776
    assert gpu.memory.accounting is Accounting.V2
    assert gpu.power_watts == pytest.approx(85.986)
    assert gpu.temperature_celsius == 37
    assert gpu.energy_joules == pytest.approx(2853.365)
    assert gpu.utilization_ratio == 0.0
    assert (gpu.ecc_corrected_total, gpu.ecc_uncorrected_total) == (3, 0)
    assert gpu.clock_event_reasons == ("gpu_idle",)
    assert (gpu.remapped_rows_pending, gpu.remapped_rows_failed) == (False, False)
    assert (gpu.bar1_total_bytes, gpu.bar1_used_bytes) == (274_877_906_944, 1_703_936)
    assert gpu.sample_interval_s == pytest.approx(0.1)
    assert gpu.capabilities_missing == ()


def test_recorded_busy_h200_has_memory_and_processes_of_one_pass(rig: Rig, fixtures: Path) -> None:
    """Two processes and the memory around them are read together, and the parts fit into the total."""
    memory = recorded(fixtures, "nvml_busy.json")["memory_v2"]["value"]
    rig.scenario.gpu(0, **{part: memory[part] for part in ("total", "used", "free", "reserved")})
    rig.scenario.gpu(0, util=99, memutil=23)
    rig.scenario.process(0, os.getpid(), 8710 * 1024**2).process(0, 1, 874 * 1024**2)

    host = until(rig.start(), lambda host: read(host) and host.gpus[0].utilization_ratio is not None)

    gpu = host.gpus[0]
    assert gpu.utilization_ratio == 0.99
    assert gpu.ledger_pass is not None
    assert gpu.ledger_pass.memory == gpu.memory
    assert gpu.ledger_pass.processes is not None
    held = sum(process.used_bytes for process in gpu.ledger_pass.processes)
    assert held == 9584 * 1024**2
    assert held <= gpu.memory.used_bytes


def test_processes_carry_what_proc_says_of_them(rig: Rig) -> None:
    """A process of this host is alive and named; one that does not exist is dead, where that can be told."""
    rig.scenario.process(0, os.getpid(), 3 * GIB).process(0, 32_760, GIB, "graphics").memory(0, 5 * GIB)

    host = until(rig.start(), read)

    processes = {p.pid: p for p in host.gpus[0].ledger_pass.processes}
    ours = processes[os.getpid()]
    assert ours.used_bytes == 3 * GIB
    assert processes[32_760].kind == "graphics"
    if host.host_pid_namespace:
        assert ours.alive is True
        assert "python" in ours.command or "pytest" in ours.command
        assert ours.started_ticks is not None
        assert ours.ancestors[0][0] == os.getppid()
        assert processes[32_760].alive is Path("/proc/32760").exists()
    else:
        assert ours.alive is None


@pytest.mark.parametrize("count", [1, 8, 16])
def test_case_A8_every_gpu_is_reported_once_by_uuid(rig: Rig, count: int) -> None:
    """One worker reports each GPU of the host exactly once, with its own values."""
    rig.scenario.gpus = count
    for index in range(count):
        rig.scenario.memory(index, (index + 1) * GIB)

    host = until(rig.start(), read)

    assert [gpu.uuid for gpu in host.gpus] == [uuid_of(index) for index in range(count)]
    assert [gpu.memory.used_bytes for gpu in host.gpus] == [(index + 1) * GIB for index in range(count)]
    assert [gpu.index for gpu in host.gpus] == list(range(count))


def test_case_A1_reserved_memory_is_not_counted_as_used(rig: Rig) -> None:
    """An empty GPU shows 0 bytes used although the driver has reserved 615 MiB."""
    gpu = until(rig.start(), read).gpus[0]

    assert gpu.memory.used_bytes == 0
    assert gpu.memory.reserved_bytes == 644_939_776
    assert gpu.memory.used_bytes + gpu.memory.free_bytes + gpu.memory.reserved_bytes == gpu.memory.total_bytes


@pytest.mark.parametrize("code", [13, 25])
def test_case_A5_version_1_is_only_a_labelled_fallback(rig: Rig, code: int) -> None:
    """Where version 2 is missing, version 1 is used and says so; reserved is then unknown, not 0."""
    rig.scenario.error(ANY, V2, code)

    gpu = until(rig.start(), read).gpus[0]

    assert gpu.memory.accounting is Accounting.V1
    assert gpu.memory.used_bytes == 644_939_776
    assert gpu.memory.reserved_bytes is None
    assert V2 in gpu.capabilities_missing


def test_case_B1_memory_that_is_not_supported_is_absent_not_version_1(rig: Rig) -> None:
    """NOT_SUPPORTED is a missing capability: no memory value, no fallback, no fault of the GPU."""
    rig.scenario.error(ANY, V2, 3)

    host = until(rig.start(), lambda host: bool(host.gpus and host.gpus[0].power_watts is not None))

    gpu = host.gpus[0]
    assert gpu.memory is None
    assert gpu.health is GpuHealth.OK
    assert V2 in gpu.capabilities_missing


def test_case_A2_shadowed_bindings_are_noticed(
    rig: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bindings without version 2 give labelled version 1 figures and a log line with the module's path."""
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    lines = [f"exec(compile(open({pynvml.__file__!r}).read(), 'pynvml', 'exec'))", "del nvmlMemory_v2"]
    (shadow / "pynvml.py").write_text("\n".join(lines))
    rig.monkeypatch.setenv("PYTHONPATH", str(shadow))
    caplog.set_level(logging.INFO, "kvwatch.sources.gpu.nvml")

    gpu = until(rig.start(), read).gpus[0]

    assert gpu.memory.accounting is Accounting.V1
    paths = {record.bindings_path for record in caplog.records if hasattr(record, "bindings_path")}
    assert paths == {str(shadow / "pynvml.py")}
    assert any("nvidia-ml-py" in record.message for record in caplog.records)


def test_case_A7_bandwidth_activity_is_not_memory_use(rig: Rig) -> None:
    """NVML's "memory utilization" lands in the bandwidth field and never in a memory figure."""
    rig.scenario.memory(0, 130 * GIB).gpu(0, util=50, memutil=2)

    gpu = until(rig.start(), lambda host: read(host) and host.gpus[0].utilization_ratio is not None).gpus[0]

    assert gpu.memory_bandwidth_utilization_ratio == 0.02
    assert gpu.memory.used_bytes == 130 * GIB


def test_case_D1_sentinels_are_unknown(rig: Rig) -> None:
    """All-ones values are "not reported": no memory, power, energy, or process size comes from them."""
    rig.scenario.gpus = 2
    rig.scenario.gpu(0, total=SENTINEL, used=SENTINEL, free=SENTINEL, reserved=SENTINEL)
    rig.scenario.gpu(1, energy=SENTINEL, power=0xFFFFFFFF, temp=0xFFFFFFFF, ecc_corrected=SENTINEL - 3)
    rig.scenario.gpu(1, bar1_total=SENTINEL).process(1, os.getpid(), SENTINEL)

    source = rig.start()
    host = until(source, lambda host: bool(host.gpus[1].ledger_pass and host.gpus[1].clock_event_reasons))

    first, second = host.gpus
    assert first.memory is None
    assert first.used_peak_bytes is None
    assert (second.energy_joules, second.power_watts, second.temperature_celsius) == (None, None, None)
    assert second.ecc_corrected_total is None
    assert second.bar1_total_bytes is None
    assert [process.used_bytes for process in second.ledger_pass.processes] == [None]


def test_case_F4_wide_process_records_are_recognised(rig: Rig, tmp_path: Path) -> None:
    """The 535.43 layout, told by its symbols, gives the right pids and sizes."""
    rig.use(build(tmp_path / "wide", layout_535=True))
    rig.scenario.process(0, os.getpid(), 3 * GIB).process(0, 1, 2 * GIB)

    gpu = until(rig.start(), read).gpus[0]

    assert {p.pid: p.used_bytes for p in gpu.ledger_pass.processes} == {os.getpid(): 3 * GIB, 1: 2 * GIB}


@pytest.mark.parametrize(("pid", "used"), [(2**31, GIB), (1, 2**50)], ids=["pid", "size"])
def test_implausible_process_lists_are_not_used(rig: Rig, pid: int, used: int) -> None:
    """A pid that cannot exist or a size over the total discards the list, not the memory reading."""
    rig.scenario.process(0, pid, used)

    gpu = until(rig.start(), read).gpus[0]

    assert gpu.ledger_pass.processes is None
    assert gpu.ledger_pass.memory.used_bytes == 0


def test_many_processes_fit(rig: Rig) -> None:
    """A list longer than the first array is read whole."""
    for pid in range(2, 62):
        rig.scenario.process(0, pid, 1024)

    gpu = until(rig.start(), read).gpus[0]

    assert {process.pid for process in gpu.ledger_pass.processes} == set(range(2, 62))


def test_expensive_calls_are_never_made(rig: Rig) -> None:
    """No PCIe throughput, no checksum, no all-fields call, and energy at most once in ten seconds."""
    rig.scenario.call_log = rig.directory / "calls"
    source = rig.start()
    until(source, read)
    after(source, 10)

    names = [name for _, name, _ in rig.calls()]
    assert "nvmlDeviceGetPcieThroughput" not in names
    assert names.count("nvmlDeviceGetTotalEnergyConsumption") <= 1
    assert names.count(V2) > 10


def test_memory_is_sampled_fast_while_it_moves(rig: Rig) -> None:
    """A move of 16 MiB brings the reported interval to 10 ms; a still neighbour stays at 100 ms."""
    rig.scenario.gpus = 2
    source = rig.start()
    until(source, read)
    rig.scenario.memory(0, GIB).write()

    host = until(source, lambda host: (host.gpus[0].sample_interval_s or 1) < 0.05)

    assert host.gpus[0].sample_interval_s == pytest.approx(0.01)
    assert host.gpus[1].sample_interval_s == pytest.approx(0.1)


def test_peak_outlives_the_moment(rig: Rig) -> None:
    """A peak between two messages stays in `used_peak_bytes`, and a 15 s reader is told what it misses."""
    rig.scenario.memory(0, 10 * GIB)
    source = rig.start()
    until(source, read)
    rig.scenario.statements.clear()
    rig.scenario.memory(0, 20 * GIB).write()
    until(source, lambda host: host.gpus[0].memory.used_bytes == 20 * GIB)
    rig.scenario.statements.clear()
    rig.scenario.memory(0, 11 * GIB).write()

    gpu = until(source, lambda host: host.gpus[0].memory.used_bytes == 11 * GIB).gpus[0]

    assert gpu.used_peak_bytes == 20 * GIB
    assert gpu.free_low_bytes == gpu.memory.total_bytes - gpu.memory.reserved_bytes - 20 * GIB
    assert gpu.hidden_from_15s_bytes == 9 * GIB


def test_expected_gpu_that_never_was_there_is_missing(rig: Rig) -> None:
    """A UUID named in the configuration and not listed is a GPU in state missing; prefixes match."""
    settings = GpuSettings(expect_uuids=("GPU-f0000000", "GPU-absent"), expect_count=2)

    host = until(rig.start(settings), read_first)

    assert [(gpu.uuid, gpu.health) for gpu in host.gpus] == [
        (uuid_of(0), GpuHealth.OK),
        ("GPU-absent", GpuHealth.MISSING),
    ]
    assert host.expected_count == 2


def read_first(host: object) -> bool:
    """Condition: the first GPU has memory."""
    return host.gpus[0].memory is not None


@pytest.mark.parametrize("code", [3, 4, 15, 999])
def test_case_B3_no_error_is_answered_with_the_host_s_memory(rig: Rig, code: int) -> None:
    """Unsupported, denied, lost or unknown: that GPU has no memory figure, the other one has its own."""
    rig.scenario.gpus = 2
    rig.scenario.memory(1, 5 * GIB).error(0, V2, code)

    host = until(rig.start(), lambda host: len(host.gpus) == 2 and host.gpus[1].memory is not None)

    assert host.gpus[0].memory is None
    assert host.gpus[1].memory.used_bytes == 5 * GIB


@pytest.mark.parametrize("first", [0, 1])
def test_case_B4_each_device_is_judged_by_its_own_answer(rig: Rig, first: int) -> None:
    """Of two alike devices one answers and one says NOT_SUPPORTED: only that one lacks the capability."""
    rig.scenario.gpus = 2
    rig.scenario.error(first, V2, 3)

    host = until(rig.start(), lambda host: len(host.gpus) == 2 and host.gpus[1 - first].memory is not None)

    assert V2 in host.gpus[first].capabilities_missing
    assert V2 not in host.gpus[1 - first].capabilities_missing


def test_case_C7_mig_instances_are_read_by_their_own_handles(rig: Rig) -> None:
    """Instances appear beside a parent that may be denied; holes in the numbering are no end."""
    total = 17 * GIB + GIB // 2
    rig.scenario.mig(0, 0, "MIG-a", total=total, used=GIB, gi=9).mig(0, 2, "MIG-b", total=total, used=2 * GIB)
    rig.scenario.mig_process(0, 2, os.getpid(), 2 * GIB).error(0, V2, 4)
    source = rig.start()

    host = until(source, lambda host: len(host.gpus) == 3 and all(g.ledger_pass for g in host.gpus[1:]))

    parent, first, second = host.gpus
    assert (parent.is_mig_parent, parent.memory, parent.health) == (True, None, GpuHealth.OK)
    assert parent.ledger_pass is None
    assert (first.uuid, first.parent_uuid, first.index) == ("MIG-a", uuid_of(0), 0)
    assert second.memory.used_bytes == 2 * GIB
    assert [process.used_bytes for process in second.ledger_pass.processes] == [2 * GIB]
    assert first.utilization_ratio is None
    assert first.mig_profile == "1g.18gb"


def test_mig_reconfiguration_is_followed(rig: Rig) -> None:
    """After instances were changed under the worker the new one is read and the old one is not."""
    rig.scenario.mig(0, 0, "MIG-a", total=18 * GIB, used=GIB)
    source = rig.start()
    until(source, lambda host: len(host.gpus) == 2)
    rig.scenario.statements.clear()
    rig.scenario.mig(0, 0, "MIG-c", total=36 * GIB, used=3 * GIB).write()

    host = until(source, lambda host: any(gpu.uuid == "MIG-c" and gpu.memory for gpu in host.gpus))

    assert [gpu.uuid for gpu in host.gpus] == [uuid_of(0), "MIG-c"]
