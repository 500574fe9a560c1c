"""What happens when a GPU, a call, the driver or the worker fails: real processes, injected faults."""

from __future__ import annotations

import time

import pytest

from kvwatch.model.gpu import GpuHealth
from kvwatch.model.sample import FailureKind
from kvwatch.sources.base import SourceError
from tests.fakes.nvml import ANY, uuid_of
from tests.sources.gpu.rig import (
    GIB,
    Rig,
    after,
    by_index,
    read,
    until,
    until_error,
)

pytestmark = pytest.mark.needs("gcc")
V2 = "nvmlDeviceGetMemoryInfo_v2"


@pytest.mark.parametrize(
    ("code", "health"),
    [(15, GpuHealth.LOST), (28, GpuHealth.LOST), (16, GpuHealth.RESET_REQUIRED), (999, GpuHealth.UNKNOWN)],
)
def test_case_E1_lost_gpu_stays_and_says_so(rig: Rig, code: int, health: GpuHealth) -> None:
    """A GPU that is gone keeps its identity, with a state and a reason, and loses every value."""
    rig.scenario.gpus = 8
    source = rig.start()
    until(source, read)
    rig.scenario.error(3, ANY, code).write()

    gpu = by_index(until(source, lambda host: by_index(host, 3).health is not GpuHealth.OK), 3)

    assert (gpu.uuid, gpu.health) == (uuid_of(3), health)
    assert str(code) in gpu.health_detail
    assert (gpu.memory, gpu.used_peak_bytes, gpu.power_watts, gpu.ledger_pass) == (None, None, None, None)


def test_case_E4_one_lost_gpu_does_not_spoil_the_others(rig: Rig) -> None:
    """Seven GPUs go on being read while the eighth is off the bus, and it comes back by itself."""
    rig.scenario.gpus = 8
    source = rig.start()
    until(source, read)
    rig.scenario.error(3, ANY, 15).memory(4, 7 * GIB).write()

    host = until(
        source,
        lambda host: (
            by_index(host, 3).health is GpuHealth.LOST and by_index(host, 4).memory.used_bytes == 7 * GIB
        ),
    )
    assert all(gpu.memory is not None for gpu in host.gpus if gpu.index != 3)

    rig.scenario.healed().write()
    until(
        source, lambda host: by_index(host, 3).health is GpuHealth.OK and by_index(host, 3).memory is not None
    )


def test_case_E2_handle_of_a_lost_gpu_is_never_used_again(rig: Rig) -> None:
    """After the first "lost" no call is made with the old handle: the device is only opened anew."""
    rig.scenario.gpus = 2
    rig.scenario.call_log = rig.directory / "calls"
    source = rig.start()
    until(source, read)
    rig.scenario.error(1, ANY, 15).write()
    until(source, lambda host: by_index(host, 1).health is GpuHealth.LOST)
    seen = len(rig.calls())
    after(source, 35)

    later = {name for _, name, gpu in rig.calls()[seen:] if gpu == 1}
    assert later == {"nvmlDeviceGetHandleByIndex_v2"}


def test_case_E3_crash_in_the_library_ends_only_the_worker(rig: Rig) -> None:
    """SIGSEGV inside NVML is reported, the worker is replaced, and Xid counts are kept."""
    source = rig.start()
    until(source, read)
    rig.scenario.xid(0, 79).xid(0, 31).xid(0, 31).write()
    until(source, lambda host: host.gpus[0].xid_events_total == ((31, 2), (79, 1)))
    first = source.worker_pid
    rig.scenario.crash(0, V2).write()

    message = until_error(source, FailureKind.CRASHED)
    rig.scenario.healed().write()
    host = until(source, read)

    assert "SIGSEGV" in message
    assert source.worker_pid != first
    assert host.gpus[0].xid_events_total == ((31, 2), (79, 1))
    assert host.gpus[0].last_xid == 31


def test_repeated_crashes_leave_memory_readings(rig: Rig) -> None:
    """After three fast crashes only memory is asked for: a crashing side call costs only itself."""
    rig.scenario.memory(0, 5 * GIB).crash(ANY, "nvmlDeviceGetUtilizationRates")
    source = rig.start()

    host = until(source, lambda host: bool(host.gpus and host.gpus[0].memory), timeout_s=30)
    host = after(source, 10)

    assert host.gpus[0].memory.used_bytes == 5 * GIB
    assert host.gpus[0].utilization_ratio is None


