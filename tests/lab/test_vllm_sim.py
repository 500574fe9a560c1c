"""The simulator keeps vLLM's books: blocks, tokens, order, determinism."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch.lab.sim_load import Arrival, poisson, uniform
from kvwatch.lab.vllm_sim import BlockPool, SimConfig, Step, StepTime, VllmSim

TIME = StepTime(base_s=0.01, per_token_s=1e-4, per_kv_token_s=1e-7)


def config(**changes: object) -> SimConfig:
    values: dict[str, object] = {
        "num_blocks": 41,
        "block_size": 8,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "step_time": TIME,
    }
    return SimConfig(**(values | changes))


arrivals = st.lists(
    st.builds(Arrival, st.floats(0, 5), st.integers(1, 150), st.integers(1, 100)), min_size=1, max_size=30
).map(lambda found: sorted(found, key=lambda arrival: arrival.at_s))
configs = st.builds(
    lambda seqs, batch, gate, watermark, caching: config(
        max_num_seqs=seqs,
        max_num_batched_tokens=batch,
        reserve_full_isl=gate,
        watermark=watermark,
        prefix_caching=caching,
    ),
    st.integers(1, 16),
    st.integers(1, 200),
    st.booleans(),
    st.sampled_from([0.0, 0.05]),
    st.booleans(),
)


def most_running(sim: VllmSim, until_s: float) -> int:
    """The most requests that ran at once, looked at every 5 ms (no step is shorter than 10)."""
    most = 0
    while sim.clock_s < until_s:
        sim.advance(sim.clock_s + 0.005)
        most = max(most, len(sim.running))
    return most


def held(sim: VllmSim) -> int:
    return sum(request.blocks for request in (*sim.running, *sim.waiting))


@settings(max_examples=60, deadline=None)
@given(configs, arrivals)
def test_every_request_ends_and_every_token_is_counted_once(cfg: SimConfig, load: list[Arrival]) -> None:
    """At the end the counters equal what was asked for, however often requests were preempted."""
    sim = VllmSim(cfg, load)
    sim.run_to_end(1e5)
    stats = sim.stats
    assert stats.finished_total == len(load)
    assert stats.prompt_tokens_total == sum(each.prompt_tokens for each in load) == stats.prompt_length.sum
    assert stats.generation_tokens_total == sum(each.output_tokens for each in load)
    assert stats.generation_length.sum == stats.generation_tokens_total
    assert stats.ttft.count + stats.itl.count == stats.generation_tokens_total
    assert stats.iteration_tokens.sum == stats.prompt_tokens_total + stats.generation_tokens_total
    assert stats.preemptions.sum == stats.preemptions_total
    needed = stats.prompt_tokens_total + stats.generation_tokens_total - len(load)  # the last is not computed
    assert stats.computed_tokens_total == needed + stats.recomputed_tokens_total


@settings(max_examples=60, deadline=None)
@given(configs, arrivals, st.integers(0, 2**32))
def test_blocks_never_leak_and_usage_excludes_the_null_block(
    cfg: SimConfig, load: list[Arrival], seed: int
) -> None:
    """After any step and any abort: free + held = allocatable, and usage = used / (num_blocks - 1)."""
    sim, rng, now = VllmSim(cfg, load), Random(seed), 0.0
    while sim.stats.finished_total + sim.stats.aborted_total < len(load):
        now += rng.uniform(0.0, 0.2)
        sim.advance(now)
        assert sim.pool.free + held(sim) == cfg.num_blocks - 1
        assert 0 <= sim.pool.free <= cfg.num_blocks - 1
        assert sim.usage_ratio == sim.gauges.used_blocks / (cfg.num_blocks - 1)
        if rng.random() < 0.1:
            sim.abort(lambda request: request.id % 3 == 0)
            assert sim.pool.free + held(sim) == cfg.num_blocks - 1
    sim.advance(now + 1e4)
    assert sim.usage_ratio == 0
    assert sim.pool.free == cfg.num_blocks - 1


class Watched(VllmSim):
    """Checks every step's schedule against the state it was made from."""

    def _schedule(self, step: Step) -> None:
        running, waiting = [each.id for each in self.running], [each.id for each in self.waiting]
        assert waiting == sorted(waiting)
        super()._schedule(step)
        admitted, victims = [each.id for each in step.admitted], [each.id for each in step.preempted]
        assert not (admitted and victims)
        assert victims == running[::-1][: len(victims)]
        assert [each.id for each in self.waiting][: len(victims)] == victims[::-1]
        assert admitted == waiting[: len(admitted)]
        assert [each.id for each in self.running] == running[: len(running) - len(victims)] + admitted
        assert 0 < step.tokens <= self.config.max_num_batched_tokens
        assert len(self.running) <= self.config.max_num_seqs
        assert all(
            each.blocks * self.config.block_size >= each.computed + new for each, new in step.scheduled
        )


