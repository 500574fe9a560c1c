"""Metrics of inference servers, their engines, and the agents inside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvwatch.catalogue.metrics_spec import (
    Facts,
    MetricSpec,
    PerReport,
    Reader,
    Row,
    counter,
    experimental,
    gauge,
    info,
    sharing,
    summary,
)
from kvwatch.model.report import ServerReport, TickReport
from kvwatch.model.server import AllocatorState, ArenaState, EngineState
from kvwatch.model.signal import EngineSignals, Quantiles

ENGINE = ("server", "engine")
RANK = ("server", "engine", "rank")
NO_SIGNALS = EngineSignals(server="", engine="")
NO_STATE = EngineState()


def engines_of(server: ServerReport) -> tuple[str, ...]:
    """The engines known of this server; "0" when none is, so that server series always have one."""
    states = server.state.engines if server.state is not None else ()
    names = dict.fromkeys([e.engine for e in states] + [e.engine for e in server.signals.engines])
    return tuple(names) or ("0",)


def _pairs(report: TickReport) -> Iterator[tuple[tuple[str, str], EngineState, EngineSignals]]:
    for server in report.servers:
        states = {e.engine: e for e in server.state.engines} if server.state is not None else {}
        signals = {e.engine: e for e in server.signals.engines}
        for engine in engines_of(server):
            ids = (server.server, engine)
            yield ids, states.get(engine, NO_STATE), signals.get(engine, NO_SIGNALS)


_engines = PerReport(lambda report: list(_pairs(report)))


def _server(pick: Callable[[ServerReport], float | None]) -> Reader:
    def read(report: TickReport) -> Iterator[Row]:
        for server in report.servers:
            value = pick(server)
            if value is None:
                continue
            for engine in engines_of(server):
                yield (server.server, engine), value

    return read


def _engine(pick: Callable[[EngineState, EngineSignals], float | None]) -> Reader:
    def read(report: TickReport) -> list[Row]:
        rows = _engines(report)
        return [(ids, value) for ids, state, signals in rows if (value := pick(state, signals)) is not None]

    return read


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _info(report: TickReport) -> Iterator[Row]:
    for server in report.servers:
        if server.state is None:
            continue
        facts = (server.state.kind or server.kind, server.state.version, server.state.model)
        for engine in engines_of(server):
            yield (server.server, engine, *facts), 1.0


def _semantics(report: TickReport) -> Iterator[Row]:
    for server in report.servers:
        if server.state is None:
            continue
        meaning = server.state.semantics
        for engine in engines_of(server):
            yield (server.server, engine, meaning.evictable.value, meaning.basis.value), 1.0


def _blocks(report: TickReport) -> Iterator[Row]:
    for ids, state, _ in _engines(report):
        kv = state.kv
        parts = (("used", kv.used_blocks), ("free", kv.free_blocks), ("evictable", kv.evictable_blocks))
        for part, count in parts:
            if count is not None:
                yield (*ids, part), count


def _requests(report: TickReport) -> Iterator[Row]:
    for ids, state, signals in _engines(report):
        running = _first(signals.running, state.scheduler.running)
        waiting = _first(signals.waiting, state.scheduler.waiting)
        if running is not None:
            yield (*ids, "running"), running
        if waiting is not None:
            yield (*ids, "waiting"), waiting


def _quantiles(pick: Callable[[EngineSignals], Quantiles | None]) -> Reader:
    def read(report: TickReport) -> Iterator[Row]:
        for ids, _, signals in _engines(report):
            found = pick(signals)
            if found is None or not found.count:
                continue
            for quantile, value in found.values:
                yield (*ids, f"{quantile:g}"), value

    return read


def _waste(report: TickReport) -> Iterator[Row]:
    for ids, _, signals in _engines(report):
        if signals.waste is not None:
            yield (*ids, signals.waste.method), signals.waste.ratio


def _agent(pick: Callable[[AllocatorState], float | None]) -> Reader:
    def read(report: TickReport) -> Iterator[Row]:
        for agent in report.agents:
            value = None if agent.allocator is None else pick(agent.allocator)
            if value is not None:
                yield (agent.server, agent.engine, str(agent.rank)), value

    return read


def _by_arena(*picks: tuple[str, Callable[[ArenaState], float | None]]) -> Reader:
    def read(report: TickReport) -> Iterator[Row]:
        for agent in report.agents:
            for arena in () if agent.allocator is None else agent.allocator.arenas:
                for name, pick in picks:
                    value = pick(arena)
                    if value is not None:
                        yield (agent.server, agent.engine, str(agent.rank), arena.name, name), value

    return read


def _by_state(*picks: tuple[str, Callable[[AllocatorState], float | None]]) -> Reader:
    def read(report: TickReport) -> Iterator[Row]:
        for agent in report.agents:
            if agent.allocator is None:
                continue
            ids = (agent.server, agent.engine, str(agent.rank))
            for name, pick in picks:
                value = pick(agent.allocator)
                if value is not None:
                    yield (*ids, name), value

    return read


_server_facts = Facts(
    lambda report: [
        (
            s.server, s.kind, s.up, s.stalled, engines_of(s),
            s.state and (s.state.kind, s.state.version, s.state.model, s.state.semantics),
        )
        for s in report.servers
    ]
)  # fmt: skip
_agent_facts = Facts(lambda report: [report.agents])

SERVER = (
    *sharing(
        _server_facts,
        gauge(
            "server_up",
            "Whether the last reading of this server was a page with the expected series.",
            _server(lambda s: float(s.up)),
            *ENGINE,
        ),
        gauge(
            "server_stalled",
            "Whether requests are running or waiting while no token counter moves.",
            _server(lambda s: None if s.stalled is None else float(s.stalled)),
            *ENGINE,
        ),
        info("server_info", "What this server says it is.", _info, *ENGINE, "kind", "version", "model"),
        info(
            "kv_semantics_info",
            "What this server's KV usage means: how evictable blocks count, and what is measured.",
            _semantics,
            *ENGINE,
            "evictable",
            "basis",
        ),
    ),
    experimental(
        counter(
            "engine_restarts_total",
            "Restarts of this engine that kvwatch noticed.",
            _engine(lambda _, g: None if g is NO_SIGNALS else g.restarts_total),
            *ENGINE,
        )
    ),
)

KV = (
    gauge(
        "kv_usage_ratio",
        "Share of the KV cache in use, in the meaning of kvwatch_kv_semantics_info.",
        _engine(lambda e, g: _first(g.kv_usage_ratio, e.kv.usage_ratio)),
        *ENGINE,
        unit="ratio",
    ),
    gauge(
        "kv_capacity_tokens",
        "Tokens that the KV cache can hold.",
        _engine(lambda e, _: e.kv.capacity_tokens),
        *ENGINE,
        unit="tokens",
    ),
    gauge(
        "kv_block_size_tokens",
        "Tokens in one KV block.",
        _engine(lambda e, _: e.kv.block_size_tokens),
        *ENGINE,
        unit="tokens",
    ),
    gauge("kv_blocks", "KV blocks by state; the states are disjoint.", _blocks, *ENGINE, "state"),
    gauge(
        "kv_block_waste_ratio",
        "Share of the token slots in use that hold no token, by how it was had.",
        _waste,
        *ENGINE,
        "method",
        unit="ratio",
    ),
)

LOAD = (
    gauge("requests", "Requests in the engine by state.", _requests, *ENGINE, "state"),
    counter(
        "preemptions_total",
        "Preempted requests, as the server counts them.",
        _engine(lambda e, _: e.scheduler.preemptions_total),
        *ENGINE,
    ),
    gauge(
        "recompute_tax_ratio",
        "Estimated share of engine time spent recomputing preempted requests, over 60 s.",
        _engine(lambda _, g: g.recompute_tax_ratio),
        *ENGINE,
        unit="ratio",
    ),
    gauge(
        "recomputed_tokens_ratio",
        "Estimated share of computed tokens that were computed before, over 60 s; tells no harm by itself.",
        _engine(lambda _, g: g.recomputed_tokens_ratio),
        *ENGINE,
        unit="ratio",
    ),
    summary(
        "ttft_seconds",
        "Time to first token over 60 s.",
        _quantiles(lambda g: g.ttft),
        *ENGINE,
        "quantile",
        unit="seconds",
    ),
    summary(
        "tpot_seconds",
        "Time per output token over 60 s.",
        _quantiles(lambda g: g.tpot),
        *ENGINE,
        "quantile",
        unit="seconds",
    ),
    summary(
        "queue_seconds",
        "Time in the queue over 60 s.",
        _quantiles(lambda g: g.queue),
        *ENGINE,
        "quantile",
        unit="seconds",
    ),
)

ALLOCATOR = sharing(
    _agent_facts,
    gauge(
        "allocator_bytes",
        "The server's PyTorch allocator by state, from an agent inside it; states overlap.",
        _by_state(
            ("allocated", lambda a: a.allocated_bytes),
            ("reserved", lambda a: a.reserved_bytes),
            ("active", lambda a: a.active_bytes),
            ("requested", lambda a: a.requested_bytes),
            ("inactive", lambda a: a.inactive_bytes),
        ),
        *RANK,
        "state",
        unit="bytes",
    ),
    gauge(
        "allocator_fragmentation_ratio",
        "soft, hard: the share of reserved memory that is free and can be returned, or lies between live "
        "blocks; total: 1 - largest free block / free of the arena with the most free, which alone misleads.",
        _by_state(
            ("soft", lambda a: a.fragmentation_soft_ratio),
            ("hard", lambda a: a.fragmentation_hard_ratio),
            ("total", lambda a: a.fragmentation_total_ratio),
        ),
        *RANK,
        "kind",
        unit="ratio",
    ),
    gauge(
        "allocator_largest_allocatable_bytes",
        "Largest single allocation that would succeed now.",
        _agent(lambda a: a.largest_allocatable_bytes),
        *RANK,
        unit="bytes",
    ),
    counter(
        "allocator_alloc_retries_total",
        "Allocations that succeeded only after cached memory was given back.",
        _agent(lambda a: a.num_alloc_retries),
        *RANK,
    ),
    counter(
        "allocator_ooms_total",
        "Out-of-memory errors that the allocator raised.",
        _agent(lambda a: a.num_ooms),
        *RANK,
    ),
    experimental(
        gauge(
            "allocator_releasable_bytes",
            "Reserved memory that the allocator could return to the device at once.",
            _agent(lambda a: a.releasable_bytes),
            *RANK,
            unit="bytes",
        )
    ),
    experimental(
        gauge(
            "allocator_private_bytes",
            "Reserved by private pools (CUDA graphs), of no use to anything else.",
            _agent(lambda a: a.private_bytes),
            *RANK,
            unit="bytes",
        )
    ),
    experimental(
        gauge(
            "allocator_arena_bytes",
            "The largest arenas of the allocator (kind/stream, private pools apart) by state.",
            _by_arena(
                ("reserved", lambda a: a.reserved_bytes),
                ("allocated", lambda a: a.allocated_bytes),
                ("active", lambda a: a.active_bytes),
                ("requested", lambda a: a.requested_bytes),
                ("free", lambda a: a.free_bytes),
                ("largest_free", lambda a: a.largest_free_bytes),
                ("releasable", lambda a: a.releasable_bytes),
            ),
            *RANK,
            "arena",
            "state",
            unit="bytes",
        )
    ),
    experimental(
        gauge(
            "allocator_arena_fragmentation_ratio",
            "1 - largest free block / free of one arena (kind total), which says nothing about danger alone.",
            _by_arena(("total", lambda a: a.fragmentation_total_ratio)),
            *RANK,
            "arena",
            "kind",
            unit="ratio",
        )
    ),
    experimental(
        counter(
            "allocator_compactions_total",
            "Times that the agent had unused allocator memory returned to the device.",
            _agent(lambda a: a.compactions_total),
            *RANK,
        )
    ),
    experimental(
        counter(
            "allocator_compact_seconds_total",
            "Time that the server stood still for that.",
            _agent(lambda a: a.compact_seconds_total),
            *RANK,
            unit="seconds",
        )
    ),
)

SERVER_METRICS: tuple[MetricSpec, ...] = (*SERVER, *KV, *LOAD, *ALLOCATOR)
