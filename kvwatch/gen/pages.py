"""Which reference pages are generated? Metrics, rules and configuration, each from the table that is used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvwatch.catalogue import metrics_gpu, metrics_self, metrics_server, metrics_verdict
from kvwatch.catalogue.alert_recordings import RECORDINGS, Recording
from kvwatch.catalogue.alerts import ALERTS, AlertSpec
from kvwatch.catalogue.metrics import MetricSpec, Stability
from kvwatch.config import reference
from kvwatch.gen.alert_rules import duration
from kvwatch.model.level import RuleId
from kvwatch.rules.shipped import SPECS
from kvwatch.rules.spec import Direction, RuleSpec, Unit

METRICS_FILE, RULES_FILE, CONFIG_FILE = "docs/metrics.md", "docs/rules.md", "docs/config.md"

_METRICS_INTRO = """\
# Metrics

Made by `kvwatch gen` from the catalogue; do not edit. Served at `/metrics` as Prometheus text or, when
asked for, as OpenMetrics.

* A series is absent when its value is unknown. There is no NaN, and nothing unknown is shown as 0.
* Base units: bytes, seconds, ratios from 0 to 1. Counters end in `_total`.
* GPU series carry `uuid` and `gpu` (the host's index). Of a MIG instance `uuid` is its own and `gpu` that of
  its parent; the parent's series are not to be added to it. Server series carry `server` and `engine`
  (the data-parallel rank, `0` where there is one). Series about either carry all four labels; those that
  do not apply are empty.
* `source` is `nvml`, `dcgm`, `dcgm_exporter`, `server/NAME` or `agent/SERVER/ENGINE/RANK`.
* Info and state-set metrics are gauges of 1 (and 0) in the Prometheus text format.
* *Experimental* names may change in a minor release; the others only with a decision record.
"""

_RULES_INTRO = """\
# Rules

Made by `kvwatch gen` from the table of rules; do not edit. A rule turns a value into a level: -1 unknown,
0 green, 1 yellow, 2 red (`kvwatch_rule_level`). Every threshold, `for`, `hold` and `clear` can be set per
rule in the configuration, see [config.md](config.md); alerts follow by themselves, because they compare
exported levels.

* Rising is immediate, unless `for` says otherwise. Falling goes straight to the level that has held for
  `hold` (30 s as shipped), once the value is past the threshold by the margin `clear` (0.02 of a ratio, 5 %
  of other units).
* Unknown, stale or single-sample input never raises a level; stale input is held for three periods, then
  unknown, never green.
* The headline colour of the status page uses paging rules only.
* A server that is starting and a GPU in maintenance have no device rule.
"""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _metric_row(row: MetricSpec) -> list[str]:
    labels = ", ".join(f"`{label}`" for label in row.labels) or "–"
    mark = " *(experimental)*" if row.stability is Stability.EXPERIMENTAL else ""
    return [f"`{row.name}`", row.kind.value, row.unit or "–", labels, _cell(row.help) + mark]


def _metrics_page() -> str:
    sections = (
        ("kvwatch itself", metrics_self.SELF_METRICS),
        ("GPUs: identity and health", metrics_gpu.IDENTITY),
        ("GPUs: memory", metrics_gpu.MEMORY),
        ("GPUs: load and errors", metrics_gpu.DEVICE),
        ("Servers", metrics_server.SERVER),
        ("KV cache", metrics_server.KV),
        ("Requests and latency", metrics_server.LOAD),
        ("Allocator (with an agent inside the server)", metrics_server.ALLOCATOR),
        ("Forecasts", metrics_verdict.FORECAST),
        ("Rules", metrics_verdict.RULES),
        ("Limits and actions", metrics_verdict.CONTROL),
    )
    head = ("name", "kind", "unit", "labels", "meaning")
    parts = [_METRICS_INTRO]
    for title, rows in sections:
        parts.append(f"## {title}\n\n{_table(head, map(_metric_row, rows))}")
    return "\n".join(parts)


def shown(unit: Unit, value: float | None) -> str:
    """A threshold as people write it; "–" for none."""
    if value is None:
        return "–"
    if unit is Unit.BYTES:
        gib, mib = value / 2**30, value / 2**20
        return f"{gib:g} GiB" if gib >= 1 else f"{mib:g} MiB"
    if unit is Unit.SECONDS:
        return f"{value / 60:g} min" if value >= 60 else f"{value:g} s"
    return f"{value:g} a minute" if unit is Unit.PER_MINUTE else f"{value:g}"


def _alerts_of(rule: RuleId) -> list[AlertSpec]:
    return [spec for spec in ALERTS if spec.rule is rule]


def _told(spec: RuleSpec) -> str:
    """Who is told at which level."""
    found = _alerts_of(spec.rule)
    if not found:
        return "nobody; it is shown"
    name = found[0].name
    levels = ", ".join(f"{a.labels['level']}: {a.severity}" for a in found)
    return f"[{name}](runbooks/{name}.md) ({levels})"


def _rule_section(spec: RuleSpec) -> str:
    side = {Direction.HIGH: "at or above", Direction.LOW: "at or below"}[spec.direction]
    side = "above" if spec.strict else side
    defaults = spec.defaults
    facts = [
        f"* Unit: {spec.unit.value.replace('_', ' ')}; bad {side} the threshold.",
        f"* Yellow: {shown(spec.unit, defaults.yellow)}. Red: {shown(spec.unit, defaults.red)}."
        + (f" For {shown(Unit.SECONDS, defaults.for_s)}." if defaults.for_s else ""),
        f"* Told: {_told(spec)}.",
        *(f"* Why {level}: {text}" for level, text in spec.provenance),
    ]
    return f"## `{spec.rule.value}`\n\n{spec.sentence}\n\n" + "\n".join(facts) + "\n"


def _alert_row(spec: AlertSpec) -> list[str]:
    link = f"[{spec.name}](runbooks/{spec.name}.md)"
    keep = duration(spec.keep_firing_for_s) if spec.keep_firing_for_s else "–"
    return [link, spec.severity, f"`{_cell(spec.expr.text)}`", duration(spec.for_s), keep]


def _recording_row(row: Recording) -> list[str]:
    return [f"`{row.name}`", row.text]


def _rules_page() -> str:
    overview = _table(
        ("rule", "yellow", "red", "red pages"),
        (
            [
                f"[`{spec.rule.value}`](#{spec.rule.value})",
                shown(spec.unit, spec.defaults.yellow),
                shown(spec.unit, spec.defaults.red),
                "yes" if spec.pages else "no",
            ]
            for spec in SPECS
        ),
    )
    alerts = _table(("alert", "severity", "expression", "for", "keeps firing for"), map(_alert_row, ALERTS))
    return "\n".join(
        [
            _RULES_INTRO,
            overview,
            *(_rule_section(spec) for spec in SPECS),
            "## Alerts\n\nAs shipped in `alerts/kvwatch.rules.yml`.\n\n" + alerts,
            "## Recording rules\n\nIn the same file, for overviews and federation of many hosts; nothing "
            "that ships needs them.\n\n"
            + _table(("series", "what it says"), map(_recording_row, RECORDINGS)),
        ]
    )


def files() -> dict[str, str]:
    """The three pages."""
    return {
        METRICS_FILE: _metrics_page(),
        RULES_FILE: _rules_page(),
        CONFIG_FILE: reference.render(),
    }
