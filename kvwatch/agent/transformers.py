"""Continuous batching of Hugging Face transformers: `attach(manager)` publishes its state and obeys leases.

    manager = model.init_continuous_batching(...)
    kvwatch.agent.transformers.attach(manager, "chat")
    manager.start()

Admission is limited by what a step gets to see: waiting requests beyond the room that a lease leaves stay
out of its sight for that step, in their order. Nothing of the scheduler's own limits is changed, so there
is nothing to give back: `max_requests_per_batch` below the active requests would leave those idle with
their cache, and the engine clears `block_new_requests` whenever a request finishes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvwatch.agent.environment import place
from kvwatch.agent.guard import Guard
from kvwatch.agent.limits import Limits, Wish
from kvwatch.wire_record import Record

GUARD = Guard()
WAIT_S = 0.25
_MARK = "_kvwatch_attached"


def attach(manager: Any, server: str | None = None, *, rank: int = 0) -> bool:
    """Watch one ContinuousBatchingManager, before or after its start; call it once for each manager.

    `server` is its name in kvwatch's configuration (default: KVWATCH_SERVER). False when no server is
    named or the manager is not as expected; never raises.
    """
    return GUARD.run("attach to this manager", _attach, manager, server, rank, otherwise=False)


def _attach(manager: Any, server: str | None, rank: int) -> bool:
    here = place(server)
    if here is None or getattr(manager, _MARK, None) is not None:
        return False
    from kvwatch.agent.publisher import Publisher
    from kvwatch.agent.torch_memory import TorchMemory

    memory = TorchMemory()
    agent = ManagerAgent(manager, Limits(here.lease, here.server), here.server, rank, memory.compact)
    setattr(manager, _MARK, agent)
    agent.hook()
    Publisher(here, engine=agent.read, memory=memory.read, rank=rank, host=agent.host, guard=GUARD).start()
    return True


class ManagerAgent:
    """One manager: follows the scheduler that its thread makes, limits its steps, and notes its state."""

    def __init__(
        self, manager: Any, limits: Limits, server: str, rank: int, compact: Callable[[], bool]
    ) -> None:
        version = getattr(sys.modules.get("transformers"), "__version__", "unknown")
        self.host = f"transformers {version}"
        self._manager = manager
        self._limits = limits
        self._server = server
        self._rank = rank
        self._compact = compact
        self._asked = False
        self._noted = threading.Event()
        self._state: Record | None = None
        self._refusal = ""
        self._scheduler: Any = None

    def hook(self) -> None:
        """Meet the scheduler as soon as it is made; `read` finds one that is there already."""
        make = getattr(self._manager, "_create_batch_processor", None)
        if make is None:
            return

        def create(*args: Any, **kwargs: Any) -> Any:
            processor = make(*args, **kwargs)
            self._meet(processor)
            return processor

        self._manager._create_batch_processor = create

    def _meet(self, processor: Any) -> None:
        GUARD.run("limit this manager", self._wrap, processor, otherwise=None, mend=self._misfit)

    def _wrap(self, processor: Any) -> None:
        """Put this agent's step before the scheduler's."""
        scheduler = processor.scheduler
        if self._scheduler is scheduler:
            return
        self._scheduler = scheduler
        if not isinstance(getattr(scheduler, "waiting_requests_order", None), deque):
            self._refusal = f"the scheduler of {self.host} is not known"
            return
        original = scheduler.schedule_batch

        def schedule_batch(*args: Any, **kwargs: Any) -> Any:
            hidden: list[Any] = GUARD.run(
                "limit this step", self._before, processor, otherwise=[], mend=self._give_up
            )
            try:
                return original(*args, **kwargs)
            finally:
                if hidden:
                    scheduler.waiting_requests_order.extend(hidden)

        scheduler.schedule_batch = schedule_batch

    def _misfit(self) -> None:
        self._refusal = "the manager is not as expected"

    def _give_up(self) -> None:
        self._refusal = self._refusal or "a fault inside the agent"

    def _before(self, processor: Any) -> list[Any]:
        """Before a step: the waiting requests that it must not see."""
        if self._asked:
            self._asked = False
            self._state = self._note(processor)
            self._noted.set()
        if self._refusal:
            return []
        wish = self._limits.look(time.monotonic())
        if self._limits.take_compaction():
            self._compact()
        return _hide(processor.scheduler, wish)

    def read(self) -> Record | None:
        """The state as of the next step, or of now where no step comes; None before there is a scheduler."""
        processor = self._manager.batch_processor
        if processor is None:
            return None
        self._meet(processor)
        self._noted.clear()
        self._asked = True
        if not self._noted.wait(WAIT_S):
            self._asked = False
            self._state = self._note(processor)
        return self._state

    def _note(self, processor: Any) -> Record:
        scheduler = processor.scheduler
        own = getattr(scheduler, "max_requests_per_batch", None)
        return {
            "server": self._server,
            "engine": 0,
            "rank": self._rank,
            "pid": os.getpid(),
            "kv": _kv(processor.cache, scheduler),
            "scheduler": {
                "running": len(scheduler.active_requests),
                "waiting": len(scheduler.waiting_requests),
                "max_running": own,
                "effective_max_running": own if self._refusal else _effective(own, self._limits.wish),
            },
            "host": self.host,
            "limits": f"refused: {self._refusal}" if self._refusal else "obeyed",
        }


def _effective(own: int | None, wish: Wish) -> int | None:
    if not wish.admit:
        return 0
    if wish.max_running is None:
        return own
    return wish.max_running if own is None else min(own, wish.max_running)


def _hide(scheduler: Any, wish: Wish) -> list[Any]:
    """Take the waiting requests out of sight for which a limit leaves no room."""
    if wish.admit and wish.max_running is None:
        return []
    active = len(scheduler.active_requests)
    room = 0 if not wish.admit else max(0, max(1, wish.max_running or 1) - active)
    order = scheduler.waiting_requests_order
    if len(order) <= room:
        return []
    listed = list(order)
    scheduler.waiting_requests_order = deque(listed[:room])
    return listed[room:]


def _kv(cache: Any, scheduler: Any) -> Record | None:
    """Blocks and tokens: in sectors that attention types share (from 5.16 on), before that in one pool."""
    allocators = getattr(cache, "cache_allocators", None)
    if isinstance(allocators, dict) and hasattr(cache, "pool"):
        return _kv_sectors(cache, scheduler, list(allocators.values()))
    groups, blocks = getattr(cache, "group_cache_managers", None), getattr(cache, "_block_manager", None)
    if groups and blocks is not None:
        return _kv_groups(cache, scheduler, groups, blocks)
    return None


def _kv_sectors(cache: Any, scheduler: Any, allocators: list[Any]) -> Record:
    """As the first allocator of pages that never slide sees it: a free sector is its blocks' worth."""
    first = next((one for one in allocators if "Full" in type(one).__name__), allocators[0])
    tokens, held = _held(scheduler, first.block_table)
    return {
        "num_blocks": first.num_blocks,
        "free_blocks": cache.pool.count_free_blocks(first.index)
        + len(cache.pool.free_sectors) * first.blocks_per_sector,
        "evictable_blocks": len(first.ledger.cached_blocks),
        "block_size": first.tokens_per_page,
        "tokens": tokens,
        "blocks_held": held,
        "bytes_per_block": first.bytes_per_block,
    }


def _kv_groups(cache: Any, scheduler: Any, groups: list[Any], blocks: Any) -> Record:
    """One pool for every group; a cached block that nobody uses is among its free ones."""
    first = next((one for one in groups if "Full" in type(one).__name__), groups[0])
    tokens, held = _held(scheduler, first.block_table)
    return {
        "num_blocks": cache.num_blocks,
        "free_blocks": len(blocks._uninit_block_ids),
        "evictable_blocks": len(blocks._init_block_ids),
        "block_size": cache.block_size,
        "tokens": tokens,
        "blocks_held": held,
    }


def _held(scheduler: Any, table: Any) -> tuple[int, int]:
    """Tokens of the active requests, and the blocks of their tables."""
    tokens = held = 0
    for name, request in list(scheduler.active_requests.items()):
        blocks = table.get(name)
        if blocks:
            tokens += int(request.current_len())
            held += len(blocks)
    return tokens, held
