"""Usage, demand and page-tail waste."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.model.report import Snapshot
from kvwatch.model.server import (
    AgentState,
    Basis,
    EngineState,
    Evictable,
    Histogram,
    KvCacheState,
    SchedulerState,
    Semantics,
)
from kvwatch.model.settings import GIB
from kvwatch.signals.occupancy import demand_ratio, fill_ratio, usage_ratio
from kvwatch.signals.waste import waste
from tests.signals.build import FREE_EVICTABLE, Run, agent, engine, gpu, host, page, process

USED = Semantics(evictable=Evictable.USED)


@pytest.mark.parametrize(
    ("kv", "semantics", "expected"),
    [
        (KvCacheState(usage_ratio=0.46875), FREE_EVICTABLE, 0.46875),
        (KvCacheState(num_blocks=32, used_blocks=15), FREE_EVICTABLE, 0.46875),
        (KvCacheState(num_blocks=100, used_blocks=20, evictable_blocks=50), USED, 0.7),
        (KvCacheState(num_blocks=100, used_blocks=20, evictable_blocks=50), FREE_EVICTABLE, 0.2),
        (KvCacheState(usage_ratio=1.0000001), FREE_EVICTABLE, 1.0),
        (KvCacheState(usage_ratio=93.0), FREE_EVICTABLE, None),
        (KvCacheState(usage_ratio=-0.1), FREE_EVICTABLE, None),
        (KvCacheState(usage_ratio=float("nan")), FREE_EVICTABLE, None),
        (KvCacheState(num_blocks=0, used_blocks=0), FREE_EVICTABLE, None),
        (KvCacheState(), FREE_EVICTABLE, None),
    ],
)
def test_usage(kv: KvCacheState, semantics: Semantics, expected: float | None) -> None:
    """Usage is the server's own figure, else from blocks in its meaning, else unknown."""
    assert usage_ratio(kv, semantics) == expected


def test_a_warm_cache_that_counts_as_used_is_not_full() -> None:
    """Where cached blocks count as used, only blocks that cannot be evicted fill the pool."""
    told_apart = KvCacheState(usage_ratio=0.95, num_blocks=100, used_blocks=20, evictable_blocks=75)

    assert fill_ratio(told_apart, USED, 0.95) == 0.2
    assert fill_ratio(KvCacheState(usage_ratio=0.95), USED, 0.95) is None


def test_demand_counts_the_queue_at_the_mean_prompt() -> None:
    """Half full, and 10 waiting prompts of 1,000 tokens for a pool of 16,000 slots: demand 1.125."""
    lengths = Histogram(bounds=(1.0,), counts=(0.0,), count=50.0, sum=50_000.0)
    one = engine(0.5, waiting=10, prompt_length=lengths)

    assert demand_ratio(one, 0.5) == 1.125
    assert demand_ratio(engine(0.5, waiting=0), 0.5) == 0.5
    assert demand_ratio(engine(0.5, waiting=10), 0.5) is None


def test_waste_estimate_has_bounds() -> None:
    """10 requests, blocks of 16, half of 16,000 slots used: 75 of 8,000 slots, at most 150."""
    found = waste(engine(0.5), FREE_EVICTABLE, 0.5, [])

    assert found is not None
    assert (found.ratio, found.low, found.high, found.method) == (75 / 8000, 0.0, 150 / 8000, "estimate")


def test_waste_is_exact_where_an_agent_counts_tokens() -> None:
    """100 blocks of 16 hold 1,200 tokens: a quarter of the slots is empty, exactly."""
    inside = AgentState(
        server="chat",
        engine="0",
        rank=0,
        pid=1,
        seq=1,
        kv=KvCacheState(tokens=1200, block_size_tokens=16),
        blocks_held=100,
    )
    run = Run()
    run.tick(Snapshot(servers={"chat": page(1000.0, engine(0.5))}, agents=agent(1000.0, inside)), 1000.0)
    found = run.chat.engines[0].waste

    assert found is not None
    assert (found.ratio, found.low, found.high, found.method) == (0.25, 0.25, 0.25, "exact")


