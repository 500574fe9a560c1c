"""What does a piece of evidence say? One sentence of cause, and the next command to type."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite

from kvwatch.catalogue.alerts import of_rule
from kvwatch.core.curves import Cut
from kvwatch.core.evidence import gpus_of
from kvwatch.core.wording import amount
from kvwatch.model.level import RuleId, Scope, Verdict
from kvwatch.model.report import GpuReport, ServerReport, TickReport
from kvwatch.model.signal import Holder
from kvwatch.rules.spec import Unit

NEIGHBOUR_BYTES = 256 * 1024 * 1024  # less is a bare context or a tool
GREW_BYTES = 256 * 1024 * 1024
MEMORY_RULES = frozenset({RuleId.DEVICE_HEADROOM, RuleId.DEVICE_EXHAUSTION})
ALLOCATOR_RULES = frozenset({RuleId.ALLOC_RETRIES, RuleId.LARGEST_ALLOCATABLE})

_UNITS = {"ratio": Unit.RATIO, "bytes": Unit.BYTES, "seconds": Unit.SECONDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The next command to type on the host, and what to look for in its answer."""

    command: str
    why: str


def where(scope: Scope) -> str:
    """Return a scope as alerts write it."""
    engine = f" engine {scope.engine}" if scope.engine else ""
    server = f"server {scope.server}{engine}" if scope.server else ""
    gpu = f"GPU {scope.gpu or scope.uuid}" if scope.gpu or scope.uuid else ""
    return " on ".join(part for part in (server, gpu) if part) or "this host"


def cause(report: TickReport, verdict: Verdict, cut: Cut) -> str:
    """Return one sentence: what is red (as its alert says it), why, and the fact that explains most."""
    row = of_rule(verdict.rule)
    lead = verdict.rule.value if row is None else row.sentence(_places(report, verdict, row.unit))
    facts = [*_joined(lead, verdict.detail), *_facts(report, verdict, cut)]
    text = "; ".join(dict.fromkeys(fact for fact in facts if fact))
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('?') else '.'}"


def _joined(lead: str, detail: str) -> list[str]:
    """The alert's words and the rule's, without saying the same words (`Xid 79`) twice in a row."""
    head, colon, rest = detail.partition(":")
    return [lead + colon + rest] if colon and lead.endswith(f" {head}") else [lead, detail]


def _places(report: TickReport, verdict: Verdict, unit: str) -> dict[str, str]:
    xids = (g.state.last_xid for g in report.gpus if g.state.uuid == verdict.scope.uuid)
    return {
        "where": where(verdict.scope),
        "instance": "this host",
        "value": _shown(unit, verdict.value),
        "threshold": _shown(unit, verdict.red),
        "xids": str(next((xid for xid in xids if xid is not None), "(see the events)")),
    }


def _shown(unit: str, value: float | None) -> str:
    if value is None or not isfinite(value):
        return "an unknown amount"
    if unit == "times":
        return f"{value:.3g} times"
    if unit == "per_minute":
        return f"{value:.3g} times a minute"
    if unit == "seconds" and value >= 120:
        return f"{value / 60:.0f} min"
    return amount(_UNITS.get(unit, Unit.COUNT), value)


def _facts(report: TickReport, verdict: Verdict, cut: Cut) -> list[str]:
    if verdict.rule in MEMORY_RULES | ALLOCATOR_RULES:
        return [fact for gpu in gpus_of(report, verdict.scope)[:1] for fact in _memory_facts(gpu, cut)]
    if verdict.rule in (RuleId.RECOMPUTE_TAX, RuleId.LATENCY_SLO):
        return [_pool_fact(report, verdict.scope)]
    if verdict.rule in (RuleId.SERVER_DOWN, RuleId.SERVER_STALLED):
        held = next((s.signals.memory_held_while_down_bytes for s in _servers(report, verdict.scope)), None)
        return [f"its processes still hold {amount(Unit.BYTES, held)} of GPU memory"] if held else []
    return []


def _memory_facts(gpu: GpuReport, cut: Cut) -> list[str]:
    found = []
    grown = cut.growth(("", "", gpu.state.uuid), "used_bytes")
    if grown is not None and grown[0] >= GREW_BYTES:
        minutes = f"{grown[1] / 60:.0f} min" if grown[1] >= 100 else f"{grown[1]:.0f} s"
        found.append(f"GPU memory in use grew by {amount(Unit.BYTES, grown[0])} in {minutes}")
    holder = neighbour(gpu) or _largest(gpu)
    return [*found, _holding(holder)] if holder is not None else found


