"""What is an alert made of? One row per alerting rule, and how its texts become Prometheus templates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvwatch.catalogue.alert_evidence import PARTS, link
from kvwatch.catalogue.metrics import MetricSpec, by_name
from kvwatch.catalogue.promql import (
    PREFIX,
    Expr,
    full_name,
)
from kvwatch.model.level import Level, RuleId

RUNBOOKS = "https://github.com/kvwatch/kvwatch/blob/main/docs/runbooks/"
SCOPE_LABELS = ("server", "engine", "uuid", "gpu")

PAGE, TICKET, INFO = "page", "ticket", "info"

# How the value of each unit is shown: a Prometheus template function and what follows it.
UNITS: Mapping[str, tuple[str, str]] = {
    "ratio": ("humanizePercentage", ""),
    "bytes": ("humanize1024", "B"),
    "seconds": ("humanizeDuration", ""),
    "times": ("humanize", "x"),
    "per_minute": ("humanize", " per minute"),
    "number": ("humanize", ""),
}


def metric(name: str) -> MetricSpec:
    """The row of a metric by its name without the prefix; KeyError for a name that does not exist."""
    return by_name(PREFIX + name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One case for the generated rule test: what is measured, and the words a person then reads."""

    labels: Mapping[str, str] = field(default_factory=dict)
    instance: str = "gpu-host-1:9843"
    value: float | None = None
    shown: str = "unknown"
    threshold: float | None = None
    shown_threshold: str = "unknown"
    where: str = ""
    xid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSpec:
    """One alerting rule. Texts may hold {instance}, {host}, {server}, {where}, {value}, {threshold},
    {source}, {action}, {xids}.

    `rule` and `level` are set for alerts on a rule's level; `unit` is a key of UNITS.
    """

    name: str
    severity: str
    expr: Expr
    summary: str
    description: str
    unit: str = "number"
    rule: RuleId | None = None
    level: Level | None = None
    for_s: int = 0
    keep_firing_for_s: int = 0
    example: Example = Example()

    @property
    def labels(self) -> dict[str, str]:
        """Labels that the alert adds to those of its expression."""
        own = {"severity": self.severity}
        if self.level is not None:
            own["level"] = self.level.name.lower()
        return own

    def annotations(self, runbooks: str = RUNBOOKS) -> dict[str, str]:
        """Annotations as Prometheus templates."""
        places = _templates(self)
        labels = {name: f"{{{{ $labels.{name} | urlquery }}}}" for name in PARTS}
        return {
            "summary": _fill(self.summary, places),
            "description": _fill(self.description, places),
            **self._evidence("{{ $labels.instance }}", labels),
            "runbook_url": f"{runbooks}{self.name}.md",
        }

    def sentence(self, places: Mapping[str, str]) -> str:
        """The summary with these words in its places; KeyError for one that is not given."""
        return _fill(self.summary, places)

    def _evidence(self, instance: str, labels: Mapping[str, str]) -> dict[str, str]:
        """Where what the host kept of the minutes before is shown; kvwatch keeps it where red pages."""
        if self.rule is None or self.severity != PAGE:
            return {}
        return {"evidence": link(instance, self.rule.value, labels)}

    def expected(self, example: Example, runbooks: str = RUNBOOKS) -> dict[str, str]:
        """Annotations as a person reads them in the example's case (for the rule tests)."""
        places = {
            **example.labels,
            "instance": example.instance,
            "host": example.instance or "any host",
            "where": example.where,
            "xids": example.xid or "(see its events)",
            "value": example.shown,
            "threshold": example.shown_threshold,
        }
        return {
            "summary": _fill(self.summary, places),
            "description": _fill(self.description, places),
            **self._evidence(example.instance, example.labels),
            "runbook_url": f"{runbooks}{self.name}.md",
        }


_WHERE = (
    "{{ if $labels.server }}server {{ $labels.server }}"
    "{{ with $labels.engine }} engine {{ . }}{{ end }}{{ end }}"
    "{{ if and $labels.server $labels.gpu }} on {{ end }}{{ with $labels.gpu }}GPU {{ . }}{{ end }}"
)

# The Xid codes of the last minutes (the rule remembers an event for ten).
_XIDS = (
    "{{ range $i, $s := query (printf `increase("
    + full_name(metric("gpu_xid_events_total"))
    + "{job=%q, instance=%q, uuid=%q}[15m]) > 0` $labels.job $labels.instance $labels.uuid) }}"
    "{{ if $i }}, {{ end }}{{ $s.Labels.xid }}{{ else }}(see its events){{ end }}"
)


def _fill(text: str, places: Mapping[str, str]) -> str:
    """Replace every {place}; an unknown place is a mistake in a row."""
    return re.sub(r"\{(\w+)\}", lambda found: places[found[1]], text)


def _query(name: str, fixed: Mapping[str, str], unit: str) -> str:
    """Template that shows the value of a series of the alert's own scope, "unknown" without one."""
    row = metric(name)
    carried = ["job", "instance", *(label for label in SCOPE_LABELS if label in row.labels)]
    matchers = [f'{key}="{value}"' for key, value in fixed.items()] + [f"{key}=%q" for key in carried]
    values = " ".join(f"$labels.{key}" for key in carried)
    function, after = UNITS[unit]
    selector = f"{full_name(row)}{{{', '.join(matchers)}}}"
    return (
        f"{{{{ with query (printf `{selector}` {values}) }}}}{{{{ . | first | value | {function} }}}}{after}"
        "{{ else }}unknown{{ end }}"
    )


def _templates(spec: AlertSpec) -> dict[str, str]:
    """Prometheus template of every place that a text may hold."""
    plain = ("instance", "server", "source", "action", "gpu", "uuid")
    places = {name: f"{{{{ $labels.{name} }}}}" for name in plain}
    places["host"] = "{{ with $labels.instance }}{{ . }}{{ else }}any host{{ end }}"
    places["where"] = _WHERE
    places["xids"] = _XIDS
    function, after = UNITS[spec.unit]
    places["value"] = f"{{{{ $value | {function} }}}}{after}"
    if spec.rule is not None and spec.level is not None:
        rule = {"rule": spec.rule.value}
        places["value"] = _query("rule_value", rule, spec.unit)
        level = {"level": spec.level.name.lower()}
        places["threshold"] = _query("rule_threshold", rule | level, spec.unit)
    return places