def test_case_E5_hang_is_reported_in_time_and_not_doubled(rig: Rig) -> None:
    """A hung call gives STUCK before its series may outlive 3 s, no second worker, and a recovery."""
    source = rig.start()
    until(source, read)
    pid = source.worker_pid
    last_s = time.monotonic()
    rig.scenario.hang().write()
    while True:
        try:
            source.poll()
            last_s = time.monotonic()
        except SourceError as error:
            failure = error.failure
            break
    took_s = time.monotonic() - last_s

    assert failure.kind is FailureKind.STUCK
    assert str(pid) in failure.message
    assert source.stuck_after_s == 2.0
    assert took_s < 3.0
    for _ in range(2):
        with pytest.raises(SourceError, match="has not returned"):
            source.poll()
    assert source.worker_pid == pid
    rig.scenario.healed().write()
    until(source, read)
    assert source.worker_pid == pid


def test_case_E11_slow_first_cycle_is_not_stuck(rig: Rig) -> None:
    """An nvmlInit of 3 s is waited for, although 2 s of silence later on would mean stuck."""
    rig.scenario.slow(3_000_000, ANY, "nvmlInitWithFlags")
    source = rig.start()

    host = source.poll()  # no STUCK before the first value

    assert host.gpus[0].memory is not None


def test_case_E13_version_mismatch_says_what_to_do_and_recovers(rig: Rig) -> None:
    """After a driver upgrade the message names the fix, and a fresh worker finds the driver once reloaded."""
    source = rig.start()
    until(source, read)
    first = source.worker_pid
    rig.scenario.error(ANY, ANY, 18).write()

    message = until_error(source, FailureKind.VERSION_MISMATCH)
    rig.scenario.healed()
    rig.scenario.driver = "590.1"
    rig.scenario.write()
    host = until(source, read)

    assert "reboot" in message
    assert "18" in message
    assert host.driver_version == "590.1"
    assert source.worker_pid != first


def test_case_E14_unknown_error_at_init_hints_at_the_cgroup(rig: Rig) -> None:
    """Error 999 at init is retried and its message names the lost device cgroup."""
    rig.scenario.error(ANY, "nvmlInitWithFlags", 999)
    source = rig.start()

    message = until_error(source, FailureKind.NO_DRIVER)
    rig.scenario.healed().write()

    assert "cgroup" in message
    assert "daemon-reload" in message
    until(source, read)


def test_no_library_is_no_driver(rig: Rig) -> None:
    """A host without libnvidia-ml.so.1 gives NO_DRIVER with the fix."""
    rig.monkeypatch.setenv("LD_LIBRARY_PATH", str(rig.directory))
    source = rig.start()

    message = until_error(source, FailureKind.NO_DRIVER)

    assert "libnvidia-ml.so.1" in message


def test_denied_gpu_is_skipped(rig: Rig) -> None:
    """A GPU that we may not open is in state denied and the other one is read."""
    rig.scenario.gpus = 2
    rig.scenario.error(0, "nvmlDeviceGetHandleByIndex_v2", 4)

    host = until(rig.start(), lambda host: len(host.gpus) == 2 and host.gpus[1].memory is not None)

    assert host.gpus[0].health is GpuHealth.DENIED
    assert host.gpus[0].memory is None


def test_case_E19_slow_side_call_slows_its_own_lane(rig: Rig) -> None:
    """Utilisation calls of 40 ms are made less often, and memory keeps its pace."""
    rig.scenario.call_log = rig.directory / "calls"
    rig.scenario.slow(40_000, ANY, "nvmlDeviceGetUtilizationRates")
    source = rig.start()
    until(source, read)
    started_s = time.monotonic()
    while time.monotonic() - started_s < 4:
        host = after(source, 1)

    calls = [name for at, name, _ in rig.calls() if at >= started_s]
    assert calls.count("nvmlDeviceGetUtilizationRates") <= 8
    assert calls.count(V2) > 2 * calls.count("nvmlDeviceGetUtilizationRates")
    assert host.gpus[0].sample_interval_s == pytest.approx(0.1)


@pytest.mark.parametrize(("slow_us", "interval_s"), [(20_000, 0.4), (100_000, 1.0)])
def test_slow_memory_calls_slow_the_sampling(rig: Rig, slow_us: int, interval_s: float) -> None:
    """The memory lane spends at most 5 % of its interval in NVML, down to one reading a second."""
    rig.scenario.slow(slow_us, ANY, V2)
    source = rig.start()

    host = until(source, lambda host: (host.gpus[0].sample_interval_s or 0) >= 0.9 * interval_s)
    host = after(source, 8)

    assert host.gpus[0].sample_interval_s == pytest.approx(interval_s, rel=0.2)


def test_slow_host_is_not_stuck(rig: Rig) -> None:
    """Sixteen GPUs at 30 ms a call still send values: a slow driver is not a stuck one."""
    rig.scenario.gpus = 16
    rig.scenario.slow(30_000)
    source = rig.start()
    until(source, lambda host: len(host.gpus) == 16 and host.gpus[15].memory is not None, timeout_s=30)
    host = after(source, 10)

    assert sum(gpu.memory is not None for gpu in host.gpus) == 16


