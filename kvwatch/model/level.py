"""Levels, rules and scopes: the vocabulary of every verdict."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.IntEnum):
    """How bad a rule's value is. UNKNOWN is a level of its own, never shown as green."""

    UNKNOWN = -1
    GREEN = 0
    YELLOW = 1
    RED = 2


class RuleId(enum.StrEnum):
    """Every rule kvwatch ships (names are part of the public contract)."""

    KV_USAGE = "kv_usage"
    RECOMPUTE_TAX = "recompute_tax"
    LATENCY_SLO = "latency_slo"
    DEVICE_HEADROOM = "device_headroom"
    DEVICE_EXHAUSTION = "device_exhaustion"
    ALLOC_RETRIES = "alloc_retries"
    LARGEST_ALLOCATABLE = "largest_allocatable"
    ALLOCATOR_FRAGMENTATION = "allocator_fragmentation"
    KV_BLOCK_WASTE = "kv_block_waste"
    DEAD_PROCESS_MEMORY = "dead_process_memory"
    SERVER_STALLED = "server_stalled"
    SERVER_DOWN = "server_down"
    GPU_LOST = "gpu_lost"
    GPU_MISSING = "gpu_missing"
    GPU_XID = "gpu_xid"
    SOURCE_STALE = "source_stale"


class Reason(enum.StrEnum):
    """Why a verdict stands where it does; an enum, so that nothing parses prose."""

    BELOW = "below"  # the value is under every threshold
    CROSSED = "crossed"  # the value reached the threshold of its level
    CAPPED = "capped"  # the value is over a threshold whose other conditions do not hold
    HOLDING = "holding"  # the value has recovered; `hold` has not passed yet
    PENDING = "pending"  # the value crossed; `for` has not passed yet
    STALE_HELD = "stale_held"  # the input is stale; the last level is held for now
    STALE = "stale"  # the input is stale: unknown (or what `on_stale` says)
    NOT_REPORTED = "not_reported"  # nothing reports this value
    TOO_FEW = "too_few"  # fewer samples or observations than the rule needs
    STARTING = "starting"  # the server is starting: no device rule yet
    MAINTENANCE = "maintenance"  # the GPU is in maintenance
    DISABLED = "disabled"  # switched off in the configuration


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Scope:
    """What a verdict is about: a server's engine, a GPU, or (all empty) this host.

    `source` is set only for rules about a source of data; it never becomes a metric label.
    """

    server: str = ""
    engine: str = ""
    uuid: str = ""
    gpu: str = ""  # host index as text
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One rule's level in one scope.

    `value` and the thresholds are in the rule's own unit (see `rules.shipped`); `since_s` is
    monotonic seconds, `since_wall_s` Unix seconds of the last level change. `seconds_before`
    holds the seconds at unknown, green, yellow and red up to `since_s`: nothing is added up tick by tick.
    """

    rule: RuleId
    scope: Scope
    level: Level
    since_s: float
    since_wall_s: float
    value: float | None = None
    yellow: float | None = None
    red: float | None = None
    reason: Reason = Reason.BELOW
    pages: bool = False  # red of this rule pages, so it counts for the headline colour
    detail: str = ""  # the facts behind it in one short sentence, for people
    seconds_before: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def seconds_at(self, now_s: float) -> tuple[float, ...]:
        """Seconds at unknown, green, yellow and red since the scope appeared, up to this monotonic time."""
        place = self.level + 1
        running_s = max(0.0, now_s - self.since_s)
        return tuple(
            spent + running_s if place == at else spent for at, spent in enumerate(self.seconds_before)
        )
