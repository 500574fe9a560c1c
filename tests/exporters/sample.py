"""A rich report, as a busy and unlucky host would give it, for everything that shows reports."""

from __future__ import annotations

import math
from dataclasses import replace

from kvwatch.model.action import Limit
from kvwatch.model.gpu import Accounting, GpuHealth, GpuMemory, GpuState
from kvwatch.model.level import Level, Reason, RuleId, Scope, Verdict
from kvwatch.model.report import (
    Event,
    GpuReport,
    LimitReport,
    ServerReport,
    ShellStatus,
    TickClock,
    TickReport,
)
from kvwatch.model.sample import Failure, FailureKind, SourceStatus
from kvwatch.model.server import (
    Activity,
    AgentState,
    AllocatorState,
    Basis,
    EngineState,
    Evictable,
    KvCacheState,
    SchedulerState,
    Semantics,
    ServerState,
)
from kvwatch.model.settings import Mode
from kvwatch.model.signal import (
    EngineSignals,
    Forecast,
    ForecastState,
    GpuSignals,
    Holder,
    LedgerPart,
    Phase,
    Quantiles,
    ServerSignals,
    Signals,
    Waste,
)

GIB = 1024**3
MIB = 1024**2
NOW_WALL_S = 1_795_996_800.0  # 2026-11-30 00:00:00 UTC
NOW_MONO_S = 50_000.0
TOTAL = 143_771 * MIB
RESERVED = 644_939_776
HOSTILE = 'python"<img src=x onerror="alert(1)">\n</script><script>alert(\'x\')</script>\\'
NO_FORECAST = Forecast()
LEVELS = ((Level.UNKNOWN, 12.0), (Level.GREEN, 3000.0), (Level.YELLOW, 240.5), (Level.RED, 7.25))


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


def quantiles(p50: float, p95: float, p99: float, *, count: float = 412.0, beyond: bool = False) -> Quantiles:
    """The three quantiles that are exported."""
    values = ((0.5, p50), (0.95, p95), (0.99, p99))
    return Quantiles(values=values, count=count, window_s=60.0, beyond=beyond)


def _engine_state(engine: str, usage: float) -> EngineState:
    used = round(usage * 10_000)
    return EngineState(
        engine=engine,
        kv=KvCacheState(
            usage_ratio=usage,
            num_blocks=10_000,
            used_blocks=used,
            free_blocks=10_000 - used - 20,
            evictable_blocks=20,
            block_size_tokens=16,
            capacity_tokens=160_000,
        ),
        scheduler=SchedulerState(running=48, waiting=17, max_running=256, preemptions_total=311),
        activity=Activity.SERVING,
    )


def _chat() -> ServerReport:
    state = ServerState(
        kind="vllm",
        semantics=Semantics(evictable=Evictable.FREE, basis=Basis.OCCUPANCY),
        engines=(_engine_state("0", 0.982), _engine_state("1", 0.41)),
        version="0.21.0",
        model="meta-llama/Llama-3.1-70B-Instruct",
    )
    hot = EngineSignals(
        server="chat",
        engine="0",
        samples=900,
        kv_usage_ratio=0.982,
        running=48,
        waiting=17,
        waiting_rising=True,
        preemptions_per_s=1.9,
        recompute_tax_ratio=0.083,
        recomputed_tokens_ratio=0.21,
        prompt_tokens_per_s=10_432.0,
        generation_tokens_per_s=1_912.0,
        ttft=quantiles(1.2, 4.7, 9.1),
        tpot=quantiles(0.021, 0.055, 0.09),
        queue=quantiles(0.4, 3.9, 8.0, beyond=True),
        waste=Waste(ratio=0.034, low=0.01, high=0.06, method="estimate"),
        demand_ratio=1.34,
        kv_forecast=Forecast(
            state=ForecastState.SATURATED, floor_s=0.0, low_s=0.0, central_s=0.0, high_s=0.0
        ),
        stalled=False,
    )
    cool = EngineSignals(
        server="chat",
        engine="1",
        samples=900,
        kv_usage_ratio=0.41,
        running=9,
        waiting=0,
        preemptions_per_s=0.0,
        recompute_tax_ratio=0.0,
        recomputed_tokens_ratio=0.0,
        ttft=quantiles(0.2, 0.5, 0.7),
        tpot=quantiles(0.019, 0.03, 0.04),
        kv_forecast=Forecast(
            state=ForecastState.STABLE,
            floor_s=900.0,
            low_s=math.inf,
            central_s=math.inf,
            high_s=math.inf,
            coverage_ratio=0.93,
            coverage_count=200,
        ),
        stalled=False,
    )
    signals = ServerSignals(
        server="chat", phase=Phase.STEADY, up=True, engines=(hot, cool), gpu_uuids=(uuid(0), uuid(1))
    )
    return ServerReport(
        server="chat",
        kind="vllm",
        url="http://admin:hunter2@127.0.0.1:8000/metrics?token=abc",
        state=state,
        signals=signals,
        up=True,
        age_s=0.31,
        stalled=False,
    )


