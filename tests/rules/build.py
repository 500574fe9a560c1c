"""Signals, snapshots and ticks built by hand, so that a rule can be asked one question at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvwatch.model.gpu import GpuHealth, GpuMemory, GpuState, HostGpus
from kvwatch.model.level import Level, RuleId, Verdict
from kvwatch.model.report import Snapshot, TickClock
from kvwatch.model.sample import Sample, SourceStatus
from kvwatch.model.server import (
    AgentState,
    AllocatorState,
    Basis,
    EngineState,
    Evictable,
    Semantics,
    ServerState,
)
from kvwatch.model.settings import GIB, RuleSettings, ServerSettings, Settings, SloSettings
from kvwatch.model.signal import (
    EngineSignals,
    GpuSignals,
    Phase,
    Quantiles,
    ServerSignals,
    Signals,
)
from kvwatch.rules.evaluate import RulesState, complete, evaluate
from kvwatch.rules.memory import Memory, remember
from kvwatch.rules.views import Freshness, gpu_states, look

G, Y, R, U = Level.GREEN, Level.YELLOW, Level.RED, Level.UNKNOWN
FREE = Semantics(evictable=Evictable.FREE, basis=Basis.OCCUPANCY)
TOTAL = 140 * GIB
UUID = "GPU-1"
AGENT = "agent/chat/0/0"


def clock(now_s: float, wall_s: float | None = None) -> TickClock:
    """A tick's time; the wall clock runs along unless told otherwise."""
    return TickClock(mono_s=now_s, wall_s=1e9 + now_s if wall_s is None else wall_s)


def quantiles(p95: float, count: float = 100.0) -> Quantiles:
    """A latency window with this p95."""
    return Quantiles(values=((0.5, p95 / 2), (0.95, p95), (0.99, p95)), count=count, window_s=60.0)


def gpu(memory: GpuMemory | None = None, **fields: object) -> GpuState:
    """A healthy GPU with 140 GiB, half of it free."""
    memory = memory or GpuMemory(total_bytes=TOTAL, used_bytes=TOTAL // 2, free_bytes=TOTAL // 2)
    return replace(GpuState(uuid=UUID, index=0, memory=memory), **fields)  # type: ignore[arg-type]


def engine(**fields: object) -> EngineSignals:
    """An idle engine with enough samples to be judged."""
    return replace(
        EngineSignals(server="chat", engine="0", samples=10, kv_usage_ratio=0.2, waiting=0),
        **fields,  # type: ignore[arg-type]
    )


def device(**fields: object) -> GpuSignals:
    """A steady GPU with plenty of headroom."""
    return replace(
        GpuSignals(uuid=UUID, index=0, phase=Phase.STEADY, headroom_bytes=TOTAL // 2),
        **fields,  # type: ignore[arg-type]
    )


def agent(seq: int = 1, retries: int | None = None, **allocator: object) -> AgentState:
    """One datagram of rank 0 on the GPU."""
    state = replace(AllocatorState(num_alloc_retries=retries), **allocator)  # type: ignore[arg-type]
    return AgentState(server="chat", engine="0", rank=0, pid=7, seq=seq, gpu_uuid=UUID, allocator=state)


@dataclass
class World:
    """One server, one GPU, one agent if given; `tick` evaluates all rules at a time."""

    settings: Settings = field(
        default_factory=lambda: Settings(
            servers=(ServerSettings(name="chat", slo=SloSettings(ttft_p95_s=2.0, tpot_p95_s=0.06)),)
        )
    )
    rules: dict[RuleId, RuleSettings] = field(default_factory=dict)
    semantics: Semantics = FREE
    engine: EngineSignals = field(default_factory=engine)
    up: bool | None = True
    server_fresh: bool = True
    server_seen: bool = True
    server_status: SourceStatus = SourceStatus(source="server/chat", period_s=1.0, up=True, good_total=9)
    gpus: tuple[GpuState, ...] = field(default_factory=lambda: (gpu(),))
    device: GpuSignals = field(default_factory=device)
    gpu_fresh: bool = True
    gpu_status: SourceStatus = SourceStatus(
        source="nvml", period_s=0.2, up=True, good_total=9, last_success_s=0.0
    )
    gpu_samples: bool = True  # a new GPU sample at every tick
    agent: AgentState | None = None
    agent_fresh: bool = True
    state: RulesState = RulesState()
    memory: Memory = Memory()
    observed_s: float = 0.0

    def tick(self, now_s: float, wall_s: float | None = None) -> dict[RuleId, Verdict]:
        """Evaluate once; the verdicts by rule (the last scope of each rule wins)."""
        return {verdict.rule: verdict for verdict in self.verdicts(now_s, wall_s)}

    def verdicts(self, now_s: float, wall_s: float | None = None) -> tuple[Verdict, ...]:
        """Evaluate once; all verdicts."""
        if self.gpu_samples:
            self.observed_s = now_s
        snapshot = self._snapshot(now_s)
        gpus = frozenset({"nvml"} if self.gpu_fresh else ())
        fresh = Freshness(
            gpu_sources=gpus,
            servers=frozenset({"chat"} if self.server_fresh else ()),
            agents=frozenset({AGENT} if self.agent_fresh else ()),
        )
        self.memory = remember(self.memory, snapshot, gpu_states(snapshot, gpus), now_s)
        inputs = look(
            self._signals(),
            snapshot,
            self.settings,
            clock(now_s, wall_s),
            self.memory,
            fresh,
            complete(self.rules),
        )
        self.state, verdicts = evaluate(self.state, inputs)
        return verdicts

    def run(self, now_s: float, ticks: int = 2) -> dict[RuleId, Verdict]:
        """Evaluate a few times within a second that ends at `now_s`; the last verdicts."""
        for place in range(1 - ticks, 1):
            verdicts = self.tick(now_s + 0.2 * place)
        return verdicts

    def _signals(self) -> Signals:
        server = ServerSignals(server="chat", up=self.up, engines=(self.engine,) if self.server_seen else ())
        return Signals(gpus=(self.device,), servers=(server,))

    def _snapshot(self, now_s: float) -> Snapshot:
        page = ServerState(kind="vllm", semantics=self.semantics, engines=(EngineState(),))
        agents = {}
        if self.agent is not None:
            agents[AGENT] = Sample(source=AGENT, observed_s=now_s, wall_s=0.0, value=self.agent)
        host = HostGpus(gpus=self.gpus)
        servers = {}
        if self.server_seen:
            servers["chat"] = Sample(source="server/chat", observed_s=now_s, wall_s=0.0, value=page)
        return Snapshot(
            gpus={"nvml": Sample(source="nvml", observed_s=self.observed_s, wall_s=0.0, value=host)},
            servers=servers,
            agents=agents,
            sources={"nvml": self.gpu_status, "server/chat": self.server_status},
        )


LOST = gpu(memory=None, health=GpuHealth.LOST)
