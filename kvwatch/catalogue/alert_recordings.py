"""What does a fleet look like in a few series per host? One row per recording rule.

Named level:metric:operation, as Prometheus advises: the labels that are left, the metric, what was done.
Nothing here is needed by an alert or a dashboard; federation and overviews of many hosts want few series.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvwatch.catalogue.alert_spec import PAGE, metric
from kvwatch.catalogue.alerts import ALERTS
from kvwatch.catalogue.promql import Expr, max_by, min_by, regex, relabelled, series, sum_by, unlike
from kvwatch.model.level import Level

HOST = ("job", "instance")
PAGING = tuple(sorted({row.rule.value for row in ALERTS if row.rule is not None and row.severity == PAGE}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One recording rule: its series' name, its expression, and what it is good for."""

    name: str
    expr: Expr
    text: str


def _free_bytes() -> Expr:
    """Free memory of what can be used: a GPU that is split has its instances counted instead."""
    parents = max_by(series(metric("gpu_info"), parent_uuid=unlike("")), *HOST, "parent_uuid")
    split = relabelled(parents, "uuid", "parent_uuid")
    return series(metric("gpu_memory_free_bytes")).unless(split, on=(*HOST, "uuid"))


def _red() -> Expr:
    return series(metric("rule_level"), rule=regex("|".join(PAGING))).is_(Level.RED.value)


RECORDINGS = (
    Recording(
        name="instance:kvwatch_headline_level:max",
        expr=max_by(series(metric("headline_level")), *HOST),
        text="Worst level of the rules that page, per host; -1 where nothing can be judged or sight is lost.",
    ),
    Recording(
        name="instance_server:kvwatch_rule_level:max",
        expr=max_by(
            series(metric("rule_level"), rule=regex("|".join(PAGING)), server=unlike("")), *HOST, "server"
        ),
        text="Worst level of the rules that page, per server; -1 only where none can be judged.",
    ),
    Recording(
        name="job_rule:kvwatch_rule_level_red:sum",
        expr=sum_by(_red(), "job", "rule"),
        text="How many servers, engines or GPUs are red, per paging rule: one is a fault, all is a change.",
    ),
    Recording(
        name="instance:kvwatch_gpu_memory_free_bytes:sum",
        expr=sum_by(_free_bytes(), *HOST),
        text="Free device memory per host. Of a GPU that is split (MIG) only its instances count.",
    ),
    Recording(
        name="instance:kvwatch_gpu_memory_free_bytes:min",
        expr=min_by(_free_bytes(), *HOST),
        text="Free device memory of the GPU or MIG instance that has least, per host.",
    ),
    Recording(
        name="instance_resource:kvwatch_time_to_exhaustion_seconds:min",
        expr=min_by(series(metric("time_to_exhaustion_seconds"), bound="central"), *HOST, "resource"),
        text="The nearest end of the KV pool or of device memory, per host; +Inf when nothing fills.",
    ),
    Recording(
        name="instance_state:kvwatch_requests:sum",
        expr=sum_by(series(metric("requests")), *HOST, "state"),
        text="Running and waiting requests, per host.",
    ),
)
