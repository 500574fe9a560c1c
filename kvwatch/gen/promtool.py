"""What does a case for `promtool test rules` look like? Series in, alerts expected."""

from __future__ import annotations

from collections.abc import Mapping

from kvwatch.catalogue.alert_spec import AlertSpec, Example, metric
from kvwatch.catalogue.alerts import ALERTS, JOB
from kvwatch.catalogue.promql import full_name

STEP_S = 15
HOST = {"instance": "gpu-host-1:9843", "job": JOB}

Case = dict[str, object]


def series(name: str, labels: Mapping[str, str], values: str) -> dict[str, str]:
    """One input series; empty labels are left out, as Prometheus drops them."""
    inner = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()) if value)
    return {"series": f"{name}{{{inner}}}", "values": values}


def metric_series(name: str, labels: Mapping[str, str], values: str) -> dict[str, str]:
    """One input series of a metric of ours; refuses a label that the metric does not have."""
    row = metric(name)
    unknown = set(labels) - {*row.labels, *HOST}
    if unknown:
        raise ValueError(f"{row.name} has no label {', '.join(sorted(unknown))}")
    return series(full_name(row), labels, values)


def expects(spec: AlertSpec, steps: int, *examples: Example) -> Case:
    """What is firing after a number of steps: one alert per example, none without."""
    firing = [
        {
            "exp_labels": dict(sorted({**_host(example), **example.labels, **_own(spec)}.items())),
            "exp_annotations": spec.expected(example),
        }
        for example in examples
    ]
    return {"eval_time": f"{steps * STEP_S}s", "alertname": spec.name, "exp_alerts": firing}


def _host(example: Example) -> dict[str, str]:
    return HOST if example.instance else {"job": JOB}


def _own(spec: AlertSpec) -> dict[str, str]:
    rule = {"rule": spec.rule.value} if spec.rule is not None else {}
    return {**rule, **spec.labels}


def case(name: str, inputs: list[dict[str, str]], *checks: Case) -> Case:
    """One case: input series, and what fires at which time."""
    return {
        "name": name,
        "interval": f"{STEP_S}s",
        "input_series": inputs,
        "alert_rule_test": list(checks),
    }


def spec_of(name: str, severity: str = "") -> AlertSpec:
    """The row of an alert, by severity where a name has several."""
    return next(s for s in ALERTS if s.name == name and severity in ("", s.severity))
