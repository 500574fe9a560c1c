"""What does a simulated vLLM engine count? Its counters and histograms, with vLLM's own buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

# Bucket bounds of vLLM 0.32 as its pages show them (seconds, tokens or counts).
REQUEST_LATENCY_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0,
    30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_LATENCY_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
ITERATION_TOKENS = (1.0, 8.0, *(float(2**n) for n in range(4, 15)))
PARAMS_N = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
HTTP_DURATION_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0,
    2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
)  # fmt: skip


def length_buckets(max_model_len: int) -> tuple[float, ...]:
    """Bounds 1, 2, 5, 10, … up to the longest sequence, in tokens."""
    bounds = (float(step * 10**power) for power in range(8) for step in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= max_model_len)


class Tally:
    """A histogram that is still being filled."""

    __slots__ = ("bounds", "count", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count one value, or the same value several times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.count += times
        self.sum += value * times

    def cumulative(self) -> list[int]:
        """Counts at or under each bound, and all of them last (`+Inf`)."""
        return list(accumulate(self.counts))


@dataclass(slots=True, kw_only=True)
class Stats:
    """Everything one engine has counted since its start.

    `recomputed_tokens_total` and `recompute_s` (the step time spent on them) are the truth
    that a real server does not tell; only evaluations may read them.
    """

    lengths: tuple[float, ...]
    steps_total: int = 0
    busy_s: float = 0.0
    computed_tokens_total: int = 0
    preemptions_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    recomputed_tokens_total: int = 0
    recompute_s: float = 0.0
    finished_total: int = 0
    aborted_total: int = 0
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
    ttft: Tally = field(default_factory=lambda: Tally(TTFT_S))
    itl: Tally = field(default_factory=lambda: Tally(TOKEN_LATENCY_S))
    tpot: Tally = field(default_factory=lambda: Tally(TOKEN_LATENCY_S))
    e2e: Tally = field(default_factory=lambda: Tally(REQUEST_LATENCY_S))
    queue: Tally = field(default_factory=lambda: Tally(REQUEST_LATENCY_S))
    inference: Tally = field(default_factory=lambda: Tally(REQUEST_LATENCY_S))
    prefill: Tally = field(default_factory=lambda: Tally(REQUEST_LATENCY_S))
    decode: Tally = field(default_factory=lambda: Tally(REQUEST_LATENCY_S))
    iteration_tokens: Tally = field(default_factory=lambda: Tally(ITERATION_TOKENS))
    preemptions: Tally = field(default_factory=lambda: Tally(PREEMPTIONS))
    http_duration: Tally = field(default_factory=lambda: Tally(HTTP_DURATION_S))
    prompt_length: Tally = field(init=False)
    generation_length: Tally = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_length = Tally(self.lengths)
        self.generation_length = Tally(self.lengths)
