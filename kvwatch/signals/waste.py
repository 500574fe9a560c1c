"""How much of the KV slots in use holds no token (page-tail waste)?

Exact where tokens and the blocks that hold them are both known, which only an agent inside the
server (or an engine that counts tokens) can tell. Elsewhere each running request leaves its last
block partly empty: between 0 and B-1 slots, (B-1)/2 on average.

In-flight tokens can also be guessed from counters that telescope (tokens counted as they appear less
lengths counted at finish). That guess is not used: one aborted request never leaves it, shared
prefixes are counted once per request, and prompts in mid-prefill not at all, so that its error is as
wide as the bound itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvwatch.model.server import AgentState, Basis, EngineState, Semantics
from kvwatch.model.signal import Waste
from kvwatch.signals.occupancy import capacity_tokens


def waste(
    engine: EngineState, semantics: Semantics, usage: float | None, agents: Sequence[AgentState]
) -> Waste | None:
    """Page-tail waste as a share of the slots in use: exact, else an estimate; None if neither."""
    for agent in sorted(agents, key=lambda one: one.rank):
        exact = _exact_of_agent(agent)
        if exact is not None:
            return exact
    kv = engine.kv
    exact = _exact(kv.tokens, kv.used_blocks, kv.block_size_tokens)
    if exact is not None:
        return exact
    return _estimate(engine, usage) if semantics.basis is Basis.OCCUPANCY else None


def _exact_of_agent(agent: AgentState) -> Waste | None:
    kv = agent.kv
    if kv is None:
        return None
    held = agent.blocks_held if agent.blocks_held is not None else kv.used_blocks
    return _exact(kv.tokens, held, kv.block_size_tokens)


def _exact(tokens: int | None, blocks: int | None, block_size: int | None) -> Waste | None:
    if tokens is None or blocks is None or block_size is None or tokens < 0 or blocks <= 0 or block_size <= 0:
        return None
    # Shared prefixes hold more tokens than slots: no waste can be seen then.
    share = max(0.0, 1.0 - tokens / (blocks * block_size))
    return Waste(ratio=share, low=share, high=share, method="exact")


def _estimate(engine: EngineState, usage: float | None) -> Waste | None:
    block_size, running = engine.kv.block_size_tokens, engine.scheduler.running
    slots = _slots_in_use(engine, usage)
    if slots is None or block_size is None or block_size <= 0 or running is None or running <= 0:
        return None
    high = min(1.0, running * (block_size - 1) / slots)
    return Waste(
        ratio=min(high, running * (block_size - 1) / 2 / slots), low=0.0, high=high, method="estimate"
    )


def _slots_in_use(engine: EngineState, usage: float | None) -> float | None:
    kv = engine.kv
    if kv.used_blocks is not None and kv.block_size_tokens is not None:
        slots: float = kv.used_blocks * kv.block_size_tokens
    else:
        capacity = capacity_tokens(kv)
        if usage is None or capacity is None:
            return None
        slots = usage * capacity
    return slots if slots > 0 else None