def _holding(holder: Holder) -> str:
    named = f"process {holder.pid}" + (f" ({holder.name[:32]})" if holder.name.isprintable() else "")
    whose = f"of {holder.server}" if holder.server else "which belongs to no watched server,"
    held = amount(Unit.BYTES, holder.used_bytes or 0)
    return f"{named}, which is gone, holds {held}" if holder.dead else f"{named} {whose} holds {held}"


def _largest(gpu: GpuReport) -> Holder | None:
    holders = gpu.signals.holders if gpu.signals is not None else None
    return max((h for h in holders or () if h.used_bytes), key=lambda h: h.used_bytes or 0, default=None)


def neighbour(gpu: GpuReport) -> Holder | None:
    """Return the largest process on a GPU that belongs to no watched server, or to nobody alive."""
    holders = gpu.signals.holders if gpu.signals is not None else None
    strangers = [h for h in holders or () if h.dead or not h.server]
    large = [h for h in strangers if (h.used_bytes or 0) >= NEIGHBOUR_BYTES]
    return max(large, key=lambda h: h.used_bytes or 0, default=None)


def _servers(report: TickReport, scope: Scope) -> list[ServerReport]:
    return [each for each in report.servers if each.server == scope.server]


def _pool_fact(report: TickReport, scope: Scope) -> str:
    engines = [e for s in _servers(report, scope) for e in s.signals.engines if e.engine == scope.engine]
    if not engines or engines[0].kv_usage_ratio is None:
        return ""
    found = engines[0]
    queue = f" with {found.running} requests running and {found.waiting} waiting"
    known = found.running is not None and found.waiting is not None
    return f"its KV pool is {amount(Unit.RATIO, found.kv_usage_ratio or 0.0)} full" + (queue if known else "")


# The next command


def next_step(report: TickReport, verdict: Verdict) -> Step:
    """Return what to type next on the host. Nothing that a process calls itself gets into it."""
    return _STEPS[verdict.rule](report, verdict)


def _memory_step(report: TickReport, verdict: Verdict) -> Step:
    gpus = gpus_of(report, verdict.scope)
    stranger = neighbour(gpus[0]) if gpus else None
    if stranger is not None and not stranger.dead:
        return Step(
            command=f"ps -o pid,user,lstart,args -p {stranger.pid}",
            why="It holds GPU memory and belongs to no watched server: whose is it, may it be stopped?",
        )
    only = "".join(f" -i {shlex.quote(gpu.state.uuid)}" for gpu in gpus[:1])
    return Step(
        command=f"nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv{only}",
        why="Compare with the list on this page: what has grown is what to stop or to shrink.",
    )


def _curl(report: TickReport, scope: Scope) -> str:
    url = next((each.url for each in _servers(report, scope)), "http://127.0.0.1:8000")
    return f"curl -sS -m 5 {shlex.quote(url.rstrip('/') + '/metrics')}"


def _page_step(report: TickReport, verdict: Verdict) -> Step:
    return Step(
        command=f"{_curl(report, verdict.scope)} | grep -E 'running|waiting|preempt'",
        why="Does the server still queue and preempt? If so, send it fewer requests.",
    )


def _down_step(report: TickReport, verdict: Verdict) -> Step:
    return Step(
        command=f"{_curl(report, verdict.scope)} | head -3",
        why="Refused: the process is gone, and its log says why. Silence: it hangs. A page: it is back.",
    )


def _busy_step(_report: TickReport, _verdict: Verdict) -> Step:
    return Step(
        command="nvidia-smi --query-gpu=index,utilization.gpu,pstate --format=csv",
        why="100 % on all ranks but one: a collective hangs. 0 %: the scheduler hangs, or it is paused.",
    )


def _kernel_step(_report: TickReport, _verdict: Verdict) -> Step:
    return Step(
        command="journalctl -k --since -15min | grep -i -e xid -e 'fallen off'",
        why="The kernel's own words say which fault it was, and on which process.",
    )


def _devices_step(_report: TickReport, _verdict: Verdict) -> Step:
    return Step(
        command="nvidia-smi -L; lspci -d 10de:",
        why="On PCIe but not in the driver: the driver refused it. On neither: hardware.",
    )


_STEPS: Mapping[RuleId, Callable[[TickReport, Verdict], Step]] = {
    **dict.fromkeys(RuleId, _page_step),
    **dict.fromkeys((*MEMORY_RULES, *ALLOCATOR_RULES, RuleId.DEAD_PROCESS_MEMORY), _memory_step),
    RuleId.SERVER_DOWN: _down_step,
    RuleId.SERVER_STALLED: _busy_step,
    RuleId.GPU_LOST: _kernel_step,
    RuleId.GPU_XID: _kernel_step,
    RuleId.GPU_MISSING: _devices_step,
}
