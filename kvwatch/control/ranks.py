"""What do the agents inside one server tell of its allocators, and what was asked of them last? Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvwatch.model.level import RuleId
from kvwatch.model.report import Snapshot
from kvwatch.model.server import AgentState

# Datagrams older than three of their periods, or block-level figures older than three snapshots of the
# agent (one every 10 s; it backs off where they are dear), say nothing of what can be returned now.
FRESH_PERIODS = 3
FIGURES_AGE_S = 30.0
OBEYED = "obeyed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank's allocator as of its newest datagram: bytes, and what compactions it has had."""

    key: str
    engine: str
    uuid: str
    pid: int
    reserved_bytes: int
    releasable_bytes: int
    compactions_total: int
    compact_seconds_total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """What control remembers of compactions of one target. Times are monotonic seconds.

    `count` is the lease's counter, 0 before the first request; it never falls. While `asked_s` is set, the
    effect of the last request on the ranks in `before` is being waited for.
    """

    count: int = 0
    asked_s: float | None = None
    next_s: float = 0.0  # not before this
    wait_s: float = 0.0  # from the last request to the next
    before: tuple[Rank, ...] = ()
    reason: str = ""
    rule: RuleId | None = None
    offered: bool = False  # an offer was told and still stands


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """The fresh ranks of one server by key, and whether one of its agents obeys leases."""

    ranks: Mapping[str, Rank] = field(default_factory=dict)
    obeys: bool = False


def look(server: str, snapshot: Snapshot, now_s: float) -> Inside:
    """Gather what is fresh and whole; a rank that leaves out one of the figures is no rank."""
    fresh = [(key, state) for key, state in _fresh(snapshot, now_s) if state.server == server]
    ranks = (_rank(key, state) for key, state in fresh)
    return Inside(
        ranks={rank.key: rank for rank in ranks if rank is not None},
        obeys=any(state.limits == OBEYED for _, state in fresh),
    )


def _fresh(snapshot: Snapshot, now_s: float) -> Iterator[tuple[str, AgentState]]:
    for key, sample in snapshot.agents.items():
        status = snapshot.sources.get(key)
        if sample.value is None or status is None or not status.up:
            continue
        if sample.age_s(now_s) <= FRESH_PERIODS * status.period_s:
            yield key, sample.value


def _rank(key: str, state: AgentState) -> Rank | None:
    found = state.allocator
    if found is None or found.reserved_bytes is None or found.releasable_bytes is None:
        return None
    if found.snapshot_age_s is None or found.snapshot_age_s > FIGURES_AGE_S:
        return None
    if found.compactions_total is None:
        return None
    return Rank(
        key=key,
        engine=state.engine,
        uuid=state.gpu_uuid,
        pid=state.pid,
        reserved_bytes=found.reserved_bytes,
        releasable_bytes=found.releasable_bytes,
        compactions_total=found.compactions_total,
        compact_seconds_total=found.compact_seconds_total or 0.0,
    )
