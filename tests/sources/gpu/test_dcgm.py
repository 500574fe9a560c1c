"""What the DCGM source reads from the host engine, with its real worker process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwatch.model.gpu import Accounting, GpuHealth
from kvwatch.sources.gpu import dcgm_fields as fields
from kvwatch.sources.gpu import dcgm_worker
from tests.fakes.dcgm import BLANK, FP_NOT_SUPPORTED, NOT_SUPPORTED, listening, uuid_of
from tests.fakes.dcgm import whole_gpu as make_gpu
from tests.sources.gpu.dcgm_rig import MIB, Rig, first, rigged
from tests.sources.gpu.rig import until


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A fresh rig; afterwards no worker is left."""
    with rigged(tmp_path, monkeypatch) as rig:
        yield rig


class BlankEntity:
    """A GPU whose profiling value can be switched off."""

    def __init__(self) -> None:
        self.key = (1, 0)
        self.missing: set[str] = set()
        self.value: float | None = None

    def number(self, field: int) -> float | None:
        return self.value if field == fields.ENGINE_ACTIVE else None


class BlankEngine:
    """An engine that profiles one GPU."""

    every_s = slow_every_s = 1.0
    profiling = True

    def __init__(self) -> None:
        self.entities = [BlankEntity()]


def test_a_well_gpu_is_read_in_kvwatch_units(rig: Rig) -> None:
    """Every value of DCGM arrives in bytes, ratios, watts and joules, and says where it comes from."""
    gpu = first(rig.start().poll())

    assert gpu.memory is not None
    assert (gpu.memory.total_bytes, gpu.memory.used_bytes) == (143771 * MIB, 1000 * MIB)
    assert (gpu.memory.reserved_bytes, gpu.memory.accounting) == (615 * MIB, Accounting.V2)
    assert (gpu.uuid, gpu.index, gpu.name) == (uuid_of(0), 0, "NVIDIA H200")
    assert (gpu.driver_version, gpu.reported_by, gpu.health) == ("580.159.04", "dcgm", GpuHealth.OK)
    assert (gpu.utilization_ratio, gpu.memory_bandwidth_utilization_ratio) == (0.37, 0.12)
    assert (gpu.power_watts, gpu.temperature_celsius, gpu.energy_joules) == (120.5, 41, 9_000_000.0)
    assert (gpu.ecc_corrected_total, gpu.ecc_uncorrected_total) == (4, 0)
    assert (gpu.remapped_rows_pending, gpu.bar1_used_bytes) == (False, 3 * MIB)
    assert (gpu.clock_event_reasons, gpu.sample_interval_s) == (("gpu_idle",), 0.2)


def test_unix_socket_is_told_from_an_address(rig: Rig) -> None:
    """An address that begins with / is connected to as a unix socket."""
    with listening(rig.directory / "engine.sock") as address:
        rig.address = address
        rig.start().poll()

    assert any(f"connect {address} unix=1" in line for line in rig.scenario.calls())


def test_watches_are_numeric_sparse_and_without_profiling(rig: Rig) -> None:
    """Memory at every tick, the rest at every tenth; no profiling field and one forced update only."""
    source = rig.start()
    for _ in range(3):
        source.poll()

    calls = rig.scenario.calls()
    watches = [line.split(" ", 1)[1] for line in calls if " watch " in line]
    assert watches[0] == "watch [250, 251, 252, 253] every 200000 us"
    assert watches[1].endswith("every 2000000 us")
    assert not any("100" in line.split("every")[0] for line in watches[1:])
    assert sum("update all" in line for line in calls) == 1


def test_case_A3_used_that_includes_reserved_is_labelled(rig: Rig) -> None:
    """DCGM before 2.4 has no RESERVED and counts it as used: labelled v1, reserved not reported."""
    rig.scenario.gpus[0].memory(used=700, reserved=None)

    memory = first(rig.start().poll()).memory

    assert memory is not None
    assert (memory.accounting, memory.reserved_bytes) == (Accounting.V1, None)


def test_case_A10_parts_that_do_not_add_up_are_refused(rig: Rig) -> None:
    """Used and free taken from different places (120 GiB total, 6.4 used, 7.4 free) are no memory reading."""
    rig.scenario.gpus[0].values |= {250: 122880, 252: 6554, 251: 7578, 253: 0}

    assert first(rig.start().poll()).memory is None


