"""What is shown of each GPU, server and agent? The newest facts, less whatever is no longer current."""

from __future__ import annotations

from kvwatch.model.gpu import GpuHealth, GpuState
from kvwatch.model.report import GpuReport, ServerReport, Snapshot
from kvwatch.model.server import AgentState
from kvwatch.model.signal import GpuSignals, ServerSignals
from kvwatch.rules.views import GpuView, Inputs, ServerView


def gpus(inputs: Inputs) -> tuple[GpuReport, ...]:
    """Return every GPU that a source has told of, by index; a lost or stale one stays, with `up` False."""
    now_s, samples = inputs.clock.mono_s, inputs.snapshot.gpus
    views = sorted(inputs.gpus, key=lambda view: (view.state.index, view.state.uuid))
    return tuple(_gpu(view, samples[view.source].age_s(now_s)) for view in views)


def servers(inputs: Inputs) -> tuple[ServerReport, ...]:
    """Return every watched server in the order of the configuration."""
    return tuple(_server(view, inputs) for view in inputs.servers)


def agents(snapshot: Snapshot, fresh: frozenset[str]) -> tuple[AgentState, ...]:
    """Return what current agents say, in the order of their names."""
    found = (snapshot.agents[key].value for key in sorted(fresh))
    return tuple(state for state in found if state is not None)


def identity(state: GpuState) -> GpuState:
    """Return what stays true of a GPU nobody has heard of lately: who it is, its health, its event counts."""
    return GpuState(
        uuid=state.uuid,
        index=state.index,
        health=state.health,
        health_detail=state.health_detail,
        name=state.name,
        driver_version=state.driver_version,
        mig_profile=state.mig_profile,
        parent_uuid=state.parent_uuid,
        is_mig_parent=state.is_mig_parent,
        xid_events_total=state.xid_events_total,
        reported_by=state.reported_by,
        capabilities_missing=state.capabilities_missing,
    )


def _gpu(view: GpuView, age_s: float) -> GpuReport:
    if not view.fresh:
        signals = _without_figures(view.signals)
        return GpuReport(state=identity(view.state), signals=signals, up=False, age_s=age_s, stale=True)
    up = view.state.health is GpuHealth.OK
    return GpuReport(state=view.state, signals=view.signals, up=up, age_s=age_s)


def _without_figures(signals: GpuSignals | None) -> GpuSignals | None:
    """What is left of a stale GPU's signals: where a reload has replaced its source, those of the source
    before are current for a moment longer, and would be a ledger without a total."""
    if signals is None or (signals.ledger is None and signals.headroom_bytes is None):
        return signals
    return GpuSignals(
        uuid=signals.uuid,
        index=signals.index,
        phase=signals.phase,
        phase_detail=signals.phase_detail,
        last_step_change_s=signals.last_step_change_s,
        servers=signals.servers,
    )


def _server(view: ServerView, inputs: Inputs) -> ServerReport:
    name = view.settings.name
    sample = inputs.snapshot.servers.get(name)
    state = sample.value if sample is not None else None
    signals = view.signals or ServerSignals(server=name)
    answering = view.status.up if view.status is not None else view.fresh
    return ServerReport(
        server=name,
        kind=state.kind if state is not None else view.settings.kind,
        url=view.settings.url,
        state=state if view.fresh else None,
        signals=signals,
        up=answering and view.fresh,
        age_s=sample.age_s(inputs.clock.mono_s) if sample is not None else None,
        stale=view.seen and not view.fresh,
        stalled=_stalled(signals),
    )


def _stalled(signals: ServerSignals) -> bool | None:
    known = [engine.stalled for engine in signals.engines if engine.stalled is not None]
    return any(known) if known else None
