"""How would vLLM's V1 scheduler treat this load? A discrete simulation, one engine step at a time.

Modelled: the block pool with its null block, the FCFS waiting queue, running before waiting under
a token budget, chunked prefill, preemption of the youngest by recomputation, the gate on the full
input length, and the watermark. A step takes base + a·tokens + b·KV tokens read. Nothing here reads
a clock or draws a random number: the same arrivals give the same run.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from kvwatch.lab.sim_load import Arrival
from kvwatch.lab.sim_stats import Stats, length_buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds that one engine step takes: base + per token computed + per KV token read."""

    base_s: float
    per_token_s: float
    per_kv_token_s: float

    def seconds(self, tokens: int, kv_tokens: int) -> float:
        """How long a step over this many tokens takes."""
        return self.base_s + self.per_token_s * tokens + self.per_kv_token_s * kv_tokens


# Fitted to the means of a recorded run of Llama-3.1-8B (bf16) under vLLM 0.19 on an RTX 4090.
RTX_4090_8B = StepTime(base_s=0.0165, per_token_s=65e-6, per_kv_token_s=0.19e-6)
H100_LIKE = StepTime(base_s=0.0065, per_token_s=20e-6, per_kv_token_s=60e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """The engine's settings under vLLM's names. `num_blocks` includes the null block.

    Raises ValueError where vLLM would refuse to start.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    reserve_full_isl: bool = True
    watermark: float = 0.0
    prefix_caching: bool = False
    step_time: StepTime = H100_LIKE

    def __post_init__(self) -> None:
        if self.capacity_tokens < self.max_model_len:
            raise ValueError(
                f"{self.capacity_tokens} KV tokens cannot hold one sequence of max_model_len "
                f"{self.max_model_len}: raise num_blocks or lower max_model_len"
            )
        if min(self.block_size, self.max_num_seqs, self.max_num_batched_tokens) < 1:
            raise ValueError("block_size, max_num_seqs and max_num_batched_tokens must be at least 1")

    @property
    def allocatable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_blocks - 1

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into the pool."""
        return self.allocatable_blocks * self.block_size

    @property
    def watermark_blocks(self) -> int:
        """Blocks that an admission must leave free."""
        return int(self.watermark * self.num_blocks)


class Request:
    """One request inside the engine. `tokens` = prompt + output so far; `computed` are in the KV cache."""

    __slots__ = (
        "aborted", "arrival_s", "blocks", "computed", "first_token_s", "highest", "id", "kept",
        "last_token_s", "output", "preemptions", "prompt", "scheduled_s", "target", "tokens",
    )  # fmt: skip

    def __init__(self, number: int, arrival: Arrival, target: int) -> None:
        self.id = number
        self.arrival_s = arrival.at_s
        self.prompt = arrival.prompt_tokens
        self.target = target  # output tokens it will produce
        self.tokens = arrival.prompt_tokens
        self.output = 0
        self.computed = 0
        self.highest = 0  # most tokens ever computed: what lies below is recomputation
        self.kept = 0  # tokens computed when it was last preempted: all that a prefix cache may still hold
        self.blocks = 0
        self.preemptions = 0
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self.aborted = False


class BlockPool:
    """Free blocks in the order in which they are reused, oldest first.

    With caching, a freed request's blocks stay known until others take them, its last block
    first; what is left of its prefix can be claimed when it comes back. Prefixes are not shared
    between requests.
    """

    __slots__ = ("_freed", "caching", "free", "size")

    def __init__(self, size: int, caching: bool) -> None:
        self.size = size
        self.free = size
        self.caching = caching
        self._freed: OrderedDict[int, int] = OrderedDict({-1: size} if caching else {})

    def take(self, blocks: int) -> None:
        """Hand out blocks; there must be enough."""
        if blocks > self.free:
            raise ValueError(f"{blocks} blocks asked for, {self.free} free")
        self.free -= blocks
        while self.caching and blocks:
            owner, held = next(iter(self._freed.items()))
            used = min(held, blocks)
            blocks -= used
            if used == held:
                del self._freed[owner]
            else:
                self._freed[owner] = held - used

    def give(self, owner: int, blocks: int) -> None:
        """Take a request's blocks back."""
        self.free += blocks
        if self.caching and blocks:
            self._freed[owner] = blocks

    def cached(self, owner: int) -> int:
        """Blocks of this request's prefix that nobody has taken yet."""
        return self._freed.get(owner, 0) if self.caching else 0

    def claim(self, owner: int, blocks: int) -> None:
        """Give a returning request the first `blocks` of its own cached prefix; the rest is forgotten."""
        left = self._freed.pop(owner, 0) - blocks
        self.free -= blocks
        if left > 0:
            self._freed[-1] = self._freed.get(-1, 0) + left
            self._freed.move_to_end(-1, last=False)


@dataclass(slots=True, kw_only=True)
class Step:
    """One engine step: what was scheduled, admitted and preempted, and when it ends."""

    start_s: float
    budget: int
    end_s: float = 0.0
    tokens: int = 0
    kv_tokens: int = 0
    recomputed: int = 0
    scheduled: list[tuple[Request, int]] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)

    def add(self, request: Request, new: int) -> None:
        """Schedule `new` tokens of a request."""
        self.scheduled.append((request, new))
        self.budget -= new
        self.tokens += new
        self.kv_tokens += request.computed + new


