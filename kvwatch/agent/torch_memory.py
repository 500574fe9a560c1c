"""What does this process's PyTorch hold on its GPUs? Read without importing torch or waking CUDA.

`memory_stats` costs 0.1-0.2 ms and is read once a second. A snapshot holds the allocator's lock and the
interpreter for about 2.5 µs a block; `SnapshotGuard` keeps that under 1/2000 of the time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvwatch.agent.allocator import Layout, largest_allocatable, layout
from kvwatch.wire_record import Record

SNAPSHOT_PERIOD_S = 10.0
SNAPSHOT_MAX_BLOCKS = 10_000
SNAPSHOT_SHARE = 2000.0  # a snapshot of 5 ms every 10 s at the most; a slower one comes more rarely
SNAPSHOT_STALE_S = 120.0
COMPACT_SPACING_S = 60.0
MAX_DEVICES = 16

_BYTES = tuple(f"{name}_bytes.all.current" for name in ("allocated", "reserved", "active", "requested"))
_COUNTS = ("num_alloc_retries", "num_ooms")
_INACTIVE = "inactive_split_bytes.all.current"

Clock = Callable[[], float]


class SnapshotGuard:
    """When may a snapshot be taken? Every 10 s, more rarely where it is dear, never of too many blocks."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def allows(self, blocks: int, now_s: float) -> bool:
        """Whether to take one now, of about so many blocks."""
        return now_s >= self._next_s and blocks <= SNAPSHOT_MAX_BLOCKS

    def took(self, seconds: float, now_s: float) -> None:
        """One was taken (or failed) and cost this much."""
        self._next_s = now_s + max(SNAPSHOT_PERIOD_S, seconds * SNAPSHOT_SHARE)


class Compactions(NamedTuple):
    """What returning unused memory has cost, for every device of this process."""

    times: int = 0
    seconds: float = 0.0
    last_s: float = -COMPACT_SPACING_S


class TorchMemory:
    """The allocator of one process. `read` is for the publisher, `compact` for between the engine's steps."""

    def __init__(self, *, cuda: Any | None = None, clock: Clock = time.monotonic) -> None:
        self._given = cuda
        self._clock = clock
        self._guards: dict[int, SnapshotGuard] = {}
        self._layouts: dict[int, tuple[Layout, float]] = {}
        self._uuids: dict[int, str] = {}
        self.weights_bytes: int | None = None  # set by whoever knows the model; for a process of one GPU
        self._lock = threading.Lock()  # one compaction at a time
        self._compactions = Compactions()

    def read(self) -> list[tuple[str, Record]]:
        """(UUID, the datagram's `allocator`) of every GPU that this process holds memory on."""
        cuda = self._cuda()
        if cuda is None:
            return []
        found = []
        for device in range(min(int(cuda.device_count()), MAX_DEVICES)):
            stats = cuda.memory_stats(device)
            if stats.get("reserved_bytes.all.current"):
                found.append((self._uuid(cuda, device), self._state(cuda, device, stats)))
        return found

    def compact(self) -> bool:
        """Return unused memory to the device, at most once a minute; waits for the device to be idle."""
        cuda = self._cuda()
        if cuda is None or not self._lock.acquire(blocking=False):
            return False
        try:
            began_s = self._clock()
            if began_s - self._compactions.last_s < COMPACT_SPACING_S:
                return False
            cuda.empty_cache()
            ended_s = self._clock()
            done = self._compactions
            self._compactions = Compactions(done.times + 1, done.seconds + ended_s - began_s, ended_s)
            self._layouts.clear()
            self._guards.clear()
            return True
        finally:
            self._lock.release()

    def _cuda(self) -> Any | None:
        """torch.cuda, only where something else has imported torch and begun to use CUDA."""
        cuda = self._given
        if cuda is None:
            cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is None or not cuda.is_initialized():
            return None
        return cuda

    def _state(self, cuda: Any, device: int, stats: Mapping[str, int]) -> Record:
        now_s = self._clock()
        known = self._snapshot(cuda, device, stats, now_s)
        state: Record = {key: stats.get(key) for key in (*_BYTES, *_COUNTS)}
        seen = self._layouts.get(device)  # however old: segments do not change their kind
        if seen is not None and not seen[0].expandable:
            state[_INACTIVE] = stats.get(_INACTIVE)  # blind with expandable ones (pytorch#159564)
        state["weights_bytes"] = self.weights_bytes
        state["compactions"] = self._compactions.times
        state["compact_s"] = self._compactions.seconds
        if known is not None:
            found, taken_s = known
            state |= _blocks(_held(found, stats), _room(cuda, device, stats), now_s - taken_s)
        return state

    def _snapshot(
        self, cuda: Any, device: int, stats: Mapping[str, int], now_s: float
    ) -> tuple[Layout, float] | None:
        guard = self._guards.setdefault(device, SnapshotGuard())
        if guard.allows(_block_count(stats), now_s):
            try:
                self._layouts[device] = layout(_segments(cuda), device), now_s
            finally:
                guard.took(self._clock() - now_s, now_s)
        known = self._layouts.get(device)
        return known if known is not None and now_s - known[1] <= SNAPSHOT_STALE_S else None

    def _uuid(self, cuda: Any, device: int) -> str:
        if device not in self._uuids:
            self._uuids[device] = _uuid(cuda, device)
        return self._uuids[device]


