"""GPUs of the sample host: tight, easy, lost, split, stale, old."""

from __future__ import annotations

import math
from dataclasses import replace

from kvwatch.model.gpu import Accounting, GpuHealth, GpuMemory, GpuState
from kvwatch.model.report import (
    GpuReport,
)
from kvwatch.model.signal import (
    Forecast,
    ForecastState,
    GpuSignals,
    Holder,
    LedgerPart,
    Phase,
)

GIB = 1024**3
MIB = 1024**2
NOW_WALL_S = 1_795_996_800.0  # 2026-11-30 00:00:00 UTC
NOW_MONO_S = 50_000.0
TOTAL = 143_771 * MIB
RESERVED = 644_939_776
HOSTILE = 'python"<img src=x onerror="alert(1)">\n</script><script>alert(\'x\')</script>\\'
NO_FORECAST = Forecast()
SECONDS_BEFORE = (12.0, 3000.0, 240.5, 7.25)  # at unknown, green, yellow and red


def uuid(index: int) -> str:
    """The UUID of the sample host's GPU `index`."""
    return f"GPU-{index:08x}-1111-2222-3333-444455556666"


def gpu_state(index: int, used: int = 96 * GIB, **changes: object) -> GpuState:
    """A healthy GPU that reports everything."""
    free = TOTAL - RESERVED - used
    state = GpuState(
        uuid=uuid(index),
        index=index,
        name="NVIDIA H200",
        driver_version="580.159.04",
        memory=GpuMemory(total_bytes=TOTAL, used_bytes=used, free_bytes=free, reserved_bytes=RESERVED),
        used_peak_bytes=used + 5 * GIB,
        free_low_bytes=free - 5 * GIB,
        hidden_from_15s_bytes=5 * GIB + 512 * MIB,
        sample_interval_s=0.01,
        utilization_ratio=0.93,
        memory_bandwidth_utilization_ratio=0.41,
        power_watts=612.5,
        temperature_celsius=61.0,
        ecc_corrected_total=2,
        ecc_uncorrected_total=0,
        energy_joules=123_456_789.5,
        xid_events_total=((31, 1),),
    )
    return replace(state, **changes)  # type: ignore[arg-type]


def gpu_signals(state: GpuState, server: str, *, forecast: Forecast = NO_FORECAST) -> GpuSignals:
    """Signals of a GPU on which one server holds nearly everything."""
    assert state.memory is not None
    used = state.memory.used_bytes
    other, dead, loose = 3 * GIB, 2 * GIB, 256 * MIB
    weights, kv_used = 16 * GIB, 52 * GIB
    engine_other = 4 * GIB
    kv_free = used - other - dead - loose - weights - kv_used - engine_other
    parts = {
        "weights": weights,
        "kv_used": kv_used,
        "kv_free": kv_free,
        "engine_other": engine_other,
        "other_process": other,
        "dead_process": dead,
        "driver_reserved": RESERVED,
        "unattributed": loose,
        "free": state.memory.free_bytes,
    }
    return GpuSignals(
        uuid=state.uuid,
        index=state.index,
        phase=Phase.STEADY,
        ledger=tuple(LedgerPart(part=name, bytes=size) for name, size in parts.items()),
        holders=(
            Holder(
                pid=4242,
                used_bytes=weights + kv_used + kv_free + engine_other,
                server=server,
                name="VLLM::EngineCor",
                command="VLLM::EngineCore --model meta-llama/Llama-3.1-70B --api-key sk-verysecret123",
                cgroup="/system.slice/vllm.service",
            ),
            Holder(
                pid=777,
                used_bytes=other,
                server="",
                name=HOSTILE[:15],
                command=HOSTILE,
                cgroup="/user.slice/user-1000.slice/session-3.scope",
            ),
            Holder(pid=31337, used_bytes=dead, server="", name="python3", command="", cgroup="", dead=True),
            Holder(pid=900, used_bytes=None, server="", name="", command="", cgroup=""),
        ),
        unattributed_bytes=loose,
        dead_process_bytes=dead,
        headroom_bytes=state.memory.free_bytes + GIB,
        headroom_low_bytes=state.memory.free_bytes - 4 * GIB,
        headroom_falling=True,
        last_step_change_s=NOW_MONO_S - 3600,
        device_forecast=forecast,
        servers=(server,),
    )


