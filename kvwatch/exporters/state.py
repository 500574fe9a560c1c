"""How does the last report look as JSON (`/api/v1/state`)?

Field names carry their unit (`_bytes`, `_s` for seconds, `_wall_s` for Unix seconds, `_ratio`
for 0..1). What is unknown is null, and the object around it has a word that says why: `state`
of GPUs, servers and forecasts, `level` and `reason` of rules. An infinite time is null beside
`"never"`. Fields are added, never renamed, while `schema` is 1. Secrets are cut out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from kvwatch.exporters import redact
from kvwatch.exporters.unknown import unknowns
from kvwatch.model.action import Limit
from kvwatch.model.gpu import GpuState
from kvwatch.model.level import Verdict
from kvwatch.model.report import GpuReport, LimitReport, ServerReport, TickReport
from kvwatch.model.sample import SourceStatus
from kvwatch.model.server import AgentState, EngineState
from kvwatch.model.signal import EngineSignals, Forecast, GpuSignals, Holder, Quantiles

SCHEMA = 1
Json = dict[str, object]

_GPU_FIELDS = (
    "used_peak_bytes",
    "free_low_bytes",
    "hidden_from_15s_bytes",
    "utilization_ratio",
    "memory_bandwidth_utilization_ratio",
    "power_watts",
    "temperature_celsius",
    "sample_interval_s",
    "energy_joules",
    "ecc_corrected_total",
    "ecc_uncorrected_total",
    "remapped_rows_pending",
    "remapped_rows_failed",
    "bar1_total_bytes",
    "bar1_used_bytes",
)
_GPU_SIGNALS = (
    "headroom_bytes",
    "headroom_low_bytes",
    "headroom_falling",
    "below_learned_floor",
    "unattributed_bytes",
    "dead_process_bytes",
)
_ENGINE_SIGNALS = (
    "running",
    "waiting",
    "waiting_rising",
    "preemptions_per_s",
    "recompute_tax_ratio",
    "recomputed_tokens_ratio",
    "prompt_tokens_per_s",
    "generation_tokens_per_s",
    "demand_ratio",
    "stalled",
    "stalled_for_s",
    "restarts_total",
    "samples",
)
_KV_FIELDS = (
    "num_blocks",
    "used_blocks",
    "free_blocks",
    "evictable_blocks",
    "block_size_tokens",
    "capacity_tokens",
    "pool_bytes",
    "tokens",
)
_ALLOCATOR_FIELDS = (
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "requested_bytes",
    "inactive_bytes",
    "largest_allocatable_bytes",
    "releasable_bytes",
    "largest_free_bytes",
    "private_bytes",
    "snapshot_age_s",
    "compactions_total",
    "compact_seconds_total",
    "fragmentation_soft_ratio",
    "fragmentation_hard_ratio",
    "fragmentation_total_ratio",
    "num_alloc_retries",
    "num_ooms",
)


def dumps(value: object) -> bytes:
    """Compact JSON in UTF-8; what no encoding can carry becomes "?", what is no number null."""
    try:
        text = _encode(value)
    except ValueError:  # somebody's counter is infinite: the page must still be JSON
        text = _encode(plain(value))
    return text.encode("utf-8", "replace")


def _encode(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def plain(value: object) -> object:
    """Any field value as JSON: infinities and NaN as null, secrets hidden by name and by look."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, Mapping):
        return {
            str(k): redact.HIDDEN if redact.is_secret_name(str(k)) else plain(v) for k, v in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return redact.text(str(value))


def _fields(source: object, names: tuple[str, ...]) -> Json:
    return {name: plain(getattr(source, name, None)) for name in names}


def state(report: TickReport) -> Json:
    """The whole report as JSON-ready values."""
    shell = report.shell
    return {
        "schema": SCHEMA,
        "version": report.version,
        "tick": report.tick,
        "wall_s": report.clock.wall_s,
        "tz": report.clock.tz,
        "period_s": report.period_s,
        "mode": report.mode.value,
        "demo": shell.demo,
        "headline": {"level": _level(report.headline), "detail": redact.text(report.headline_detail)},
        "maintenance": {
            "active": shell.maintenance_until_wall_s is not None,
            "until_wall_s": plain(shell.maintenance_until_wall_s),
        },
        "config": {
            "last_reload_successful": shell.config_last_reload_successful,
            "last_reload_success_wall_s": shell.config_last_reload_success_wall_s or None,
            "error": redact.text(shell.config_error),
        },
        "started_wall_s": shell.started_wall_s or None,
        "ticks_missed_total": shell.ticks_missed_total,
        "actions_dropped_total": shell.dropped_actions_total,
        "ledger_clamped_total": shell.clamped_total,
        "gpus": [_gpu(gpu) for gpu in report.gpus],
        "servers": [_server(server) for server in report.servers],
        "agents": [_agent(agent) for agent in report.agents],
        "rules": [_rule(verdict) for verdict in report.verdicts],
        "limits": [_limit_report(limit) for limit in report.limits],
        "sources": [_source(source, report) for source in report.sources],
        "actions": [{"action": a, "outcome": o, "count": n} for a, o, n in report.actions_total],
        "unknown": [{"what": what, "why": redact.text(why)} for what, why in unknowns(report)],
    }


def _level(level: object) -> str:
    return str(getattr(level, "name", level)).lower()


def _freshness(age_s: float | None, *, stale: bool) -> str:
    return "never" if age_s is None else "stale" if stale else "fresh"


def _gpu(gpu: GpuReport) -> Json:
    found = gpu.state
    return {
        "uuid": found.uuid,
        "index": found.index,
        "name": found.name,
        "up": gpu.up,
        "state": found.health.value,
        "detail": redact.text(found.health_detail),
        "freshness": _freshness(gpu.age_s, stale=gpu.stale),
        "age_s": plain(gpu.age_s),
        "driver_version": found.driver_version,
        "mig_profile": found.mig_profile,
        "parent_uuid": found.parent_uuid,
        "is_mig_parent": found.is_mig_parent,
        "reported_by": found.reported_by,
        "memory": _memory(found),
        **_fields(found, _GPU_FIELDS),
        "xid_events": [{"xid": xid, "count": count} for xid, count in found.xid_events_total],
        "last_xid": found.last_xid,
        "clock_event_reasons": plain(found.clock_event_reasons),
        "capabilities_missing": list(found.capabilities_missing),
        **_gpu_signals(gpu.signals),
    }


def _memory(found: GpuState) -> Json | None:
    memory = found.memory
    if memory is None:
        return None
    return {
        "accounting": memory.accounting.value,
        "total_bytes": memory.total_bytes,
        "used_bytes": memory.used_bytes,
        "free_bytes": memory.free_bytes,
        "reserved_bytes": memory.reserved_bytes,
        "reclaimable_bytes": found.reclaimable_bytes,
        "os_pages_bytes": found.os_pages_bytes,
        "note": found.memory_note,
    }


def _gpu_signals(signals: GpuSignals | None) -> Json:
    if signals is None:
        nothing = GpuSignals(uuid="", index=0)
        return {**_gpu_signals(nothing)}
    ledger = signals.ledger
    return {
        "phase": signals.phase.value,
        "phase_detail": redact.text(signals.phase_detail),
        "ledger": None if ledger is None else [{"part": p.part, "bytes": p.bytes} for p in ledger],
        "ledger_clamped": signals.ledger_clamped,
        "holders": None if signals.holders is None else [_holder(h) for h in signals.holders],
        "servers": list(signals.servers),
        **_fields(signals, _GPU_SIGNALS),
        "forecast": forecast(signals.device_forecast),
    }


def _holder(holder: Holder) -> Json:
    return {
        "pid": holder.pid,
        "used_bytes": holder.used_bytes,
        "server": holder.server,
        "name": holder.name,
        "command": redact.text(holder.command),
        "cgroup": holder.cgroup,
        "dead": holder.dead,
    }


def forecast(found: Forecast) -> Json:
    """A forecast; each bound beside a word: known, never (it does not fill), or unknown."""
    made: Json = {"state": found.state.value}
    for name in ("floor", "low", "central", "high"):
        seconds: float | None = getattr(found, f"{name}_s")
        made[f"{name}_s"] = plain(seconds)
        made[f"{name}_state"] = (
            "unknown" if seconds is None else "known" if math.isfinite(seconds) else "never"
        )
    made["slope_per_s"] = plain(found.slope_per_s)
    made["coverage_ratio"] = plain(found.coverage_ratio)
    made["coverage_count"] = found.coverage_count
    return made


def _server(server: ServerReport) -> Json:
    found, signals = server.state, server.signals
    states = {e.engine: e for e in found.engines} if found is not None else {}
    derived = {e.engine: e for e in signals.engines}
    return {
        "server": server.server,
        "kind": server.kind,
        "url": redact.url(server.url),
        "up": server.up,
        "state": "down" if not server.up else "stale" if server.stale else "up",
        "freshness": _freshness(server.age_s, stale=server.stale),
        "age_s": plain(server.age_s),
        "stalled": server.stalled,
        "version": found.version if found else "",
        "model": found.model if found else "",
        "phase": signals.phase.value,
        "phase_detail": redact.text(signals.phase_detail),
        "down_for_s": plain(signals.down_for_s),
        "memory_held_while_down_bytes": signals.memory_held_while_down_bytes,
        "gpu_uuids": list(signals.gpu_uuids),
        "semantics": _semantics(server),
        "notes": [redact.text(note) for note in found.notes] if found else [],
        "engines": [
            _engine(name, states.get(name), derived.get(name)) for name in dict.fromkeys([*states, *derived])
        ],
    }


def _semantics(server: ServerReport) -> Json | None:
    if server.state is None:
        return None
    meaning = server.state.semantics
    return {
        "evictable": meaning.evictable.value,
        "basis": meaning.basis.value,
        "fresh_within_s": plain(meaning.fresh_within_s),
        "note": meaning.note,
    }


def _engine(name: str, found: EngineState | None, signals: EngineSignals | None) -> Json:
    found = found or EngineState(engine=name)
    signals = signals or EngineSignals(server="", engine=name)
    usage = signals.kv_usage_ratio if signals.kv_usage_ratio is not None else found.kv.usage_ratio
    made: Json = {
        "engine": name,
        "activity": found.activity.value,
        "kv_usage_ratio": plain(usage),
        "kv": _fields(found.kv, _KV_FIELDS),
        **_fields(signals, _ENGINE_SIGNALS),
        "preemptions_total": found.scheduler.preemptions_total,
        "max_running": found.scheduler.max_running,
        "ttft": _quantiles(signals.ttft),
        "tpot": _quantiles(signals.tpot),
        "queue": _quantiles(signals.queue),
        "forecast": forecast(signals.kv_forecast),
    }
    for key in ("running", "waiting"):
        if made[key] is None:
            made[key] = getattr(found.scheduler, key)
    waste = signals.waste
    made["waste"] = None if waste is None else _fields(waste, ("ratio", "low", "high", "method"))
    return made


def _quantiles(found: Quantiles | None) -> Json:
    if found is None or not found.count:
        return {"state": "unknown" if found is None else "empty", "p50_s": None, "p95_s": None, "p99_s": None}
    values = {f"p{round(q * 100)}_s": plain(v) for q, v in found.values}
    return {
        "state": "known",
        **values,
        "count": found.count,
        "window_s": found.window_s,
        "beyond": found.beyond,
    }


def _agent(agent: AgentState) -> Json:
    return {
        "server": agent.server,
        "engine": agent.engine,
        "rank": agent.rank,
        "pid": agent.pid,
        "gpu_uuid": agent.gpu_uuid,
        "host": agent.host,
        "limits": agent.limits,
        "kv": None if agent.kv is None else _fields(agent.kv, _KV_FIELDS),
        "blocks_held": agent.blocks_held,
        "effective_max_running": agent.effective_max_running,
        "allocator": None if agent.allocator is None else _fields(agent.allocator, _ALLOCATOR_FIELDS),
    }


def _rule(verdict: Verdict) -> Json:
    scope = verdict.scope
    return {
        "rule": verdict.rule.value,
        "server": scope.server,
        "engine": scope.engine,
        "uuid": scope.uuid,
        "gpu": scope.gpu,
        "source": scope.source,
        "level": _level(verdict.level),
        "reason": verdict.reason.value,
        "value": plain(verdict.value),
        "yellow": plain(verdict.yellow),
        "red": plain(verdict.red),
        "since_wall_s": plain(verdict.since_wall_s),
        "pages": verdict.pages,
        "detail": redact.text(verdict.detail),
    }


def limit(found: Limit | None) -> Json | None:
    """A limit, null where there is none."""
    if found is None:
        return None
    return {"max_running": found.max_running, "admit": found.admit, "compact": found.compact}


def _limit_report(found: LimitReport) -> Json:
    active = found.active is not None and found.active.restricts
    return {
        "server": found.server,
        "state": "active" if active else "advised" if found.would_be is not None else "none",
        "configured": found.configured,
        "active": limit(found.active),
        "would_be": limit(found.would_be),
        "expires_wall_s": plain(found.expires_wall_s),
        "since_wall_s": plain(found.since_wall_s),
        "imposed_by": found.imposed_by,
        "reason": redact.text(found.reason),
        "dry_run": found.dry_run,
    }


def _source(source: SourceStatus, report: TickReport) -> Json:
    failure = source.failure
    word = "stuck" if source.stuck else "paused" if source.paused else "up" if source.up else "down"
    last = source.last_success_s
    return {
        "source": source.source,
        "state": word,
        "period_s": plain(source.period_s),
        "age_s": None if last is None else plain(max(0.0, report.clock.mono_s - last)),
        "last_success_wall_s": plain(source.last_success_wall_s),
        "took_s": plain(source.last_took_s),
        "good_total": source.good_total,
        "errors_total": source.errors_total,
        "failure": None
        if failure is None
        else {"kind": failure.kind.value, "message": redact.text(failure.message)},
    }
