"""Which dashboards ship? One function per dashboard, each a list of rows of panels."""

from __future__ import annotations

from typing import Any

from kvwatch.catalogue.alert_spec import metric
from kvwatch.catalogue.promql import (
    Expr,
    Match,
    age_s,
    increase,
    max_by,
    min_by,
    rate,
    series,
    sum_by,
)
from kvwatch.gen import boards_gpu, boards_kv, panels
from kvwatch.gen.panels import (
    ACTIVE_NAMES,
    GOOD_IS_ONE,
    GOOD_IS_ZERO,
    INSTANCE,
    LEVEL_NAMES,
    LEVELS,
    PLAIN,
    SCOPE,
    SERVER,
    UP_NAMES,
    WINDOW,
    YES_NAMES,
    Query,
    Row,
)
from kvwatch.gen.variables import gpu_variable, instance_variable, server_variable

FOLDER = "dashboards/"


def _of_host(name: str, **matchers: str | Match) -> Expr:
    return series(metric(name), instance=INSTANCE, **matchers)


def _headline() -> Any:
    return panels.number(
        "Headline",
        "The worst level of the rules that page, over the chosen hosts. Red: open the row of levels below "
        "and the runbook of the alert that fired. Grey: kvwatch does not know; look at the dashboard "
        "`kvwatch itself`.",
        "none",
        Query(max_by(_of_host("headline_level")), "headline"),
        steps=LEVELS,
        names=LEVEL_NAMES,
    )


def _levels() -> Any:
    worst = max_by(series(metric("rule_level"), **SCOPE), "instance", "rule")
    return panels.states(
        "Level of every rule (worst scope)",
        "One line per rule and host. Yellow is a notice, red of a paging rule wakes somebody. Grey means "
        "unknown: the input is stale, missing or too new. A rule that is red only for short is still "
        "counted, see `Seconds in red`.",
        Query(worst, "{{instance}} {{rule}}"),
    )


def _red_now() -> Any:
    on = ("job", "instance", "server", "engine", "uuid", "gpu", "rule")
    raised = series(metric("rule_level"), **SCOPE).ge(1)
    return panels.table(
        "What is yellow or red now",
        "The value that each raised rule judges, in the rule's own unit (bytes, seconds, ratio, count; see "
        "docs/rules.md). Empty when everything is green or unknown.",
        "none",
        Query(series(metric("rule_value"), **SCOPE).where(raised, on=on)),
        hide=("uuid",),
    )


def _counts() -> tuple[Any, ...]:
    servers = sum_by(_of_host("server_up", server=SERVER).is_(0))
    gpus = sum_by(_of_host("gpu_up").is_(0))
    sources = sum_by(_of_host("source_up").is_(0))
    limits = sum_by(_of_host("limit_active", server=SERVER).is_(1))
    red = sum_by(series(metric("rule_level"), **SCOPE).is_(2))
    return (
        _headline(),
        panels.number(
            "Rules in red",
            "How many rules are red now, over all servers and GPUs.",
            "none",
            Query(red, "red"),
            steps=(("green", None), ("red", 1)),
        ),
        panels.number(
            "Servers down",
            "Engines whose last page was not good.",
            "none",
            Query(servers, "down"),
            steps=GOOD_IS_ZERO,
            runbook="KvwatchServerDown",
        ),
        panels.number(
            "GPUs down",
            "GPUs that do not answer, those seen before included.",
            "none",
            Query(gpus, "down"),
            steps=GOOD_IS_ZERO,
            runbook="KvwatchGpuLost",
        ),
        panels.number(
            "Sources failing",
            "Sources whose newest reading failed. What they tell is unknown meanwhile.",
            "none",
            Query(sources, "failing"),
            steps=GOOD_IS_ZERO,
            runbook="KvwatchSourceStale",
        ),
        panels.number(
            "Limits in force",
            "Engines that kvwatch limits now. `no targets`: none is listed under `control.targets`, so none "
            "can be.",
            "none",
            Query(limits, "limited"),
            steps=(("green", None), ("#EAB839", 1)),
            nothing="no targets",
        ),
    )


