"""How are PromQL expressions built? From metric rows, so that a wrong metric or label fails here.

Metric names and labels are never typed by hand in an expression: `series` takes a row of the
catalogue and checks every label. Results carry the labels that are known to remain, and later
steps check against those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

PREFIX = "kvwatch_"
# Prometheus adds these to every scraped series.
TARGET_LABELS = ("job", "instance")


class MetricRow(Protocol):
    """The part of a catalogue row that an expression needs."""

    @property
    def name(self) -> str:
        """Name of the metric, with or without the prefix."""
        ...

    @property
    def kind(self) -> str:
        """gauge, counter, info, stateset or summary."""
        ...

    @property
    def labels(self) -> Sequence[str]:
        """Names of its labels."""
        ...


class ExpressionError(ValueError):
    """An expression that cannot be right; the text names the metric and the label."""


@dataclass(frozen=True, slots=True)
class Match:
    """A label matcher other than equality: `=~`, `!=` or `!~`."""

    operator: str
    value: str


def regex(value: str) -> Match:
    """Match label values against a regular expression (RE2, anchored)."""
    return Match("=~", value)


def unlike(value: str) -> Match:
    """Match every value but this one."""
    return Match("!=", value)


@dataclass(frozen=True, slots=True)
class _Up:
    """Prometheus's own `up`, which no exporter exports."""

    name: str = "up"
    kind: str = "gauge"
    labels: tuple[str, ...] = ()


UP = _Up()


@dataclass(frozen=True, slots=True)
class Expr:
    """An expression, the labels its result carries, and whether it stands alone as an operand."""

    text: str
    labels: frozenset[str]
    atomic: bool = True
    counter: bool = False

    def __str__(self) -> str:
        return self.text

    def _operand(self) -> str:
        return self.text if self.atomic else f"({self.text})"

    def _binary(self, operator: str, other: Expr | float, on: Sequence[str] | None = None) -> Expr:
        """Join two vectors on equal labels, or a vector with a number."""
        if not isinstance(other, Expr):
            return Expr(f"{self._operand()} {operator} {number(other)}", self.labels, atomic=False)
        if on is not None:
            _known(on, self.labels, self.text)
            _known(on, other.labels, other.text)
        by = f" on ({', '.join(on)})" if on is not None else ""
        return Expr(f"{self._operand()} {operator}{by} {other._operand()}", self.labels, atomic=False)

    def eq(self, value: float) -> Expr:
        """Keep the series that equal a number."""
        return self._binary("==", value)

    def is_(self, value: float) -> Expr:
        """1 for the series that equal a number, 0 for the others; none where there is no series."""
        return self._binary("== bool", value)

    def gt(self, other: Expr | float, on: Sequence[str] | None = None) -> Expr:
        """Keep the series above a number or another series."""
        return self._binary(">", other, on)

    def ge(self, other: Expr | float, on: Sequence[str] | None = None) -> Expr:
        """Keep the series at or above a number or another series."""
        return self._binary(">=", other, on)

    def plus(self, other: Expr | float, on: Sequence[str] | None = None) -> Expr:
        """Add."""
        return self._binary("+", other, on)

    def minus(self, other: Expr | float, on: Sequence[str] | None = None) -> Expr:
        """Subtract."""
        return self._binary("-", other, on)

    def times(self, other: Expr | float, on: Sequence[str] | None = None) -> Expr:
        """Multiply."""
        return self._binary("*", other, on)

    def over(self, other: Expr | float, on: Sequence[str] | None = None) -> Expr:
        """Divide."""
        return self._binary("/", other, on)

    def where(self, other: Expr, on: Sequence[str]) -> Expr:
        """Keep the series for which the other has one with the same labels (`and`)."""
        return self._binary("and", other, on)

    def unless(self, other: Expr, on: Sequence[str]) -> Expr:
        """Keep the series for which the other has none with the same labels."""
        return self._binary("unless", other, on)

    def either(self, other: Expr) -> Expr:
        """Join two sets of series (`or`)."""
        return Expr(f"{self._operand()} or {other._operand()}", self.labels & other.labels, atomic=False)