def _block_count(stats: Mapping[str, int]) -> int:
    """Blocks that a snapshot would walk, at most: live ones, free parts of segments, whole free segments."""
    keys = ("active.all.current", "inactive_split.all.current", "segment.all.current")
    return sum(int(stats.get(key, 0)) for key in keys)


def _segments(cuda: Any) -> Any:
    """Return one snapshot without allocation traces where this torch lets them be left out."""
    take = cuda.memory_snapshot
    names = getattr(getattr(take, "__code__", None), "co_varnames", ())
    return take(include_traces=False) if "include_traces" in names else take()


def _room(cuda: Any, device: int, stats: Mapping[str, int]) -> tuple[int, int | None]:
    """Free bytes of the device, and what a memory fraction still allows this process (None: no fraction)."""
    free, total = cuda.mem_get_info(device)
    fraction_of = getattr(cuda, "get_per_process_memory_fraction", None)
    fraction = 1.0 if fraction_of is None else float(fraction_of(device))
    if fraction >= 1.0:
        return int(free), None
    return int(free), int(fraction * total) - int(stats["reserved_bytes.all.current"])


def _held(found: Layout, stats: Mapping[str, int]) -> Layout:
    """The block-level figures, held to what the counters of this second allow."""
    unused = max(0, (stats.get(_BYTES[1]) or 0) - (stats.get(_BYTES[0]) or 0))
    return found._replace(
        releasable_bytes=min(found.releasable_bytes, unused),
        largest_free_bytes=min(found.largest_free_bytes, unused),
        growable_bytes=min(found.growable_bytes, unused),
    )


def _blocks(found: Layout, room: tuple[int, int | None], age_s: float) -> Record:
    free_bytes, cap_bytes = room
    return {
        "largest_free_bytes": found.largest_free_bytes,
        "largest_allocatable_bytes": largest_allocatable(found, free_bytes, cap_bytes=cap_bytes),
        "releasable_bytes": found.releasable_bytes,
        "private_bytes": found.private_bytes,
        "soft_ratio": found.soft_ratio,
        "hard_ratio": found.hard_ratio,
        "total_ratio": found.total_ratio,
        "snapshot_age_s": age_s,
        "arenas": [arena.record() for arena in found.arenas],
    }


def _uuid(cuda: Any, device: int) -> str:
    """Return the GPU's UUID in NVML's spelling, or "" where torch does not tell."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    named = visible[device].strip() if device < len(visible) else ""
    if named.startswith("MIG-"):
        return named
    found = str(getattr(cuda.get_device_properties(device), "uuid", "") or "")
    return found if not found or found.startswith("GPU-") else f"GPU-{found}"