@settings(max_examples=60, deadline=None)
@given(configs, arrivals)
def test_a_step_obeys_the_scheduler_s_rules(cfg: SimConfig, load: list[Arrival]) -> None:
    """Token budget, seats, the youngest as victim, first come first served, no admission beside it."""
    sim = Watched(cfg, load)
    sim.run_to_end(1e5)
    assert sim.stats.finished_total == len(load)


@settings(max_examples=40, deadline=None)
@given(configs, arrivals, st.lists(st.floats(0, 30), max_size=20))
def test_the_run_does_not_depend_on_when_it_is_looked_at(
    cfg: SimConfig, load: list[Arrival], looks: list[float]
) -> None:
    """Advancing in many small strides or in one gives the same engine."""
    often, once = VllmSim(cfg, load), VllmSim(cfg, load)
    for look in sorted(looks):
        often.advance(look)
    often.advance(40.0)
    once.advance(40.0)
    assert often.gauges == once.gauges
    assert [request.id for request in often.running] == [request.id for request in once.running]
    for name in (
        "steps_total",
        "busy_s",
        "preemptions_total",
        "generation_tokens_total",
        "recomputed_tokens_total",
    ):
        assert getattr(often.stats, name) == getattr(once.stats, name)
    assert often.stats.ttft.counts == once.stats.ttft.counts


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    """All chance comes from the generator that is passed in."""

    def run(seed: int) -> tuple[int, float]:
        sim = VllmSim(config(), poisson(Random(seed), lambda _t: 8.0, 8.0, uniform((10, 60), (10, 60))))
        sim.advance(20.0)
        return sim.stats.generation_tokens_total, sim.stats.ttft.sum

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_the_victim_is_recomputed_and_comes_first_again() -> None:
    """A preempted request loses its blocks and its computed tokens, not its output, and leads the queue."""
    load = [Arrival(0.0, 100, 100), Arrival(0.0, 100, 100), Arrival(0.0, 100, 10)]
    sim = VllmSim(config(num_blocks=33, max_num_batched_tokens=256), load)
    while sim.stats.preemptions_total == 0:
        sim.advance(sim.clock_s + 0.005)
    victim = sim.waiting[0]
    assert (victim.id, victim.computed, victim.blocks) == (1, 0, 0)
    assert victim.tokens == 100 + victim.output > 100
    assert [request.id for request in sim.waiting] == [1, 2]
    sim.run_to_end(1e4)
    assert sim.stats.recomputed_tokens_total >= 100
    assert sim.stats.finished_total == 3


def test_a_long_prompt_is_prefilled_in_chunks_and_gives_its_first_token_after_the_last() -> None:
    """With 64 tokens a step, 150 prompt tokens take three steps, and the token comes with the third."""
    sim = VllmSim(config(), [Arrival(0.0, 150, 1)])
    sim.run_to_end(10.0)
    assert sim.stats.steps_total == 3
    assert sim.stats.ttft.sum == pytest.approx(
        3 * TIME.base_s + 150 * TIME.per_token_s + (64 + 128 + 150) * 1e-7
    )