def gpus() -> tuple[GpuReport, ...]:
    """A tight GPU, an easy one, a lost one, one split into MIG instances, one with stale figures, one old."""
    tight = gpu_state(0, used=TOTAL - RESERVED - 380 * MIB, used_peak_bytes=TOTAL - RESERVED - 60 * MIB)
    tight = replace(tight, free_low_bytes=60 * MIB)
    easy = gpu_state(1)
    lost = GpuState(
        uuid=uuid(2),
        index=2,
        name="NVIDIA H200",
        health=GpuHealth.LOST,
        health_detail="NVML says the GPU is lost (Xid 79): drain the host and reset it",
        xid_events_total=((79, 1),),
    )
    parent = gpu_state(3, is_mig_parent=True, utilization_ratio=None)
    instance = replace(
        gpu_state(3, used=9 * GIB),
        uuid="MIG-aaaa0003-0000-0000-0000-000000000001",
        mig_profile="1g.18gb",
        parent_uuid=uuid(3),
        memory=GpuMemory(
            total_bytes=18 * GIB, used_bytes=9 * GIB, free_bytes=9 * GIB - 64 * MIB, reserved_bytes=64 * MIB
        ),
        used_peak_bytes=None,
        free_low_bytes=None,
        hidden_from_15s_bytes=None,
        utilization_ratio=None,
        power_watts=None,
        temperature_celsius=None,
        ecc_corrected_total=None,
        ecc_uncorrected_total=None,
        capabilities_missing=("utilization", "power", "temperature"),
    )
    stale = GpuState(uuid=uuid(4), index=4, name="NVIDIA H200", driver_version="580.159.04")
    old = replace(
        gpu_state(5),
        name="Tesla V100",
        memory=GpuMemory(
            total_bytes=32 * GIB, used_bytes=20 * GIB, free_bytes=12 * GIB, accounting=Accounting.V1
        ),
        used_peak_bytes=21 * GIB,
        free_low_bytes=11 * GIB,
        capabilities_missing=("xid_events",),
        xid_events_total=(),
    )
    rising = Forecast(
        state=ForecastState.RISING,
        floor_s=41.0,
        low_s=120.0,
        central_s=290.0,
        high_s=math.inf,
        slope_per_s=1.3e6,
        coverage_ratio=0.81,
        coverage_count=64,
    )
    flat = Forecast(
        state=ForecastState.STABLE, floor_s=4000.0, low_s=math.inf, central_s=math.inf, high_s=math.inf
    )
    return (
        GpuReport(state=tight, signals=gpu_signals(tight, "chat", forecast=rising), up=True, age_s=0.012),
        GpuReport(state=easy, signals=gpu_signals(easy, "chat", forecast=flat), up=True, age_s=0.012),
        GpuReport(state=lost, signals=None, up=False, age_s=183.0, stale=True),
        GpuReport(state=parent, signals=GpuSignals(uuid=parent.uuid, index=3), up=True, age_s=0.012),
        GpuReport(
            state=instance,
            signals=GpuSignals(
                uuid=instance.uuid, index=3, phase=Phase.STARTING, phase_detail="level for 40 s of 300 s"
            ),
            up=True,
            age_s=0.012,
        ),
        GpuReport(state=stale, signals=GpuSignals(uuid=uuid(4), index=4), up=False, age_s=31.0, stale=True),
        GpuReport(state=old, signals=GpuSignals(uuid=uuid(5), index=5), up=True, age_s=0.4),
    )
