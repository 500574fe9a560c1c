"""What an inference server reports, in one vocabulary. `None` is "not reported", never zero."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Evictable(enum.StrEnum):
    """How cached but evictable blocks are counted in "usage"."""

    FREE = "free"
    USED = "used"
    UNKNOWN = "unknown"


class Basis(enum.StrEnum):
    """What "usage" measures: blocks in use, worst-case reservations, or slots."""

    OCCUPANCY = "occupancy"
    RESERVATION = "reservation"
    SLOTS = "slots"


class Activity(enum.StrEnum):
    """Whether the engine can make progress at all, as far as the server tells."""

    SERVING = "serving"
    SLEEPING = "sleeping"
    PAUSED = "paused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Semantics:
    """What an adapter's figures mean.

    `fresh_within_s` is how old a gauge may be although the page is new (0: as of the last
    engine step); `destructive` says that reading it takes data from another reader.
    """

    evictable: Evictable = Evictable.UNKNOWN
    basis: Basis = Basis.OCCUPANCY
    fresh_within_s: float = 0.0
    destructive: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheState:
    """KV-cache fill of one engine. Blocks are disjoint: used + free + evictable = num_blocks."""

    usage_ratio: float | None = None  # 0..1 in the server's own meaning (see Semantics)
    num_blocks: int | None = None  # allocatable blocks (vLLM's null block excluded)
    used_blocks: int | None = None
    free_blocks: int | None = None
    evictable_blocks: int | None = None
    block_size_tokens: int | None = None
    capacity_tokens: int | None = None
    pool_bytes: int | None = None  # device bytes of the KV pool on each GPU of the engine
    weights_bytes: int | None = None  # where the server tells (SGLang), per GPU
    tokens: int | None = None  # tokens held, where exact


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """Queue and counters of one engine. Counters end in `_total`; a drop means a restart."""

    running: int | None = None
    waiting: int | None = None
    max_running: int | None = None  # the server's own limit where it tells
    preemptions_total: int | None = None
    recomputed_tokens_total: int | None = None  # where the server counts them itself
    prompt_tokens_total: int | None = None
    cached_prompt_tokens_total: int | None = None
    generation_tokens_total: int | None = None
    steps_total: int | None = None  # engine iterations, where counted
    finished_total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """A cumulative histogram: `bounds` are the finite upper bounds (ascending, seconds or tokens),
    `counts` the cumulative counts at each bound, `count` all observations, `sum` their sum."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    count: float
    sum: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """One engine (data-parallel rank) of a server; `engine` is its rank as text, "0" where there is one."""

    engine: str = "0"
    kv: KvCacheState = KvCacheState()
    scheduler: SchedulerState = SchedulerState()
    ttft: Histogram | None = None
    tpot: Histogram | None = None
    queue: Histogram | None = None
    prompt_length: Histogram | None = None  # of finished requests, tokens
    generation_length: Histogram | None = None
    activity: Activity = Activity.UNKNOWN
    started_wall_s: float | None = None  # Unix seconds where the page tells (process start)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """One reading of one server."""

    kind: str
    semantics: Semantics
    engines: tuple[EngineState, ...] = ()
    version: str = ""
    model: str = ""
    notes: tuple[str, ...] = ()  # what is unknown here, and why, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaState:
    """One arena of PyTorch's allocator: blocks merge inside a segment only, and a segment serves one arena.

    `name` is "<kind>/<stream>" of the default pool or "<kind>/<stream>/<pool>" of a private one.
    """

    name: str
    private: bool = False  # a pool of its own (CUDA graphs): of no use to other allocations
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    active_bytes: int = 0
    requested_bytes: int = 0
    largest_free_bytes: int = 0
    free_bytes: int = 0  # in inactive blocks
    releasable_bytes: int = 0  # whole free segments (pages, where segments expand)

    @property
    def fragmentation_total_ratio(self) -> float | None:
        """1 - largest free block over all free; None where nothing is free. Alone it misleads."""
        return None if self.free_bytes <= 0 else 1.0 - self.largest_free_bytes / self.free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorState:
    """PyTorch allocator figures from an agent, under PyTorch's names (bytes)."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    active_bytes: int | None = None
    requested_bytes: int | None = None
    inactive_bytes: int | None = None  # inactive_split; None with expandable segments, which it leaves out
    largest_free_bytes: int | None = None
    largest_allocatable_bytes: int | None = None
    releasable_bytes: int | None = None
    private_bytes: int | None = None  # reserved by private pools (CUDA graphs)
    fragmentation_soft_ratio: float | None = None
    fragmentation_hard_ratio: float | None = None
    fragmentation_total_ratio: float | None = None
    num_alloc_retries: int | None = None
    num_ooms: int | None = None
    weights_bytes: int | None = None  # of the model on this GPU, where the engine tells its agent
    compactions_total: int | None = None  # times the agent had the cache returned
    compact_seconds_total: float | None = None  # what that cost the server
    snapshot_age_s: float | None = None  # of the block-level figures
    arenas: tuple[ArenaState, ...] = ()  # the largest few


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """One agent datagram: one rank of one engine, from inside the server."""

    server: str
    engine: str
    rank: int
    pid: int
    seq: int
    gpu_uuid: str = ""
    allocator: AllocatorState | None = None
    kv: KvCacheState | None = None
    scheduler: SchedulerState | None = None
    effective_max_running: int | None = None
    blocks_held: int | None = None  # blocks that hold `kv.tokens` tokens (for exact page waste)
    host: str = ""  # what the agent runs in: "vllm 0.32.0"
    limits: str = ""  # whether it obeys leases: "obeyed", or why it refuses; "" where it has no scheduler
