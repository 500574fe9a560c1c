"""How large is an engine's KV pool, and what of it is used? vLLM's cache_config_info and its usage gauge.

Not an adapter itself: the underscore keeps it out of the registry.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvwatch.sources.exposition import Labels
from kvwatch.sources.servers.base import clean


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What an engine's configuration says of its pool, the null block left out."""

    blocks: int | None = None
    block_tokens: int | None = None
    capacity_tokens: int | None = None
    pool_bytes: int | None = None
    notes: tuple[str, ...] = ()


def sizes(names: Iterable[str], configs: Mapping[str, Labels], null_blocks: int) -> dict[str, Size]:
    """The pool of each engine, by the labels of its cache_config_info."""
    return {name: _size(configs.get(name), configs, null_blocks) for name in names}


def _size(config: Labels | None, configs: Mapping[str, Labels], null_blocks: int) -> Size:
    if config is None:
        why = "no vllm:cache_config_info there (as with the Rust front end): KV capacity is unknown"
        return Size(notes=(why,))
    notes: dict[str, None] = {}
    share = sum(replica(each) == replica(config) for each in configs.values())
    total = _per_engine(config, share, notes)
    blocks = total - null_blocks if total is not None and total > null_blocks else None
    block_tokens, capacity = _tokens(config, total, blocks, notes)
    return Size(
        blocks=blocks,
        block_tokens=block_tokens,
        capacity_tokens=capacity,
        pool_bytes=_pool_bytes(config),
        notes=tuple(notes),
    )


def replica(labels: Labels) -> str:
    """The Ray replica that a series names, "" without Ray."""
    return clean(labels.get("ReplicaId") or labels.get("WorkerId") or "")[:16]


def _per_engine(config: Labels, share: int, notes: dict[str, None]) -> int | None:
    total = _number(config, "num_gpu_blocks")
    if total is None or share <= 1:
        return total
    if total % share:
        notes[f"{total} blocks do not divide by {share} engines: blocks per engine are unknown"] = None
        return None
    return total // share


def used_blocks(
    level: float | None, blocks: int | None, null_blocks: int, null_counted: bool | None
) -> int | None:
    """Blocks in use out of `blocks`, the null block left out.

    From 0.11 usage is used/(n-1). Up to 0.10 it is (used+1)/n, the null block counted as used. Where a page
    has both names (0.9.2 to 0.11) the denominator that gives a whole number is the right one.
    """
    if level is None or blocks is None:
        return None
    if not null_blocks:
        return round(level * blocks)
    total = blocks + null_blocks
    if null_counted is None:
        new, old = level * blocks, level * total
        null_counted = abs(old - round(old)) < abs(new - round(new))
    used = round(level * total) - null_blocks if null_counted else round(level * blocks)
    return min(blocks, max(0, used))


def _tokens(
    config: Labels, total: int | None, blocks: int | None, notes: dict[str, None]
) -> tuple[int | None, int | None]:
    """Block size and capacity in tokens.

    With several kinds of attention layers (hybrid models) blocks x size is not the capacity: then the
    server's own figure counts, and no block size is given, lest somebody multiplies by it.
    """
    size, told = _number(config, "block_size"), _number(config, "kv_cache_size_tokens")
    hints = ("sliding_window", "mamba_block_size", "mamba_page_size_padded")
    if told is not None and total is not None and size is not None:
        hybrid = told != total * size
    else:
        hybrid = any(_number(config, name) is not None for name in hints)
    if hybrid:
        notes["a hybrid model: blocks do not convert to tokens"] = None
        return None, told
    if size is not None and blocks is not None:
        return size, size * blocks
    return size, told


def _pool_bytes(config: Labels) -> int | None:
    """The configured pool size, unless the number of blocks was set by hand, which overrides it."""
    overridden = _number(config, "num_gpu_blocks_override") is not None
    return None if overridden else _number(config, "kv_cache_memory_bytes")


def _number(config: Labels, name: str) -> int | None:
    """A label's whole number; "None" and anything else is no number."""
    text = config.get(name, "")
    if not re.fullmatch(r"\d{1,18}(\.0)?", text, re.ASCII):
        return None
    return int(float(text)) if "." in text else int(text)