def test_case_C2_blanks_never_become_numbers(rig: Rig) -> None:
    """Each kind of blank makes its value absent; "not supported" is named as a missing capability."""
    rig.scenario.gpus[0].values |= {203: NOT_SUPPORTED, 150: BLANK, 155: FP_NOT_SUPPORTED, 310: BLANK + 1}

    gpu = first(rig.start().poll())

    assert (gpu.utilization_ratio, gpu.temperature_celsius, gpu.power_watts) == (None, None, None)
    assert gpu.ecc_corrected_total is None
    assert {"utilization", "power"} <= set(gpu.capabilities_missing)
    assert "temperature" not in gpu.capabilities_missing


def test_case_C1_mig_instances_are_read_on_their_own(rig: Rig) -> None:
    """Each instance has its own memory, the parent is marked, and nobody has a utilisation."""
    rig.scenario.gpus[0].values |= {203: NOT_SUPPORTED}
    rig.scenario.instance(3, gpu=0, number=7)
    host = rig.start().poll()

    parent, instance = host.gpus
    assert (parent.is_mig_parent, instance.is_mig_parent) == (True, False)
    assert (instance.uuid, instance.parent_uuid) == (f"MIG-{uuid_of(0)}/7", uuid_of(0))
    assert instance.memory is not None
    assert instance.memory.total_bytes == 16384 * MIB
    assert (instance.index, instance.utilization_ratio, parent.utilization_ratio) == (0, None, None)


def test_case_C4_profile_follows_the_device_in_each_reading(rig: Rig) -> None:
    """The profile label is derived from the present name, never kept from before."""
    rig.scenario.instance(3, gpu=0, number=7, profile="1g.18gb")
    source = rig.start()
    assert source.poll().gpus[1].mig_profile == "1g.18gb"
    rig.scenario.instances[0].values[50] = "NVIDIA H200 MIG 1c.2g.35gb"
    rig.scenario.write()

    until(source, lambda host: host.gpus[1].mig_profile == "1c.2g.35gb")


def test_case_C5_mig_reconfiguration_is_followed(rig: Rig) -> None:
    """Instances that vanish and others that appear under the running worker are neither crash nor ghost."""
    rig.scenario.instance(3, gpu=0, number=7)
    source = rig.start()
    source.poll()
    pid = source.worker_pid
    rig.scenario.instances.clear()
    rig.scenario.instance(4, gpu=0, number=9)
    rig.scenario.write()

    host = until(source, lambda host: len(host.gpus) == 2 and host.gpus[1].uuid.endswith("/9"))
    assert host.gpus[1].memory is not None
    assert source.worker_pid == pid


def test_one_spoilt_entity_does_not_hide_the_others(rig: Rig) -> None:
    """Where one GPU makes the common call fail, each is read alone."""
    rig.scenario.gpus = [make_gpu(0), make_gpu(1)]
    rig.scenario.gpus[1].set(spoils=True)

    well, bad = rig.start().poll().gpus

    assert well.memory is not None
    assert (bad.memory, bad.health) == (None, GpuHealth.UNKNOWN)


@pytest.mark.parametrize(
    ("change", "health"),
    [
        ({"code": -18}, GpuHealth.LOST),
        ({"code": -19}, GpuHealth.RESET_REQUIRED),
        ({"code": -17}, GpuHealth.DENIED),
        ({"status": 4, "code": -14}, GpuHealth.LOST),
        ({"status": 4}, GpuHealth.LOST),
        ({"status": 3}, GpuHealth.DENIED),
        ({"status": 7}, GpuHealth.UNKNOWN),
    ],
)
def test_status_codes_become_states(rig: Rig, change: dict[str, int], health: GpuHealth) -> None:
    """A GPU that DCGM calls lost or inaccessible keeps its identity and loses its values."""
    rig.scenario.gpus = [make_gpu(0), make_gpu(1)]
    source = rig.start()
    assert all(gpu.memory is not None for gpu in source.poll().gpus)
    rig.scenario.gpus[1].set(**change)
    rig.scenario.write()

    host = until(source, lambda host: host.gpus[1].health is health)
    assert host.gpus[1].uuid == uuid_of(1)
    assert host.gpus[1].memory is None
    assert host.gpus[1].health_detail
    assert host.gpus[0].memory is not None


def test_bindings_before_4_0_serve_as_well(rig: Rig) -> None:
    """They lack dcgmGetGpuStatus; everything but the engine's own view of a GPU is read all the same."""
    rig.scenario.write(bindings="3.3")
    source = rig.start()
    assert first(source.poll()).memory is not None
    rig.scenario.gpus[0].set(code=-18)
    rig.scenario.write()

    until(source, lambda host: first(host).health is GpuHealth.LOST)