def _overview() -> str:
    return panels.dashboard(
        "kvwatch-overview",
        "kvwatch / Overview",
        "What the status page of kvwatch shows, over time: start here.",
        [instance_variable(), server_variable(), gpu_variable()],
        [
            Row("Now", _counts(), height=4),
            Row("Levels", (_levels(), _red_now()), height=10),
            Row("KV pool: full means queueing, not out of memory", (boards_kv.usage(), boards_kv.requests())),
            Row("Harm", (boards_kv.tax(), boards_kv.first_token())),
            Row(
                "Device memory: empty means CUDA out of memory", (boards_gpu.headroom(), boards_gpu.ledger())
            ),
            Row("Forecast", (boards_gpu.exhaustion(), boards_kv.limits())),
        ],
        [*boards_kv.notes(), boards_gpu.xid_note()],
    )


def _fleet() -> str:
    red_seconds = increase(series(metric("rule_level_seconds_total"), level="red", **SCOPE), "1h")
    return panels.dashboard(
        "kvwatch-fleet",
        "kvwatch / Fleet",
        "All hosts side by side: which one needs somebody?",
        [instance_variable(), server_variable(), gpu_variable()],
        [
            Row(
                "Hosts",
                (
                    panels.states(
                        "Headline per host",
                        "One line per host. Compare hosts of the same kind: a single red one is a fault "
                        "there, all red at once is load or a change that went everywhere.",
                        Query(max_by(_of_host("headline_level"), "instance"), "{{instance}}"),
                    ),
                    panels.lines(
                        "Seconds in red within an hour",
                        "Worst scope per host and rule. It loses nothing between scrapes, so short reds "
                        "show here. Rank hosts by it when you look for the one to fix first.",
                        "s",
                        Query(max_by(red_seconds, "instance", "rule").gt(0), "{{instance}} {{rule}}"),
                    ),
                ),
                height=9,
            ),
            Row(
                "Extremes",
                (
                    panels.lines(
                        "Fullest KV pool per host",
                        "Near 100 % is normal for a busy server. It is a problem only with waiting "
                        "requests and a recompute tax.",
                        "percentunit",
                        Query(max_by(_of_host("kv_usage_ratio"), "instance"), "{{instance}}"),
                        top=1,
                    ),
                    panels.lines(
                        "Least device headroom per host",
                        "Free device memory plus what the allocator could return, of the worst GPU. Under "
                        "512 MiB the next prefill can kill an engine.",
                        "bytes",
                        Query(min_by(_of_host("gpu_memory_headroom_bytes"), "instance"), "{{instance}}"),
                        runbook="KvwatchDeviceHeadroomLow",
                    ),
                    panels.lines(
                        "Waiting requests per host",
                        "Queue over all servers of a host. One host with a queue among idle ones points "
                        "at routing.",
                        "short",
                        Query(sum_by(_of_host("requests", state="waiting"), "instance"), "{{instance}}"),
                    ),
                ),
            ),
            Row(
                "What runs where",
                (
                    panels.table(
                        "Versions",
                        "kvwatch on each host. More than one version at a time is fine during a roll-out "
                        "only.",
                        "none",
                        Query(_of_host("build_info")),
                        hide=("Value",),
                    ),
                    panels.table(
                        "Servers",
                        "Engines as they report themselves.",
                        "none",
                        Query(_of_host("server_info", server=SERVER)),
                        hide=("Value",),
                    ),
                    panels.table(
                        "GPUs",
                        "Names, drivers and how memory is accounted. `v1` counts what the driver keeps as "
                        "used.",
                        "none",
                        Query(_of_host("gpu_info")),
                        hide=("Value",),
                    ),
                ),
            ),
        ],
    )


