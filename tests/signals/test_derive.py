"""derive() as a whole: pure, deterministic, never raising, and deaf to repeats and to the wall clock."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch.model.gpu import GpuMemory, GpuProcess, GpuState, HostGpus, LedgerPass
from kvwatch.model.report import Snapshot
from kvwatch.model.sample import Failure, FailureKind, Sample, SourceStatus
from kvwatch.model.server import (
    AgentState,
    AllocatorState,
    EngineState,
    Histogram,
    KvCacheState,
    SchedulerState,
    Semantics,
    ServerState,
)
from kvwatch.model.settings import GIB, ServerSettings
from kvwatch.model.signal import Signals
from kvwatch.signals.derive import SignalState, derive
from kvwatch.signals.freshness import gpu_fresh, server_fresh
from tests.signals.build import CHAT, PATTERNS, Run, clock, engine, gpu, host, page, process, status
from tests.signals.build import settings as config

whole = st.none() | st.integers(-5, 10**12)
real = st.none() | st.floats(allow_nan=True, allow_infinity=True)
number = st.floats(allow_nan=True, allow_infinity=True)
histograms = st.none() | st.builds(
    Histogram,
    bounds=st.lists(number, max_size=4).map(tuple),
    counts=st.lists(number, max_size=4).map(tuple),
    count=number,
    sum=real,
)
kvs = st.builds(
    KvCacheState,
    usage_ratio=real,
    num_blocks=whole,
    used_blocks=whole,
    evictable_blocks=whole,
    block_size_tokens=whole,
    capacity_tokens=whole,
    pool_bytes=whole,
    weights_bytes=whole,
    tokens=whole,
)
schedulers = st.builds(
    SchedulerState,
    running=whole,
    waiting=whole,
    preemptions_total=whole,
    recomputed_tokens_total=whole,
    prompt_tokens_total=whole,
    generation_tokens_total=whole,
    steps_total=whole,
    finished_total=whole,
)
engines = st.builds(
    EngineState,
    engine=st.sampled_from(["0", "1"]),
    kv=kvs,
    scheduler=schedulers,
    ttft=histograms,
    tpot=histograms,
    queue=histograms,
    prompt_length=histograms,
    started_wall_s=real,
)
semantics = st.from_type(Semantics)
states = st.builds(
    ServerState,
    kind=st.sampled_from(["vllm", "x"]),
    semantics=semantics,
    engines=st.lists(engines, max_size=3).map(tuple),
)
memories = st.builds(
    GpuMemory,
    total_bytes=st.integers(-5, 10**12),
    used_bytes=st.integers(-5, 10**12),
    free_bytes=st.integers(-5, 10**12),
    reserved_bytes=whole,
)
processes = st.builds(
    GpuProcess,
    pid=st.integers(-1, 9),
    used_bytes=whole,
    alive=st.sampled_from([True, False, None]),
    command=st.sampled_from(["", "vllm serve --port 8000", "vllm serve", "("]),
)
passes = st.none() | st.builds(
    LedgerPass,
    observed_s=number,
    memory=memories,
    processes=st.none() | st.lists(processes, max_size=3).map(tuple),
)
gpus = st.builds(
    GpuState,
    uuid=st.sampled_from(["GPU-a", "GPU-b", ""]),
    index=st.integers(-1, 3),
    is_mig_parent=st.booleans(),
    memory=st.none() | memories,
    free_low_bytes=whole,
    ledger_pass=passes,
)
hosts = st.builds(HostGpus, gpus=st.lists(gpus, max_size=3).map(tuple), host_pid_namespace=st.booleans())
agents = st.builds(
    AgentState,
    server=st.sampled_from(["chat", "ghost"]),
    engine=st.sampled_from(["0", "1"]),
    rank=st.integers(0, 2),
    pid=st.integers(1, 5),
    seq=st.integers(0, 9),
    gpu_uuid=st.sampled_from(["", "GPU-a"]),
    allocator=st.none() | st.builds(AllocatorState, releasable_bytes=whole),
    kv=st.none() | kvs,
    blocks_held=whole,
)


def _sample(values: st.SearchStrategy[object]) -> st.SearchStrategy[Sample[object]]:
    return st.builds(
        Sample,
        source=st.just("s"),
        observed_s=st.floats(0, 100) | number,
        wall_s=number,
        value=st.none() | values,
    )


failures = st.none() | st.builds(Failure, kind=st.sampled_from(FailureKind), message=st.just(""))
statuses = st.builds(SourceStatus, source=st.just("s"), period_s=number, up=st.booleans(), failure=failures)
snapshots = st.builds(
    Snapshot,
    gpus=st.dictionaries(st.sampled_from(["nvml", "dcgm", "odd"]), _sample(hosts), max_size=2),
    servers=st.dictionaries(st.sampled_from(["chat", "ghost"]), _sample(states), max_size=2),
    agents=st.dictionaries(st.sampled_from(["agent/chat/0/0", "odd"]), _sample(agents), max_size=2),
    sources=st.dictionaries(st.sampled_from(["server/chat", "server/ghost"]), statuses, max_size=2),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(snapshots, st.floats(0, 100)), min_size=1, max_size=5))
def test_derive_never_raises_and_is_deterministic(ticks: list[tuple[Snapshot, float]]) -> None:
    """Whatever the samples hold, there is an answer, and the same one twice."""
    first, again = SignalState.initial(), SignalState.initial()
    for snapshot, now_s in ticks:
        first, one = derive(first, snapshot, config(CHAT), PATTERNS, clock(now_s))
        again, other = derive(again, snapshot, config(CHAT), PATTERNS, clock(now_s))

        assert repr(one) == repr(other)
        assert one.servers[0].server == "chat"
        for shown in one.gpus:
            assert shown.headroom_bytes is None or shown.headroom_bytes >= 0


def _world(second: int) -> Snapshot:
    now_s = 1000.0 + second
    return Snapshot(
        servers={
            "chat": page(
                now_s, engine(second / 100, preemptions=second, prompt=second * 50, generation=second)
            )
        },
        gpus=host(now_s, gpu(now_s, 60 * GIB + second, [process(1, 60 * GIB)])),
        sources={"server/chat": status()},
    )


def test_repeated_and_older_samples_change_nothing() -> None:
    """Ticks that repeat the newest samples, or bring older ones, leave the signals as they are."""
    plain, noisy = Run(), Run()
    for second in range(40):
        now_s = 1000.0 + second
        expected = plain.tick(_world(second), now_s)
        assert noisy.tick(_world(second), now_s) == expected
        assert noisy.tick(_world(second), now_s) == expected
        assert noisy.tick(_world(max(0, second - 5)), now_s) == expected


def test_tick_without_news_carries_everything_over() -> None:
    """Nothing new: the very same signals come back."""
    run = Run()
    for second in range(5):
        before = run.tick(_world(second), 1000.0 + second)
    after = run.tick(_world(4), 1004.5)

    assert after is before


def test_wall_clock_steps_change_nothing() -> None:
    """With the wall clock jumping by years, the signals are those of a steady clock."""
    steady, jumping = Run(), Run()
    for second in range(70):
        now_s = 1000.0 + second
        expected = steady.tick(_world(second), now_s)

        assert jumping.tick(_world(second), now_s, wall_s=(-1) ** second * 1e9) == expected


def test_empty_snapshot_knows_nothing() -> None:
    """Before the first sample every configured server is listed as unknown, and no GPU is invented."""
    signals = Run().tick(Snapshot(), 0.0)

    assert signals.gpus == ()
    assert [(one.server, one.up, one.engines) for one in signals.servers] == [("chat", None, ())]


def test_a_server_that_is_not_configured_is_still_shown() -> None:
    """A sample of an unknown name gets signals of its own; removing it removes them."""
    run = Run()
    run.tick(Snapshot(servers={"ghost": page(1000.0, engine(0.5), server="ghost")}), 1000.0)
    assert [one.server for one in run.signals.servers] == ["chat", "ghost"]
    run.tick(Snapshot(), 1001.0)

    assert [one.server for one in run.signals.servers] == ["chat"]


def test_reload_with_another_server_attributes_anew() -> None:
    """After a reload the same pass is attributed to the servers of the new configuration."""
    run = Run()
    world = Snapshot(gpus=host(1000.0, gpu(1000.0, GIB, [process(1, GIB)])))
    run.tick(world, 1000.0)
    assert run.signals.gpus[0].servers == ("chat",)
    run.settings = config(ServerSettings(name="other", kind="vllm"))
    run.tick(world, 1000.1)

    assert run.signals.gpus[0].servers == ("other",)
    assert [one.server for one in run.signals.servers] == ["other"]


def test_current_source_wins_over_a_stale_better_one() -> None:
    """NVML comes first while it is current; when it goes stale, DCGM's reading of the same GPU counts."""
    both = host(1000.0, gpu(1000.0, 10 * GIB))
    both["dcgm"] = replace(host(1000.0, gpu(1000.0, 20 * GIB))["nvml"], source="dcgm")
    run = Run()
    run.tick(Snapshot(gpus=both), 1000.0)
    assert run.signals.gpus[0].headroom_bytes == 80 * GIB - 10 * GIB - GIB // 2
    later = {**both, "dcgm": replace(host(1005.0, gpu(1005.0, 20 * GIB))["nvml"], source="dcgm")}
    run.tick(Snapshot(gpus=later), 1005.0)

    assert run.signals.gpus[0].headroom_bytes == 80 * GIB - 20 * GIB - GIB // 2


