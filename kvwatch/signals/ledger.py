"""Where has a GPU's memory gone? Parts of one pass that add up to the total, exactly, whatever came in.

What cannot be told apart is in the coarser part: without a pool size all of a server's memory is
`engine_other`; a process whose size is not reported, or that cannot be looked up from here (a foreign pid
namespace), is in `unattributed`, as is what no process holds (contexts, managed memory, dying processes).
With v1 accounting the driver's own reserve is counted as used and ends up there too. No cause and no quota
is read into any of it: a limit of MPS or of a server's settings is not a cap on what NVML shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvwatch.model.gpu import GpuMemory, GpuProcess
from kvwatch.model.server import AgentState, Basis, EngineState, ServerState
from kvwatch.model.signal import Holder, LedgerPart
from kvwatch.signals.occupancy import usage_ratio

PARTS = (
    "weights",
    "kv_used",
    "kv_free",
    "engine_other",
    "other_process",
    "dead_process",
    "driver_reserved",
    "unattributed",
    "free",
)
"""Every part, in the order in which they are shown."""

Owned = Sequence[tuple[GpuProcess, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one server says it keeps on one GPU, in bytes; None where it does not tell."""

    weights: int | None = None
    pool: int | None = None
    pool_used: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The parts (absent ones are unknown, not zero), and whether any had to be clamped to add up."""

    parts: tuple[LedgerPart, ...]
    clamped: bool

    def bytes_of(self, part: str) -> int | None:
        """Bytes of one part; None when it is absent."""
        return next((entry.bytes for entry in self.parts if entry.part == part), None)


def ledger(
    memory: GpuMemory, processes: Owned | None, shares: Mapping[str, Share], *, host_pids: bool
) -> Ledger:
    """Split one pass into parts. `shares` holds what fresh server samples tell about this GPU."""
    book = _Book(memory)
    if processes is not None:
        _enter_servers(book, processes, shares)
        if _told_at_all([one for one, server in processes if server]):
            book.enter("engine_other", 0)
        if host_pids:
            _enter_all(book, "dead_process", [one for one, _ in processes if one.alive is False])
        others = [one for one, server in processes if not server and one.alive is not False and _known(one)]
        _enter_all(book, "other_process", others)
    return book.close()


class _Book:
    """Spends the used bytes part by part, never more than there are."""

    def __init__(self, memory: GpuMemory) -> None:
        total = max(0, memory.total_bytes)
        self.clamped = memory.total_bytes < 0
        self.parts: dict[str, int] = {}
        self.left = total
        self.enter("free", memory.free_bytes)
        if memory.reserved_bytes is not None:
            self.enter("driver_reserved", memory.reserved_bytes)

    def enter(self, part: str, amount: int) -> None:
        """Add to a part what is there of the amount."""
        given = min(max(0, amount), self.left)
        self.clamped = self.clamped or given != amount
        self.parts[part] = self.parts.get(part, 0) + given
        self.left -= given

    def close(self) -> Ledger:
        """What is left is nobody's."""
        self.enter("unattributed", self.left)
        parts = tuple(LedgerPart(part=part, bytes=self.parts[part]) for part in PARTS if part in self.parts)
        return Ledger(parts=parts, clamped=self.clamped)


def _enter_servers(book: _Book, processes: Owned, shares: Mapping[str, Share]) -> None:
    held: dict[str, int] = {}
    for process, server in processes:
        if server and process.used_bytes is not None:
            held[server] = held.get(server, 0) + max(0, process.used_bytes)
            book.clamped = book.clamped or process.used_bytes < 0
    for server, amount in held.items():
        _enter_server(book, amount, shares.get(server, Share()))


def _enter_server(book: _Book, held: int, share: Share) -> None:
    """One server's memory: weights and pool as far as it tells and as they fit; the rest is "other"."""
    left = held
    for part, wanted in _told(share):
        fits = min(wanted, left)
        book.clamped = book.clamped or fits != wanted
        book.enter(part, fits)
        left -= fits
    book.enter("engine_other", left)


def _told(share: Share) -> list[tuple[str, int]]:
    told = []
    if share.weights is not None:
        told.append(("weights", max(0, share.weights)))
    if share.pool is not None and share.pool_used is not None:
        used = min(max(0, share.pool_used), max(0, share.pool))
        told += [("kv_used", used), ("kv_free", max(0, share.pool) - used)]
    return told


def _known(process: GpuProcess) -> bool:
    """Whether anything is known of the process: a pid of a foreign namespace could be anybody's, ours too."""
    return process.alive is True or bool(process.command or process.name or process.cgroup)


def _told_at_all(processes: Sequence[GpuProcess]) -> bool:
    """Whether what these hold may be stated: nothing where there are none, else one size at least."""
    return not processes or any(process.used_bytes is not None for process in processes)


def _enter_all(book: _Book, part: str, processes: Sequence[GpuProcess]) -> None:
    """What is told of their sizes; where none is told the part is absent, since that is no 0."""
    if _told_at_all(processes):
        book.enter(part, sum(max(0, process.used_bytes or 0) for process in processes))


def share_of(state: ServerState, gpus: int, uuid: str, agents: Sequence[AgentState]) -> Share:
    """What a server's newest page tells about one of its GPUs (it is on `gpus` of them).

    Pool and weights are per GPU of an engine. One engine on several GPUs (tensor parallel) has them on
    each; several engines on one GPU add up; several on several are told apart only by their agents.
    """
    engines: Sequence[EngineState] = state.engines
    if gpus > 1 and len(engines) > 1:
        here = {agent.engine for agent in agents if agent.gpu_uuid == uuid}
        engines = [engine for engine in engines if engine.engine in here]
    if not engines:
        return Share()
    on_this_gpu = [agent for agent in agents if agent.gpu_uuid == uuid]
    return Share(
        weights=_total([_weights(engine, on_this_gpu) for engine in engines]),
        pool=_total([engine.kv.pool_bytes for engine in engines]),
        pool_used=_total([_pool_used(engine, state) for engine in engines]),
    )


def _weights(engine: EngineState, here: Sequence[AgentState]) -> int | None:
    """As the page tells, else as the engine's agents on this GPU do."""
    if engine.kv.weights_bytes is not None:
        return engine.kv.weights_bytes
    told = [
        agent.allocator.weights_bytes for agent in here if agent.engine == engine.engine and agent.allocator
    ]
    return _total(told) if told else None


def _total(amounts: Sequence[int | None]) -> int | None:
    """The sum, unknown as soon as one is."""
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None


def _pool_used(engine: EngineState, state: ServerState) -> int | None:
    usage = usage_ratio(engine.kv, state.semantics)
    if usage is None or engine.kv.pool_bytes is None or state.semantics.basis is not Basis.OCCUPANCY:
        return None
    return round(usage * engine.kv.pool_bytes)


def holders(processes: Owned) -> tuple[Holder, ...]:
    """Who holds memory, the largest first, for people."""
    return tuple(
        Holder(
            pid=process.pid,
            used_bytes=process.used_bytes,
            server=server,
            name=process.name,
            command=process.command,
            cgroup=process.cgroup,
            dead=process.alive is False,
        )
        for process, server in sorted(processes, key=lambda owned: -(owned[0].used_bytes or 0))
    )
