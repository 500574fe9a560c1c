"""A host on paper: one GPU and one vLLM-like server whose every figure a test can set, second by second."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvwatch import core
from kvwatch.model.action import ActionResult
from kvwatch.model.gpu import GpuHealth, GpuMemory, GpuProcess, GpuState, HostGpus, LedgerPass
from kvwatch.model.level import Level, RuleId, Verdict
from kvwatch.model.report import ShellStatus, Snapshot, TickClock, TickReport
from kvwatch.model.sample import Failure, FailureKind, Sample, SourceStatus
from kvwatch.model.server import (
    AgentState,
    Basis,
    EngineState,
    Evictable,
    Histogram,
    KvCacheState,
    SchedulerState,
    Semantics,
    ServerState,
)
from kvwatch.model.settings import GIB, ServerSettings, Settings, SloSettings

TOTAL = 140 * GIB
PATTERNS = {"vllm": (r"\bvllm\b",)}
BOUNDS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
SLO = SloSettings(ttft_p95_s=2.0)
CHAT = ServerSettings(name="chat", kind="vllm", slo=SLO)


@dataclass
class Host:
    """What is true on the host now. `tick` lets time pass and returns kvwatch's report of it."""

    settings: Settings = field(default_factory=lambda: Settings(servers=(CHAT,)))
    state: core.CoreState | None = None
    now_s: float = 1000.0
    wall_s: float = 1.7e9
    # server
    serving: bool = True
    failure: FailureKind = FailureKind.REFUSED
    usage: float | None = 0.3
    running: int = 8
    waiting: int = 0
    tokens_per_s: int = 4000
    requests_per_s: int = 5
    preemptions_per_s: float = 0.0
    ttft_s: float = 0.3
    semantics: Semantics = Semantics(evictable=Evictable.FREE, basis=Basis.OCCUPANCY)
    counters: dict[str, float] = field(default_factory=dict)
    ttft: list[float] = field(default_factory=lambda: [0.0] * (len(BOUNDS) + 1))
    # GPU
    used_bytes: int = int(0.92 * TOTAL)
    process: bool = True
    health: GpuHealth = GpuHealth.OK
    xids: tuple[tuple[int, int], ...] = ()
    gpu_answers: bool = True
    paused: bool = False
    gpu_total: int = TOTAL
    # what the board keeps
    agents: dict[str, Sample[AgentState]] = field(default_factory=dict)
    gpu_sample: Sample[HostGpus] | None = None
    server_sample: Sample[ServerState] | None = None
    server_status: SourceStatus = SourceStatus(source="server/chat", period_s=1.0)
    gpu_status: SourceStatus = SourceStatus(source="nvml", period_s=1.0)
    shell: ShellStatus = ShellStatus()
    watched: bool = True
    report: TickReport | None = None

    def tick(
        self, seconds: float = 1.0, results: tuple[ActionResult, ...] = (), poll: bool = True
    ) -> TickReport:
        """Let time pass, poll everything (or not), and step once."""
        self.now_s += seconds
        self.wall_s += seconds
        if poll:
            self._serve(seconds)
            self._poll_server()
            self._poll_gpu()
        return self.step(results)

    def step(self, results: tuple[ActionResult, ...] = ()) -> TickReport:
        """Step on what the board holds now."""
        if self.state is None:
            self.state = core.initial(self.settings, version="1.0", patterns=PATTERNS)
        self.state, self.report = core.step(self.state, self.snapshot(), results, self.clock())
        return self.report

    def run(self, seconds: int) -> list[TickReport]:
        """Let so many seconds pass, a tick each; all reports."""
        return [self.tick() for _ in range(seconds)]

    def clock(self) -> TickClock:
        """The tick's time."""
        return TickClock(mono_s=self.now_s, wall_s=self.wall_s)

    def configure(self, settings: Settings) -> None:
        """Reload the configuration."""
        self.settings = settings
        assert self.state is not None
        self.state = core.reconfigure(self.state, settings)
        self.watched = any(server.name == "chat" for server in settings.servers)

    def snapshot(self) -> Snapshot:
        """What the board would say."""
        servers = {"chat": self.server_sample} if self.server_sample is not None and self.watched else {}
        sources = {"nvml": self.gpu_status}
        if self.watched:
            sources["server/chat"] = self.server_status
        return Snapshot(
            gpus={} if self.gpu_sample is None else {"nvml": self.gpu_sample},
            servers=servers,
            agents=dict(self.agents),
            sources=sources,
            shell=self.shell,
        )

    def verdict(self, rule: RuleId) -> Verdict:
        """The newest verdict of a rule, the worst of its scopes."""
        assert self.report is not None
        return max((v for v in self.report.verdicts if v.rule is rule), key=lambda v: v.level)

    def level(self, rule: RuleId) -> Level:
        """The newest level of a rule."""
        return self.verdict(rule).level

    def _serve(self, seconds: float) -> None:
        if not self.serving:
            self.counters, self.ttft = {}, [0.0] * (len(BOUNDS) + 1)
            return
        gained = {
            "prompt": self.tokens_per_s * seconds,
            "generation": self.tokens_per_s * seconds / 4,
            "preemptions": self.preemptions_per_s * seconds,
        }
        for name, amount in gained.items():
            self.counters[name] = self.counters.get(name, 0.0) + amount
        for place, bound in enumerate((*BOUNDS, float("inf"))):
            if self.ttft_s <= bound:
                self.ttft[place] += self.requests_per_s * seconds

    def _poll_server(self) -> None:
        status = self.server_status
        if not self.serving:
            failure = Failure(kind=self.failure, message=f"chat: {self.failure.value}")
            self.server_status = replace(
                status, up=False, good_streak=0, errors_total=status.errors_total + 1, failure=failure
            )
            return
        self.server_sample = Sample(
            source="server/chat", observed_s=self.now_s, wall_s=self.wall_s, value=self._page()
        )
        self.server_status = _good(status, self.now_s, self.wall_s)

    def _page(self) -> ServerState:
        scheduler = SchedulerState(
            running=self.running,
            waiting=self.waiting,
            preemptions_total=int(self.counters["preemptions"]),
            prompt_tokens_total=int(self.counters["prompt"]),
            generation_tokens_total=int(self.counters["generation"]),
        )
        kv = KvCacheState(
            usage_ratio=self.usage, num_blocks=10_000, block_size_tokens=16, capacity_tokens=160_000
        )
        count = self.ttft[-1]
        ttft = Histogram(bounds=BOUNDS, counts=tuple(self.ttft[:-1]), count=count, sum=count * self.ttft_s)
        engine = EngineState(kv=kv, scheduler=scheduler, ttft=ttft)
        return ServerState(kind="vllm", semantics=self.semantics, engines=(engine,))

    def _poll_gpu(self) -> None:
        if self.paused or not self.gpu_answers:
            kind = FailureKind.PAUSED if self.paused else FailureKind.STUCK
            failure = Failure(kind=kind, message=kind.value)
            self.gpu_status = replace(
                self.gpu_status, up=False, stuck=not self.paused, paused=self.paused, failure=failure
            )
            return
        host = HostGpus(gpus=(self._gpu(),), driver_version="580", host_pid_namespace=True)
        self.gpu_sample = Sample(source="nvml", observed_s=self.now_s, wall_s=self.wall_s, value=host)
        self.gpu_status = _good(self.gpu_status, self.now_s, self.wall_s)

    def _gpu(self) -> GpuState:
        state = GpuState(
            uuid="GPU-1",
            index=0,
            name="H200",
            health=self.health,
            xid_events_total=self.xids,
            driver_version="580",
        )
        if self.health is not GpuHealth.OK:
            return replace(state, health_detail="GPU is lost")
        memory = GpuMemory(
            total_bytes=self.gpu_total,
            used_bytes=self.used_bytes,
            free_bytes=self.gpu_total - self.used_bytes,
            reserved_bytes=0,
        )
        process = GpuProcess(
            pid=100, used_bytes=self.used_bytes, alive=True, name="vllm", command="vllm serve m --port 8000"
        )
        processes = (process,) if self.process else ()
        ledger = LedgerPass(observed_s=self.now_s, memory=memory, processes=processes)
        return replace(
            state, memory=memory, free_low_bytes=memory.free_bytes, ledger_pass=ledger, utilization_ratio=0.9
        )


def _good(status: SourceStatus, now_s: float, wall_s: float) -> SourceStatus:
    return replace(
        status,
        up=True,
        stuck=False,
        paused=False,
        failure=None,
        good_total=status.good_total + 1,
        good_streak=status.good_streak + 1,
        last_success_s=now_s,
        last_success_wall_s=wall_s,
    )


def paged(reports: list[TickReport]) -> list[tuple[int, str]]:
    """Every (tick, rule) at which a paging rule was red."""
    return [
        (report.tick, verdict.rule.value)
        for report in reports
        for verdict in report.verdicts
        if verdict.pages and verdict.level is Level.RED
    ]
