"""The simulated page is a vLLM page: the standard parser and our adapter read what the engine holds."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvwatch.lab.sim_load import poisson, uniform
from kvwatch.lab.vllm_page import PageInfo, render
from kvwatch.lab.vllm_sim import SimConfig, VllmSim
from kvwatch.model.settings import ServerSettings
from kvwatch.sources.servers import vllm

REAL = Path(__file__).parents[3] / "shared" / "fixtures" / "servers" / "vllm-0.32.0-cpu" / "preempting.prom"
INFO = PageInfo(model="m", created_wall_s=1.79e9, kv_cache_memory_bytes=1 << 30)


def busy() -> VllmSim:
    """An engine that has preempted, with requests waiting."""
    config = SimConfig(num_blocks=401, max_model_len=2048)
    sim = VllmSim(config, poisson(Random(3), lambda _t: 40.0, 40.0, uniform((50, 200), (50, 300))))
    while sim.stats.preemptions_total < 5 or not sim.gauges.waiting or not sim.stats.finished_total:
        sim.advance(sim.clock_s + 0.5)
    return sim


def series(page: str, pattern: str) -> set[str]:
    return set(re.findall(pattern, page, re.MULTILINE))


def test_the_standard_parser_reads_every_family_and_its_histograms_are_sound() -> None:
    """Buckets are cumulative, the open bucket equals the count, and no family is there twice."""
    families = list(text_string_to_metric_families(render(busy(), INFO)))
    names = [family.name for family in families]
    assert len(names) == len(set(names)) > 75
    histograms = [family for family in families if family.type == "histogram"]
    assert len(histograms) == 17
    for family in histograms:
        buckets = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
        (count,) = [sample.value for sample in family.samples if sample.name.endswith("_count")]
        assert buckets == sorted(buckets)
        assert buckets[-1] == count


def test_our_adapter_reads_the_simulator_s_state_from_its_page() -> None:
    """Usage, queue, counters, capacity and histograms arrive as they are in the engine."""
    sim = busy()
    state = vllm.parse({"metrics": render(sim, INFO).encode()}, ServerSettings(name="chat", kind="vllm"))
    (engine,) = state.engines
    kv, scheduler, stats = engine.kv, engine.scheduler, sim.stats
    assert (kv.usage_ratio, kv.used_blocks) == (sim.usage_ratio, sim.gauges.used_blocks)
    assert (kv.num_blocks, kv.block_size_tokens, kv.capacity_tokens) == (400, 16, 6400)
    assert kv.pool_bytes == INFO.kv_cache_memory_bytes
    assert (scheduler.running, scheduler.waiting) == (sim.gauges.running, sim.gauges.waiting)
    assert scheduler.preemptions_total == stats.preemptions_total
    assert scheduler.prompt_tokens_total == stats.prompt_tokens_total
    assert scheduler.generation_tokens_total == stats.generation_tokens_total
    assert scheduler.steps_total == stats.steps_total
    assert scheduler.finished_total == stats.finished_total
    for histogram, tally in (
        (engine.ttft, stats.ttft),
        (engine.tpot, stats.itl),
        (engine.queue, stats.queue),
    ):
        assert histogram is not None
        assert histogram.bounds == tally.bounds
        assert list(histogram.counts) == tally.cumulative()[:-1]
        assert (histogram.count, histogram.sum) == (tally.count, pytest.approx(tally.sum))
    assert state.notes == ()


@pytest.mark.needs("shared/fixtures/servers")
def test_the_page_has_every_vllm_series_of_a_real_one_and_the_same_types() -> None:
    """Names, types and label names of all `vllm:` series are those of a recorded 0.32 page."""
    real, ours = REAL.read_text(), render(busy(), INFO)
    assert series(ours, r"^# TYPE (vllm:\S+ \w+)") == series(real, r"^# TYPE (vllm:\S+ \w+)")

    def labels(page: str) -> dict[str, set[str]]:
        return {
            sample.name: set(sample.labels)
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name.startswith("vllm:") and sample.name != "vllm:cache_config_info"
        }

    assert labels(ours) == labels(real)
    assert 0.8 < len(ours) / len(real) < 1.2