def test_hot_unplug_leaves_a_missing_gpu_and_pinned_indices(rig: Rig) -> None:
    """A removed GPU is missing under its index; one that NVML renumbers keeps the index it had."""
    rig.scenario.gpus = 3
    source = rig.start()
    until(source, read)
    rig.scenario.gpus = 2
    rig.scenario.gpu(1, uuid=uuid_of(2)).write()

    host = until(source, lambda host: any(gpu.health is GpuHealth.MISSING for gpu in host.gpus))

    assert {(gpu.uuid, gpu.index, gpu.health) for gpu in host.gpus} == {
        (uuid_of(0), 0, GpuHealth.OK),
        (uuid_of(1), 1, GpuHealth.MISSING),
        (uuid_of(2), 2, GpuHealth.OK),
    }
    assert by_index(host, 2).name == "NVIDIA H200"


def test_gpu_that_is_gone_after_a_restart_is_missing(rig: Rig) -> None:
    """The inventory outlives the daemon: a GPU that did not come up again is reported."""
    rig.scenario.gpus = 2
    source = rig.start()
    until(source, read)
    source.close()
    rig.scenario.gpus = 1
    rig.scenario.write()

    host = until(rig.start_again(), read_any)

    assert by_index(host, 1).health is GpuHealth.MISSING
    assert by_index(host, 1).uuid == uuid_of(1)


def read_any(host: object) -> bool:
    """Condition: some GPU has memory."""
    return any(gpu.memory is not None for gpu in host.gpus)


def test_gpu_lost_before_the_start_is_named_from_the_inventory(rig: Rig) -> None:
    """A GPU that cannot be opened at all is still reported under the UUID it had."""
    rig.scenario.gpus = 2
    source = rig.start()
    until(source, read)
    source.close()
    rig.scenario.error(1, ANY, 15).write()

    host = until(rig.start_again(), read_any)

    assert (by_index(host, 1).uuid, by_index(host, 1).health) == (uuid_of(1), GpuHealth.LOST)


def test_unsupported_call_is_asked_once(rig: Rig) -> None:
    """NOT_SUPPORTED is remembered per device and call: one attempt an hour, the rest goes on."""
    rig.scenario.gpus = 2
    rig.scenario.call_log = rig.directory / "calls"
    rig.scenario.error(0, "nvmlDeviceGetPowerUsage", 3)
    source = rig.start()
    until(source, lambda host: host.gpus[1].power_watts is not None)
    host = after(source, 12)

    attempts = [gpu for _, name, gpu in rig.calls() if name == "nvmlDeviceGetPowerUsage"]
    assert attempts.count(0) == 1
    assert attempts.count(1) >= 3
    assert host.gpus[0].power_watts is None
    assert host.gpus[0].temperature_celsius is not None
    assert "nvmlDeviceGetPowerUsage" in host.gpus[0].capabilities_missing


def test_what_was_read_before_a_hang_is_not_shown_after_it(rig: Rig) -> None:
    """One pass reads GPU 0 and then hangs at GPU 1: when it goes on, what it has of GPU 0 is old news."""
    rig.scenario.gpus = 2
    rig.scenario.memory(0, 5 * GIB)
    source = rig.start()
    until(source, read)
    rig.scenario.hang(1, V2).write()
    until_error(source, FailureKind.STUCK)
    time.sleep(1.0)
    rig.scenario.healed().memory(0, 7 * GIB).write()

    shown = by_index(until(source, lambda host: bool(host.gpus)), 0).memory
    later = by_index(after(source, 5), 0).memory

    assert shown is None or shown.used_bytes == 7 * GIB
    assert later is not None
    assert later.used_bytes == 7 * GIB


def test_lines_that_waited_in_the_pipe_are_as_old_as_they_say(rig: Rig) -> None:
    """The daemon was stopped, and a call hangs since: what it reads then is from before the hang."""
    source = rig.start()
    until(source, read)
    time.sleep(2.5)  # two heartbeats that nobody reads
    rig.scenario.hang().write()
    time.sleep(3.0)
    shown: list[int | None] = []

    def read_on() -> None:
        while True:
            shown.extend(gpu.memory and gpu.memory.total_bytes for gpu in source.poll().gpus)

    with pytest.raises(SourceError) as told:
        read_on()

    assert told.value.failure.kind is FailureKind.STUCK
    assert shown
    assert set(shown) == {None}


def test_known_gpus_can_be_named_while_nvml_is_away(rig: Rig) -> None:
    """`known` gives identities in state unknown, never values."""
    source = rig.start()
    until(source, read)
    rig.scenario.hang().write()
    until_error(source, FailureKind.STUCK)

    known = source.known()

    assert [(gpu.uuid, gpu.health, gpu.memory) for gpu in known.gpus] == [
        (uuid_of(0), GpuHealth.UNKNOWN, None)
    ]
