"""Any program that uses PyTorch: its allocator is published, nothing is limited."""

from __future__ import annotations

import logging
import os
from typing import Any

from kvwatch.agent.environment import place

log = logging.getLogger("kvwatch.agent")

_running: tuple[int, Any] | None = None


def start(server: str | None, *, rank: int = 0) -> bool:
    """See `kvwatch.agent.start`. A forked child starts a publisher of its own."""
    global _running
    try:
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
    except Exception as error:  # noqa: BLE001 - the guard: nothing may reach the host
        log.warning("kvwatch agent: not started: %s", error)
        return False
