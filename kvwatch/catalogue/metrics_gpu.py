"""Metrics of GPUs and MIG instances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from kvwatch.catalogue.metrics_spec import (
    Facts,
    MetricSpec,
    PerReport,
    Reader,
    Row,
    counter,
    experimental,
    gauge,
    info,
    kept,
    sharing,
    stateset,
)
from kvwatch.model.gpu import GpuHealth, GpuMemory, GpuState
from kvwatch.model.report import GpuReport, TickReport
from kvwatch.model.signal import GpuSignals

# Xids that the shipped rule `gpu_xid` waits for: their counters exist from the start, so that the
# first event is an increase. NVIDIA's Xid catalogue says what each means.
AWAITED_XIDS = (48, 63, 64, 74, 79, 94, 95, 119, 120)
HEALTHS = tuple(GpuHealth)
GPU = ("uuid", "gpu")
T = TypeVar("T")


# The same tuple for a GPU in every row of every report: rows are compared by identity first.
_IDS: dict[str, tuple[int, tuple[str, str]]] = {}
MAX_KEPT_IDS = 1024


def _ids(gpu: GpuReport) -> tuple[str, str]:
    state = gpu.state
    known = _IDS.get(state.uuid)
    if known is not None and known[0] == state.index:
        return known[1]
    if len(_IDS) >= MAX_KEPT_IDS:
        _IDS.clear()
    made = (state.uuid, str(state.index))
    _IDS[state.uuid] = (state.index, made)
    return made


_states = PerReport(lambda report: [(_ids(gpu), gpu.state) for gpu in report.gpus])
_memories = PerReport(
    lambda report: [(_ids(gpu), memory) for gpu in report.gpus if (memory := gpu.state.memory) is not None]
)
_signals = PerReport(
    lambda report: [(_ids(gpu), signals) for gpu in report.gpus if (signals := gpu.signals) is not None]
)


def _rows(
    things: Callable[[TickReport], list[tuple[tuple[str, str], T]]], pick: Callable[[T], float | None]
) -> Reader:
    def read(report: TickReport) -> list[Row]:
        return [(ids, value) for ids, thing in things(report) if (value := pick(thing)) is not None]

    return read


def _state(pick: Callable[[GpuState], float | None]) -> Reader:
    return _rows(_states, pick)


def _memory(pick: Callable[[GpuMemory], int | None]) -> Reader:
    return _rows(_memories, pick)


def _signal(pick: Callable[[GpuSignals], float | None]) -> Reader:
    return _rows(_signals, pick)


def _up(report: TickReport) -> Iterator[Row]:
    for gpu in report.gpus:
        yield _ids(gpu), float(gpu.up)


def _health(report: TickReport) -> Iterator[Row]:
    for gpu in report.gpus:
        ids = _ids(gpu)
        for health in HEALTHS:
            yield (*ids, health.value), float(gpu.state.health is health)


def _info(report: TickReport) -> Iterator[Row]:
    for gpu in report.gpus:
        state = gpu.state
        accounting = state.memory.accounting.value if state.memory else ""
        facts = (state.name, state.driver_version, accounting, state.mig_profile, state.parent_uuid)
        yield (*_ids(gpu), *facts), 1.0


def _lacking(report: TickReport) -> Iterator[Row]:
    for gpu in report.gpus:
        ids = _ids(gpu)
        for name in sorted({text.partition(" (")[0] for text in gpu.state.capabilities_missing}):
            yield (*ids, name), 1.0


def _ledger(report: TickReport) -> Iterator[Row]:
    for gpu in report.gpus:
        if gpu.signals is None or gpu.signals.ledger is None or gpu.state.is_mig_parent:
            continue
        ids = _ids(gpu)
        for part in gpu.signals.ledger:
            yield (*ids, part.part), part.bytes


def _xids(report: TickReport) -> Iterator[Row]:
    for gpu in report.gpus:
        counts = dict(gpu.state.xid_events_total)
        if not _deaf_to_xids(gpu.state):
            counts = dict.fromkeys(AWAITED_XIDS, 0) | counts
        ids = _ids(gpu)
        for xid in sorted(counts):
            yield (*ids, str(xid)), counts[xid]


def _deaf_to_xids(state: GpuState) -> bool:
    """Whether this device reports no events, so that a zero would be a claim; instances never do."""
    missing = state.capabilities_missing
    return bool(state.parent_uuid) or any("xid" in name or name in _EVENT_CALLS for name in missing)


_EVENT_CALLS = frozenset(("nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents"))


def _ecc(report: TickReport) -> Iterator[Row]:
    for gpu in report.gpus:
        ids = _ids(gpu)
        if gpu.state.ecc_corrected_total is not None:
            yield (*ids, "corrected"), gpu.state.ecc_corrected_total
        if gpu.state.ecc_uncorrected_total is not None:
            yield (*ids, "uncorrected"), gpu.state.ecc_uncorrected_total


def _of_state(*pick: Callable[[GpuState], object]) -> Callable[[TickReport], list[object]]:
    """Facts of each GPU's state, for rows that are kept while these are equal."""
    return lambda report: [[choose(gpu.state) for choose in _WHO + pick] for gpu in report.gpus]


_WHO: tuple[Callable[[GpuState], object], ...] = (lambda s: s.uuid, lambda s: s.index)

