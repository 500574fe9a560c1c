"""What pages, what opens a ticket, what is only told? One row per alert and level.

Thresholds are not repeated here: alerts compare exported levels, so a changed configuration
needs no new rules file. Levels are debounced by kvwatch itself (`hold`, `for`, two samples at
least), so `for` is short here. `keep_firing_for` bridges what makes a series vanish without
anything being better: a host that dies while red, a restart of kvwatch.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvwatch.catalogue.alert_spec import INFO, PAGE, RUNBOOKS, TICKET, AlertSpec, Example, metric
from kvwatch.catalogue.promql import UP, Expr, absent, age_s, increase, regex, series, sum_by
from kvwatch.model.level import Level, RuleId

__all__ = ["ALERTS", "INFO", "JOB", "PAGE", "RUNBOOKS", "TICKET", "AlertSpec", "Example"]

# The label `job` under which Prometheus scrapes kvwatch; `KvwatchDown` cannot work without knowing it.
JOB = "kvwatch"
# KvwatchDown needs a minute to fire; a page that was red before must not end earlier than that.
KEEP_PAGE_S = 300
KEEP_TICKET_S = 300


def _level(rule: RuleId, level: Level) -> Expr:
    return series(metric("rule_level"), rule=rule.value).eq(level.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RuleAlert:
    """What an alert on a rule says at its levels; `yellow` is the severity at yellow, "" for none."""

    name: str
    rule: RuleId
    summary: str
    description: str
    unit: str = "number"
    red: str = PAGE
    yellow: str = ""
    for_s: int = 0
    example: Example = Example()
    yellow_example: Example | None = None

    def rows(self) -> list[AlertSpec]:
        """One row per level that tells anybody."""
        found = []
        if self.red:
            found.append(self._row(Level.RED, self.red, self.for_s, self.example))
        if self.yellow:
            # What nobody is woken for may wait until it has lasted.
            wait_s = 60 if self.yellow == TICKET else 300
            found.append(self._row(Level.YELLOW, self.yellow, wait_s, self.yellow_example or self.example))
        return found

    def _row(self, level: Level, severity: str, for_s: int, example: Example) -> AlertSpec:
        keep_s = {PAGE: KEEP_PAGE_S, TICKET: KEEP_TICKET_S, INFO: 0}[severity]
        return AlertSpec(
            name=self.name,
            severity=severity,
            expr=_level(self.rule, level),
            summary=self.summary,
            description=self.description,
            unit=self.unit,
            rule=self.rule,
            level=level,
            for_s=for_s,
            keep_firing_for_s=keep_s,
            example=example,
        )


_SERVER = {"server": "chat", "engine": "0"}
_GPU = {"uuid": "GPU-11111111-2222-3333-4444-555555555555", "gpu": "3"}
_MIB = 1024.0 * 1024.0


def _server(value: float, shown: str, threshold: float, shown_threshold: str) -> Example:
    """Make a case on the server `chat`."""
    return Example(
        labels=_SERVER,
        where="server chat engine 0",
        value=value,
        shown=shown,
        threshold=threshold,
        shown_threshold=shown_threshold,
    )


def _gpu(value: float, shown: str, threshold: float, shown_threshold: str) -> Example:
    """Make a case on GPU 3."""
    return Example(
        labels=_GPU,
        where="GPU 3",
        value=value,
        shown=shown,
        threshold=threshold,
        shown_threshold=shown_threshold,
    )


_RULE_ALERTS = (
    _RuleAlert(
        name="KvwatchServerDown",
        rule=RuleId.SERVER_DOWN,
        summary="{where} on {instance} does not answer",
        description=(
            "No page with the expected series came for longer than the rule allows (2 min as shipped), so "
            "requests to {where} very likely fail. Likely cause: the engine died (CUDA out of memory is "
            "the usual reason), still starts, or serves its metrics elsewhere. A process left behind "
            "keeps its GPU memory and lets the next start fail."
        ),
        example=Example(labels={"server": "chat"}, where="server chat"),
    ),
    _RuleAlert(
        name="KvwatchServerStalled",
        rule=RuleId.SERVER_STALLED,
        summary="{where} on {instance} has requests but makes no token",
        description=(
            "Requests are running or waiting on {where} and no token counter has moved. The endpoint may "
            "still look healthy. Likely cause: a hung collective or kernel, a GPU that stopped (look for "
            "Xid events), or a paused engine."
        ),
        for_s=5,
        example=Example(labels=_SERVER, where="server chat engine 0"),
    ),
    _RuleAlert(
        name="KvwatchKvThrashing",
        rule=RuleId.RECOMPUTE_TAX,
        summary="{where} on {instance} spends {value} of its time on recomputing preempted requests",
        description=(
            "Recompute tax of {where} is {value} of engine time (threshold {threshold}) with requests "
            "waiting: the KV pool is too small for the requests admitted, so some are thrown out and "
            "computed again. This is not an out-of-memory risk. Likely cause: more or longer generations "
            "at once than the pool can hold. First remedy: the engine's own admission watermark (2-5 % of "
            "the pool)."
        ),
        unit="ratio",
        yellow=INFO,
        for_s=5,
        example=_server(0.08, "8%", 0.05, "5%"),
        yellow_example=_server(0.03, "3%", 0.02, "2%"),
    ),
    _RuleAlert(
        name="KvwatchLatencySlo",
        rule=RuleId.LATENCY_SLO,
        summary="{where} on {instance} is at {value} its latency objective",
        description=(
            "The worst p95 of {where} over the last minute is {value} the objective set for it "
            "(threshold {threshold}). Users wait. Likely cause: a queue (see waiting requests), "
            "recomputation (see recompute tax), or a few very long prompts."
        ),
        unit="times",
        yellow=INFO,
        for_s=5,
        example=_server(2.5, "2.5x", 1.5, "1.5x"),
        yellow_example=_server(1.25, "1.25x", 1.0, "1x"),
    ),
    _RuleAlert(
        name="KvwatchDeviceHeadroomLow",
        rule=RuleId.DEVICE_HEADROOM,
        summary="{where} on {instance} has {value} of device memory left",
        description=(
            "Free device memory plus what the allocator could give back is {value} on {where} (threshold "
            "{threshold}). The next large prefill can end in CUDA out of memory, which kills the engine "
            "and every request in it. This is device memory, not the KV pool. Likely cause: growth "
            "outside the pool (activations, graphs, adapters) or another process on the GPU; the memory "
            "ledger says which."
        ),
        unit="bytes",
        yellow=INFO,
        example=_gpu(256 * _MIB, "256MiB", 512 * _MIB, "512MiB"),
        yellow_example=_gpu(1024 * _MIB, "1GiB", 2048 * _MIB, "2GiB"),
    ),
    _RuleAlert(
        name="KvwatchDeviceExhaustionSoon",
        rule=RuleId.DEVICE_EXHAUSTION,
        summary="{where} on {instance} runs out of device memory in about {value}",
        description=(
            "Device memory of {where} has been drifting up; at this rate it is gone in about {value} "
            "(threshold {threshold}). Likely cause: a leak or a cache without a limit outside the KV "
            "pool. A step (a process that started) is not the reason: ten minutes after a step are left "
            "out."
        ),
        unit="seconds",
        yellow=INFO,
        example=_gpu(150, "2m 30s", 300, "5m 0s"),
        yellow_example=_gpu(1200, "20m 0s", 1800, "30m 0s"),
    ),
    _RuleAlert(
        name="KvwatchAllocatorRetries",
        rule=RuleId.ALLOC_RETRIES,
        summary="The allocator of {where} on {instance} had to free its cache {value}",
        description=(
            "PyTorch's allocator in {where} found no memory, emptied its cache and tried again: {value} "
            "(threshold {threshold}). It is the earliest honest sign of a coming CUDA out of memory, and "
            "each retry stalls the engine. Likely cause: too little memory outside the KV pool."
        ),
        unit="per_minute",
        yellow=INFO,
        example=_server(12, "12 per minute", 6, "6 per minute"),
        yellow_example=_server(2, "2 per minute", 0, "0 per minute"),
    ),
    _RuleAlert(
        name="KvwatchLargestAllocatableLow",
        rule=RuleId.LARGEST_ALLOCATABLE,
        summary="{where} on {instance} can allocate no more than {value} at once",
        description=(
            "The largest block that the allocator of {where} could hand out is {value} (threshold "
            "{threshold}), counting free blocks, what it would release on a retry, and free device "
            "memory. A prefill that needs more ends in CUDA out of memory. In mode act admission is "
            "stopped until this recovers."
        ),
        unit="bytes",
        yellow=INFO,
        example=_server(512 * _MIB, "512MiB", 1024 * _MIB, "1GiB"),
        yellow_example=_server(1536 * _MIB, "1.5GiB", 2048 * _MIB, "2GiB"),
    ),
    _RuleAlert(
        name="KvwatchFragmentationHigh",
        rule=RuleId.ALLOCATOR_FRAGMENTATION,
        summary="{value} of the allocator's free memory of {where} on {instance} lies between live blocks",
        description=(
            "Hard fragmentation of {where} is {value} (threshold {threshold}): free memory inside "
            "segments that also hold live blocks, which emptying the cache cannot return. Not urgent "
            "while device headroom is good. Likely cause: allocations of mixed sizes and lifetimes "
            "without expandable segments."
        ),
        unit="ratio",
        red="",
        yellow=TICKET,
        yellow_example=_server(0.45, "45%", 0.30, "30%"),
    ),
    _RuleAlert(
        name="KvwatchDeadProcessMemory",
        rule=RuleId.DEAD_PROCESS_MEMORY,
        summary="{value} on {where} of {instance} belong to a process that is gone",
        description=(
            "{value} of device memory on {where} are held by a pid that no longer exists, or by what "
            "remains of a server that is down (threshold {threshold}). The next start of a server there "
            "will find too little memory. Likely cause: an orphaned worker after its parent was killed."
        ),
        unit="bytes",
        red="",
        yellow=TICKET,
        yellow_example=_gpu(8192 * _MIB, "8GiB", 1024 * _MIB, "1GiB"),
    ),
    _RuleAlert(
        name="KvwatchGpuLost",
        rule=RuleId.GPU_LOST,
        summary="{where} on {instance} is lost",
        description=(
            "The driver no longer reaches {where} (fallen off the bus, or it needs a reset). Whatever ran "
            "on it is dead or hangs. Likely cause: hardware, power or PCIe link, or a driver fault; look "
            "for Xid 79, 119 and 120."
        ),
        example=Example(labels=_GPU, where="GPU 3"),
    ),
    _RuleAlert(
        name="KvwatchGpuMissing",
        rule=RuleId.GPU_MISSING,
        summary="A GPU of {instance} that should be there is missing ({where})",
        description=(
            "The driver lists fewer GPUs than were seen before or than `gpus.expect` demands ({where}). "
            "Likely cause: the GPU did not come back after a reset or reboot, or a container lost its "
            "devices."
        ),
        example=Example(labels=_GPU, where="GPU 3"),
    ),
    _RuleAlert(
        name="KvwatchGpuXid",
        rule=RuleId.GPU_XID,
        summary="{where} on {instance} reported Xid {xids}",
        description=(
            "The driver reported Xid {xids} on {where}. Red (48, 79, 95, 119, 120): the GPU or its memory "
            "can no longer be trusted, or its work was lost. Yellow (63, 64, 74, 94): contained or "
            "recoverable; plan a reset. What each means is in NVIDIA's Xid catalogue and the runbook."
        ),
        yellow=TICKET,
        example=Example(labels=_GPU, where="GPU 3", xid="79"),
        yellow_example=Example(labels=_GPU, where="GPU 3", xid="94"),
    ),
)


def _down() -> Expr:
    """No answer from one kvwatch, or no kvwatch known to Prometheus at all."""
    up = series(UP, job=JOB)
    return up.eq(0).either(absent(up))


def _stale() -> Expr:
    """Name the failing sources of a host on which the rule (with its configured threshold) fires."""
    failing = series(metric("source_up")).eq(0)
    rule = series(metric("rule_level"), rule=RuleId.SOURCE_STALE.value).ge(Level.YELLOW.value)
    return failing.where(rule, on=("job", "instance"))


def _failing_actions() -> Expr:
    """Two failures within ten minutes: one may be a hiccup that the retry has healed."""
    failures = series(metric("actions_total"), outcome=regex("failed|timed_out|refused"))
    return sum_by(increase(failures, "10m"), "job", "instance", "action").gt(1.5)


def _stuck_lease() -> Expr:
    """A limit still in force a minute after its lease ran out (Prometheus's clock against the host's)."""
    expired = age_s(series(metric("lease_expiry_timestamp_seconds"))).gt(60)
    on = ("job", "instance", "server", "engine")
    return expired.where(series(metric("limit_active")).eq(1), on=on)


_WATCHER = (
    AlertSpec(
        name="KvwatchDown",
        severity=PAGE,
        expr=_down(),
        for_s=60,
        keep_firing_for_s=0,
        summary="kvwatch on {host} does not answer",
        description=(
            "Prometheus cannot scrape kvwatch (job `kvwatch`, instance {host}). Either the host is "
            "gone or only the watcher is; until it is back nobody is told about GPU memory or KV pressure "
            "there. Limits that kvwatch imposed end by themselves within their lease. Alerts that were "
            "red before stay firing for five minutes."
        ),
    ),
    AlertSpec(
        name="KvwatchSourceStale",
        severity=TICKET,
        expr=_stale(),
        for_s=60,
        keep_firing_for_s=KEEP_TICKET_S,
        summary="kvwatch on {instance} gets no data from {source}",
        description=(
            "The source {source} has given no good sample for longer than the rule source_stale allows. "
            "What depends on it is unknown, not green, and kvwatch does not act on it. Likely cause: the "
            "endpoint moved or changed its names, credentials expired, the driver was upgraded, or the "
            "process is gone."
        ),
    ),
    AlertSpec(
        name="KvwatchSourceStuck",
        severity=TICKET,
        expr=series(metric("source_stuck")).eq(1),
        for_s=60,
        keep_firing_for_s=KEEP_TICKET_S,
        summary="A call of {source} on {instance} does not return",
        description=(
            "kvwatch has been waiting for {source} past every deadline. For NVML that means a driver call "
            "hangs in the kernel: often a GPU is about to be lost, and servers on it may stall. kvwatch "
            "goes on with its other sources and starts no second worker beside the stuck one."
        ),
    ),
    AlertSpec(
        name="KvwatchConfigReloadFailed",
        severity=TICKET,
        expr=series(metric("config_last_reload_successful")).eq(0),
        for_s=60,
        keep_firing_for_s=KEEP_TICKET_S,
        summary="kvwatch on {instance} could not load its configuration",
        description=(
            "The last reload was refused; kvwatch goes on with the configuration before it. A restart now "
            "would fail. `kvwatch check` names every finding with its line."
        ),
    ),
    AlertSpec(
        name="KvwatchActionFailing",
        severity=TICKET,
        expr=_failing_actions(),
        for_s=0,
        keep_firing_for_s=KEEP_TICKET_S,
        summary="The action {action} fails on {instance}",
        description=(
            "{value} runs of the action {action} failed, were refused or timed out within ten minutes. "
            "Limits or notifications that go through it do not arrive. Likely cause: the hook's target is "
            "down, its credentials expired, or the program is missing or not executable."
        ),
    ),
    AlertSpec(
        name="KvwatchLeaseStuck",
        severity=TICKET,
        expr=_stuck_lease(),
        for_s=60,
        keep_firing_for_s=KEEP_TICKET_S,
        unit="seconds",
        summary="A limit on {server} at {instance} outlived its lease",
        description=(
            "The lease of the limit on {server} ran out {value} ago, yet the limit is still in force: the "
            "server takes fewer requests than it could. Likely cause: a lever that does not expire by "
            "itself (exec, http, a proxy) could not be told to restore. `kvwatch restore` gives "
            "everything back."
        ),
    ),
)

ALERTS: tuple[AlertSpec, ...] = (*_WATCHER, *(row for alert in _RULE_ALERTS for row in alert.rows()))


def of_rule(rule: RuleId) -> AlertSpec | None:
    """The alert that pages on a rule's red; None where none does."""
    return next((row for row in ALERTS if row.rule is rule and row.severity == PAGE), None)
