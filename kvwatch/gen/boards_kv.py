"""What does the dashboard of KV cache and requests show? Fill, queue, cost, latency, limits."""

from __future__ import annotations

from typing import Any

from kvwatch.catalogue.alert_spec import metric
from kvwatch.catalogue.promql import Expr, Match, increase, max_by, rate, regex, series
from kvwatch.gen import panels
from kvwatch.gen.boards_gpu import limits_of
from kvwatch.gen.panels import (
    ACTIVE_NAMES,
    GOOD_IS_ONE,
    GOOD_IS_ZERO,
    INSTANCE,
    SERVER,
    SERVER_OR_NONE,
    UP_NAMES,
    WINDOW,
    YES_NAMES,
    Note,
    Query,
    Row,
)
from kvwatch.gen.variables import instance_variable, server_variable

NAMED = "{{instance}} {{server}}/{{engine}}"


def _engine(name: str, **matchers: str | Match) -> Expr:
    return series(metric(name), instance=INSTANCE, server=SERVER, **matchers)


def usage() -> Any:
    """Draw how full the pools are."""
    return panels.lines(
        "KV pool in use",
        "Share of blocks in use, in the server's own meaning (see the table of meanings). Near 100 % is "
        "the normal state of a busy server; it never pages by itself. With waiting requests and a tax "
        "beside it, the pool is too small for what is admitted.",
        "percentunit",
        Query(_engine("kv_usage_ratio"), NAMED),
        *limits_of("kv_usage"),
        top=1,
    )


def requests() -> Any:
    """Draw running and waiting requests."""
    return panels.lines(
        "Requests",
        "Running and waiting. A queue with a pool that is not full points at another limit: the engine's "
        "batch size, or a limit of kvwatch.",
        "short",
        Query(_engine("requests", state="running"), f"{NAMED} running"),
        Query(_engine("requests", state="waiting"), f"{NAMED} waiting"),
    )


def tax() -> Any:
    """Draw the recompute tax."""
    return panels.lines(
        "Recompute tax (share of engine time)",
        "What preempted requests cost. Under 2 % leave it alone. Above 5 % with a queue: set the engine's "
        "admission watermark (2-5 % of the pool) or admit fewer requests.",
        "percentunit",
        Query(_engine("recompute_tax_ratio"), NAMED),
        *limits_of("recompute_tax"),
        runbook="KvwatchKvThrashing",
    )


def _quantiles(title: str, how: str, name: str) -> Any:
    wanted = _engine(name, quantile=regex("0.5|0.95|0.99"))
    return panels.lines(
        title, how, "s", Query(wanted, f"{NAMED} p{{{{quantile}}}}"), runbook="KvwatchLatencySlo"
    )


def first_token() -> Any:
    """Draw time to first token."""
    return _quantiles(
        "Time to first token",
        "Over the last minute, from the server's histogram; gaps mean no finished first token. It rises "
        "with the queue first.",
        "ttft_seconds",
    )


def limits() -> Any:
    """Draw what kvwatch imposes."""
    return panels.lines(
        "Limits on running requests",
        "What kvwatch allows each engine now, beside the engine's own limit. Nothing drawn: nothing is "
        "imposed. Limits end by themselves unless they are renewed.",
        "short",
        Query(_engine("limit_running"), f"{NAMED} imposed"),
        Query(_engine("limit_configured"), f"{NAMED} its own", dashed="blue"),
        runbook="KvwatchLeaseStuck",
    )


def notes() -> list[Note]:
    """Mark what kvwatch imposed, and restarts."""
    limited = max_by(_engine("limit_active").gt(0), "instance", "server")
    again = max_by(increase(_engine("engine_restarts_total"), WINDOW).gt(0), "instance", "server")
    return [
        Note("Limits by kvwatch", limited, "{{server}} on {{instance}} is limited", "orange"),
        Note("Engine restarts", again, "{{server}} on {{instance}} restarted", "purple"),
    ]


def _server_row() -> Row:
    return Row(
        "Servers",
        (
            panels.states(
                "Server up",
                "Whether the last page was good. A page without the expected series counts as down.",
                Query(max_by(_engine("server_up"), "instance", "server", "engine"), NAMED),
                steps=GOOD_IS_ONE,
                names=UP_NAMES,
                runbook="KvwatchServerDown",
            ),
            panels.states(
                "Server stalled",
                "Requests are there and no token counter moves. Look at Xid events and the server's log.",
                Query(max_by(_engine("server_stalled"), "instance", "server", "engine"), NAMED),
                steps=GOOD_IS_ZERO,
                names=YES_NAMES,
                runbook="KvwatchServerStalled",
            ),
            panels.states(
                "Limited by kvwatch",
                "Whether kvwatch limits this engine.",
                Query(max_by(_engine("limit_active"), "instance", "server", "engine"), NAMED),
                steps=GOOD_IS_ZERO,
                names=ACTIVE_NAMES,
                runbook="KvwatchLeaseStuck",
            ),
        ),
    )


