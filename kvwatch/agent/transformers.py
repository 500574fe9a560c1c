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

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvwatch.agent.environment import place
from kvwatch.agent.limits import Limits, Wish
from kvwatch.model.server import AgentState, KvCacheState, SchedulerState

log = logging.getLogger("kvwatch.agent")

WAIT_S = 0.25
_MARK = "_kvwatch_attached"


def attach(manager: Any, server: str | None = None, *, rank: int = 0) -> bool:
    """Watch one ContinuousBatchingManager, before or after its start; call it once for each manager.

    `server` is its name in kvwatch's configuration (default: KVWATCH_SERVER). False when no server is
    named or the manager is not as expected; never raises.
    """
    try:
        here = place(server)
        if here is None or getattr(manager, _MARK, None) is not None:
            return False
        from kvwatch.agent.publisher import Publisher
        from kvwatch.agent.torch_memory import TorchMemory

        memory = TorchMemory()
        agent = ManagerAgent(manager, Limits(here.lease, here.server), here.server, rank, memory.compact)
        setattr(manager, _MARK, agent)
        agent.hook()
        Publisher(here, engine=agent.read, memory=memory.read, rank=rank, host=agent.host).start()
        return True
    except Exception as error:  # noqa: BLE001 - the guard: nothing may reach the host
        log.warning("kvwatch agent: cannot attach to this manager: %r", error)
        return False


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
        self._state: AgentState | None = None
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
        """Put this agent's step before the scheduler's."""
        try:
            scheduler = processor.scheduler
            if self._scheduler is scheduler:
                return
            self._scheduler = scheduler
            if not isinstance(getattr(scheduler, "waiting_requests_order", None), deque):
                self._refusal = f"the scheduler of {self.host} is not known"
                return
            original = scheduler.schedule_batch

            def schedule_batch(*args: Any, **kwargs: Any) -> Any:
                hidden = self._before(processor)
                try:
                    return original(*args, **kwargs)
                finally:
                    if hidden:
                        scheduler.waiting_requests_order.extend(hidden)

            scheduler.schedule_batch = schedule_batch
        except Exception as error:  # noqa: BLE001 - the guard
            self._refusal = "the manager is not as expected"
            log.warning("kvwatch agent: cannot limit this manager: %r", error)

    def _before(self, processor: Any) -> list[Any]:
        """Before a step: the waiting requests that it must not see."""
        try:
            if self._asked:
                self._asked = False
                self._state = self._note(processor)
                self._noted.set()
            wish = self._limits.look(time.monotonic())
            if self._limits.take_compaction():
                self._compact()
            return _hide(processor.scheduler, wish)
        except Exception as error:  # noqa: BLE001 - the guard
            if not self._refusal:
                self._refusal = "a fault inside the agent"
                log.warning("kvwatch agent: gives up limiting: %r", error)
            return []

    def read(self) -> AgentState | None:
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

    def _note(self, processor: Any) -> AgentState:
        scheduler = processor.scheduler
        own = getattr(scheduler, "max_requests_per_batch", None)
        wish = self._limits.wish
        kv, held = _kv(processor.cache, scheduler)
        return AgentState(
            server=self._server,
            engine="0",
            rank=self._rank,
            pid=os.getpid(),
            seq=0,
            kv=kv,
            scheduler=SchedulerState(
                running=len(scheduler.active_requests),
                waiting=len(scheduler.waiting_requests),
                max_running=own,
            ),
            effective_max_running=own if self._refusal else _effective(own, wish),
            blocks_held=held,
            host=self.host,
            limits=f"refused: {self._refusal}" if self._refusal else "obeyed",
        )


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


def _kv(cache: Any, scheduler: Any) -> tuple[KvCacheState | None, int | None]:
    """Blocks and tokens: in sectors that attention types share (from 5.16 on), before that in one pool."""
    allocators = getattr(cache, "cache_allocators", None)
    if isinstance(allocators, dict) and hasattr(cache, "pool"):
        return _kv_sectors(cache, scheduler, list(allocators.values()))
    groups, blocks = getattr(cache, "group_cache_managers", None), getattr(cache, "_block_manager", None)
    if groups and blocks is not None:
        return _kv_groups(cache, scheduler, groups, blocks)
    return None, None


def _kv_sectors(cache: Any, scheduler: Any, allocators: list[Any]) -> tuple[KvCacheState, int | None]:
    """As the first allocator of pages that never slide sees it: a free sector is its blocks' worth."""
    first = next((one for one in allocators if "Full" in type(one).__name__), allocators[0])
    free = cache.pool.count_free_blocks(first.index) + len(cache.pool.free_sectors) * first.blocks_per_sector
    evictable = len(first.ledger.cached_blocks)
    tokens, held = _held(scheduler, first.block_table)
    state = KvCacheState(
        num_blocks=first.num_blocks,
        used_blocks=first.num_blocks - free - evictable,
        free_blocks=free,
        evictable_blocks=evictable,
        block_size_tokens=first.tokens_per_page,
        tokens=tokens,
        pool_bytes=first.num_blocks * first.bytes_per_block,
    )
    return state, held


def _kv_groups(cache: Any, scheduler: Any, groups: list[Any], blocks: Any) -> tuple[KvCacheState, int | None]:
    """One pool for every group; a cached block that nobody uses is among its free ones."""
    free, evictable = len(blocks._uninit_block_ids), len(blocks._init_block_ids)
    first = next((one for one in groups if "Full" in type(one).__name__), groups[0])
    tokens, held = _held(scheduler, first.block_table)
    state = KvCacheState(
        num_blocks=cache.num_blocks,
        used_blocks=cache.num_blocks - free - evictable,
        free_blocks=free,
        evictable_blocks=evictable,
        block_size_tokens=cache.block_size,
        tokens=tokens,
    )
    return state, held


def _held(scheduler: Any, table: Any) -> tuple[int, int]:
    """Tokens of the active requests, and the blocks of their tables."""
    tokens = held = 0
    for name, request in list(scheduler.active_requests.items()):
        blocks = table.get(name)
        if blocks:
            tokens += int(request.current_len())
            held += len(blocks)
    return tokens, held
