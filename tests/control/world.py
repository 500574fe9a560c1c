"""One server under control in simulated time: pages in, requests out, levers that obey or fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from kvwatch.actions.base import is_self_expiring
from kvwatch.control import plan
from kvwatch.model.action import ActionRequest, ActionResult, EventKind, Limit, Outcome
from kvwatch.model.level import Level, Reason, RuleId, Scope, Verdict
from kvwatch.model.report import LimitReport, Snapshot, TickClock
from kvwatch.model.sample import Failure, FailureKind, Sample, SourceStatus
from kvwatch.model.server import (
    AgentState,
    AllocatorState,
    EngineState,
    Evictable,
    KvCacheState,
    SchedulerState,
    Semantics,
    ServerState,
)
from kvwatch.model.settings import (
    ActionSettings,
    ControlSettings,
    Mode,
    ServerSettings,
    Settings,
    TargetSettings,
)
from kvwatch.model.signal import EngineSignals, ServerSignals, Signals

LEASE = ActionSettings(kind="lease")
EXEC = ActionSettings(kind="exec", params={"argv": ("/bin/set",), "deadline_s": 5.0})
HTTP = ActionSettings(kind="http", params={"url": "http://127.0.0.1/", "deadline_s": 5.0})
THRESHOLD = {"shrink_above": 0.95, "regrow_below": 0.80, "factor": 0.8}
GPU = "GPU-1"
AGENT = "agent/chat/0/0"
GIB = 1 << 30


def target(**changes: object) -> TargetSettings:
    values: dict[str, object] = {
        "server": "chat", "policy": "threshold", "params": THRESHOLD, "accept_goodput_loss": True,
        "floor": 4, "ceiling": 64, "lease_s": 15.0, "cooldown_s": 30.0, "via": (LEASE,),
    } | changes  # fmt: skip
    return TargetSettings(**values)  # type: ignore[arg-type]


def stop_verdict(level: Level, reason: Reason = Reason.CROSSED) -> Verdict:
    return Verdict(
        rule=RuleId.DEVICE_HEADROOM, scope=Scope(uuid=GPU, gpu="0"), level=level, since_s=0.0,
        since_wall_s=0.0, value=1.0, reason=reason,
    )  # fmt: skip


def agent_verdict(
    level: Level = Level.GREEN,
    reason: Reason = Reason.BELOW,
    rule: RuleId = RuleId.LARGEST_ALLOCATABLE,
    uuid: str = GPU,
) -> Verdict:
    """What a rule says of the one rank of the one engine."""
    return Verdict(
        rule=rule, scope=Scope(server="chat", engine="0", uuid=uuid, gpu="0"), level=level, since_s=0.0,
        since_wall_s=0.0, value=1.0, reason=reason,
    )  # fmt: skip


@dataclass
class Agent:
    """The agent inside the server: follows the counter of the lease as the real one does."""

    reserved: int = 20 * GIB
    releasable: int | None = 4 * GIB
    returns: float = 1.0  # the share that compacting brings
    working: bool = True
    talking: bool = True
    limits: str = "obeyed"
    figures_age_s: float | None = 5.0
    max_running: int | None = None  # the server's own limit
    pid: int = 7
    seq: int = 0
    counter: int = 0
    compactions: int = 0
    told: Sample[AgentState] | None = None

    def obey(self, counter: int) -> None:
        grew, self.counter = counter > self.counter, counter
        if grew and self.working:
            self.compactions += 1
            self.reserved -= int((self.releasable or 0) * self.returns)
            self.releasable = int((self.releasable or 0) * (1 - self.returns))

    def tell(self, now_s: float, wall_s: float) -> None:
        self.seq += 1
        allocator = AllocatorState(
            reserved_bytes=self.reserved, releasable_bytes=self.releasable,
            compactions_total=self.compactions, compact_seconds_total=0.25 * self.compactions,
            snapshot_age_s=self.figures_age_s,
        )  # fmt: skip
        state = AgentState(
            server="chat", engine="0", rank=0, pid=self.pid, seq=self.seq, gpu_uuid=GPU, allocator=allocator,
            limits=self.limits, scheduler=SchedulerState(max_running=self.max_running),
        )  # fmt: skip
        self.told = Sample(source=AGENT, observed_s=now_s, wall_s=wall_s, value=state)


@dataclass
class Page:
    """What the server shows now."""

    usage: float | None = 0.5
    running: int | None = 10
    waiting: int | None = 0
    samples: int = 10
    restarts: int = 0
    own_limit: int | None = None
    semantics: Semantics = Semantics(evictable=Evictable.FREE)


@dataclass
class World:
    """Ticks of 0.2 s, a page a second. `lever` says what becomes of each request that is carried out.

    With `late` a limit that timed out has taken effect all the same: the worst that can be.
    """

    settings: Settings
    page: Page = field(default_factory=Page)
    now_s: float = 1000.0
    wall_s: float = 1.8e9
    polled_s: float | None = 1000.0
    polling: bool = True
    failing: bool = False
    late: bool = False
    verdicts: tuple[Verdict, ...] = ()
    agent: Agent | None = None
    lever: Callable[[ActionRequest], Outcome] = lambda request: (
        Outcome.DRY_RUN if request.dry_run else Outcome.APPLIED
    )
    state: plan.ControlState = field(default_factory=plan.initial)
    requests: list[ActionRequest] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    results: list[ActionResult] = field(default_factory=list)
    limits: tuple[LimitReport, ...] = ()
    held: dict[str, tuple[Limit, float | None]] = field(default_factory=dict)  # by action: limit, end

    def tick(self, seconds: float = 0.2) -> list[ActionRequest]:
        """One tick; the requests it handed out are carried out at once."""
        self.now_s += seconds
        self.wall_s += seconds
        if self.polling and (self.polled_s is None or self.now_s - self.polled_s >= 1.0):
            self.polled_s = self.now_s
        self.talk()
        results, self.results = tuple(self.results), []
        planned = plan.plan(
            self.state, self.signals(), self.verdicts, self.snapshot(), results, self.settings,
            TickClock(mono_s=self.now_s, wall_s=self.wall_s),
        )  # fmt: skip
        self.state, self.limits = planned.state, planned.limits
        self.events += [event.message for event in planned.events]
        for request in planned.due:
            self.requests.append(request)
            self.results.append(self.carry_out(request))
        return list(planned.due)

    def talk(self) -> None:
        """The agent looks at the lease, and tells once a second."""
        agent = self.agent
        if agent is None:
            return
        limit, end_s = self.held.get("lease", (None, None))
        if limit is not None and (end_s is None or self.now_s < end_s):
            agent.obey(limit.compact)
        if agent.talking and (agent.told is None or self.now_s - agent.told.observed_s >= 1.0):
            agent.tell(self.now_s, self.wall_s)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.2)):
            self.tick()

    def carry_out(self, request: ActionRequest) -> ActionResult:
        outcome = self.lever(request)
        expiring = is_self_expiring(request.action)
        took_effect = outcome in (Outcome.APPLIED, Outcome.NOOP) or (
            self.late and outcome is Outcome.TIMED_OUT and request.event is EventKind.LIMIT
        )
        if took_effect and request.limit is not None:
            if request.event is EventKind.RESTORE:
                self.held.pop(request.action, None)
            else:
                end_s = self.now_s + (request.expires_in_s or 0.0) if expiring else None
                self.held[request.action] = (request.limit, end_s)
        return ActionResult(
            request_id=request.request_id, target=request.target, action=request.action, event=request.event,
            outcome=outcome, started_s=self.now_s, took_s=0.0, finished_wall_s=self.wall_s,
            limit=request.limit, self_expiring=expiring, step=request.step,
        )  # fmt: skip

    def in_force(self) -> list[Limit]:
        """Every limit that some lever holds at this moment."""
        return [limit for limit, end_s in self.held.values() if end_s is None or self.now_s < end_s]

    @property
    def cap(self) -> int | None:
        """The limit that the one lever holds now."""
        caps = [limit.max_running for limit in self.in_force()]
        assert len(caps) <= 1, caps
        return caps[0] if caps else None

    def caps(self) -> list[int | None]:
        """Every limit asked for so far, without renewals; None for a restore."""
        asked: list[int | None] = []
        for request in self.requests:
            number = request.limit.max_running if request.limit is not None else None
            if not asked or asked[-1] != number:
                asked.append(number)
        return asked

    def wanted(self) -> Limit | None:
        return self.state.targets["chat"].limit

    def signals(self) -> Signals:
        page = self.page
        engine = EngineSignals(
            server="chat", engine="0", samples=page.samples, kv_usage_ratio=page.usage, running=page.running,
            waiting=page.waiting, restarts_total=page.restarts, generation_tokens_per_s=100.0,
        )  # fmt: skip
        return Signals(servers=(ServerSignals(server="chat", engines=(engine,), gpu_uuids=(GPU,)),))

    def snapshot(self) -> Snapshot:
        failure = Failure(kind=FailureKind.REFUSED, message="refused") if self.failing else None
        status = SourceStatus(source="server/chat", period_s=1.0, up=failure is None, failure=failure)
        samples: Mapping[str, Sample[ServerState]] = {}
        if self.polled_s is not None:
            own = EngineState(
                kv=KvCacheState(usage_ratio=self.page.usage),
                scheduler=SchedulerState(max_running=self.page.own_limit),
            )
            value = ServerState(kind="vllm", semantics=self.page.semantics, engines=(own,))
            samples = {
                "chat": Sample(
                    source="server/chat", observed_s=self.polled_s, wall_s=self.wall_s, value=value
                )
            }
        agents: dict[str, Sample[AgentState]] = {}
        sources = {"server/chat": status}
        if self.agent is not None and self.agent.told is not None:
            agents[AGENT] = self.agent.told
            sources[AGENT] = SourceStatus(source=AGENT, period_s=1.0, up=True)
        return Snapshot(servers=samples, agents=agents, sources=sources)

    def reconfigure(self, *targets: TargetSettings, mode: Mode | None = None) -> None:
        control = replace(self.settings.control, targets=targets)
        self.settings = replace(
            self.settings, control=replace(control, mode=mode) if mode is not None else control
        )


def world(*targets: TargetSettings, mode: Mode = Mode.ACT, **changes: object) -> World:
    settings = Settings(
        servers=(ServerSettings(name="chat", kind="vllm"),),
        control=ControlSettings(mode=mode, targets=targets or (target(),)),
    )
    return World(settings=settings, **changes)  # type: ignore[arg-type]


def full(running: int = 40, waiting: int = 8) -> Page:
    return Page(usage=0.99, running=running, waiting=waiting)
