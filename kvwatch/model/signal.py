"""Derived quantities: what the samples mean. `None` is "unknown", never zero."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Phase(enum.StrEnum):
    """Where a server or a GPU is in its life; device rules hold only in STEADY."""

    STARTING = "starting"
    STEADY = "steady"
    MAINTENANCE = "maintenance"
    DOWN = "down"
    UNKNOWN = "unknown"


class ForecastState(enum.StrEnum):
    """What the forecast can say at all."""

    UNKNOWN = "unknown"  # stale, too few points, a reset or a gap in the window
    STABLE = "stable"  # not filling
    RISING = "rising"
    IMMINENT = "imminent"  # the low bound is under a minute
    SATURATED = "saturated"  # already full: the tax matters now, not a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Time to exhaustion in seconds; `inf` when not filling, None when unknown.

    `floor_s` is the deterministic minimum at the highest rate seen; `low_s` and `high_s` bound
    `central_s` (Theil-Sen slope and its order-statistic interval). `coverage_ratio` is how
    often past intervals held, None until enough forecasts have come due.
    """

    state: ForecastState = ForecastState.UNKNOWN
    floor_s: float | None = None
    low_s: float | None = None
    central_s: float | None = None
    high_s: float | None = None
    slope_per_s: float | None = None
    coverage_ratio: float | None = None
    coverage_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerPart:
    """One part of a GPU's memory; parts of one GPU add up to its total."""

    part: str  # one of signals.ledger.PARTS
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds memory on a GPU, for people: attributed server ("" if none) and role."""

    pid: int
    used_bytes: int | None
    server: str
    name: str
    command: str
    cgroup: str
    dead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Quantiles over a window in seconds, from histogram deltas: (quantile, value) pairs.

    `count` observations fell into the window; a value in the histogram's last open bucket
    is reported as its lower bound and flagged by `beyond`.
    """

    values: tuple[tuple[float, float], ...]
    count: float
    window_s: float
    beyond: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """Page-tail waste as a share of the slots in use, with bounds and how it was had."""

    ratio: float
    low: float
    high: float
    method: str  # exact or estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSignals:
    """Derived per GPU. `headroom_bytes` = free + what the allocator could return (if an agent tells).

    `headroom_low_bytes` is its low over the peak window. `headroom_falling` compares the last
    30 s with the 30 s before; `below_learned_floor` compares with the lowest headroom this
    server has lived with while steady. `last_step_change_s` is the monotonic time of the last
    step (a process that came or went, or CUSUM), after which no exhaustion forecast pages for
    ten minutes. `phase` is that of the server(s) on this GPU.
    """

    uuid: str
    index: int
    phase: Phase = Phase.UNKNOWN
    phase_detail: str = ""
    ledger: tuple[LedgerPart, ...] | None = None
    ledger_clamped: bool = False
    holders: tuple[Holder, ...] | None = None
    unattributed_bytes: int | None = None
    dead_process_bytes: int | None = None
    headroom_bytes: int | None = None
    headroom_low_bytes: int | None = None
    headroom_falling: bool | None = None
    below_learned_floor: bool | None = None
    last_step_change_s: float | None = None
    device_forecast: Forecast = Forecast()
    servers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSignals:
    """Derived per engine. Ratios and tokens over 60 s; None until two good samples.

    `stalled_for_s` counts since a token counter last moved while requests were running or
    waiting (None: not stalled or not known). `demand_ratio` = used + waiting prompts, as a share
    of the pool.
    """

    server: str
    engine: str
    samples: int = 0  # good samples since start, restart or counter reset
    kv_usage_ratio: float | None = None
    running: int | None = None
    waiting: int | None = None
    waiting_rising: bool | None = None
    preemptions_per_s: float | None = None
    recompute_tax_ratio: float | None = None  # share of engine time (estimate)
    recomputed_tokens_ratio: float | None = None  # share of computed tokens (estimate)
    prompt_tokens_per_s: float | None = None
    generation_tokens_per_s: float | None = None
    ttft: Quantiles | None = None
    tpot: Quantiles | None = None
    queue: Quantiles | None = None
    waste: Waste | None = None
    demand_ratio: float | None = None
    kv_forecast: Forecast = Forecast()
    stalled: bool | None = None
    stalled_for_s: float | None = None
    restarts_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSignals:
    """Derived per server: its engines, its life phase, and the GPUs it holds memory on."""

    server: str
    phase: Phase = Phase.UNKNOWN
    phase_detail: str = ""
    up: bool | None = None
    down_for_s: float | None = None
    engines: tuple[EngineSignals, ...] = ()
    gpu_uuids: tuple[str, ...] = ()
    memory_held_while_down_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """Everything derived in one tick."""

    gpus: tuple[GpuSignals, ...] = ()
    servers: tuple[ServerSignals, ...] = ()
