"""Runs inside an inference server: tells kvwatch what only the server knows, and obeys limit leases.

Nothing here raises into its host or waits for anybody. For a program of your own:

    import kvwatch.agent
    kvwatch.agent.start("train")

vLLM needs no line at all (docs/agent.md). This module itself imports nothing.
"""

from __future__ import annotations


def start(server: str | None = None, *, rank: int = 0) -> bool:
    """Publish this program's PyTorch allocator once a second as `server` (default: KVWATCH_SERVER).

    False, and nothing else, when no server is named or the agent cannot start. Call it as often as you
    like; the first call counts.
    """
    from kvwatch.agent import program

    return program.start(server, rank=rank)
