"""What does the dashboard of GPU memory show? Who holds it, how near the wall is, and the device's health."""

from __future__ import annotations

from typing import Any

from kvwatch.catalogue.alert_spec import metric
from kvwatch.catalogue.promql import Expr, Match, increase, max_by, rate, regex, series
from kvwatch.gen import panels
from kvwatch.gen.panels import (
    GOOD_IS_ONE,
    GPU,
    GPU_OR_NONE,
    INSTANCE,
    SERVER,
    UP_NAMES,
    WINDOW,
    Note,
    Query,
    Row,
)
from kvwatch.gen.variables import gpu_variable, instance_variable, server_variable

NAMED = "{{instance}} GPU {{gpu}}"
RANKED = "{{server}} engine {{engine}} rank {{rank}}"


def _gpu(name: str, **matchers: str | Match) -> Expr:
    return series(metric(name), instance=INSTANCE, gpu=GPU, **matchers)


def _inside(name: str, **matchers: str | Match) -> Expr:
    return series(metric(name), instance=INSTANCE, server=SERVER, **matchers)


def _threshold(rule: str, level: str) -> Expr:
    found = series(metric("rule_threshold"), instance=INSTANCE, rule=rule, level=level)
    return max_by(found)


def limits_of(rule: str) -> tuple[Query, Query]:
    """Draw the configured thresholds of a rule as dashed lines."""
    return (
        Query(_threshold(rule, "yellow"), "yellow from", dashed="#EAB839"),
        Query(_threshold(rule, "red"), "red from", dashed="red"),
    )


def headroom() -> Any:
    """Draw what can still be had on the device, and its lows."""
    return panels.lines(
        "Device headroom",
        "Free device memory plus what the server's allocator could return; dashed: the rule's thresholds. "
        "A sudden low is a prefill burst (it can take 9 GiB in 100 ms), a slow slope is a leak. Near red: "
        "lower the engine's memory share or its largest batch, and see who holds the memory in the ledger.",
        "bytes",
        Query(_gpu("gpu_memory_headroom_bytes"), NAMED),
        Query(_gpu("gpu_memory_free_low_bytes"), f"{NAMED}, lowest free"),
        *limits_of("device_headroom"),
        runbook="KvwatchDeviceHeadroomLow",
    )


def ledger() -> Any:
    """Stack the parts of the memory ledger."""
    return panels.lines(
        "Who holds the memory",
        "The ledger's parts add up to the device's total. Choose one GPU to read it. `engine_other` that "
        "grows is a leak or a burst outside the KV pool; `other_process` is a neighbour; `dead_process` "
        "is memory of a process that is gone.",
        "bytes",
        Query(
            max_by(_gpu("gpu_memory_ledger_bytes"), "instance", "gpu", "uuid", "part"),
            f"{NAMED} {{{{part}}}}",
        ),
        stacked=True,
        runbook="KvwatchDeadProcessMemory",
    )


def exhaustion() -> Any:
    """Draw the forecast of device memory with its bounds."""
    left = series(
        metric("time_to_exhaustion_seconds"),
        instance=INSTANCE,
        gpu=GPU_OR_NONE,
        resource="device",
        bound=regex("low|central|high"),
    )
    return panels.lines(
        "Time until device memory is gone",
        "Central estimate with its interval, up to two hours; nothing is drawn while memory does not fill "
        "(+Inf). Believe it only when the measured coverage is good, and not within ten minutes of a step.",
        "s",
        Query(left, f"{NAMED} {{{{bound}}}}"),
        *limits_of("device_exhaustion"),
        top=7200,
        runbook="KvwatchDeviceExhaustionSoon",
    )


def _memory_rows() -> list[Row]:
    return [
        Row(
            "Memory",
            (
                panels.lines(
                    "Used, its peak, and the total",
                    "The peak is the highest of fast samples within the last minute: what a 15 s reader "
                    "of last values misses. Reserved belongs to driver and firmware and is not counted as "
                    "used.",
                    "bytes",
                    Query(_gpu("gpu_memory_used_bytes"), f"{NAMED} used"),
                    Query(_gpu("gpu_memory_used_peak_bytes"), f"{NAMED} peak"),
                    Query(_gpu("gpu_memory_reserved_bytes"), f"{NAMED} reserved"),
                    Query(_gpu("gpu_memory_total_bytes"), f"{NAMED} total", dashed="red"),
                ),
                ledger(),
            ),
            height=10,
        ),
        Row(
            "How near is the wall?",
            (
                headroom(),
                exhaustion(),
                panels.lines(
                    "What a 15 s reader would have missed",
                    "How far the true peak of the last 15 s lay above what a reader of last values saw. "
                    "Keep at least this much headroom above the largest burst.",
                    "bytes",
                    Query(_gpu("gpu_memory_hidden_from_15s_bytes"), NAMED),
                ),
            ),
        ),
        Row(
            "Sampling",
            (
                panels.lines(
                    "Free memory",
                    "Free as the driver reports it. On the device memory does not fragment: all of it can "
                    "be had at once.",
                    "bytes",
                    Query(_gpu("gpu_memory_free_bytes"), NAMED),
                ),
                panels.lines(
                    "Interval of fast samples",
                    "10 Hz while memory is flat, 100 Hz for 10 s after it moved. Up to 1 s: the driver is "
                    "slow and kvwatch holds back.",
                    "s",
                    Query(_gpu("gpu_sample_interval_seconds"), NAMED),
                ),
                panels.lines(
                    "How often the forecast's interval held",
                    "Measured on forecasts that have come due. Well under 80 %: do not act on the times "
                    "above.",
                    "percentunit",
                    Query(
                        series(
                            metric("forecast_coverage_ratio"),
                            instance=INSTANCE,
                            gpu=GPU_OR_NONE,
                            resource="device",
                        ),
                        NAMED,
                    ),
                    top=1,
                ),
            ),
        ),
    ]


