"""Short ways to build samples, servers and GPUs for the tests of signals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kvwatch.model.gpu import GpuMemory, GpuProcess, GpuState, HostGpus, LedgerPass
from kvwatch.model.report import ShellStatus, Snapshot, TickClock
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
from kvwatch.model.settings import GIB, MIB, ServerSettings, Settings
from kvwatch.model.signal import EngineSignals, GpuSignals, ServerSignals, Signals
from kvwatch.signals.derive import SignalState, derive

FREE_EVICTABLE = Semantics(evictable=Evictable.FREE, basis=Basis.OCCUPANCY)
PATTERNS: Mapping[str, tuple[str, ...]] = {
    "vllm": (r"vllm serve", r"vllm\.entrypoints", r"VLLM::"),
    "sglang": (r"sglang\.launch_server", r"sglang::"),
    "tgi": (r"text-generation-launcher", r"text-generation-server"),
}
GPU = "GPU-11111111-aaaa"
OTHER_GPU = "GPU-22222222-bbbb"
START_S = 1000.0
CHAT = ServerSettings(name="chat", kind="vllm", url="http://127.0.0.1:8000")
VLLM = "python -m vllm.entrypoints.openai.api_server --port 8000"


def clock(mono_s: float, wall_s: float = 1.8e9) -> TickClock:
    return TickClock(mono_s=mono_s, wall_s=wall_s)


def settings(*servers: ServerSettings) -> Settings:
    return Settings(servers=servers or (CHAT,))


def histogram(*counts: float, bounds: Sequence[float] = (0.1, 0.5, 1.0), count: float) -> Histogram:
    return Histogram(bounds=tuple(bounds), counts=counts, count=count, sum=None)


def engine(
    usage: float | None = 0.5,
    *,
    name: str = "0",
    slots: int | None = 16000,
    block: int | None = 16,
    running: int | None = 10,
    waiting: int | None = 0,
    preemptions: int | None = 0,
    prompt: int | None = 0,
    generation: int | None = 0,
    pool_bytes: int | None = None,
    weights_bytes: int | None = None,
    **more: object,
) -> EngineState:
    kv = KvCacheState(
        usage_ratio=usage,
        capacity_tokens=slots,
        block_size_tokens=block,
        pool_bytes=pool_bytes,
        weights_bytes=weights_bytes,
    )
    scheduler = SchedulerState(
        running=running,
        waiting=waiting,
        preemptions_total=preemptions,
        prompt_tokens_total=prompt,
        generation_tokens_total=generation,
    )
    return replace(EngineState(engine=name, kv=kv, scheduler=scheduler), **more)  # type: ignore[arg-type]


def page(
    observed_s: float, *engines: EngineState, server: str = "chat", **more: object
) -> Sample[ServerState]:
    state = ServerState(kind="vllm", semantics=FREE_EVICTABLE, engines=engines, model="m")
    return Sample(
        source=f"server/{server}",
        observed_s=observed_s,
        wall_s=0.0,
        value=replace(state, **more),  # type: ignore[arg-type]
    )


def status(
    source: str = "server/chat", *, failure: FailureKind | None = None, period_s: float = 1.0
) -> SourceStatus:
    failed = None if failure is None else Failure(kind=failure, message="")
    return SourceStatus(source=source, period_s=period_s, up=failure is None, failure=failed)


def memory(used: int = 0, *, total: int = 80 * GIB, reserved: int | None = 512 * MIB) -> GpuMemory:
    return GpuMemory(
        total_bytes=total,
        used_bytes=used,
        free_bytes=total - used - (reserved or 0),
        reserved_bytes=reserved,
    )


def process(pid: int, used: int | None, command: str = VLLM, **more: object) -> GpuProcess:
    return replace(
        GpuProcess(pid=pid, used_bytes=used, alive=True, command=command, name="python"),
        **more,  # type: ignore[arg-type]
    )


def gpu(
    observed_s: float,
    used: int,
    processes: Iterable[GpuProcess] | None = (),
    *,
    uuid: str = GPU,
    index: int = 0,
    mem: GpuMemory | None = None,
    **more: object,
) -> GpuState:
    now = mem or memory(used)
    listed = None if processes is None else tuple(processes)
    ledger_pass = LedgerPass(observed_s=observed_s, memory=now, processes=listed)
    return replace(
        GpuState(uuid=uuid, index=index, memory=now, ledger_pass=ledger_pass),
        **more,  # type: ignore[arg-type]
    )


def host(observed_s: float, *gpus: GpuState, namespace: bool = True) -> dict[str, Sample[HostGpus]]:
    value = HostGpus(gpus=gpus, host_pid_namespace=namespace)
    return {"nvml": Sample(source="nvml", observed_s=observed_s, wall_s=0.0, value=value)}


def agent(observed_s: float, state: AgentState) -> dict[str, Sample[AgentState]]:
    source = f"agent/{state.server}/{state.engine}/{state.rank}"
    return {source: Sample(source=source, observed_s=observed_s, wall_s=0.0, value=state)}


class Run:
    """Drives derive() over time, one snapshot after the other, and keeps the last signals."""

    def __init__(self, config: Settings | None = None) -> None:
        self.settings = config or settings()
        self.state = SignalState.initial()
        self.signals = Signals()

    def tick(self, snapshot: Snapshot, now_s: float, wall_s: float = 1.8e9) -> Signals:
        self.state, self.signals = derive(self.state, snapshot, self.settings, PATTERNS, clock(now_s, wall_s))
        return self.signals

    def page(self, observed_s: float, *engines: EngineState, **more: object) -> EngineSignals:
        """Tick at the moment when one page of `chat` arrives; its first engine's signals."""
        self.tick(Snapshot(servers={"chat": page(observed_s, *engines, **more)}), observed_s)
        return self.signals.servers[0].engines[0]

    def gpu(self, observed_s: float, state: GpuState, **more: object) -> GpuSignals:
        """Tick at the moment when one GPU's reading arrives; its signals."""
        self.tick(replace(Snapshot(gpus=host(observed_s, state)), **more), observed_s)  # type: ignore[arg-type]
        return self.signals.gpus[0]

    @property
    def chat(self) -> ServerSignals:
        return self.signals.servers[0]


MAINTENANCE = ShellStatus(maintenance_until_wall_s=2e9)
