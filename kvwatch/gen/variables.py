"""What can be chosen at the top of a dashboard? Host, server, GPU."""

from __future__ import annotations

from typing import Any

from kvwatch.catalogue.alert_spec import metric
from kvwatch.catalogue.promql import label_values
from kvwatch.gen.panels import INSTANCE, variable


def instance_variable() -> Any:
    """Hosts, as Prometheus names their kvwatch."""
    return variable("instance", "Host", label_values(metric("build_info"), "instance"))


def server_variable() -> Any:
    """Servers of the chosen hosts."""
    return variable("server", "Server", label_values(metric("server_up"), "server", instance=INSTANCE))


def gpu_variable() -> Any:
    """GPUs (host index) of the chosen hosts."""
    return variable("gpu", "GPU", label_values(metric("gpu_up"), "gpu", instance=INSTANCE))
