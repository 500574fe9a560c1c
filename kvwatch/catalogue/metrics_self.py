"""Metrics of kvwatch itself: the watcher watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvwatch.catalogue.metrics_spec import (
    Facts,
    MetricSpec,
    Reader,
    Row,
    counter,
    experimental,
    gauge,
    info,
    sharing,
    stateset,
)
from kvwatch.model.report import ShellStatus, TickReport
from kvwatch.model.sample import SourceStatus
from kvwatch.model.settings import Mode


def _shell(pick: Callable[[ShellStatus], float | None]) -> Reader:
    def read(report: TickReport) -> Iterator[Row]:
        value = pick(report.shell)
        if value is not None:
            yield (), value

    return read


def _source(pick: Callable[[SourceStatus], float | None]) -> Reader:
    def read(report: TickReport) -> Iterator[Row]:
        for source in report.sources:
            value = pick(source)
            if value is not None:
                yield (source.source,), value

    return read


def _build(report: TickReport) -> Iterator[Row]:
    yield (report.version,), 1.0


def _mode(report: TickReport) -> Iterator[Row]:
    for mode in Mode:
        yield (mode.value,), float(report.mode is mode)


def _last_tick(report: TickReport) -> Iterator[Row]:
    yield (), report.clock.wall_s


def _datagrams(report: TickReport) -> Iterator[Row]:
    for outcome, count in report.shell.agent_datagrams_total:
        yield (outcome,), count


def _evidence(report: TickReport) -> Iterator[Row]:
    for outcome, count in report.shell.evidence_total:
        yield (outcome,), count


def _maintenance(shell: ShellStatus) -> float:
    return float(shell.maintenance_until_wall_s is not None)


_own_facts = Facts(lambda report: [report.version, report.mode, report.shell])
_OWN = (  # what hardly ever changes
    "build_info", "control_mode", "maintenance_active", "ticks_missed_total", "config_last_reload_successful",
    "config_last_reload_success_timestamp_seconds", "actions_dropped_total", "agent_datagrams_total",
    "ledger_clamped_total", "evidence_files_total",
)  # fmt: skip

_METRICS: tuple[MetricSpec, ...] = (
    info("build_info", "Version of kvwatch.", _build, "version"),
    stateset("control_mode", "What kvwatch may do; exactly one is 1.", _mode, "mode"),
    gauge("maintenance_active", "Whether the GPUs are released for maintenance.", _shell(_maintenance)),
    gauge(
        "source_up",
        "Whether the newest reading of this source was good.",
        _source(lambda s: float(s.up)),
        "source",
    ),
    gauge(
        "source_stuck",
        "Whether a call of this source has not come back within its deadline.",
        _source(lambda s: float(s.stuck)),
        "source",
    ),
    gauge(
        "source_last_success_timestamp_seconds",
        "When this source last gave a good reading, as Unix time.",
        _source(lambda s: s.last_success_wall_s),
        "source",
        unit="seconds",
    ),
    counter(
        "source_errors_total", "Failed readings of this source.", _source(lambda s: s.errors_total), "source"
    ),
    gauge(
        "source_poll_seconds",
        "How long the newest reading of this source took.",
        _source(lambda s: s.last_took_s),
        "source",
        unit="seconds",
    ),
    counter(
        "ticks_missed_total",
        "Ticks of the loop that were skipped because it was late.",
        _shell(lambda s: s.ticks_missed_total),
    ),
    gauge(
        "config_last_reload_successful",
        "Whether the configuration was good when it was last read.",
        _shell(lambda s: float(s.config_last_reload_successful)),
    ),
    gauge(
        "config_last_reload_success_timestamp_seconds",
        "When a good configuration was last read, as Unix time.",
        _shell(lambda s: s.config_last_reload_success_wall_s or None),
        unit="seconds",
    ),
    experimental(
        gauge(
            "last_tick_timestamp_seconds",
            "When the report on this page was made, as Unix time.",
            _last_tick,
            unit="seconds",
        )
    ),
    experimental(
        counter(
            "actions_dropped_total",
            "Actions that were not started because their target was still busy.",
            _shell(lambda s: s.dropped_actions_total),
        )
    ),
    experimental(
        counter(
            "agent_datagrams_total",
            "Datagrams from agents by outcome: accepted, or why one was refused and changed nothing.",
            _datagrams,
            "outcome",
        )
    ),
    experimental(
        counter(
            "evidence_files_total",
            "Pieces of evidence by outcome: written, failed (kept in memory, tried again), dropped.",
            _evidence,
            "outcome",
        )
    ),
    experimental(
        counter(
            "ledger_clamped_total",
            "Ledger parts that had to be clamped because readings did not add up.",
            _shell(lambda s: s.clamped_total),
        )
    ),
)

SELF_METRICS: tuple[MetricSpec, ...] = tuple(
    sharing(_own_facts, spec)[0] if spec.name.removeprefix("kvwatch_") in _OWN else spec for spec in _METRICS
)
