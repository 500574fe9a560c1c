"""Is a sample still current? The one place that says how old each kind of sample may be."""

from __future__ import annotations

from kvwatch.model.gpu import HostGpus
from kvwatch.model.report import TickClock
from kvwatch.model.sample import Sample, SourceStatus
from kvwatch.model.server import AgentState, ServerState
from kvwatch.model.settings import ServerSettings

GPU_MAX_AGE_S = 2.5
"""NVML's worker sends once a second at the least; a slower source is given as many of its own periods."""

PERIODS = 3.0
"""Periods without a good sample after which a source is stale (rule `source_stale`)."""

LEAST_S = 3.0
"""No polled source is called stale before this, however short its period."""


def gpu_fresh(sample: Sample[HostGpus] | None, clock: TickClock, status: SourceStatus | None = None) -> bool:
    """Whether a GPU sample is current: at most 2.5 of its periods old, its source not stuck nor paused."""
    if sample is None or sample.value is None or (status is not None and (status.stuck or status.paused)):
        return False
    period_s = 1.0 if status is None else status.period_s
    return sample.age_s(clock.mono_s) <= GPU_MAX_AGE_S * max(1.0, period_s)


def server_limit_s(settings: ServerSettings) -> float:
    """How old a server's sample may be: three of its periods, at least 3 s."""
    return max(PERIODS * settings.period_s, LEAST_S)


def server_fresh(sample: Sample[ServerState] | None, settings: ServerSettings, clock: TickClock) -> bool:
    """Whether a server's sample is current: it has a value and is at most three periods (3 s) old."""
    if sample is None or sample.value is None:
        return False
    return sample.age_s(clock.mono_s) <= server_limit_s(settings)


def agent_fresh(sample: Sample[AgentState], status: SourceStatus | None, clock: TickClock) -> bool:
    """Whether an agent's datagram is current, by the period its source status expects (1 s without one)."""
    period_s = 1.0 if status is None else status.period_s
    return sample.value is not None and sample.age_s(clock.mono_s) <= max(PERIODS * period_s, LEAST_S)
