"""How fragmented is PyTorch's allocator? One snapshot in, sums per arena out; pure.

An arena is (device, stream, pool, large or small): free blocks merge only inside one segment, and a
segment serves only its arena. Definitions (M1-M10) are in docs/agent.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

MIB = 1 << 20

SMALL_PAGE_BYTES = 2 * MIB
LARGE_PAGE_BYTES = 20 * MIB
"""Pages that expandable segments map and unmap (kSmallBuffer and kLargeBuffer of CUDACachingAllocator)."""

GUARD_BYTES = 64 * MIB
"""What the driver may need for itself; the device's last bytes are not counted as allocatable."""

LITTLE_BYTES = 256 * MIB
LITTLE_SHARE = 0.01
"""Under both of these the split of free memory says nothing."""

DEFAULT_POOL = (0, 0)
MAX_ARENAS = 8

Segment = Mapping[str, Any]


class Arena:
    """The sums of one arena, in bytes."""

    __slots__ = (
        "active_bytes", "allocated_bytes", "end", "expandable", "free_bytes", "kind", "largest_free_bytes",
        "pool", "releasable_bytes", "requested_bytes", "reserved_bytes", "stream", "tail", "tail_releasable",
    )  # fmt: skip

    def __init__(self, kind: str, stream: int, pool: tuple[int, int]) -> None:
        self.kind, self.stream, self.pool = kind, stream, pool
        self.expandable = False
        self.reserved_bytes = self.allocated_bytes = self.active_bytes = self.requested_bytes = 0
        self.free_bytes = self.largest_free_bytes = self.releasable_bytes = 0
        self.tail = 0  # free at the end of the last mapped range: grows into new pages
        self.tail_releasable = 0
        self.end = -1

    @property
    def private(self) -> bool:
        """Whether this is a pool of its own (CUDA graphs): of no use to other allocations."""
        return self.pool != DEFAULT_POOL

    @property
    def name(self) -> str:
        """kind/stream, and the pool where it is a private one."""
        name = f"{self.kind}/{self.stream}"
        return f"{name}/{self.pool[0]}.{self.pool[1]}" if self.private else name

    def record(self) -> dict[str, Any]:
        """Under the datagram's names."""
        return {
            "name": self.name,
            "private": self.private,
            "reserved_bytes": self.reserved_bytes,
            "allocated_bytes": self.allocated_bytes,
            "active_bytes": self.active_bytes,
            "requested_bytes": self.requested_bytes,
            "largest_free_bytes": self.largest_free_bytes,
            "free_bytes": self.free_bytes,
            "releasable_bytes": self.releasable_bytes,
        }


class Layout(NamedTuple):
    """What one snapshot says of one device. Private pools are apart: nobody else can use their blocks."""

    arenas: tuple[Arena, ...]
    reserved_bytes: int  # of the default pool, as are the five below
    free_bytes: int
    releasable_bytes: int
    largest_free_bytes: int
    growable_bytes: int  # free at the end of an expandable range, beyond what could be released of it
    expandable: bool
    private_bytes: int
    blocks: int

    @property
    def soft_ratio(self) -> float | None:
        """Free memory that could be returned, as a share of what is reserved."""
        return self.releasable_bytes / self.reserved_bytes if self.reserved_bytes else None

    @property
    def hard_ratio(self) -> float | None:
        """Free memory that lies between live blocks, as a share of what is reserved."""
        if not self.reserved_bytes:
            return None
        return (self.free_bytes - self.releasable_bytes) / self.reserved_bytes

    @property
    def total_ratio(self) -> float | None:
        """1 - largest free block / free, of the arena with the most free memory; None if that is little."""
        shared = [arena for arena in self.arenas if not arena.private]
        widest = max(shared, key=lambda arena: arena.free_bytes, default=None)
        little = min(LITTLE_BYTES, LITTLE_SHARE * self.reserved_bytes)
        if widest is None or widest.free_bytes < little or not widest.free_bytes:
            return None
        return 1.0 - widest.largest_free_bytes / widest.free_bytes