def test_one_gpu_with_old_values_is_unknown(rig: Rig) -> None:
    """Where only one GPU's values are old, only that one goes absent."""
    rig.scenario.gpus = [make_gpu(0), make_gpu(1)]
    rig.scenario.gpus[1].set(age_s=30.0)

    well, old = rig.start().poll().gpus

    assert well.memory is not None
    assert (old.memory, old.health) == (None, GpuHealth.UNKNOWN)


def test_case_G2_profiling_hardware_that_another_holds_costs_only_profiling(rig: Rig) -> None:
    """Another engine or a profiler owns the counters (-37): named as missing, memory is read as ever."""
    rig.scenario.write(profiling_code=-37)

    gpu = first(rig.start(profiling=True).poll())

    assert gpu.memory is not None
    assert any("-37" in text or text.startswith("profiling (") for text in gpu.capabilities_missing)


def test_case_G4_profiling_that_stays_blank_is_a_lost_capability() -> None:
    """Ten minutes without one value are said; the first value afterwards takes it back."""
    engine = BlankEngine()
    worker = dcgm_worker.Worker(engine, max_rss_bytes=1 << 40)  # type: ignore[arg-type]
    worker._watch_blanks(0.0)
    worker._watch_blanks(599.0)
    early = set(engine.entities[0].missing)
    worker._watch_blanks(600.0)
    late = set(engine.entities[0].missing)
    engine.entities[0].value = 0.5
    worker._watch_blanks(601.0)

    assert (early, late) == (set(), {fields.PROFILING_BLANK})
    assert engine.entities[0].missing == set()


@pytest.mark.parametrize("code", [-33, -36, -37, -38])
def test_case_G10_profiling_is_optional(rig: Rig, code: int) -> None:
    """A refused profiling watch (module missing, hardware held) is a missing capability, nothing more."""
    rig.scenario.write(profiling_code=code)

    gpu = first(rig.start(profiling=True).poll())

    assert gpu.memory is not None
    assert gpu.utilization_ratio == 0.37
    assert any(text.startswith("profiling (") for text in gpu.capabilities_missing)


def test_case_G3_unsupported_profiling_is_named(rig: Rig) -> None:
    """GeForce and containers without CAP_SYS_ADMIN: "not supported" is named, the value is absent."""
    rig.scenario.gpus[0].values |= {1001: FP_NOT_SUPPORTED, 203: BLANK}

    gpu = first(rig.start(profiling=True).poll())

    assert gpu.utilization_ratio is None
    assert "profiling" in gpu.capabilities_missing


def test_profiling_gives_mig_instances_a_utilisation(rig: Rig) -> None:
    """Switched on, the engine-active ratio speaks where NVML cannot."""
    rig.scenario.instance(3, gpu=0, number=7).values[1001] = 0.625

    assert rig.start(profiling=True).poll().gpus[1].utilization_ratio == 0.625


def test_case_G5_xid_gauge_is_no_event(rig: Rig) -> None:
    """The last Xid code of DCGM counts nothing, and the absence of events is said rather than shown as 0."""
    gpu = first(rig.start().poll())

    assert (gpu.xid_events_total, gpu.last_xid) == ((), None)
    assert fields.XID_MISSING in gpu.capabilities_missing


def test_vanished_gpu_is_missing_over_a_restart(rig: Rig) -> None:
    """A GPU seen once stays in the inventory and is reported missing by DCGM's source as well."""
    rig.scenario.gpus = [make_gpu(0), make_gpu(1)]
    source = rig.start()
    source.poll()
    source.close()
    rig.scenario.gpus.pop()

    gone = rig.start().poll().gpus[1]

    assert (gone.uuid, gone.health, gone.reported_by) == (uuid_of(1), GpuHealth.MISSING, "dcgm")
    assert "DCGM" in gone.health_detail


@pytest.mark.parametrize(
    "value", [BLANK, BLANK + 3, 0x7FFFFFF0, 0x7FFFFFF3, 2.0**47, 2.0**47 + 3, float("nan")]
)
def test_every_blank_is_known_as_one(value: float) -> None:
    """64-bit, 32-bit and floating blanks are no numbers."""
    assert fields.known(value) is None


@pytest.mark.parametrize("value", [0, 1, 0x7FFFFFEF, 0x80000000, 10**15, 0.0, 1.5, 2.0**46])
def test_ordinary_numbers_are_no_blanks(value: float) -> None:
    """What is near a blank, or merely large, is kept."""
    assert fields.known(value) == value