def _allocator_row() -> Row:
    retries = rate(_inside("allocator_alloc_retries_total"), WINDOW).times(60)
    return Row(
        "Inside the server's allocator (needs an agent in it)",
        (
            panels.lines(
                "Allocator memory by state",
                "Reserved less allocated is what emptying the cache might return; how much of it really "
                "can come back is in the fragmentation beside it.",
                "bytes",
                Query(_inside("allocator_bytes"), f"{RANKED} {{{{state}}}}"),
            ),
            panels.lines(
                "Fragmentation",
                "Soft: whole segments are free, and emptying the cache returns them. Hard: free memory "
                "between live blocks, which only a restart or expandable segments cure.",
                "percentunit",
                Query(_inside("allocator_fragmentation_ratio"), f"{RANKED} {{{{kind}}}}"),
                top=1,
                runbook="KvwatchFragmentationHigh",
            ),
            panels.lines(
                "Largest allocation that would succeed",
                "A prefill that needs more than this ends in CUDA out of memory.",
                "bytes",
                Query(_inside("allocator_largest_allocatable_bytes"), RANKED),
                *limits_of("largest_allocatable"),
                runbook="KvwatchLargestAllocatableLow",
            ),
            panels.lines(
                "Retries a minute, and errors",
                "Retries are the earliest honest sign of a coming out of memory; errors are those that came.",
                "short",
                Query(retries, f"{RANKED} retries"),
                Query(increase(_inside("allocator_ooms_total"), WINDOW), f"{RANKED} out of memory"),
                runbook="KvwatchAllocatorRetries",
            ),
        ),
        height=9,
    )


def _xids() -> Expr:
    found = panels.news(_gpu("gpu_xid_events_total"), _gpu("gpu_up"), ("job", "instance", "uuid"))
    return max_by(found, "instance", "gpu", "xid")


def xid_note() -> Note:
    """Mark driver errors."""
    return Note("Xid events", _xids(), "Xid {{xid}} on GPU {{gpu}} of {{instance}}", "red")


def _device_rows() -> list[Row]:
    health = max_by(_gpu("gpu_state").eq(1), "instance", "gpu", "state")
    return [
        Row(
            "Health",
            (
                panels.states(
                    "GPU answers",
                    "A GPU that was seen once stays here when it is gone.",
                    Query(max_by(_gpu("gpu_up"), "instance", "gpu"), NAMED),
                    steps=GOOD_IS_ONE,
                    names=UP_NAMES,
                    runbook="KvwatchGpuLost",
                ),
                panels.states(
                    "State",
                    "The state that holds: anything but ok needs somebody.",
                    Query(health, f"{NAMED} {{{{state}}}}"),
                    steps=(("blue", None),),
                    names=[],
                    runbook="KvwatchGpuMissing",
                ),
                panels.lines(
                    "Xid events",
                    "New driver error events by code. What each means: NVIDIA's Xid catalogue and the "
                    "runbook.",
                    "short",
                    Query(_xids(), f"{NAMED} Xid {{{{xid}}}}"),
                    runbook="KvwatchGpuXid",
                ),
                panels.lines(
                    "ECC errors",
                    "New errors. Corrected ones are repaired and only tell a trend; an uncorrected one "
                    "costs work.",
                    "short",
                    Query(increase(_gpu("gpu_ecc_errors_total"), WINDOW), f"{NAMED} {{{{kind}}}}"),
                    runbook="KvwatchGpuXid",
                ),
            ),
        ),
        Row(
            "Load",
            (
                panels.lines(
                    "Utilisation",
                    "Share of time with a kernel running, and with memory being read or written. The "
                    "second says nothing about how full memory is.",
                    "percentunit",
                    Query(_gpu("gpu_utilization_ratio"), f"{NAMED} kernels"),
                    Query(_gpu("gpu_memory_bandwidth_utilization_ratio"), f"{NAMED} memory traffic"),
                    top=1,
                ),
                panels.lines("Power", "Power draw.", "watt", Query(_gpu("gpu_power_watts"), NAMED)),
                panels.lines(
                    "Temperature",
                    "Of the GPU core. Steady above 85 °C: look at cooling.",
                    "celsius",
                    Query(_gpu("gpu_temperature_celsius"), NAMED),
                ),
            ),
        ),
    ]


def board() -> str:
    """Write the dashboard of GPU memory."""
    return panels.dashboard(
        "kvwatch-gpu-memory",
        "kvwatch / GPU memory",
        "Device memory: who holds it, how near it is to running out, and whether the devices are well.",
        [instance_variable(), server_variable(), gpu_variable()],
        [*_memory_rows(), _allocator_row(), *_device_rows()],
        [xid_note()],
    )
