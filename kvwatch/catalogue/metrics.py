"""Everything that kvwatch exports, by its public name: one row per metric.

`/metrics`, the documentation and the dashboards are made from these rows. kvwatch's own
metrics come first on every page, so that no fault in the others can hide them.
"""

from __future__ import annotations

from kvwatch.catalogue.metrics_gpu import GPU_METRICS
from kvwatch.catalogue.metrics_self import SELF_METRICS
from kvwatch.catalogue.metrics_server import SERVER_METRICS
from kvwatch.catalogue.metrics_spec import MetricKind, MetricSpec, Row, Stability
from kvwatch.catalogue.metrics_verdict import VERDICT_METRICS

__all__ = ["METRICS", "MetricKind", "MetricSpec", "Row", "Stability", "by_name"]

METRICS: tuple[MetricSpec, ...] = (*SELF_METRICS, *GPU_METRICS, *SERVER_METRICS, *VERDICT_METRICS)

_BY_NAME = {spec.name: spec for spec in METRICS}


def by_name(name: str) -> MetricSpec:
    """The row of one metric by its complete name; KeyError when there is none."""
    return _BY_NAME[name]
