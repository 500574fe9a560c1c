"""The datagram's reading side: what an agent tells, once a second, in at most 16 KiB of JSON.

Names are those of docs/agent.md. A reader trusts nothing: size, depth, types and ranges are checked
here, before anything else sees the figures; who sent it is for the receiving socket to say. The writing
side is `wire_record`.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass

from kvwatch.model.server import AgentState, AllocatorState, ArenaState, KvCacheState, SchedulerState
from kvwatch.wire_record import MAX_ARENAS, MAX_BYTES, MAX_TEXT, VERSION

MAX_DEPTH = 8
MAX_COUNT = 2**53  # the largest whole number that every JSON reader keeps
MAX_RANK = 65535

_SERVER = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)
_BRACKETS = re.compile(rb"[\[\]{}]")
_PRINTABLE = re.compile(r"[ -~]*", re.ASCII)

# wire name, field of AllocatorState
_STATS = (
    ("allocated_bytes.all.current", "allocated_bytes"),
    ("reserved_bytes.all.current", "reserved_bytes"),
    ("active_bytes.all.current", "active_bytes"),
    ("requested_bytes.all.current", "requested_bytes"),
    ("inactive_split_bytes.all.current", "inactive_bytes"),
    ("num_alloc_retries", "num_alloc_retries"),
    ("num_ooms", "num_ooms"),
    ("largest_free_bytes", "largest_free_bytes"),
    ("largest_allocatable_bytes", "largest_allocatable_bytes"),
    ("releasable_bytes", "releasable_bytes"),
    ("private_bytes", "private_bytes"),
    ("weights_bytes", "weights_bytes"),
    ("compactions", "compactions_total"),
)
_RATIOS = (
    ("soft_ratio", "fragmentation_soft_ratio"),
    ("hard_ratio", "fragmentation_hard_ratio"),
    ("total_ratio", "fragmentation_total_ratio"),
)
_SECONDS = (("compact_s", "compact_seconds_total"), ("snapshot_age_s", "snapshot_age_s"))
_ARENA = (
    "reserved_bytes",
    "allocated_bytes",
    "active_bytes",
    "requested_bytes",
    "largest_free_bytes",
    "free_bytes",
    "releasable_bytes",
)

Record = dict[str, object]


class DatagramError(ValueError):
    """The content is no datagram of this version; it must change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datagram:
    """One datagram. `mono_s` is the sender's CLOCK_MONOTONIC when the figures were taken."""

    state: AgentState
    mono_s: float


def decode(content: bytes) -> Datagram:
    """Read a datagram; raises DatagramError for anything that is not exactly one."""
    if len(content) > MAX_BYTES:
        raise DatagramError(f"more than {MAX_BYTES} bytes")
    _check_depth(content)
    try:
        record = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise DatagramError(f"not JSON: {error}") from error
    if not isinstance(record, dict) or _whole(record, "v", 0, VERSION) != VERSION:
        raise DatagramError("not version 1")
    state = AgentState(
        server=_server(record),
        engine=str(_whole(record, "engine", 0, MAX_RANK)),
        rank=_whole(record, "rank", 0, MAX_RANK),
        pid=_whole(record, "pid", 1, 2**22),
        seq=_whole(record, "seq", 0, MAX_COUNT),
        gpu_uuid=_text(record, "gpu_uuid"),
        host=_text(record, "host"),
        limits=_text(record, "limits"),
        **_parts(record),  # type: ignore[arg-type]
    )
    return Datagram(state=state, mono_s=_number(record, "mono_s", 0.0, 1e10))


def _parts(record: Record) -> Record:
    parts: Record = {}
    for key, read in (("allocator", _allocator), ("kv", _kv), ("scheduler", _scheduler)):
        part = record.get(key)
        if part is None:
            continue
        if not isinstance(part, dict):
            raise DatagramError(f"{key}: expected an object")
        parts |= read(part)
    if not parts:
        raise DatagramError("it tells nothing: no allocator, kv or scheduler")
    return parts