@dataclass(frozen=True, slots=True)
class Gauges:
    """What the engine published with its last finished step."""

    running: int = 0
    waiting: int = 0
    used_blocks: int = 0


class VllmSim:
    """The engine. `max_num_active_reqs` may be changed at any time; it gates admission, it evicts nobody."""

    def __init__(self, config: SimConfig, arrivals: Iterable[Arrival] = ()) -> None:
        self.config = config
        self.pool = BlockPool(config.allocatable_blocks, config.prefix_caching)
        self.stats = Stats(lengths=length_buckets(config.max_model_len))
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.max_num_active_reqs: int | None = None
        self.gauges = Gauges()
        self.last_step: Step | None = None
        self.clock_s = 0.0
        self.on_finish: Callable[[Request, float], None] | None = None
        self._arrivals: Iterator[Arrival] = iter(arrivals)
        self._next = next(self._arrivals, None)
        self._step: Step | None = None  # the one in progress
        self._ready_s = 0.0  # when the engine can begin its next step
        self._numbers = 0

    @property
    def usage_ratio(self) -> float:
        """KV usage as vLLM publishes it: used over allocatable blocks (the null block excluded)."""
        return self.gauges.used_blocks / self.config.allocatable_blocks

    def submit(self, arrival: Arrival) -> Request:
        """Queue a request. Raises ValueError for a prompt that the engine would refuse."""
        room = self.config.max_model_len - arrival.prompt_tokens
        if arrival.prompt_tokens < 1 or arrival.output_tokens < 1 or room < 1:
            raise ValueError(f"{arrival} does not fit max_model_len {self.config.max_model_len}")
        request = Request(self._numbers, arrival, min(arrival.output_tokens, room))
        self._numbers += 1
        self.waiting.append(request)
        return request

    def abort(self, chosen: Callable[[Request], bool]) -> int:
        """Drop every chosen request, as when its client hangs up; returns how many."""
        gone = [request for request in (*self.running, *self.waiting) if chosen(request)]
        for request in gone:
            request.aborted = True
            self._free(request)
        self.running = [request for request in self.running if not request.aborted]
        self.waiting = deque(request for request in self.waiting if not request.aborted)
        self.stats.aborted_total += len(gone)
        return len(gone)

    def stall(self, seconds: float) -> None:
        """Hang: the step in progress (or the next) ends later, while requests go on arriving."""
        if self._step is not None:
            self._step.end_s += seconds
        else:
            self._ready_s = max(self._ready_s, self.clock_s) + seconds

    def advance(self, until_s: float) -> None:
        """Run every step that ends by `until_s`; one still in progress then stays in progress."""
        while self._step is not None or self._begin(until_s):
            step = self._step
            if step is None or step.end_s > until_s:
                break
            self._finish(step)
        self.clock_s = max(self.clock_s, until_s)

    def run_to_end(self, limit_s: float) -> None:
        """Run until every request is done, at most to `limit_s` simulated seconds."""
        while (self._next or self.waiting or self.running or self._step) and self.clock_s < limit_s:
            self.advance(min(limit_s, max(self.clock_s, self._ready_s) + 1.0))

    def _begin(self, until_s: float) -> bool:
        """Start the next step if there is work by `until_s`."""
        self._receive(self._ready_s)
        if not self.running and not self.waiting:
            if self._next is None or self._next.at_s > until_s:
                return False
            self._ready_s = self._next.at_s
            self._receive(self._ready_s)
        step = Step(start_s=self._ready_s, budget=self.config.max_num_batched_tokens)
        self._schedule(step)
        if not step.scheduled:  # all admission is closed: look again at the next call
            self._ready_s = max(self._ready_s, until_s)
            self._receive(self._ready_s)
            self._publish()
            return False
        step.end_s = step.start_s + self.config.step_time.seconds(step.tokens, step.kv_tokens)
        self._step = step
        return True

    def _receive(self, now_s: float) -> None:
        while self._next is not None and self._next.at_s <= now_s:
            self.submit(self._next)
            self._next = next(self._arrivals, None)

    def _schedule(self, step: Step) -> None:
        """Running requests first; new ones only in a step that preempted nobody."""
        index, block_size = 0, self.config.block_size
        while index < len(self.running) and step.budget > 0:
            request = self.running[index]
            new = min(request.tokens - request.computed, step.budget)
            full = request.computed + new > request.blocks * block_size
            if full and not self._make_room(step, request, new):
                break
            step.add(request, new)
            index += 1
        if not step.preempted:
            self._admit(step)

    def _make_room(self, step: Step, request: Request, new: int) -> bool:
        """Allocate a running request's next blocks, preempting from the youngest; False: it fell itself."""
        needed = self._blocks_for(request.computed + new) - request.blocks
        while needed > self.pool.free:
            victim = self.running.pop()
            self._preempt(step, victim)
            if victim is request:
                return False
        self.pool.take(needed)
        request.blocks += needed
        return True

    def _preempt(self, step: Step, victim: Request) -> None:
        self._free(victim)
        victim.kept, victim.computed = victim.computed, 0
        victim.preemptions += 1
        self.stats.preemptions_total += 1
        self.waiting.appendleft(victim)
        step.preempted.append(victim)

    def _admit(self, step: Step) -> None:
        """Admit from the front of the queue while seats, tokens and blocks last."""
        seats = self.config.max_num_seqs
        if self.max_num_active_reqs is not None:
            seats = min(seats, self.max_num_active_reqs)
        while self.waiting and step.budget > 0 and len(self.running) < seats:
            request = self.waiting[0]
            cached = self._cached_blocks(request)
            new = min(request.tokens - cached * self.config.block_size, step.budget)
            if not self._fits(request, cached, new):
                break
            self.waiting.popleft()
            self._start(step, request, cached, new)

    def _cached_blocks(self, request: Request) -> int:
        """Full blocks of its own prefix that a returning request finds; one token is always computed."""
        full = min(request.kept, request.tokens - 1) // self.config.block_size
        return min(self.pool.cached(request.id), full)

    def _fits(self, request: Request, cached: int, new: int) -> bool:
        """Whether the pool can take it: with the gate, the whole sequence so far must fit, not one chunk."""
        tokens = cached * self.config.block_size + new
        blocks = self._blocks_for(request.tokens if self.config.reserve_full_isl else tokens)
        spare = self.config.watermark_blocks if self.running else 0  # else a long prompt could wait for ever
        return blocks + spare <= self.pool.free

    def _start(self, step: Step, request: Request, cached: int, new: int) -> None:
        if request.preemptions:
            self.pool.claim(request.id, cached)
        request.computed = cached * self.config.block_size
        request.blocks = self._blocks_for(request.computed + new)
        self.pool.take(request.blocks - cached)
        if request.scheduled_s is None:
            request.scheduled_s = step.start_s
            self.stats.prefix_queries_total += request.tokens if self.config.prefix_caching else 0
        self.running.append(request)
        step.admitted.append(request)
        step.add(request, new)

    def _finish(self, step: Step) -> None:
        """Book a step at its end: tokens, latencies, finished requests; then publish the gauges."""
        previous_end_s = self.last_step.end_s if self.last_step else -1.0
        prompts = generated = steady = 0
        for request, new in step.scheduled:
            if request.aborted or not self._compute(step, request, new):
                continue
            generated += 1
            if request.first_token_s is None:
                prompts += request.prompt
                self._first_token(request, step.end_s)
            elif request.last_token_s == previous_end_s:
                steady += 1
            else:
                self.stats.itl.observe(step.end_s - request.last_token_s)
            request.last_token_s = step.end_s
            request.tokens += 1
            request.output += 1
            if request.output >= request.target:
                step.finished.append(request)
        if steady:
            self.stats.itl.observe(step.end_s - previous_end_s, steady)
        self._count(step, prompts, generated)
        self._retire(step)
        self.last_step, self._step, self._ready_s = step, None, step.end_s
        self._publish()

    def _compute(self, step: Step, request: Request, new: int) -> bool:
        """Book computed tokens; True when the request has caught up and so gets its next token."""
        if request.computed < request.highest:
            step.recomputed += min(new, request.highest - request.computed)
        request.computed += new
        if request.computed > request.highest:
            request.highest = request.computed
        return request.computed >= request.tokens

    def _first_token(self, request: Request, now_s: float) -> None:
        request.first_token_s = now_s
        self.stats.ttft.observe(now_s - request.arrival_s)

    def _count(self, step: Step, prompts: int, generated: int) -> None:
        stats = self.stats
        stats.steps_total += 1
        stats.busy_s += step.end_s - step.start_s
        stats.computed_tokens_total += step.tokens
        stats.prompt_tokens_total += prompts
        stats.generation_tokens_total += generated
        stats.recomputed_tokens_total += step.recomputed
        stats.recompute_s += step.recomputed * self.config.step_time.per_token_s
        stats.iteration_tokens.observe(prompts + generated)

    def _retire(self, step: Step) -> None:
        if not step.finished:
            return
        done = set(step.finished)
        self.running = [request for request in self.running if request not in done]
        for request in step.finished:
            self._free(request)
            self._observe(request, step.end_s)
            if self.on_finish:
                self.on_finish(request, step.end_s)

    def _observe(self, request: Request, now_s: float) -> None:
        """Record a finished request as vLLM does: queue time ends at the *first* scheduling."""
        stats = self.stats
        scheduled_s = now_s if request.scheduled_s is None else request.scheduled_s
        first_s = now_s if request.first_token_s is None else request.first_token_s
        stats.finished_total += 1
        stats.e2e.observe(now_s - request.arrival_s)
        stats.http_duration.observe(now_s - request.arrival_s)
        stats.queue.observe(scheduled_s - request.arrival_s)
        stats.prefill.observe(first_s - scheduled_s)
        stats.decode.observe(now_s - first_s)
        stats.inference.observe(now_s - scheduled_s)
        stats.tpot.observe((now_s - first_s) / (request.output - 1) if request.output > 1 else 0.0)
        stats.prompt_length.observe(request.prompt)
        stats.generation_length.observe(request.output)
        stats.preemptions.observe(request.preemptions)

    def _free(self, request: Request) -> None:
        self.pool.give(request.id, request.blocks)
        request.blocks = 0

    def _publish(self) -> None:
        self.gauges = Gauges(len(self.running), len(self.waiting), self.pool.size - self.pool.free)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)