def test_freshness_limits() -> None:
    """A GPU sample is current for 2.5 s (a stuck or paused source's never), a server's for three periods."""
    one, slow = host(100.0)["nvml"], replace(CHAT, period_s=5.0)
    good = page(100.0)

    assert (gpu_fresh(one, clock(102.5)), gpu_fresh(one, clock(102.6)), gpu_fresh(None, clock(0))) == (
        True,
        False,
        False,
    )
    told = status("nvml")
    assert gpu_fresh(one, clock(100.0), told)
    assert not gpu_fresh(one, clock(100.0), replace(told, stuck=True))
    assert not gpu_fresh(one, clock(100.0), replace(told, paused=True))
    assert (server_fresh(good, CHAT, clock(103.0)), server_fresh(good, CHAT, clock(103.1))) == (True, False)
    assert (server_fresh(good, slow, clock(115.0)), server_fresh(good, slow, clock(115.1))) == (True, False)
    assert server_fresh(replace(good, value=None), CHAT, clock(100.0)) is False


def test_state_does_not_grow() -> None:
    """Ten minutes and one hour of ticks leave a state of the same size."""
    run, sizes = Run(), []
    for second in range(3600):
        run.tick(_world(second), 1000.0 + second)
        if second in (600, 3599):
            sizes.append(len(repr(run.state.servers)) // 1000)

    assert sizes[1] <= sizes[0] * 1.2
    assert isinstance(run.signals, Signals)