def layout(segments: Iterable[Segment], device: int) -> Layout:
    """Sum one snapshot (`torch.cuda.memory_snapshot()`) of one device; raises nothing on odd entries but
    KeyError, TypeError and ValueError."""
    found: dict[tuple[int, tuple[int, int], str], Arena] = {}
    blocks = 0
    for segment in segments:
        if int(segment.get("device", 0)) != device:
            continue
        pool = _pool(segment)
        key = (int(segment["stream"]), pool, str(segment["segment_type"]))
        arena = found.get(key)
        if arena is None:
            arena = found[key] = Arena(key[2], key[0], pool)
        blocks += _add(arena, segment)
    return _sum(list(found.values()), blocks)


def _pool(segment: Segment) -> tuple[int, int]:
    first, second = segment.get("segment_pool_id") or DEFAULT_POOL
    return int(first), int(second)


def _add(arena: Arena, segment: Segment) -> int:
    """Walk one segment's blocks; how many there were."""
    arena.reserved_bytes += int(segment["total_size"])
    arena.allocated_bytes += int(segment["allocated_size"])
    arena.active_bytes += int(segment["active_size"])
    arena.requested_bytes += int(segment.get("requested_size", segment["allocated_size"]))
    expandable = bool(segment.get("is_expandable", False))
    arena.expandable = arena.expandable or expandable
    start = int(segment["address"])
    blocks = segment["blocks"]
    offset, last_free = 0, 0
    for block in blocks:
        size = int(block["size"])
        last_free = 0
        if block["state"] == "inactive":
            last_free = size
            arena.free_bytes += size
            arena.largest_free_bytes = max(arena.largest_free_bytes, size)
            if expandable:
                arena.releasable_bytes += _whole_pages(offset, size, arena.kind)
        offset += size
    if not expandable and len(blocks) == 1 and last_free:
        arena.releasable_bytes += last_free
    if expandable and start > arena.end:
        arena.end = start
        arena.tail = last_free
        arena.tail_releasable = _whole_pages(offset - last_free, last_free, arena.kind)
    return len(blocks)


def _whole_pages(offset: int, size: int, kind: str) -> int:
    """Bytes of the pages that lie wholly inside a free block; a mapped range begins at a page."""
    page = SMALL_PAGE_BYTES if kind == "small" else LARGE_PAGE_BYTES
    first = -(-offset // page)
    last = (offset + size) // page
    return max(0, last - first) * page


def _sum(arenas: list[Arena], blocks: int) -> Layout:
    shared = [arena for arena in arenas if not arena.private]
    large = [arena for arena in shared if arena.kind != "small"]
    return Layout(
        arenas=tuple(sorted(arenas, key=lambda one: (-one.reserved_bytes, one.name))[:MAX_ARENAS]),
        reserved_bytes=sum(arena.reserved_bytes for arena in shared),
        free_bytes=sum(arena.free_bytes for arena in shared),
        releasable_bytes=sum(arena.releasable_bytes for arena in shared),
        largest_free_bytes=max((arena.largest_free_bytes for arena in large), default=0),
        growable_bytes=max((arena.tail - arena.tail_releasable for arena in large), default=0),
        expandable=any(arena.expandable for arena in arenas),
        private_bytes=sum(arena.reserved_bytes for arena in arenas if arena.private),
        blocks=blocks,
    )


def largest_allocatable(layout: Layout, device_free_bytes: int, *, cap_bytes: int | None = None) -> int:
    """The largest single allocation that would succeed now (M5).

    A block that is there, or new memory: what the device has, plus what the allocator returns before it
    gives up (it retries after emptying its cache), plus the free end of an expandable segment. Device
    memory itself does not fragment, so those add up. `cap_bytes` is what a memory fraction still allows.
    """
    room = max(0, device_free_bytes - GUARD_BYTES) + layout.releasable_bytes
    if cap_bytes is not None:
        room = min(room, max(0, cap_bytes) + layout.releasable_bytes)
    if layout.expandable:
        room += layout.growable_bytes
    return max(layout.largest_free_bytes, room)
