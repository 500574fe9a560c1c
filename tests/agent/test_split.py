"""What an agent adds to the split of a GPU's memory."""

from __future__ import annotations

import pytest

from kvwatch.model.server import EngineState, KvCacheState, Semantics, ServerState
from kvwatch.signals.ledger import share_of
from tests.agent.build import GIB, UUID, agent, allocator


def page(*weights: int | None) -> ServerState:
    engines = tuple(
        EngineState(
            engine=str(rank), kv=KvCacheState(weights_bytes=each, pool_bytes=20 * GIB, usage_ratio=0.5)
        )
        for rank, each in enumerate(weights)
    )
    return ServerState(kind="vllm", semantics=Semantics(), engines=engines)


def teller(weights: int | None, **change: object) -> object:
    return agent(allocator=allocator(weights_bytes=weights), **change)


@pytest.mark.parametrize(
    ("pages", "agents", "expected"),
    [
        ((None,), [], None),
        ((None,), [teller(None)], None),
        ((None,), [agent(allocator=None)], None),
        ((None,), [teller(14 * GIB)], 14 * GIB),
        ((None,), [teller(14 * GIB, gpu_uuid="GPU-another")], None),
        ((None,), [teller(14 * GIB, engine="7")], None),
        ((13 * GIB,), [teller(14 * GIB)], 13 * GIB),
        ((None, None), [teller(14 * GIB), teller(14 * GIB, engine="1")], 28 * GIB),
        ((None, None), [teller(14 * GIB)], None),
    ],
    ids=[
        "nobody",
        "silent",
        "no_allocator",
        "agent",
        "other_gpu",
        "other_engine",
        "page",
        "two",
        "one_of_two",
    ],
)
def test_weights(pages: tuple[int | None, ...], agents: list[object], expected: int | None) -> None:
    """The page's word on weights goes first, then that of the agents on this very GPU; half of it is none."""
    share = share_of(page(*pages), 1, UUID, agents)  # type: ignore[arg-type]

    assert share.weights == expected
    assert share.pool == 20 * GIB * len(pages)
