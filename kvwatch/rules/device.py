"""How bad is it on a GPU? Headroom, exhaustion, memory of the dead, lost or missing GPUs, Xid events."""

from __future__ import annotations

from collections.abc import Iterator

from kvwatch.model.gpu import GpuHealth
from kvwatch.model.level import Reason, RuleId
from kvwatch.model.sample import FailureKind
from kvwatch.model.settings import GIB, MIB, RuleSettings
from kvwatch.model.signal import ForecastState, GpuSignals, Holder, Phase
from kvwatch.rules.kv import MIN_SAMPLES
from kvwatch.rules.spec import Reading
from kvwatch.rules.views import GpuView, Inputs, scope_of

HEADROOM_YELLOW_BYTES = 2 * GIB
HEADROOM_YELLOW_SHARE = (
    0.05  # of the device's total: the smaller of the two counts, while neither is configured
)
HEADROOM_RED_BYTES = 512 * MIB
LOW_BUT_STEADY = "low, but neither falling nor below what its server has lived with"
MAX_TOLD = 3  # processes named in one detail
AFTER_STEP_S = 600.0  # contract: no exhaustion forecast is judged within ten minutes of a step change

# NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors).
XID_YELLOW = {
    63: "row remapping or page retirement was recorded",
    64: "row remapping or page retirement could not be recorded",
    74: "NVLink error",
    94: "contained memory error: the application must restart",
}
XID_RED = {
    48: "double-bit memory error: the GPU needs a reset",
    79: "the GPU has fallen off the bus",
    95: "uncontained memory error: the GPU needs a reset",
    119: "the GPU's system processor does not answer",
    120: "the GPU's system processor reported an error",
}
NO_DRIVER_KINDS = frozenset({FailureKind.NO_DRIVER, FailureKind.VERSION_MISMATCH})


def device_headroom(inputs: Inputs) -> Iterator[Reading]:
    """Bytes that can still be had: device free plus what the allocator could return."""
    settings = inputs.rules[RuleId.DEVICE_HEADROOM]
    for view in inputs.gpus:
        if view.state.is_mig_parent:
            continue
        signals = view.signals
        value = signals.headroom_bytes if signals is not None else None
        near = value is not None and settings.red is not None and value <= settings.red
        why = _headroom_red(view, signals, inputs) if near else ""
        yield Reading(
            scope=view.scope,
            value=value,
            absent=_device_absent(view) or _none(value),
            red_allowed=bool(why),
            yellow=_headroom_yellow(view, settings),
            period_s=view.period_s,
            detail=why or (LOW_BUT_STEADY if near else ""),
        )


def device_exhaustion(inputs: Inputs) -> Iterator[Reading]:
    """Central time in seconds until the device is full; infinite when it is not filling."""
    for view in inputs.gpus:
        if view.state.is_mig_parent:
            continue
        value = _exhaustion_s(view.signals)
        absent = (
            _device_absent(view) or _stepped(view.signals, inputs.clock.mono_s) or _no_forecast(view, value)
        )
        yield Reading(scope=view.scope, value=value, absent=absent, period_s=view.period_s)


def _no_forecast(view: GpuView, value: float | None) -> Reason | None:
    """Where headroom is known, a forecast that is not there waits for more of it."""
    if value is None and view.signals is not None and view.signals.headroom_bytes is not None:
        return Reason.TOO_FEW
    return _none(value)


def dead_process_memory(inputs: Inputs) -> Iterator[Reading]:
    """Bytes held by processes that are gone (only where process ids resolve), or left of a server that is
    down: an engine outlives its API server under another title (vllm#55510, #34643)."""
    down = {server.server for server in inputs.signals.servers if server.phase is Phase.DOWN}
    for view in inputs.gpus:
        if view.state.is_mig_parent:
            continue
        value = view.signals.dead_process_bytes if view.signals is not None else None
        left = _left_of(view.signals, down)
        if left:
            value = (value or 0) + sum(one.used_bytes or 0 for one in left)
        absent = _gpu_absent(view) or _none(value)
        detail = ", ".join(_holding(one) for one in left[:MAX_TOLD])
        yield Reading(scope=view.scope, value=value, absent=absent, period_s=view.period_s, detail=detail)


def _left_of(signals: GpuSignals | None, down: set[str]) -> list[Holder]:
    """Living processes of servers that are down, as far as their sizes are told."""
    if signals is None or not down:
        return []
    return [one for one in signals.holders or () if one.server in down and not one.dead and one.used_bytes]


def _holding(one: Holder) -> str:
    gib = (one.used_bytes or 0) / GIB
    return f"process {one.pid} ({one.name}) of {one.server}, which is down, holds {gib:.1f} GiB"


def gpu_lost(inputs: Inputs) -> Iterator[Reading]:
    """1 where a GPU has fallen off the bus or needs a reset, 0 where it answers."""
    for view in inputs.gpus:
        health = view.state.health
        value = _health_value(health, bad=(GpuHealth.LOST, GpuHealth.RESET_REQUIRED))
        yield _health_reading(inputs, view, value, view.state.health_detail if value else "")


def gpu_missing(inputs: Inputs) -> Iterator[Reading]:
    """1 where a GPU seen before or expected is gone; for the host, how many of the expected are not there."""
    for view in inputs.gpus:
        value = _health_value(view.state.health, bad=(GpuHealth.MISSING,))
        yield _health_reading(inputs, view, value, view.state.health_detail if value else "")
    yield from _fewer_than_expected(inputs)


