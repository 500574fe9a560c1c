"""What one row of the metric catalogue looks like."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from kvwatch.model.report import TickReport

Row = tuple[tuple[str, ...], float]
Reader = Callable[[TickReport], Iterable[Row]]
T = TypeVar("T")


def kept(facts: Callable[[TickReport], list[object]], rows: Reader) -> Reader:
    """A reader for what seldom changes: the very same list as last time while its facts are equal.

    Whoever gets the same list again need not look into it.
    """
    last: tuple[list[object], list[Row]] | None = None

    def read(report: TickReport) -> list[Row]:
        nonlocal last
        now, before = facts(report), last
        if before is not None and (before[0] is now or before[0] == now):
            return before[1]
        found = list(rows(report))
        last = (now, found)
        return found

    return read


class PerReport(Generic[T]):
    """Something worked out once per report, although many metrics ask for it."""

    __slots__ = ("_last", "_make")

    def __init__(self, make: Callable[[TickReport], T]) -> None:
        self._make = make
        self._last: tuple[TickReport, T] | None = None

    def __call__(self, report: TickReport) -> T:
        """What was made of this report, made now if it is a new one."""
        last = self._last
        if last is None or last[0] is not report:
            self._last = last = (report, self._make(report))
        return last[1]


class Facts(PerReport[list[object]]):
    """Facts worked out once per report; the very same list as before while they are equal."""

    __slots__ = ()

    def __call__(self, report: TickReport) -> list[object]:
        """The facts of this report."""
        last = self._last
        if last is not None and last[0] is report:
            return last[1]
        made = self._make(report)
        if last is not None and last[1] == made:
            made = last[1]
        self._last = (report, made)
        return made


class MetricKind(enum.StrEnum):
    """How a metric behaves; `info` and `stateset` are written as gauges where a format lacks them."""

    GAUGE = "gauge"
    COUNTER = "counter"
    INFO = "info"
    STATESET = "stateset"
    SUMMARY = "summary"


class Stability(enum.StrEnum):
    """Whether a name may change without a decision record."""

    STABLE = "stable"
    EXPERIMENTAL = "experimental"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric: what it is called outside, and how it is read from a report.

    `name` is complete, prefix and `_total` included. `unit` is the base unit ("" for counts and
    states). `read` yields (values of `labels` in their order, value), nothing where unknown.
    """

    name: str
    kind: MetricKind
    unit: str = ""
    help: str
    labels: tuple[str, ...] = ()
    stability: Stability = Stability.STABLE
    read: Reader


def gauge(name: str, text: str, read: Reader, *labels: str, unit: str = "") -> MetricSpec:
    """A value that goes up and down."""
    return _spec(name, MetricKind.GAUGE, text, read, labels, unit)


def counter(name: str, text: str, read: Reader, *labels: str, unit: str = "") -> MetricSpec:
    """A value that only grows; its name ends in `_total`."""
    return _spec(name, MetricKind.COUNTER, text, read, labels, unit)


def info(name: str, text: str, read: Reader, *labels: str) -> MetricSpec:
    """Facts as labels, value 1."""
    return _spec(name, MetricKind.INFO, text, read, labels, "")


def stateset(name: str, text: str, read: Reader, *labels: str) -> MetricSpec:
    """One series per possible state: 1 for the present one, 0 for the others."""
    return _spec(name, MetricKind.STATESET, text, read, labels, "")


def summary(name: str, text: str, read: Reader, *labels: str, unit: str = "") -> MetricSpec:
    """Quantiles, without sum and count."""
    return _spec(name, MetricKind.SUMMARY, text, read, labels, unit)


def sharing(facts: Callable[[TickReport], list[object]], *specs: MetricSpec) -> tuple[MetricSpec, ...]:
    """Rows whose readers look at nothing but these facts: read again only when one of them differs.

    A test renders every single change of a report against a page that has never seen another one.
    """
    return tuple(replace(spec, read=kept(facts, spec.read)) for spec in specs)


def experimental(spec: MetricSpec) -> MetricSpec:
    """The same row, marked as free to change."""
    return MetricSpec(
        name=spec.name,
        kind=spec.kind,
        unit=spec.unit,
        help=spec.help,
        labels=spec.labels,
        stability=Stability.EXPERIMENTAL,
        read=spec.read,
    )


def _spec(
    name: str, kind: MetricKind, text: str, read: Reader, labels: tuple[str, ...], unit: str
) -> MetricSpec:
    return MetricSpec(name=f"kvwatch_{name}", kind=kind, unit=unit, help=text, labels=labels, read=read)
