"""GPU facts as one worker pass reports them. `None` is "not reported", never zero."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class GpuHealth(enum.StrEnum):
    """State of one GPU (the states of `kvwatch_gpu_state`)."""

    OK = "ok"
    LOST = "lost"
    RESET_REQUIRED = "reset_required"
    DENIED = "denied"
    MISSING = "missing"
    UNKNOWN = "unknown"


class Accounting(enum.StrEnum):
    """How `used` was counted: NVML memory info v2, v1 (driver-reserved counted as used), or host memory."""

    V2 = "v2"
    V1 = "v1"
    UNIFIED = "unified"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """Device memory of one reading, in bytes. With v1 `reserved_bytes` is None."""

    total_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_bytes: int | None = None
    accounting: Accounting = Accounting.V2


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """One process that holds memory on one GPU.

    `alive` is None where /proc cannot tell (a foreign pid namespace). `ancestors` holds
    (pid, command line) from the parent upwards, at most eight. `started_ticks` is field 22 of
    /proc/<pid>/stat and tells a reused pid from the old one.
    """

    pid: int
    used_bytes: int | None = None
    kind: str = "compute"  # compute, graphics or mps
    alive: bool | None = None
    name: str = ""  # comm
    command: str = ""  # command line, cut to 512 characters
    cgroup: str = ""
    unit: str = ""  # systemd unit taken from the cgroup path, "" if none
    ancestors: tuple[tuple[int, str], ...] = ()
    started_ticks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerPass:
    """Memory and processes read together in one pass, so that they can be added up."""

    observed_s: float
    memory: GpuMemory
    processes: tuple[GpuProcess, ...] | None = None  # None: the list could not be read


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """Everything one source knows of one GPU or MIG instance.

    `uuid` identifies it; `index` is the host's index (of the parent for a MIG instance).
    The peaks are extremes over the configured peak window, `*_last_send` those since the
    previous message. `capabilities_missing` names calls that this device does not support.
    Rates and counters: `utilization_ratio` 0..1, `energy_joules` and the error counts cumulative.
    """

    uuid: str
    index: int
    health: GpuHealth = GpuHealth.OK
    health_detail: str = ""
    name: str = ""
    driver_version: str = ""
    mig_profile: str = ""
    parent_uuid: str = ""
    is_mig_parent: bool = False
    memory: GpuMemory | None = None
    used_peak_bytes: int | None = None
    free_low_bytes: int | None = None
    hidden_from_15s_bytes: int | None = None  # peak of the last 15 s less the largest value a 15 s reader saw
    sample_interval_s: float | None = None
    ledger_pass: LedgerPass | None = None
    utilization_ratio: float | None = None
    memory_bandwidth_utilization_ratio: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    clock_event_reasons: tuple[str, ...] | None = None
    ecc_corrected_total: int | None = None
    ecc_uncorrected_total: int | None = None
    remapped_rows_pending: bool | None = None
    remapped_rows_failed: bool | None = None
    bar1_total_bytes: int | None = None
    bar1_used_bytes: int | None = None
    energy_joules: float | None = None
    xid_events_total: tuple[tuple[int, int], ...] = ()  # (xid, count), kept over worker restarts
    last_xid: int | None = None
    last_xid_s: float | None = None  # monotonic
    memory_note: str = ""  # what `memory` is on this device, where it is no ordinary device memory
    reclaimable_bytes: int | None = None  # unified: the part of free that is page cache just now
    os_pages_bytes: int | None = None  # GH200, GB200: the part of used that the operating system keeps there
    reported_by: str = "nvml"
    capabilities_missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGpus:
    """All GPUs of the host as one source sees them, GPUs seen before and now gone included.

    `expected_count` comes from the configuration; `host_pid_namespace` says whether pids
    resolve in /proc here (without it nothing may be called dead).
    """

    gpus: tuple[GpuState, ...] = ()
    driver_version: str = ""
    expected_count: int | None = None
    host_pid_namespace: bool = False
    clamped_total: int = 0
