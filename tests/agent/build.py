"""Made agents' states and PyTorch snapshots."""

from __future__ import annotations

import random
from typing import Any

from kvwatch import wire_record
from kvwatch.model.server import AgentState, AllocatorState, ArenaState, KvCacheState, SchedulerState
from kvwatch.wire_datagram import decode
from kvwatch.wire_record import Record

GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10
UUID = "GPU-11111111-2222-3333-4444-555555555555"


def arena(**change: Any) -> ArenaState:
    sizes: dict[str, Any] = {
        "name": "large/0",
        "reserved_bytes": 10 * GIB,
        "allocated_bytes": 7 * GIB,
        "active_bytes": 7 * GIB,
        "requested_bytes": 6 * GIB,
        "largest_free_bytes": 1 * GIB,
        "free_bytes": 3 * GIB,
        "releasable_bytes": 2 * GIB,
    }
    return ArenaState(**sizes | change)


def allocator(**change: Any) -> AllocatorState:
    fields: dict[str, Any] = {
        "allocated_bytes": 7 * GIB,
        "reserved_bytes": 10 * GIB,
        "active_bytes": 7 * GIB,
        "requested_bytes": 6 * GIB,
        "inactive_bytes": 1 * GIB,
        "largest_free_bytes": 1 * GIB,
        "largest_allocatable_bytes": 5 * GIB,
        "releasable_bytes": 2 * GIB,
        "private_bytes": 0,
        "fragmentation_soft_ratio": 0.2,
        "fragmentation_hard_ratio": 0.1,
        "fragmentation_total_ratio": 0.6,
        "num_alloc_retries": 3,
        "num_ooms": 0,
        "compactions_total": 1,
        "compact_seconds_total": 0.25,
        "snapshot_age_s": 4.5,
        "arenas": (arena(),),
    }
    return AllocatorState(**fields | change)


def agent(**change: Any) -> AgentState:
    fields: dict[str, Any] = {
        "server": "chat",
        "engine": "0",
        "rank": 0,
        "pid": 4242,
        "seq": 1,
        "gpu_uuid": UUID,
        "allocator": allocator(),
        "kv": KvCacheState(
            num_blocks=100,
            used_blocks=60,
            free_blocks=30,
            evictable_blocks=10,
            block_size_tokens=16,
            tokens=900,
            pool_bytes=100 * MIB,
        ),
        "scheduler": SchedulerState(running=5, waiting=2, max_running=16),
        "effective_max_running": 8,
        "blocks_held": 60,
        "host": "vllm 0.32.0",
        "limits": "obeyed",
    }
    return AgentState(**fields | change)


ALLOCATOR_NAMES = {
    "allocated_bytes": "allocated_bytes.all.current",
    "reserved_bytes": "reserved_bytes.all.current",
    "active_bytes": "active_bytes.all.current",
    "requested_bytes": "requested_bytes.all.current",
    "inactive_bytes": "inactive_split_bytes.all.current",
    "fragmentation_soft_ratio": "soft_ratio",
    "fragmentation_hard_ratio": "hard_ratio",
    "fragmentation_total_ratio": "total_ratio",
    "compactions_total": "compactions",
    "compact_seconds_total": "compact_s",
}


def allocator_record(state: AllocatorState) -> Record:
    """What an agent would tell so that this state is what comes out."""
    fields = {name: getattr(state, name) for name in AllocatorState.__slots__}
    arenas = [{name: getattr(one, name) for name in ArenaState.__slots__} for one in fields.pop("arenas")]
    return {ALLOCATOR_NAMES.get(name, name): value for name, value in fields.items()} | {"arenas": arenas}


def record(state: AgentState) -> Record:
    """The whole of it, as `allocator_record`."""
    found: Record = {
        name: getattr(state, name) for name in ("server", "rank", "pid", "gpu_uuid", "host", "limits")
    }
    found["engine"] = int(state.engine)
    if state.allocator is not None:
        found["allocator"] = allocator_record(state.allocator)
    if (kv := state.kv) is not None:
        found["kv"] = {
            "num_blocks": kv.num_blocks,
            "free_blocks": kv.free_blocks,
            "evictable_blocks": kv.evictable_blocks,
            "block_size": kv.block_size_tokens,
            "tokens": kv.tokens,
            "blocks_held": state.blocks_held,
            "bytes_per_block": kv.pool_bytes and kv.num_blocks and kv.pool_bytes // kv.num_blocks,
        }
    if (scheduler := state.scheduler) is not None:
        found["scheduler"] = {
            "running": scheduler.running,
            "waiting": scheduler.waiting,
            "max_running": scheduler.max_running,
            "effective_max_running": state.effective_max_running,
        }
    return found


def encode(state: AgentState, mono_s: float) -> bytes:
    """The datagram that tells this state."""
    return wire_record.encode(record(state), seq=state.seq, mono_s=mono_s)


def told(part: Record) -> AllocatorState:
    """An agent's allocator figures, as the daemon takes them from the datagram."""
    whole = {"server": "x", "engine": 0, "rank": 0, "pid": 1, "allocator": part}
    found = decode(wire_record.encode(whole, seq=1, mono_s=0.0)).state.allocator
    assert found is not None
    return found


def segment(
    blocks: list[tuple[int, str]],
    *,
    address: int = 0,
    stream: int = 0,
    pool: tuple[int, int] = (0, 0),
    kind: str = "large",
    expandable: bool = False,
    device: int = 0,
) -> dict[str, Any]:
    """One segment of a snapshot, as PyTorch lays it out: blocks are (size, state)."""
    total = sum(size for size, _ in blocks)
    used = sum(size for size, state in blocks if state == "active_allocated")
    pending = sum(size for size, state in blocks if state == "active_pending_free")
    listed, at = [], address
    for size, state in blocks:
        listed.append({"address": at, "size": size, "requested_size": max(0, size - 100), "state": state})
        at += size
    return {
        "device": device,
        "address": address,
        "total_size": total,
        "allocated_size": used,
        "active_size": used + pending,
        "requested_size": used,
        "stream": stream,
        "segment_type": kind,
        "segment_pool_id": pool,
        "is_expandable": expandable,
        "blocks": listed,
    }


def random_snapshot(seed: int, *, expandable: bool) -> list[dict[str, Any]]:
    """Segments over a few streams and pools; free neighbours are merged, as the allocator does."""
    chance = random.Random(seed)
    segments, address = [], 1 << 40
    for _ in range(chance.randrange(1, 30)):
        kind = chance.choice(("large", "large", "small"))
        page = 2 * MIB if kind == "small" else 20 * MIB
        blocks: list[tuple[int, str]] = []
        for _ in range(chance.randrange(1, 12)):
            size = (
                chance.randrange(1, 4000) * 64 * KIB if kind == "large" else chance.randrange(1, 2000) * 512
            )
            state = chance.choice(("inactive", "active_allocated", "active_allocated", "active_pending_free"))
            if blocks and state == "inactive" == blocks[-1][1]:
                blocks[-1] = (blocks[-1][0] + size, state)
            else:
                blocks.append((size, state))
        if expandable:
            short = -sum(size for size, _ in blocks) % page
            if short:
                last, state = blocks[-1]
                blocks = [*blocks[:-1], (last + short, state)]
        segments.append(
            segment(
                blocks,
                address=address,
                stream=chance.choice((0, 0, 7)),
                pool=chance.choice(((0, 0), (0, 0), (0, 0), (0, 3))),
                kind=kind,
                expandable=expandable,
                device=chance.choice((0, 0, 0, 1)),
            )
        )
        address += 1 << 34
    return segments