def _embed() -> ServerReport:
    state = ServerState(
        kind="llamacpp",
        semantics=Semantics(evictable=Evictable.UNKNOWN, basis=Basis.SLOTS, note="slots in use, not blocks"),
        engines=(
            EngineState(
                engine="0", kv=KvCacheState(usage_ratio=0.25), scheduler=SchedulerState(running=1, waiting=0)
            ),
        ),
        version="b6000",
        model="bge-m3",
        notes=("preemptions are not reported by llama.cpp",),
    )
    engine = EngineSignals(
        server="embed", engine="0", samples=1, kv_usage_ratio=0.25, running=1, waiting=0, stalled=None
    )
    signals = ServerSignals(
        server="embed",
        phase=Phase.STARTING,
        phase_detail="first good page 3 s ago",
        up=True,
        engines=(engine,),
    )
    return ServerReport(
        server="embed",
        kind="llamacpp",
        url="http://127.0.0.1:8081",
        state=state,
        signals=signals,
        up=True,
        age_s=0.8,
    )


def _dead() -> ServerReport:
    signals = ServerSignals(
        server="batch",
        phase=Phase.DOWN,
        up=False,
        down_for_s=181.0,
        memory_held_while_down_bytes=2 * GIB,
    )
    return ServerReport(
        server="batch",
        kind="sglang",
        url="http://127.0.0.1:30000",
        state=None,
        signals=signals,
        up=False,
        age_s=181.0,
        stale=True,
    )