def _pool_row() -> Row:
    left = series(
        metric("time_to_exhaustion_seconds"),
        instance=INSTANCE,
        server=SERVER_OR_NONE,
        resource="kv",
        bound=regex("floor|low|central"),
    )
    coverage = series(
        metric("forecast_coverage_ratio"), instance=INSTANCE, server=SERVER_OR_NONE, resource="kv"
    )
    return Row(
        "The pool",
        (
            panels.lines(
                "Blocks by state",
                "The states are disjoint. Evictable blocks hold cached prefixes and can be taken at once.",
                "short",
                Query(_engine("kv_blocks"), f"{NAMED} {{{{state}}}}"),
                stacked=True,
            ),
            panels.lines(
                "Time until the pool is full",
                "`floor` is the minimum at the highest rate ever seen: if it is under a few seconds, no "
                "reaction from outside can come in time, and the engine's own watermark is the tool. Longer "
                "times than five minutes are off the chart.",
                "s",
                Query(left, f"{NAMED} {{{{bound}}}}"),
                top=300,
            ),
            panels.lines(
                "How often the forecast's interval held",
                "Measured on forecasts that have come due.",
                "percentunit",
                Query(coverage, NAMED),
                top=1,
            ),
            panels.lines(
                "Wasted slots",
                "Share of the slots in use that hold no token (page tails). 2-4 % is usual; 30 % means a "
                "block size that does not suit the traffic.",
                "percentunit",
                Query(_engine("kv_block_waste_ratio"), f"{NAMED} {{{{method}}}}"),
                top=1,
            ),
        ),
        height=9,
    )


def _cost_row() -> Row:
    return Row(
        "What a full pool costs",
        (
            tax(),
            panels.lines(
                "Recomputed share of computed tokens",
                "Tells no harm by itself: tokens of a prompt are computed far faster than new ones.",
                "percentunit",
                Query(_engine("recomputed_tokens_ratio"), NAMED),
            ),
            panels.lines(
                "Preemptions per minute",
                "The server's own counter. Some are normal under load; the tax says whether they matter.",
                "short",
                Query(rate(_engine("preemptions_total"), WINDOW).times(60), NAMED),
            ),
        ),
    )


def _meaning_row() -> Row:
    return Row(
        "What the figures mean",
        (
            panels.table(
                "Meaning of KV usage per server",
                "`evictable` says whether cached blocks count as used; `basis` whether the figure is "
                "blocks in use, worst-case reservations, or slots. Do not compare servers with different "
                "meanings.",
                "none",
                Query(_engine("kv_semantics_info")),
                hide=("Value",),
            ),
            panels.table(
                "Capacity in tokens",
                "What the pool can hold.",
                "short",
                Query(_engine("kv_capacity_tokens")),
            ),
            panels.table(
                "Block size in tokens",
                "Tokens per KV block.",
                "short",
                Query(_engine("kv_block_size_tokens")),
            ),
        ),
    )


def board() -> str:
    """Write the dashboard of KV cache and requests."""
    return panels.dashboard(
        "kvwatch-kv-requests",
        "kvwatch / KV cache and requests",
        "The KV pool, the queue, what preemption costs, latency, and what kvwatch limits.",
        [instance_variable(), server_variable()],
        [
            _server_row(),
            Row("Load", (usage(), requests(), limits())),
            _cost_row(),
            Row(
                "Latency",
                (
                    first_token(),
                    _quantiles(
                        "Time per output token",
                        "Over the last minute. It rises with the batch size and with preemption.",
                        "tpot_seconds",
                    ),
                    _quantiles(
                        "Time in the queue",
                        "Over the last minute. Queueing is what a full pool does first.",
                        "queue_seconds",
                    ),
                ),
            ),
            _pool_row(),
            Row(
                "Restarts",
                (
                    panels.lines(
                        "Engine restarts",
                        "Counter resets that kvwatch noticed. A restart nobody asked for is often a CUDA "
                        "out of memory.",
                        "short",
                        Query(increase(_engine("engine_restarts_total"), WINDOW), NAMED),
                        runbook="KvwatchServerDown",
                    ),
                ),
                height=6,
            ),
            _meaning_row(),
        ],
        notes(),
    )
