"""Any program that uses PyTorch: its allocator is published, nothing is limited."""

from __future__ import annotations

import os
from typing import Any

from kvwatch.agent.environment import place
from kvwatch.agent.guard import Guard

GUARD = Guard()

_running: tuple[int, Any] | None = None


def start(server: str | None, *, rank: int = 0) -> bool:
    """See `kvwatch.agent.start`. A forked child starts a publisher of its own."""
    return GUARD.run("start", _start, server, rank, otherwise=False)


def _start(server: str | None, rank: int) -> bool:
    global _running
    here = place(server)
    if here is None:
        return False
    if _running is None or _running[0] != os.getpid():
        from kvwatch.agent.publisher import Publisher
        from kvwatch.agent.torch_memory import TorchMemory

        publisher = Publisher(here, memory=TorchMemory().read, rank=rank, host="torch")
        publisher.start()
        _running = os.getpid(), publisher
    return True