def gpu_xid(inputs: Inputs) -> Iterator[Reading]:
    """Listed Xid events of the last ten minutes; red only where one of the grave ones is among them."""
    for view in inputs.gpus:
        history = inputs.memory.gpus.get(view.state.uuid)
        recent = history.recent if history is not None else ()
        grave = sum(event.count for event in recent if event.xid in XID_RED)
        value = grave + sum(event.count for event in recent if event.xid in XID_YELLOW)
        detail = ", ".join(sorted({_xid_text(event.xid) for event in recent} - {""}))
        yield Reading(
            scope=view.scope,
            value=float(value),
            absent=_host_absent(inputs, view),
            red_allowed=grave > 0,
            period_s=view.period_s,
            detail=detail,
        )


def _xid_text(xid: int) -> str:
    text = XID_RED.get(xid) or XID_YELLOW.get(xid)
    return f"Xid {xid}: {text}" if text else ""


def _none(value: float | None) -> Reason | None:
    return Reason.NOT_REPORTED if value is None else None


def _headroom_yellow(view: GpuView, settings: RuleSettings) -> float | None:
    memory = view.state.memory
    if settings.yellow != HEADROOM_YELLOW_BYTES or memory is None:
        return settings.yellow
    return min(HEADROOM_YELLOW_BYTES, HEADROOM_YELLOW_SHARE * memory.total_bytes)


def _headroom_red(view: GpuView, signals: GpuSignals | None, inputs: Inputs) -> str:
    """Say what besides the value makes low headroom an emergency; empty: nothing does."""
    if signals is None:
        return ""
    if signals.headroom_falling:
        return "headroom is falling"
    if signals.below_learned_floor:
        return "headroom is below what its server has lived with"
    here = [agent for agent in inputs.agents if agent.fresh and agent.state.gpu_uuid == view.state.uuid]
    if any(agent.memory.samples >= MIN_SAMPLES and agent.memory.retries_in_window for agent in here):
        return "the server's allocator had to retry in the last minute"
    return ""


def _exhaustion_s(signals: GpuSignals | None) -> float | None:
    if signals is None:
        return None
    forecast = signals.device_forecast
    if forecast.central_s is None and forecast.state is ForecastState.STABLE:
        return float("inf")
    return forecast.central_s


def _stepped(signals: GpuSignals | None, now_s: float) -> Reason | None:
    stepped_s = signals.last_step_change_s if signals is not None else None
    return Reason.TOO_FEW if stepped_s is not None and now_s - stepped_s < AFTER_STEP_S else None


def _gpu_absent(view: GpuView) -> Reason | None:
    if view.paused or (view.signals is not None and view.signals.phase is Phase.MAINTENANCE):
        return Reason.MAINTENANCE
    if not view.fresh:
        return Reason.STALE
    if view.state.health is not GpuHealth.OK:
        return Reason.NOT_REPORTED
    return Reason.TOO_FEW if view.samples < MIN_SAMPLES else None


def _device_absent(view: GpuView) -> Reason | None:
    absent = _gpu_absent(view)
    if absent is None and view.signals is not None and view.signals.phase is Phase.STARTING:
        return Reason.STARTING
    return absent


def _host_absent(inputs: Inputs, view: GpuView) -> Reason | None:
    """Health and events are told by the host's source, which must have answered twice itself."""
    if view.paused:
        return Reason.MAINTENANCE
    if not view.fresh:
        return Reason.STALE
    passes = max((count for _, count in inputs.memory.gpu_passes.values()), default=0)
    return Reason.TOO_FEW if passes < MIN_SAMPLES else None


def _health_value(health: GpuHealth, bad: tuple[GpuHealth, ...]) -> float | None:
    if health in bad:
        return 1.0
    return 0.0 if health is GpuHealth.OK else None


def _health_reading(inputs: Inputs, view: GpuView, value: float | None, detail: str) -> Reading:
    absent = _host_absent(inputs, view) or _none(value)
    return Reading(scope=view.scope, value=value, absent=absent, period_s=view.period_s, detail=detail)


def _fewer_than_expected(inputs: Inputs) -> Iterator[Reading]:
    seen = [view.state.uuid for view in inputs.gpus]
    for name in inputs.settings.gpus.expect_uuids:
        if not any(uuid.startswith(name) for uuid in seen):
            absent = _host_absent(inputs, inputs.gpus[0]) if seen else _driver_absent(inputs)
            detail = f"{name} is expected, and nothing has ever seen it"
            yield Reading(scope=scope_of("", "", name), value=1.0, absent=absent, detail=detail)
    expected = inputs.settings.gpus.expect_count
    if expected is None:
        return
    whole = [view for view in inputs.gpus if not view.state.parent_uuid]
    # MISSING GPUs are judged one by one above; here it is those that nothing has ever seen.
    known = len(whole)
    period_s = whole[0].period_s if whole else 1.0
    absent = _host_absent(inputs, whole[0]) if whole else _driver_absent(inputs)
    short = max(0, expected - known)
    detail = f"{expected} GPUs are expected, {known} were ever seen" if short else ""
    yield Reading(scope=scope_of(), value=float(short), absent=absent, period_s=period_s, detail=detail)


def _driver_absent(inputs: Inputs) -> Reason | None:
    """Without any GPU: a driver that says twice that it is not there is a fact, silence is not."""
    statuses = [inputs.snapshot.sources[name] for name in _GPU_SOURCES if name in inputs.snapshot.sources]
    if any(status.paused for status in statuses):
        return Reason.MAINTENANCE
    for status in statuses:
        kind = status.failure.kind if status.failure is not None else None
        if kind in NO_DRIVER_KINDS and status.errors_total >= MIN_SAMPLES:
            return None
    if any(count >= MIN_SAMPLES for _, count in inputs.memory.gpu_passes.values()):
        return None
    return Reason.NOT_REPORTED


_GPU_SOURCES = ("nvml", "dcgm", "dcgm_exporter")