IDENTITY = (
    gauge(
        "gpu_up", "Whether this GPU answers now; a GPU seen once stays here at 0 when it is gone.", _up, *GPU
    ),
    stateset(
        "gpu_state",
        "State of this GPU; exactly one is 1.",
        kept(_of_state(lambda s: s.health), _health),
        *GPU,
        "state",
    ),
    info(
        "gpu_info",
        "What this GPU is, how its used memory is counted, and for a MIG instance its parent.",
        kept(
            _of_state(
                lambda s: (s.name, s.driver_version, s.mig_profile, s.parent_uuid),
                lambda s: s.memory.accounting if s.memory else None,
            ),
            _info,
        ),
        *GPU,
        "name",
        "driver_version",
        "memory_accounting",
        "mig_profile",
        "parent_uuid",
    ),
    experimental(
        gauge(
            "gpu_capability_missing",
            "1 for each value that this GPU's source does not tell, by the name of the value or call.",
            kept(_of_state(lambda s: s.capabilities_missing), _lacking),
            *GPU,
            "capability",
        )
    ),
)


_memory_facts = Facts(
    lambda report: [
        (
            *ids, s.is_mig_parent, s.memory, s.used_peak_bytes, s.free_low_bytes, s.hidden_from_15s_bytes,
            s.sample_interval_s, g and (g.ledger, g.headroom_bytes),
        )
        for (ids, s), g in zip(_states(report), [gpu.signals for gpu in report.gpus], strict=True)
    ]
)  # fmt: skip

MEMORY = sharing(
    _memory_facts,
    gauge(
        "gpu_memory_total_bytes",
        "Device memory: used + free + reserved.",
        _memory(lambda m: m.total_bytes),
        *GPU,
        unit="bytes",
    ),
    gauge(
        "gpu_memory_used_bytes",
        "Device memory in use, without the driver's own part (see memory_accounting of kvwatch_gpu_info).",
        _memory(lambda m: m.used_bytes),
        *GPU,
        unit="bytes",
    ),
    gauge(
        "gpu_memory_free_bytes", "Free device memory.", _memory(lambda m: m.free_bytes), *GPU, unit="bytes"
    ),
    gauge(
        "gpu_memory_reserved_bytes",
        "Device memory that driver and firmware keep; absent where the driver cannot tell it apart.",
        _memory(lambda m: m.reserved_bytes),
        *GPU,
        unit="bytes",
    ),
    gauge(
        "gpu_memory_used_peak_bytes",
        "Highest use within the last peak window of fast samples.",
        _state(lambda s: s.used_peak_bytes),
        *GPU,
        unit="bytes",
    ),
    gauge(
        "gpu_memory_free_low_bytes",
        "Lowest free memory within the last peak window of fast samples.",
        _state(lambda s: s.free_low_bytes),
        *GPU,
        unit="bytes",
    ),
    experimental(
        gauge(
            "gpu_memory_hidden_from_15s_bytes",
            "How far the true peak of the last 15 s lies above what a reader of last values would have seen.",
            _state(lambda s: s.hidden_from_15s_bytes),
            *GPU,
            unit="bytes",
        )
    ),
    gauge(
        "gpu_sample_interval_seconds",
        "Present interval of the fast memory samples.",
        _state(lambda s: s.sample_interval_s),
        *GPU,
        unit="seconds",
    ),
    gauge(
        "gpu_memory_ledger_bytes",
        "Who holds this GPU's memory; the parts add up to the total. None on a GPU split into MIG instances.",
        _ledger,
        *GPU,
        "part",
        unit="bytes",
    ),
    experimental(
        gauge(
            "gpu_memory_headroom_bytes",
            "Free device memory plus what the server's allocator could return.",
            _signal(lambda s: s.headroom_bytes),
            *GPU,
            unit="bytes",
        )
    ),
)

DEVICE = (
    gauge(
        "gpu_utilization_ratio",
        "Share of time in which at least one kernel ran.",
        _state(lambda s: s.utilization_ratio),
        *GPU,
        unit="ratio",
    ),
    gauge(
        "gpu_memory_bandwidth_utilization_ratio",
        "Share of time in which device memory was read or written; says nothing about how full it is.",
        _state(lambda s: s.memory_bandwidth_utilization_ratio),
        *GPU,
        unit="ratio",
    ),
    gauge("gpu_power_watts", "Power draw.", _state(lambda s: s.power_watts), *GPU, unit="watts"),
    gauge(
        "gpu_temperature_celsius",
        "Temperature of the GPU core.",
        _state(lambda s: s.temperature_celsius),
        *GPU,
        unit="celsius",
    ),
    experimental(
        counter(
            "gpu_energy_joules_total",
            "Energy used since the driver was loaded.",
            _state(lambda s: s.energy_joules),
            *GPU,
            unit="joules",
        )
    ),
    counter(
        "gpu_xid_events_total",
        "Xid events seen since kvwatch first saw this GPU.",
        kept(_of_state(lambda s: (s.xid_events_total, s.capabilities_missing, s.parent_uuid)), _xids),
        *GPU,
        "xid",
    ),
    counter(
        "gpu_ecc_errors_total",
        "ECC errors that the device counts.",
        kept(_of_state(lambda s: (s.ecc_corrected_total, s.ecc_uncorrected_total)), _ecc),
        *GPU,
        "kind",
    ),
)

GPU_METRICS: tuple[MetricSpec, ...] = (*IDENTITY, *MEMORY, *DEVICE)
