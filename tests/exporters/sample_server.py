"""Servers of the sample host: a hot one with two engines, a starting one, a dead one; agents and limits."""

from __future__ import annotations

import math

from kvwatch.model.action import Limit
from kvwatch.model.report import (
    LimitReport,
    ServerReport,
)
from kvwatch.model.server import (
    Activity,
    AgentState,
    AllocatorState,
    ArenaState,
    Basis,
    EngineState,
    Evictable,
    KvCacheState,
    SchedulerState,
    Semantics,
    ServerState,
)
from kvwatch.model.signal import (
    EngineSignals,
    Forecast,
    ForecastState,
    Phase,
    Quantiles,
    ServerSignals,
    Waste,
)
from tests.exporters.sample_gpu import GIB, MIB, NOW_WALL_S, uuid


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


def chat() -> ServerReport:
    """A vLLM server with a full engine that thrashes and an easy one; its address carries a password."""
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


def embed() -> ServerReport:
    """A llama.cpp server that has just started, with one sample."""
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


def dead() -> ServerReport:
    """A server that is down and whose processes still hold memory."""
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
        private_bytes=2 * GIB,
        compactions_total=1,
        compact_seconds_total=0.31,
        snapshot_age_s=4.0,
        arenas=(
            ArenaState(
                name="large/0",
                reserved_bytes=100 * GIB,
                allocated_bytes=88 * GIB,
                active_bytes=89 * GIB,
                requested_bytes=87 * GIB,
                largest_free_bytes=900 * MIB,
                free_bytes=11 * GIB,
                releasable_bytes=GIB,
            ),
        ),
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