def _check_depth(content: bytes) -> None:
    """Refuse deep nesting before the parser sees it: it crashes some Pythons. Brackets in texts count too."""
    depth = 0
    for found in _BRACKETS.finditer(content):
        depth += 1 if found.group() in b"[{" else -1
        if depth > MAX_DEPTH:
            raise DatagramError(f"nested deeper than {MAX_DEPTH}")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _server(record: Record) -> str:
    value = record.get("server")
    if not isinstance(value, str) or _SERVER.fullmatch(value) is None:
        raise DatagramError("server: expected a name of a-z 0-9 . _ -")
    return value


def _text(record: Record, key: str) -> str:
    value = record.get(key, "")
    if not isinstance(value, str) or len(value) > MAX_TEXT or _PRINTABLE.fullmatch(value) is None:
        raise DatagramError(f"{key}: expected at most {MAX_TEXT} printable ASCII characters")
    return value


def _whole(record: Record, key: str, least: int, most: int) -> int:
    value = record.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise DatagramError(f"{key}: expected a whole number from {least} to {most}")
    return value


def _number(record: Record, key: str, least: float, most: float) -> float:
    value = record.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise DatagramError(f"{key}: expected a number from {least:g} to {most:g}")
    return float(value)


def _count(record: Record, key: str) -> int | None:
    return None if record.get(key) is None else _whole(record, key, 0, MAX_COUNT)


def _allocator(part: Record) -> Record:
    fields: Record = {field: _count(part, wire) for wire, field in _STATS}
    for names, most in ((_RATIOS, 1.0), (_SECONDS, 1e9)):
        for wire, field in names:
            value = None if part.get(wire) is None else _number(part, wire, 0.0, most)
            fields[field] = value if value is None or math.isfinite(value) else None
    return {"allocator": AllocatorState(arenas=_arenas(part), **fields)}  # type: ignore[arg-type]


def _arenas(part: Record) -> tuple[ArenaState, ...]:
    listed = part.get("arenas", [])
    if not isinstance(listed, list) or len(listed) > MAX_ARENAS:
        raise DatagramError(f"arenas: expected a list of at most {MAX_ARENAS}")
    return tuple(_arena(entry) for entry in listed)


def _arena(entry: object) -> ArenaState:
    if not isinstance(entry, dict):
        raise DatagramError("arenas: expected objects")
    sizes = {key: _whole(entry, key, 0, MAX_COUNT) for key in _ARENA}
    if sizes["largest_free_bytes"] > sizes["free_bytes"]:
        raise DatagramError("largest_free_bytes: more than is free")
    return ArenaState(name=_text(entry, "name"), private=entry.get("private") is True, **sizes)


def _kv(part: Record) -> Record:
    def pick(key: str) -> int | None:
        return _count(part, key)

    blocks, free, evictable = pick("num_blocks"), pick("free_blocks"), pick("evictable_blocks")
    each = pick("bytes_per_block")
    used = None
    if blocks is not None and free is not None:
        used = blocks - free - (evictable or 0)
        if used < 0:
            raise DatagramError("free_blocks: more blocks free than there are")
    if (blocks or 0) * (each or 0) > MAX_COUNT:
        raise DatagramError("bytes_per_block: the pool would be larger than any memory")
    kv = KvCacheState(
        num_blocks=blocks,
        used_blocks=used,
        free_blocks=free,
        evictable_blocks=evictable,
        block_size_tokens=pick("block_size"),
        tokens=pick("tokens"),
        pool_bytes=None if blocks is None or each is None else blocks * each,
    )
    return {"kv": kv, "blocks_held": pick("blocks_held")}


def _scheduler(part: Record) -> Record:
    scheduler = SchedulerState(
        running=_count(part, "running"),
        waiting=_count(part, "waiting"),
        max_running=_count(part, "max_running"),
    )
    return {"scheduler": scheduler, "effective_max_running": _count(part, "effective_max_running")}