def number(value: float) -> str:
    """Write a number as PromQL reads it: no trailing `.0`."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def full_name(row: MetricRow) -> str:
    """Name of a metric on the wire, prefix included."""
    if row is UP or row.name.startswith(PREFIX):
        return row.name
    return PREFIX + row.name


def quote(value: str) -> str:
    """Quote a label value."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _known(labels: Sequence[str], have: frozenset[str], where: str) -> None:
    """Raise ExpressionError when a label is not among those a series carries."""
    unknown = [label for label in labels if label not in have]
    if unknown:
        raise ExpressionError(f"{where}: no label {', '.join(unknown)}; it has {', '.join(sorted(have))}")


def series(row: MetricRow, **matchers: str | Match) -> Expr:
    """Select the series of one metric; each keyword is a label with its value or a Match.

    Raises ExpressionError for a label that the metric does not have.
    """
    name = full_name(row)
    have = frozenset((*row.labels, *TARGET_LABELS))
    _known(list(matchers), have, name)
    parts = []
    for label, value in matchers.items():
        match = Match("=", value) if isinstance(value, str) else value
        parts.append(f"{label}{match.operator}{quote(match.value)}")
    text = f"{name}{{{', '.join(parts)}}}" if parts else name
    return Expr(text, have, counter=row.kind == "counter")


def _ranged(function: str, expr: Expr, window: str) -> Expr:
    return Expr(f"{function}({expr.text}[{window}])", expr.labels)


def rate(expr: Expr, window: str) -> Expr:
    """Per-second increase of a counter over a window; refuses what is not a counter."""
    if not expr.counter:
        raise ExpressionError(f"rate of {expr.text}, which is not a counter")
    return _ranged("rate", expr, window)


def increase(expr: Expr, window: str) -> Expr:
    """Increase of a counter over a window; refuses what is not a counter."""
    if not expr.counter:
        raise ExpressionError(f"increase of {expr.text}, which is not a counter")
    return _ranged("increase", expr, window)


def _by(function: str, expr: Expr, labels: Sequence[str]) -> Expr:
    _known(labels, expr.labels, expr.text)
    by = f" by ({', '.join(labels)})" if labels else ""
    return Expr(f"{function}{by} ({expr.text})", frozenset(labels))


def max_by(expr: Expr, *labels: str) -> Expr:
    """Largest value per combination of labels."""
    return _by("max", expr, labels)


def min_by(expr: Expr, *labels: str) -> Expr:
    """Smallest value per combination of labels."""
    return _by("min", expr, labels)


def sum_by(expr: Expr, *labels: str) -> Expr:
    """Sum per combination of labels."""
    return _by("sum", expr, labels)


def absent(expr: Expr) -> Expr:
    """One series when the selection is empty."""
    return Expr(f"absent({expr.text})", frozenset(TARGET_LABELS))


def relabelled(expr: Expr, label: str, source: str) -> Expr:
    """The same series with the value of one label under another name, too."""
    _known([source], expr.labels, expr.text)
    return Expr(f'label_replace({expr.text}, "{label}", "$1", "{source}", "(.+)")', expr.labels | {label})


def now() -> Expr:
    """The time of the evaluation, Unix seconds (Prometheus's clock)."""
    return Expr("time()", frozenset())


def age_s(expr: Expr) -> Expr:
    """Seconds since a timestamp series, by Prometheus's clock."""
    return Expr(f"time() - {expr._operand()}", expr.labels, atomic=False)


def label_values(row: MetricRow, label: str, **matchers: str | Match) -> str:
    """Write a Grafana query for the values of one label of one metric."""
    selected = series(row, **matchers)
    _known([label], selected.labels, selected.text)
    return f"label_values({selected.text}, {label})"
