"""The simulator reproduces a recorded run of a real vLLM under KV pressure."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from statistics import fmean

import pytest

from kvwatch.lab.sim_load import Arrival
from kvwatch.lab.vllm_sim import RTX_4090_8B, Request, SimConfig, VllmSim

TRACES = Path(__file__).parents[3] / "shared" / "traces"
RUN = "vllm_run_rtx4090_llama-3_1-8b"


def rows(kind: str) -> list[dict[str, float]]:
    with gzip.open(TRACES / f"{RUN}_{kind}.csv.gz", "rt") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@pytest.mark.needs("shared/traces")
def test_a_recorded_run_is_reproduced() -> None:
    """Llama-3.1-8B on an RTX 4090: means within 5 %, p99 within 10 %, KV usage within 4 points."""
    real, series = rows("requests"), rows("timeseries")
    load = [
        Arrival(each["arrival_s"], int(each["prompt_tokens"]), int(each["output_tokens"])) for each in real
    ]
    config = SimConfig(num_blocks=2588, max_model_len=32768, step_time=RTX_4090_8B, prefix_caching=True)
    sim, done = VllmSim(config, load), dict[int, Request]()
    sim.on_finish = lambda request, _now: done.__setitem__(request.id, request)
    usage = []
    for tick in series:
        sim.advance(tick["t"])
        usage.append(100 * sim.usage_ratio)
    sim.run_to_end(400.0)

    assert len(done) == 300
    ttft = [done[n].first_token_s - done[n].arrival_s for n in range(300)]
    tpot = [(done[n].last_token_s - done[n].first_token_s) / max(1, done[n].output - 1) for n in range(300)]
    real_ttft = [each["first_token_s"] - each["arrival_s"] for each in real]
    real_tpot = [
        (each["last_token_s"] - each["first_token_s"]) / max(1, each["output_tokens"] - 1) for each in real
    ]
    assert fmean(ttft) == pytest.approx(fmean(real_ttft), rel=0.05)
    assert fmean(tpot) == pytest.approx(fmean(real_tpot), rel=0.05)
    assert percentile(ttft, 0.99) == pytest.approx(percentile(real_ttft, 0.99), rel=0.10)
    assert percentile(tpot, 0.99) == pytest.approx(percentile(real_tpot, 0.99), rel=0.10)
    end_s = max(request.last_token_s for request in done.values())
    assert end_s == pytest.approx(max(each["last_token_s"] for each in real), rel=0.05)
    assert fmean(abs(got - tick["kv_cache_pct"]) for got, tick in zip(usage, series, strict=True)) <= 4.0
