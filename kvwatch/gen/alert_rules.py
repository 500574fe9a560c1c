"""Which rules does Prometheus load? The catalogue's alerts and recordings, as a file and for the operator."""

from __future__ import annotations

from kvwatch.catalogue.alert_recordings import RECORDINGS
from kvwatch.catalogue.alerts import ALERTS, JOB, RUNBOOKS, AlertSpec
from kvwatch.gen import yamltext

RULES_FILE = "alerts/kvwatch.rules.yml"
OPERATOR_FILE = "alerts/kvwatch.prometheusrule.yaml"
NOTE = f"""
Needs Prometheus 2.42 or newer (keep_firing_for). Scrape kvwatch under the job name `{JOB}`.
Runbooks are linked below {RUNBOOKS}; to use a copy of your own, replace that text in this file.
`evidence` leads to kvwatch itself at `instance`: where that is not its host:port, or kvwatch serves TLS, see
docs/evidence.md.
"""


def _rule(spec: AlertSpec) -> dict[str, object]:
    rule: dict[str, object] = {"alert": spec.name, "expr": spec.expr.text}
    if spec.for_s:
        rule["for"] = duration(spec.for_s)
    if spec.keep_firing_for_s:
        rule["keep_firing_for"] = duration(spec.keep_firing_for_s)
    rule["labels"] = spec.labels
    rule["annotations"] = spec.annotations()
    return rule


def duration(seconds: int) -> str:
    """Write whole seconds as Prometheus does: the largest unit that fits."""
    return f"{seconds // 60}m" if seconds and seconds % 60 == 0 else f"{seconds}s"


def groups() -> list[dict[str, object]]:
    """Three groups: kvwatch itself, what it watches, and a few series per host for overviews."""
    watcher = [_rule(spec) for spec in ALERTS if spec.rule is None]
    watched = [_rule(spec) for spec in ALERTS if spec.rule is not None]
    recordings = [{"record": row.name, "expr": row.expr.text} for row in RECORDINGS]
    return [
        {"name": "kvwatch-itself", "interval": "15s", "rules": watcher},
        {"name": "kvwatch", "interval": "5s", "rules": watched},
        {"name": "kvwatch-fleet", "interval": "15s", "rules": recordings},
    ]


def files() -> dict[str, str]:
    """The rules file, and the same rules as a PrometheusRule object."""
    operator = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "kvwatch", "labels": {"app.kubernetes.io/name": "kvwatch"}},
        "spec": {"groups": groups()},
    }
    return {
        RULES_FILE: yamltext.dump({"groups": groups()}, NOTE),
        OPERATOR_FILE: yamltext.dump(
            operator, "\nFor the Prometheus operator: kubectl apply -f this file.\n"
        ),
    }