def verdict(rule: RuleId, level: Level, scope: Scope, **changes: object) -> Verdict:
    """A verdict that has stood for two minutes."""
    made = Verdict(
        rule=rule,
        scope=scope,
        level=level,
        since_s=NOW_MONO_S - 125.0,
        since_wall_s=NOW_WALL_S - 125.0,
        seconds_by_level=LEVELS,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def verdicts() -> tuple[Verdict, ...]:
    """Red, yellow, green and unknown, on engines, GPUs, servers and sources."""
    hot, cool = Scope(server="chat", engine="0"), Scope(server="chat", engine="1")
    gpu0, gpu1 = Scope(uuid=uuid(0), gpu="0"), Scope(uuid=uuid(1), gpu="1")
    red, yellow, green, unknown = Level.RED, Level.YELLOW, Level.GREEN, Level.UNKNOWN
    return (
        verdict(
            RuleId.DEVICE_HEADROOM,
            red,
            gpu0,
            value=float(380 * MIB),
            yellow=float(2 * GIB),
            red=float(512 * MIB),
            reason=Reason.CROSSED,
            pages=True,
            detail="380 MiB free and falling; the next prefill may not fit",
        ),
        verdict(
            RuleId.RECOMPUTE_TAX,
            red,
            hot,
            value=0.083,
            yellow=0.02,
            red=0.05,
            reason=Reason.CROSSED,
            pages=True,
            detail="8.3 % of engine time goes into recomputing, 17 requests wait",
        ),
        verdict(RuleId.KV_USAGE, yellow, hot, value=0.982, yellow=0.7, red=0.95, reason=Reason.CAPPED),
        verdict(RuleId.KV_USAGE, green, cool, value=0.41, yellow=0.7, red=0.95),
        verdict(
            RuleId.LATENCY_SLO,
            red,
            hot,
            value=2.35,
            yellow=1.0,
            red=1.5,
            pages=True,
            reason=Reason.CROSSED,
            detail="TTFT p95 4.7 s against 2.0 s",
        ),
        verdict(
            RuleId.DEVICE_HEADROOM,
            green,
            gpu1,
            value=float(40 * GIB),
            yellow=float(2 * GIB),
            red=float(512 * MIB),
            pages=True,
        ),
        verdict(
            RuleId.DEVICE_EXHAUSTION,
            unknown,
            gpu1,
            yellow=1800.0,
            red=300.0,
            reason=Reason.TOO_FEW,
            pages=True,
        ),
        verdict(
            RuleId.ALLOC_RETRIES, unknown, hot, yellow=0.0, red=6.0, reason=Reason.NOT_REPORTED, pages=True
        ),
        verdict(
            RuleId.GPU_LOST,
            red,
            Scope(uuid=uuid(2), gpu="2"),
            value=1.0,
            red=1.0,
            reason=Reason.CROSSED,
            pages=True,
            detail="lost",
        ),
        verdict(
            RuleId.SERVER_DOWN,
            red,
            Scope(server="batch"),
            value=181.0,
            red=120.0,
            reason=Reason.CROSSED,
            pages=True,
        ),
        verdict(RuleId.SOURCE_STALE, green, Scope(source="nvml"), value=0.1, yellow=0.6),
        verdict(
            RuleId.SOURCE_STALE, yellow, Scope(source="dcgm"), value=31.0, yellow=3.0, reason=Reason.CROSSED
        ),
        verdict(
            RuleId.DEAD_PROCESS_MEMORY,
            yellow,
            gpu0,
            value=float(2 * GIB),
            yellow=float(GIB),
            reason=Reason.CROSSED,
            detail="2.0 GiB of pid 31337",
        ),
    )


def sources() -> tuple[SourceStatus, ...]:
    """Good, stuck, refused, and never seen."""
    return (
        SourceStatus(
            source="nvml",
            period_s=0.2,
            up=True,
            good_total=9000,
            good_streak=9000,
            last_success_s=NOW_MONO_S - 0.012,
            last_success_wall_s=NOW_WALL_S - 0.012,
            last_took_s=0.0008,
        ),
        SourceStatus(
            source="dcgm",
            period_s=1.0,
            stuck=True,
            errors_total=3,
            good_total=12,
            last_success_s=NOW_MONO_S - 31.0,
            last_success_wall_s=NOW_WALL_S - 31.0,
            last_took_s=0.01,
            failure=Failure(kind=FailureKind.STUCK, message="no answer for 31 s; the host engine may hang"),
        ),
        SourceStatus(
            source="server/chat",
            period_s=1.0,
            up=True,
            good_total=900,
            good_streak=900,
            last_success_s=NOW_MONO_S - 0.31,
            last_success_wall_s=NOW_WALL_S - 0.31,
            last_took_s=0.0042,
        ),
        SourceStatus(
            source="server/batch",
            period_s=1.0,
            errors_total=181,
            failure=Failure(
                kind=FailureKind.REFUSED,
                message="http://user:s3cret@127.0.0.1:30000/metrics: connection refused; is it running?",
            ),
        ),
    )


def events() -> tuple[Event, ...]:
    """What changed in this tick."""
    return (
        Event(
            seq=41,
            wall_s=NOW_WALL_S - 125.0,
            kind="level",
            message="device_headroom yellow -> red: 380 MiB free and falling",
            rule="device_headroom",
            scope=Scope(uuid=uuid(0), gpu="0"),
            level_from=Level.YELLOW,
            level_to=Level.RED,
            fields={"value": 380 * MIB, "threshold": math.inf, "command": HOSTILE, "password": "hunter2"},
        ),
        Event(
            seq=42,
            wall_s=NOW_WALL_S - 4.0,
            kind="decision",
            message="would cap chat at 38 running requests (advise)",
        ),
    )


def agents() -> tuple[AgentState, ...]:
    """One agent that reports everything, one that knows nothing yet."""
    full = AllocatorState(
        allocated_bytes=90 * GIB,
        reserved_bytes=110 * GIB,
        active_bytes=91 * GIB,
        requested_bytes=89 * GIB,
        inactive_bytes=GIB,
        largest_free_bytes=900 * MIB,
        largest_allocatable_bytes=1200 * MIB,
        releasable_bytes=GIB,
        fragmentation_soft_ratio=0.01,
        fragmentation_hard_ratio=0.17,
        fragmentation_total_ratio=0.18,
        num_alloc_retries=4,
        num_ooms=0,
    )
    return (
        AgentState(server="chat", engine="0", rank=0, pid=4242, seq=17, gpu_uuid=uuid(0), allocator=full),
        AgentState(server="chat", engine="0", rank=1, pid=4243, seq=17, gpu_uuid=uuid(1)),
    )


def limits() -> tuple[LimitReport, ...]:
    """One limit in force, one that would be, one server without."""
    return (
        LimitReport(
            server="chat",
            configured=256,
            active=Limit(server="chat", max_running=38),
            expires_wall_s=NOW_WALL_S + 11.0,
            since_wall_s=NOW_WALL_S - 60.0,
            imposed_by="threshold",
            reason="kv_usage_ratio 0.98 with 17 waiting",
        ),
        LimitReport(server="embed", would_be=Limit(server="embed", admit=False), dry_run=True),
        LimitReport(server="batch"),
    )


def report(**changes: object) -> TickReport:
    """The whole report; keyword arguments replace fields."""
    gpu_reports, server_reports = gpus(), (_chat(), _embed(), _dead())
    made = TickReport(
        tick=250_123,
        clock=TickClock(mono_s=NOW_MONO_S, wall_s=NOW_WALL_S, tz="UTC"),
        version="0.1.0",
        mode=Mode.ADVISE,
        headline=Level.RED,
        headline_detail="device_headroom on GPU 0: 380 MiB free and falling (and 4 more)",
        gpus=gpu_reports,
        servers=server_reports,
        agents=agents(),
        signals=Signals(
            gpus=tuple(g.signals for g in gpu_reports if g.signals is not None),
            servers=tuple(s.signals for s in server_reports),
        ),
        verdicts=verdicts(),
        events=events(),
        sources=sources(),
        limits=limits(),
        actions_total=(("lease", "applied", 12), ("lease", "failed", 1), ("exec", "dry_run", 4)),
        shell=ShellStatus(
            started_wall_s=NOW_WALL_S - 50_000.0,
            ticks_missed_total=3,
            config_last_reload_success_wall_s=NOW_WALL_S - 50_000.0,
            clamped_total=1,
        ),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def bench_report(tick: int = 1) -> TickReport:
    """Eight healthy GPUs, two servers and a verdict of every GPU and engine rule: the size to time."""
    host = []
    for index in range(8):
        state = gpu_state(index, used=(90 + index) * GIB)
        host.append(GpuReport(state=state, signals=gpu_signals(state, "chat"), up=True, age_s=0.01))
    rules = []
    for index in range(8):
        scope = Scope(uuid=uuid(index), gpu=str(index))
        for rule in (
            RuleId.DEVICE_HEADROOM,
            RuleId.DEVICE_EXHAUSTION,
            RuleId.DEAD_PROCESS_MEMORY,
            RuleId.GPU_LOST,
            RuleId.GPU_XID,
        ):
            rules.append(verdict(rule, Level.GREEN, scope, value=1.5 * GIB + tick, yellow=2.0, red=1.0))
    for server, engine in (("chat", "0"), ("chat", "1"), ("embed", "0")):
        scope = Scope(server=server, engine=engine)
        for rule in list(RuleId)[:12]:
            rules.append(verdict(rule, Level.GREEN, scope, value=0.5, yellow=0.7, red=0.95))
    return report(tick=tick, gpus=tuple(host), servers=(_chat(), _embed()), verdicts=tuple(rules))


def empty_report() -> TickReport:
    """A report in which nothing is known of anything."""
    bare_gpu = GpuReport(
        state=GpuState(uuid="GPU-x", index=0, health=GpuHealth.UNKNOWN), signals=None, up=False, age_s=None
    )
    bare_server = ServerReport(
        server="chat",
        kind="vllm",
        url="http://127.0.0.1:8000",
        state=None,
        signals=ServerSignals(server="chat"),
        up=False,
        age_s=None,
    )
    return TickReport(
        tick=1,
        clock=TickClock(mono_s=1.0, wall_s=NOW_WALL_S),
        version="0.1.0",
        mode=Mode.OBSERVE,
        headline=Level.UNKNOWN,
        gpus=(bare_gpu,),
        servers=(bare_server,),
        agents=(AgentState(server="chat", engine="0", rank=0, pid=1, seq=1),),
        verdicts=(
            verdict(
                RuleId.KV_USAGE,
                Level.UNKNOWN,
                Scope(server="chat", engine="0"),
                reason=Reason.NOT_REPORTED,
                seconds_by_level=(),
            ),
        ),
        sources=(SourceStatus(source="nvml", period_s=0.2),),
        limits=(LimitReport(server="chat"),),
    )