def test_old_agent_does_not_count() -> None:
    """An agent that fell silent is not taken for exact."""
    inside = AgentState(
        server="chat",
        engine="0",
        rank=0,
        pid=1,
        seq=1,
        kv=KvCacheState(tokens=1, block_size_tokens=16),
        blocks_held=9,
    )
    run = Run()
    run.tick(Snapshot(servers={"chat": page(1000.0, engine(0.5))}, agents=agent(990.0, inside)), 1000.0)
    found = run.chat.engines[0].waste

    assert found is not None
    assert found.method == "estimate"


@pytest.mark.parametrize(
    ("one", "semantics"),
    [
        (engine(0.5, running=0), FREE_EVICTABLE),
        (engine(0.0), FREE_EVICTABLE),
        (engine(0.5, block=None), FREE_EVICTABLE),
        (engine(0.5), Semantics(basis=Basis.SLOTS)),
        (engine(0.5), Semantics(basis=Basis.RESERVATION)),
    ],
    ids=["nothing runs", "nothing used", "no block size", "slots", "reservation"],
)
def test_waste_is_unknown_rather_than_guessed(one: EngineState, semantics: Semantics) -> None:
    """Without running requests, used slots, block size or block accounting there is no estimate."""
    assert waste(one, semantics, usage_ratio(one.kv, semantics), []) is None


def test_case_H2_blocks_are_not_tokens() -> None:
    """66.7 % of the blocks are used and 36.5 % of the slots hold tokens: usage and waste say so apart."""
    kv = KvCacheState(
        usage_ratio=0.667, num_blocks=3000, used_blocks=2000, block_size_tokens=16, tokens=17520
    )
    one = EngineState(kv=kv, scheduler=SchedulerState(running=1000, waiting=0))
    shown = Run().page(1000.0, one)

    assert shown.kv_usage_ratio == 0.667
    assert shown.waste is not None
    assert shown.waste.method == "exact"
    assert shown.waste.ratio == pytest.approx(1 - 0.365 / 0.667, abs=0.001)


def test_case_H1_empty_pool_is_not_free_memory() -> None:
    """Usage falls to 0 while the pool stays allocated: headroom does not move, the pool is `kv_free`."""
    run = Run()
    holding = [process(1, 60 * GIB)]
    for second, usage in ((0, 1.0), (1, 0.0)):
        now_s = 1000.0 + second
        run.tick(
            Snapshot(
                servers={"chat": page(now_s, engine(usage, pool_bytes=40 * GIB))},
                gpus=host(now_s, gpu(now_s, 60 * GIB, holding)),
            ),
            now_s,
        )
        shown = run.signals.gpus[0]
        parts = {part.part: part.bytes for part in shown.ledger or ()}

        assert parts["kv_used"] + parts["kv_free"] == 40 * GIB
        assert shown.headroom_bytes == 80 * GIB - 60 * GIB - 512 * 2**20
    assert parts["kv_used"] == 0


@given(
    usage=st.floats(0.01, 1.0),
    running=st.integers(1, 5000),
    block=st.integers(1, 256),
    slots=st.integers(1, 10**6),
)
def test_waste_estimate_is_a_ratio_within_its_bounds(
    usage: float, running: int, block: int, slots: int
) -> None:
    """Whatever the figures: 0 <= low <= ratio <= high <= 1."""
    found = waste(engine(usage, running=running, block=block, slots=slots), FREE_EVICTABLE, usage, [])

    assert found is not None
    assert 0.0 <= found.low <= found.ratio <= found.high <= 1.0


def test_replaced_semantics_do_not_change_the_usage_shown() -> None:
    """What is shown as usage stays the server's own figure, even where cached blocks count as used."""
    shown = Run().page(1000.0, engine(0.95), semantics=replace(FREE_EVICTABLE, evictable=Evictable.USED))

    assert shown.kv_usage_ratio == 0.95
    assert shown.kv_forecast.central_s is None
