"""What is not known right now, and why? Said aloud, so that a blank is never taken for "all good"."""

from __future__ import annotations

from collections.abc import Iterator

from kvwatch.model.gpu import Accounting
from kvwatch.model.level import Level, Reason, Scope
from kvwatch.model.report import GpuReport, ServerReport, TickReport
from kvwatch.model.sample import SourceStatus

_REASONS = {
    Reason.STALE: "its newest sample is too old",
    Reason.STALE_HELD: "its newest sample is too old; the last level is held",
    Reason.NOT_REPORTED: "nothing reports this value here",
    Reason.TOO_FEW: "too few samples or observations yet",
    Reason.STARTING: "the server is starting",
    Reason.MAINTENANCE: "the GPU is in maintenance",
    Reason.DISABLED: "switched off in the configuration",
}


def unknowns(report: TickReport) -> Iterator[tuple[str, str]]:
    """(what, why) in plain words: sources first, then GPUs, servers and rules."""
    for source in report.sources:
        if not source.up:
            yield f"source {source.source}", _source_reason(source)
    for gpu in report.gpus:
        yield from _gpu(gpu)
    for server in report.servers:
        yield from _server(server)
    for verdict in report.verdicts:
        if verdict.level is Level.UNKNOWN:
            why = verdict.detail or _REASONS.get(verdict.reason, verdict.reason.value)
            yield f"rule {verdict.rule.value} of {scope_text(verdict.scope)}", why


def scope_text(scope: Scope) -> str:
    """A scope for people: "chat/0", "GPU 3", "source nvml" or "this host"."""
    if scope.server:
        return f"{scope.server}/{scope.engine}" if scope.engine else scope.server
    if scope.uuid:
        return f"GPU {scope.gpu}" if scope.uuid.startswith("GPU-") else f"GPU {scope.gpu} ({scope.uuid[:12]})"
    return f"source {scope.source}" if scope.source else "this host"


def _source_reason(source: SourceStatus) -> str:
    if source.paused:
        return "released for maintenance"
    if source.failure is not None:
        return source.failure.message
    return "a call has not come back" if source.stuck else "no answer yet"


def _gpu(gpu: GpuReport) -> Iterator[tuple[str, str]]:
    found = gpu.state
    name = f"GPU {found.index}" + (f" {found.mig_profile}" if found.mig_profile else "")
    if found.memory is None:
        why = found.health_detail or ("its figures are too old" if gpu.stale else "no source reports it")
        yield f"memory of {name}", why
    elif found.memory.accounting is Accounting.V1:
        yield f"reserved memory of {name}", "this driver counts it as used (memory information v1)"
    if found.memory is not None and found.memory_note:
        yield f"memory of {name} alone", found.memory_note
    if found.capabilities_missing:
        yield f"{', '.join(found.capabilities_missing)} of {name}", "this device does not support it"


def _server(server: ServerReport) -> Iterator[tuple[str, str]]:
    if server.state is None:
        yield f"everything about {server.server}", "no current answer from it"
        return
    for note in server.state.notes:
        yield server.server, note
