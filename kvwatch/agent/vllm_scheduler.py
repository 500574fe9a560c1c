"""What does vLLM's scheduler hold, and how is it limited? Called at the top of every `schedule()`.

Admission is limited by `max_num_active_reqs` where it exists (0.31 on). Before, `max_num_running_reqs`
is both the admission limit and the bound of an assertion that ends the engine; it is therefore never
set below the number of running requests.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

from kvwatch.agent.limits import Limits, Wish
from kvwatch.wire_record import Record

KNOWN_FROM = (0, 9, 2)
KNOWN_BEFORE = (0, 34, 0)
"""Releases whose scheduler was read: others are told about, never limited."""

WAIT_S = 0.25
EXACT_BLOCKS = 1024  # pools up to this size are counted within a step, larger ones beside it
COUNT_PERIOD_S = 10.0
COUNT_CHUNK = 256
MAX_COUNTED = 500_000


def refusal(version: str) -> str:
    """Why a vLLM of this version is not limited; "" where it is."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version, re.ASCII)
    if found is None:
        return f"vLLM {version} is not a known release"
    numbers = tuple(int(group) for group in found.groups())
    if KNOWN_FROM <= numbers < KNOWN_BEFORE:
        return ""
    return f"vLLM {version} is not known to this kvwatch (0.9.2 to 0.33 are)"


class Gate:
    """Holds a scheduler to a wish. `apply` never lets a bound fall below what is running."""

    def __init__(self, scheduler: Any) -> None:
        self._active = hasattr(scheduler, "max_num_active_reqs")
        self.own_running = int(scheduler.max_num_running_reqs)
        self.own = int(scheduler.max_num_active_reqs) if self._active else self.own_running
        self.effective = self.own
        self._wish = Wish()
        self._restricts = False

    def apply(self, scheduler: Any, wish: Wish) -> None:
        """Before a step. Costs next to nothing while nothing changes."""
        if wish is not self._wish:
            self._wish = wish
            self._set(wish)
            if self._active:
                scheduler.max_num_active_reqs = self.effective
            elif not self._restricts:
                scheduler.max_num_running_reqs = self.own_running
        if self._restricts and not self._active:
            scheduler.max_num_running_reqs = min(
                self.own_running, max(self.effective, len(scheduler.running))
            )

    def _set(self, wish: Wish) -> None:
        cap = self.own if wish.max_running is None else min(self.own, max(1, wish.max_running))
        self.effective = cap if wish.admit else 0
        self._restricts = self.effective < self.own

    def release(self, scheduler: Any) -> None:
        """Back to the server's own limits."""
        self.apply(scheduler, Wish())


