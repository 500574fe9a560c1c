"""A rich report, as a busy and unlucky host would give it, for everything that shows reports."""

from __future__ import annotations

import math
from dataclasses import replace

from kvwatch.model.gpu import GpuHealth, GpuState
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
    AgentState,
)
from kvwatch.model.settings import Mode
from kvwatch.model.signal import (
    ServerSignals,
    Signals,
)
from tests.exporters.sample_gpu import (
    GIB,
    HOSTILE,
    MIB,
    NOW_MONO_S,
    NOW_WALL_S,
    SECONDS_BEFORE,
    TOTAL,
    gpu_signals,
    gpu_state,
    gpus,
    uuid,
)
from tests.exporters.sample_server import agents, chat, dead, embed, limits, quantiles

__all__ = [
    "GIB",
    "HOSTILE",
    "MIB",
    "NOW_MONO_S",
    "NOW_WALL_S",
    "SECONDS_BEFORE",
    "TOTAL",
    "agents",
    "bench_report",
    "chat",
    "dead",
    "embed",
    "empty_report",
    "events",
    "gpu_signals",
    "gpu_state",
    "gpus",
    "limits",
    "quantiles",
    "report",
    "sources",
    "uuid",
    "verdict",
    "verdicts",
]


def verdict(rule: RuleId, level: Level, scope: Scope, **changes: object) -> Verdict:
    """A verdict that has stood for two minutes."""
    made = Verdict(
        rule=rule,
        scope=scope,
        level=level,
        since_s=NOW_MONO_S - 125.0,
        since_wall_s=NOW_WALL_S - 125.0,
        seconds_before=SECONDS_BEFORE,
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


def report(**changes: object) -> TickReport:
    """The whole report; keyword arguments replace fields."""
    gpu_reports, server_reports = gpus(), (chat(), embed(), dead())
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
            evidence_total=(("written", 3), ("failed", 1), ("dropped", 0)),
            agent_datagrams_total=(("accepted", 4000), ("rate", 0), ("pid", 2)),
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
    return report(tick=tick, gpus=tuple(host), servers=(chat(), embed()), verdicts=tuple(rules))


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
            ),
        ),
        sources=(SourceStatus(source="nvml", period_s=0.2),),
        limits=(LimitReport(server="chat"),),
    )