def _sources() -> tuple[Row, ...]:
    errors = rate(_of_host("source_errors_total"), WINDOW).times(60)
    return (
        Row(
            "Sources",
            (
                panels.states(
                    "Source up",
                    "Whether the newest reading was good. Down for long: what depends on it is unknown "
                    "and no action is taken on it.",
                    Query(max_by(_of_host("source_up"), "instance", "source"), "{{instance}} {{source}}"),
                    steps=GOOD_IS_ONE,
                    names=UP_NAMES,
                    runbook="KvwatchSourceStale",
                ),
                panels.states(
                    "Source stuck",
                    "Whether a call does not come back. For NVML: the driver hangs; a GPU may be about to "
                    "be lost.",
                    Query(max_by(_of_host("source_stuck"), "instance", "source"), "{{instance}} {{source}}"),
                    steps=GOOD_IS_ZERO,
                    names=YES_NAMES,
                    runbook="KvwatchSourceStuck",
                ),
            ),
        ),
        Row(
            "Freshness",
            (
                panels.lines(
                    "Age of the newest good reading",
                    "By Prometheus's clock, so a scrape interval is normal. A steady climb is a source "
                    "that is gone.",
                    "s",
                    Query(
                        age_s(_of_host("source_last_success_timestamp_seconds")), "{{instance}} {{source}}"
                    ),
                ),
                panels.lines(
                    "Time per reading",
                    "How long the newest reading took. Close to a server's `timeout` it soon fails; "
                    "servers that are busy answer slowly.",
                    "s",
                    Query(_of_host("source_poll_seconds"), "{{instance}} {{source}}"),
                ),
                panels.lines(
                    "Failed readings per minute",
                    "A few while a server restarts are normal.",
                    "short",
                    Query(errors, "{{instance}} {{source}}"),
                ),
            ),
        ),
    )


def _loop() -> tuple[Row, ...]:
    by_outcome = sum_by(increase(_of_host("actions_total"), WINDOW), "instance", "action", "outcome")
    missed = rate(_of_host("ticks_missed_total"), WINDOW)
    return (
        Row(
            "Loop and configuration",
            (
                panels.lines(
                    "Missed ticks per second",
                    "Ticks skipped because the loop was late. More than now and then: the host is short "
                    "of CPU.",
                    "short",
                    Query(missed, "{{instance}}"),
                ),
                panels.lines(
                    "Age of the report on the page",
                    "Should stay near the scrape interval. A climb with scrapes still working means a "
                    "hung loop; the watchdog of systemd restarts it after 30 s.",
                    "s",
                    Query(age_s(_of_host("last_tick_timestamp_seconds")), "{{instance}}"),
                ),
                panels.states(
                    "Configuration good",
                    "Whether the last reload was accepted. `down`: the configuration before it is still "
                    "in force.",
                    Query(_of_host("config_last_reload_successful"), "{{instance}}"),
                    steps=GOOD_IS_ONE,
                    names=UP_NAMES,
                    runbook="KvwatchConfigReloadFailed",
                ),
                panels.states(
                    "Maintenance",
                    "Whether GPUs are released for maintenance; no device rule holds meanwhile.",
                    Query(_of_host("maintenance_active"), "{{instance}}"),
                    steps=GOOD_IS_ZERO,
                    names=ACTIVE_NAMES,
                ),
            ),
        ),
        Row(
            "Control",
            (
                panels.states(
                    "Mode",
                    "The mode in force. observe: only watch; advise: decide and apply nothing; act: limit.",
                    Query(_of_host("control_mode").eq(1), "{{instance}} {{mode}}"),
                    steps=PLAIN,
                    names=[],
                ),
                panels.lines(
                    "Actions by outcome",
                    "Runs per interval. `failed`, `timed_out` and `refused` need a look; `dry_run` is "
                    "what advise would have done.",
                    "short",
                    Query(by_outcome.gt(0), "{{instance}} {{action}} {{outcome}}"),
                    runbook="KvwatchActionFailing",
                ),
                panels.lines(
                    "Actions dropped",
                    "Not started because the same target was still busy. Steady growth: the target is too "
                    "slow.",
                    "short",
                    Query(increase(_of_host("actions_dropped_total"), WINDOW), "{{instance}}"),
                ),
            ),
        ),
    )


def _itself() -> str:
    return panels.dashboard(
        "kvwatch-itself",
        "kvwatch / kvwatch itself",
        "The watcher watched: sources, loop, configuration and actions.",
        [instance_variable()],
        [*_sources(), *_loop()],
    )


def files() -> dict[str, str]:
    """Every dashboard."""
    return {
        f"{FOLDER}overview.json": _overview(),
        f"{FOLDER}fleet.json": _fleet(),
        f"{FOLDER}gpu-memory.json": boards_gpu.board(),
        f"{FOLDER}kv-requests.json": boards_kv.board(),
        f"{FOLDER}kvwatch-itself.json": _itself(),
    }
