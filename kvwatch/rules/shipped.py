"""Which rules ship? One row per rule: unit, thresholds with their provenance, and how the value is read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvwatch.model.level import RuleId
from kvwatch.model.settings import GIB, RuleSettings
from kvwatch.rules import allocator, device, kv, sources
from kvwatch.rules.spec import Direction, RuleSpec, Unit

_FIRST_SIGN = "The earliest honest sign measured: retries began 30 s before memory ran out on an H200."
_STATE = "A state, not a measure: 1 is the fault, 0 is none."

SPECS: tuple[RuleSpec, ...] = (
    RuleSpec(
        rule=RuleId.KV_USAGE,
        unit=Unit.RATIO,
        defaults=RuleSettings(yellow=0.70, red=0.95),
        read=kv.kv_usage,
        sentence="How full the KV pool is. A full pool is the normal state of a busy server, so this never "
        "pages; red needs a queue and a sign of harm, and a server whose figure means occupancy.",
        provenance=(
            ("yellow", "Where queueing becomes possible within seconds; an orientation, not an alarm."),
            (
                "red",
                "vLLM PR 42827: above 0.95 with requests waiting, preemption thrash begins. A real engine "
                "under overload stood above 0.95 for 90 % of the time, hence the further conditions.",
            ),
        ),
    ),
    RuleSpec(
        rule=RuleId.RECOMPUTE_TAX,
        unit=Unit.RATIO,
        defaults=RuleSettings(yellow=0.02, red=0.05),
        read=kv.recompute_tax,
        sentence="The share of engine time that goes into recomputing preempted requests; red only while "
        "requests wait.",
        provenance=(
            ("yellow", "Chat traffic that lost nothing by it spent 2.0 % of its time on recomputation."),
            (
                "red",
                "Traffic that gained from fewer preemptions spent 9.7 % of its time; 5 % stands between.",
            ),
        ),
        pages=True,
    ),
    RuleSpec(
        rule=RuleId.LATENCY_SLO,
        unit=Unit.RATIO,
        defaults=RuleSettings(yellow=1.0, red=1.5),
        read=kv.latency_slo,
        sentence="The worst p95 (time to first token, time per token, queue) as a multiple of the server's "
        "own objective; unknown under 20 observations a minute.",
        provenance=(
            ("yellow", "The objective itself, as configured."),
            ("red", "Half as much again: beyond what a burst of one minute explains. A convention."),
        ),
        pages=True,
    ),
    RuleSpec(
        rule=RuleId.DEVICE_HEADROOM,
        unit=Unit.BYTES,
        direction=Direction.LOW,
        defaults=RuleSettings(yellow=device.HEADROOM_YELLOW_BYTES, red=device.HEADROOM_RED_BYTES),
        read=device.device_headroom,
        sentence="Device memory that can still be had: free plus what the allocator could return. Red needs "
        "it to be falling, below what its server has lived with, or an allocator that had to retry.",
        provenance=(
            (
                "yellow",
                "The smaller of 2 GiB and 5 % of the device (while not configured): prefill bursts of "
                "2.4 GiB within a second were measured in 10 % of the windows.",
            ),
            ("red", "vllm#5907 and its kin: out of memory with 218 MiB free and 304 MiB wanted."),
        ),
        pages=True,
    ),
    RuleSpec(
        rule=RuleId.DEVICE_EXHAUSTION,
        unit=Unit.SECONDS,
        direction=Direction.LOW,
        defaults=RuleSettings(yellow=1800.0, red=300.0),
        read=device.device_exhaustion,
        sentence="The central estimate of the time until the device is full; not judged within ten minutes "
        "of a step change, since a new process or model is not a leak.",
        provenance=(
            (
                "yellow",
                "Half an hour is time for a planned restart. Leaks are slow: TGI#801 took five hours.",
            ),
            ("red", "Five minutes is time for a drain, not for a decision. A convention."),
        ),
        pages=True,
    ),
    RuleSpec(
        rule=RuleId.ALLOC_RETRIES,
        unit=Unit.PER_MINUTE,
        defaults=RuleSettings(yellow=0.0, red=6.0),
        read=allocator.alloc_retries,
        sentence="How often in the last minute the server's allocator had to free its cache and try again.",
        provenance=(
            ("yellow", _FIRST_SIGN),
            ("red", "One every ten seconds; 180 in 30 s were measured at the wall, none in steady state."),
        ),
        strict=True,
        pages=True,
    ),
    RuleSpec(
        rule=RuleId.LARGEST_ALLOCATABLE,
        unit=Unit.BYTES,
        direction=Direction.LOW,
        defaults=RuleSettings(yellow=2 * GIB, red=1 * GIB),
        read=allocator.largest_allocatable,
        sentence="The largest single allocation that would succeed inside the server, as its agent tells; "
        "never judged without an agent, since no device counter knows it.",
        provenance=(
            ("yellow", "Twice red."),
            ("red", "1 GiB, the size of a large logits or activation buffer, as first asked for."),
        ),
        pages=True,
    ),
    RuleSpec(
        rule=RuleId.ALLOCATOR_FRAGMENTATION,
        unit=Unit.RATIO,
        defaults=RuleSettings(yellow=0.30),
        read=allocator.allocator_fragmentation,
        sentence="The share of the allocator's reserved memory that is free but interleaved with live "
        "blocks, so that giving back its cache would not help (hard fragmentation).",
        provenance=(
            ("yellow", "A convention; the bare ratio of the largest block is near 1 in healthy states."),
        ),
    ),
    RuleSpec(
        rule=RuleId.KV_BLOCK_WASTE,
        unit=Unit.RATIO,
        defaults=RuleSettings(yellow=0.30),
        read=kv.kv_block_waste,
        sentence="The share of KV slots in use that page tails waste.",
        provenance=(
            (
                "yellow",
                "2-4 % is usual (32-token blocks, 650 tokens a request): ten times that is a "
                "block size that does not suit the traffic.",
            ),
        ),
    ),
    RuleSpec(
        rule=RuleId.DEAD_PROCESS_MEMORY,
        unit=Unit.BYTES,
        defaults=RuleSettings(yellow=1 * GIB, for_s=120.0),
        read=device.dead_process_memory,
        sentence=(
            "Device memory held by processes that are gone, or left of a server that is down, for two "
            "minutes: the next start lacks it."
        ),
        provenance=(
            (
                "yellow",
                "More than a bare CUDA context holds (about 0.5 GiB); two minutes is longer than "
                "a driver takes to clean up. vllm#55510.",
            ),
        ),
    ),
    RuleSpec(
        rule=RuleId.SERVER_STALLED,
        unit=Unit.COUNT,
        defaults=RuleSettings(red=1.0),
        read=kv.server_stalled,
        sentence="Requests run or wait, and no token counter has moved for three periods (five seconds "
        "at least).",
        provenance=(("red", _STATE),),
        pages=True,
    ),
    RuleSpec(
        rule=RuleId.SERVER_DOWN,
        unit=Unit.COUNT,
        defaults=RuleSettings(red=1.0, for_s=120.0),
        read=sources.server_down,
        sentence="A configured server gives no good page for two minutes. A server that says that it is "
        "loading is not down for its first half hour.",
        provenance=(("red", _STATE + " Two minutes is longer than a restart of the process alone."),),
        pages=True,
    ),
    RuleSpec(
        rule=RuleId.GPU_LOST,
        unit=Unit.COUNT,
        defaults=RuleSettings(red=1.0),
        read=device.gpu_lost,
        sentence="A GPU has fallen off the bus or needs a reset.",
        provenance=(("red", _STATE + " dcgm-exporter#348: series that merely vanish alarm nobody."),),
        pages=True,
    ),
    RuleSpec(
        rule=RuleId.GPU_MISSING,
        unit=Unit.COUNT,
        defaults=RuleSettings(red=1.0),
        read=device.gpu_missing,
        sentence="A GPU that was seen before, or is expected by the configuration, is not there.",
        provenance=(("red", _STATE),),
        pages=True,
    ),
    RuleSpec(
        rule=RuleId.GPU_XID,
        unit=Unit.COUNT,
        defaults=RuleSettings(yellow=1.0, red=1.0),
        read=device.gpu_xid,
        sentence="Listed Xid events of the last ten minutes: 63, 64, 74 and 94 are yellow, 48, 79, 95, 119 "
        "and 120 red; others are counted and logged.",
        provenance=(
            (
                "yellow",
                "NVIDIA's Xid catalogue: a repair was recorded, a link failed, or an error was contained.",
            ),
            ("red", "NVIDIA's Xid catalogue: the GPU needs a reset, or cannot be reached."),
        ),
        pages=True,
    ),
    RuleSpec(
        rule=RuleId.SOURCE_STALE,
        unit=Unit.COUNT,
        defaults=RuleSettings(yellow=3.0),
        read=sources.source_stale,
        sentence="Periods since a source last gave a good sample (a period counts as a second at least).",
        provenance=(("yellow", "One lost sample is chance, three are not."),),
    ),
)

BY_RULE: Mapping[RuleId, RuleSpec] = MappingProxyType({spec.rule: spec for spec in SPECS})
DEFAULTS: Mapping[RuleId, RuleSettings] = MappingProxyType({spec.rule: spec.defaults for spec in SPECS})
"""Every rule's settings as shipped; the configuration overrides single fields of them."""