class SchedulerAgent:
    """One scheduler: limits it before a step, and notes its state there when the publisher asks."""

    def __init__(
        self, scheduler: Any, limits: Limits | None, *, server: str, engine: int, pid: int, version: str
    ):
        self._server, self._engine, self._pid = server, engine, pid
        self._host = f"vllm {version}"
        self._scheduler = scheduler
        self._limits = limits
        self._refusal = refusal(version)
        self._gate: Gate | None = None
        if limits is not None and not self._refusal:
            self._gate = Gate(scheduler)
        self._own = _whole(getattr(scheduler, "max_num_active_reqs", None) or scheduler.max_num_running_reqs)
        self._asked = False
        self._noted = threading.Event()
        self._state: Record | None = None
        self._counted: tuple[int, float] | None = None  # evictable blocks, when

    def before_step(self, scheduler: Any, now_s: float) -> None:
        """Look at the lease when it is time, hold the scheduler to it, and note the state when asked."""
        gate, limits = self._gate, self._limits
        if gate is not None and limits is not None:
            gate.apply(scheduler, limits.wish if now_s < limits.due_s else limits.look(now_s))
        if self._asked:
            self._asked = False
            self._state = self._note(scheduler)
            self._noted.set()

    def give_up(self, scheduler: Any) -> None:
        """Never limit again, and leave the server's own limits behind."""
        gate, self._gate = self._gate, None
        self._refusal = self._refusal or "a fault inside the agent"
        if gate is not None:
            gate.release(scheduler)

    def read(self) -> Record | None:
        """The state as of the next step; of now where no step comes (an idle engine, or a long step)."""
        self._noted.clear()
        self._asked = True
        if not self._noted.wait(WAIT_S):
            self._asked = False
            self._state = self._note(self._scheduler)
        self._count_beside()
        return self._state

    def _note(self, scheduler: Any) -> Record:
        running, waiting = _counts(scheduler)
        gate = self._gate
        return {
            "server": self._server,
            "engine": self._engine,
            "rank": 0,
            "pid": self._pid,
            "kv": self._kv(scheduler),
            "scheduler": {
                "running": running,
                "waiting": waiting,
                "max_running": self._own,
                "effective_max_running": self._own if gate is None else gate.effective,
            },
            "host": self._host,
            "limits": f"refused: {self._refusal}" if self._refusal else ("obeyed" if gate else "off"),
        }

    def _kv(self, scheduler: Any) -> Record:
        manager = scheduler.kv_cache_manager
        pool = manager.block_pool
        blocks = int(pool.num_gpu_blocks) - 1  # without the null block
        free = int(pool.get_num_free_blocks())
        evictable = self._evictable(pool, blocks, free)
        tokens, held, size = _held(scheduler, manager)
        return {
            "num_blocks": blocks,
            "free_blocks": free - (evictable or 0),
            "evictable_blocks": evictable,
            "block_size": size,
            "tokens": tokens,
            "blocks_held": held,
            "bytes_per_block": _bytes_per_block(scheduler, blocks + 1),
        }

    def _evictable(self, pool: Any, blocks: int, free: int) -> int | None:
        """Cached blocks that nobody uses: exact in a small pool, of the last ten seconds in a large one."""
        if not getattr(pool, "enable_caching", True):
            return 0
        if blocks <= EXACT_BLOCKS:
            return sum(map(_is_evictable, pool.blocks))
        return None if self._counted is None else min(free, self._counted[0])

    def _count_beside(self) -> None:
        """Count a large pool in small pieces, so that the engine never waits for the interpreter."""
        pool = self._scheduler.kv_cache_manager.block_pool
        blocks, now_s = pool.blocks, time.monotonic()
        if not EXACT_BLOCKS < len(blocks) <= MAX_COUNTED:
            return
        if self._counted is not None and now_s - self._counted[1] < COUNT_PERIOD_S:
            return
        found = 0
        for start in range(0, len(blocks), COUNT_CHUNK):
            found += sum(map(_is_evictable, blocks[start : start + COUNT_CHUNK]))
            time.sleep(0.0002)
        self._counted = found, now_s


def _is_evictable(block: Any) -> bool:
    return block.ref_cnt == 0 and block.block_hash is not None and not block.is_null


def _counts(scheduler: Any) -> tuple[int, int]:
    both: Callable[[], tuple[int, int]] | None = getattr(scheduler, "get_request_counts", None)
    if both is not None:
        running, waiting = both()
        return int(running), int(waiting)
    return len(scheduler.running), len(scheduler.waiting)


def _held(scheduler: Any, manager: Any) -> tuple[int | None, int | None, int | None]:
    """Tokens in the KV pool, the blocks that hold them, and the block size, over the groups of one size.

    A request that is shared in a prefix counts its tokens and its blocks both. Groups without pages of
    tokens (Mamba) are left out; of sliding windows what has slid out is neither block nor token.
    """
    groups = getattr(getattr(manager, "coordinator", None), "single_type_managers", None)
    if not groups:
        return None, None, None
    paged = [group for group in groups if "Mamba" not in type(group).__name__]
    if not paged:
        return None, None, None
    size = int(paged[0].block_size)
    tokens = held = 0
    running = scheduler.running
    for group in paged:
        if int(group.block_size) != size:
            continue
        table, slides = group.req_to_blocks, "Full" not in type(group).__name__
        for request in running:
            blocks = table.get(request.request_id, ())
            gone = _slid_out(blocks) if slides else 0
            held += len(blocks) - gone
            tokens += min(max(0, request.num_computed_tokens - gone * size), (len(blocks) - gone) * size)
    return tokens, held, size


def _slid_out(blocks: Any) -> int:
    """How many leading blocks are placeholders, by halves."""
    low, high = 0, len(blocks)
    while low < high:
        middle = (low + high) // 2
        if blocks[middle].is_null:
            low = middle + 1
        else:
            high = middle
    return low


def _bytes_per_block(scheduler: Any, blocks: int) -> int | None:
    tensors = getattr(getattr(scheduler, "kv_cache_config", None), "kv_cache_tensors", None)
    if not tensors or blocks <= 0:
        return None
    total = sum(int(tensor.size) for tensor in tensors)
    return total // blocks or None


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int) else None