def test_the_gate_admits_only_what_fits_whole_and_its_absence_only_what_fits_for_now() -> None:
    """`reserve_full_isl` keeps a prompt out of a pool that has room for one chunk of it only."""
    load = [Arrival(0.0, 200, 50), Arrival(0.1, 130, 1)]
    for gate, running in ((True, 1), (False, 2)):
        assert most_running(VllmSim(config(reserve_full_isl=gate), load), 0.3) == running


def test_the_watermark_keeps_blocks_free_but_starves_nobody() -> None:
    """Beside running requests an admission leaves the watermark free; an idle engine takes any prompt."""
    wide = VllmSim(config(watermark=0.5), [Arrival(0.0, 250, 1)])
    wide.run_to_end(10.0)
    assert wide.stats.finished_total == 1
    load = [Arrival(0.0, 150, 50), Arrival(0.1, 60, 1)]
    for watermark, running in ((0.0, 2), (0.5, 1)):
        assert most_running(VllmSim(config(watermark=watermark), load), 0.3) == running


def test_a_lowered_limit_evicts_nobody_and_gates_admission_only() -> None:
    """Running requests finish; the running count falls to the new limit, and rises after it is lifted."""
    sim = VllmSim(config(num_blocks=101), [Arrival(0.0, 8, 15 + 3 * n) for n in range(14)])
    sim.advance(0.1)
    assert len(sim.running) == 14
    sim.max_num_active_reqs = 4
    for n in range(6):
        sim.submit(Arrival(0.1, 8, 60 + n))
    sim.advance(0.2)
    assert sim.stats.preemptions_total == 0
    assert len(sim.running) > 4
    while len(sim.running) > 4:
        assert len(sim.waiting) == 6
        sim.advance(sim.clock_s + 0.01)
    sim.max_num_active_reqs = 0
    sim.advance(20.0)
    assert (len(sim.running), len(sim.waiting)) == (0, 6 - sim.stats.finished_total + 14)
    sim.max_num_active_reqs = None
    sim.advance(60.0)
    assert sim.stats.finished_total == 20


def test_a_returning_request_finds_what_is_left_of_its_prefix() -> None:
    """With caching less is recomputed, and never more than was computed."""
    load = [Arrival(0.01 * n, 60, 60) for n in range(12)]
    plain, cached = VllmSim(config(), load), VllmSim(config(prefix_caching=True), load)
    for sim in (plain, cached):
        sim.run_to_end(1e3)
        assert sim.stats.preemptions_total > 0
    assert cached.stats.recomputed_tokens_total < plain.stats.recomputed_tokens_total


def test_the_pool_hands_out_the_oldest_free_blocks_and_each_segment_s_tail_first() -> None:
    """What remains of a freed request is its prefix, until the pool has used everything older and it too."""
    pool = BlockPool(10, caching=True)
    pool.take(6)
    pool.give(7, 6)
    pool.take(5)  # four never used, one of request 7
    assert pool.cached(7) == 5
    pool.claim(7, 3)
    assert (pool.free, pool.cached(7)) == (2, 0)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 free"):
        pool.take(3)


def test_an_engine_that_cannot_hold_one_sequence_does_not_start() -> None:
    """As in vLLM, the pool must hold max_model_len tokens; a prompt beyond it is refused."""
    with pytest.raises(ValueError, match="raise num_blocks"):
        config(num_blocks=20)
    with pytest.raises(ValueError, match="does not fit"):
        VllmSim(config()).submit(Arrival(0.0, 256, 1))


def test_a_stall_delays_the_step_in_progress_and_nothing_moves_meanwhile() -> None:
    """While the engine hangs its counters stand still although requests arrive."""
    sim = VllmSim(config(), [Arrival(0.1 * n, 8, 100) for n in range(30)])
    sim.advance(0.5)
    counted, gauges = sim.stats.generation_tokens_total, sim.gauges
    sim.stall(5.0)
    sim.advance(5.4)
    assert (sim.stats.generation_tokens_total, sim.gauges) == (counted, gauges)
    sim.advance(6.0)
    assert sim.stats.generation_tokens_total > counted
    assert sim.gauges.running + sim.gauges.waiting == 30
