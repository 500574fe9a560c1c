"""How full is the KV pool, in the server's own meaning, and how full would it be with the queue in it?"""

from __future__ import annotations

from kvwatch.model.server import EngineState, Evictable, KvCacheState, Semantics

HIGHEST_PLAUSIBLE = 1.5
"""Ratios a little over 1 are rounding or over-reservation; beyond this the figure is not a ratio at all."""


def ratio(value: float | None) -> float | None:
    """A ratio that can be used: clamped to 1; None when missing, negative, not a number or no ratio."""
    if value is None or not 0.0 <= value <= HIGHEST_PLAUSIBLE:
        return None
    return min(value, 1.0)


def capacity_tokens(kv: KvCacheState) -> int | None:
    """Token slots of the pool: as reported, else blocks times block size; None when unknown or zero."""
    if kv.capacity_tokens is not None:
        return kv.capacity_tokens if kv.capacity_tokens > 0 else None
    if kv.num_blocks is None or kv.block_size_tokens is None:
        return None
    slots = kv.num_blocks * kv.block_size_tokens
    return slots if slots > 0 else None


def usage_ratio(kv: KvCacheState, semantics: Semantics) -> float | None:
    """Usage as the server means it; from blocks where it reports only those.

    Low usage never means free device memory: cached blocks may count as free, and the pool
    stays allocated (vllm#20302).
    """
    if kv.usage_ratio is not None:
        return ratio(kv.usage_ratio)
    if kv.used_blocks is None or not kv.num_blocks or kv.num_blocks < 0:
        return None
    cached = (kv.evictable_blocks or 0) if semantics.evictable is Evictable.USED else 0
    return ratio((kv.used_blocks + cached) / kv.num_blocks)


def fill_ratio(kv: KvCacheState, semantics: Semantics, usage: float | None) -> float | None:
    """The share of the pool that cannot be evicted: what a forecast of "full" is about.

    None where cached blocks count as used and are not told apart, since 1.0 is then a warm cache.
    """
    if semantics.evictable is not Evictable.USED:
        return usage
    if kv.used_blocks is None or kv.evictable_blocks is None or not kv.num_blocks or kv.num_blocks < 0:
        return None
    return ratio(kv.used_blocks / kv.num_blocks)


def demand_ratio(engine: EngineState, usage: float | None) -> float | None:
    """Used plus waiting prompts as a share of the pool; over 1 means the queue does not fit.

    After Llumnix's kv_blocks_ratio, with waiting blocks taken as waiting requests times the mean prompt.
    """
    waiting = engine.scheduler.waiting
    if usage is None or waiting is None or waiting < 0:
        return None
    if waiting == 0:
        return usage
    slots, prompt = capacity_tokens(engine.kv), mean_prompt_tokens(engine)
    if slots is None or prompt is None:
        return None
    return usage + waiting * prompt / slots


def mean_prompt_tokens(engine: EngineState) -> float | None:
    """Mean prompt length of finished requests; None where the server does not tell."""
    lengths = engine.prompt_length
    if lengths is not None and lengths.sum is not None and lengths.count > 0 and lengths.sum >= 0:
        return lengths.sum / lengths.count
    prompts, finished = engine.scheduler.prompt_tokens_total, engine.scheduler.finished_total
    if prompts is None or not finished or finished < 0 or prompts < 0:
        return None
    return prompts / finished
