"""How bad is it for an engine's requests? KV pool, recomputation, latency, page waste, stalls."""

from __future__ import annotations

from collections.abc import Iterator

from kvwatch.model.level import Reason, RuleId
from kvwatch.model.server import Basis, Evictable
from kvwatch.model.settings import RuleSettings, SloSettings
from kvwatch.model.signal import EngineSignals, Quantiles
from kvwatch.rules.spec import Reading
from kvwatch.rules.views import EngineView, Inputs

MIN_OBSERVATIONS = 20  # contract: latency is unknown under this many observations in the window
JUDGED_QUANTILE = 0.95
MIN_SAMPLES = 2  # contract: fewer good samples since start, restart or reset never trigger anything


def kv_usage(inputs: Inputs) -> Iterator[Reading]:
    """Share of the KV pool in use; red needs a queue and a sign of harm, since a full pool is normal."""
    for view in inputs.engines:
        signals = view.signals
        value = signals.kv_usage_ratio if signals is not None else None
        why = _why_capped(view, inputs) if _at_red(value, inputs.rules[RuleId.KV_USAGE]) else ""
        yield _reading(view, value, red_allowed=not why, detail=why)


def recompute_tax(inputs: Inputs) -> Iterator[Reading]:
    """Share of engine time spent on recomputing preempted requests; red needs requests waiting."""
    for view in inputs.engines:
        signals = view.signals
        value = signals.recompute_tax_ratio if signals is not None else None
        allowed = bool(signals is not None and signals.waiting)
        why = (
            ""
            if allowed or not _at_red(value, inputs.rules[RuleId.RECOMPUTE_TAX])
            else "no requests are waiting"
        )
        yield _reading(view, value, red_allowed=allowed, detail=why)


def latency_slo(inputs: Inputs) -> Iterator[Reading]:
    """The worst p95 as a multiple of its objective; engines of servers without objectives have no rule."""
    for view in inputs.engines:
        slo = view.server.settings.slo
        if slo == _NO_SLO:
            continue
        ratio, name = slo_ratio(view.signals, slo) if view.signals is not None else (None, "")
        absent = Reason.TOO_FEW if ratio is None else None
        detail = f"{name} p95 is {ratio:.2f} x its objective" if ratio is not None and ratio >= 1.0 else ""
        yield _reading(view, ratio, absent=absent, detail=detail)


def kv_block_waste(inputs: Inputs) -> Iterator[Reading]:
    """Share of the KV slots in use that page tails waste."""
    for view in inputs.engines:
        waste = view.signals.waste if view.signals is not None else None
        yield _reading(view, waste.ratio if waste is not None else None)


def server_stalled(inputs: Inputs) -> Iterator[Reading]:
    """1 while requests run or wait and no token counter moves; 0 otherwise."""
    for view in inputs.engines:
        signals = view.signals
        stalled = signals.stalled if signals is not None else None
        for_s = signals.stalled_for_s if signals is not None else None
        detail = f"no token for {for_s:.0f} s with requests at hand" if stalled and for_s is not None else ""
        yield _reading(view, None if stalled is None else float(stalled), detail=detail)


def slo_ratio(signals: EngineSignals, slo: SloSettings) -> tuple[float | None, str]:
    """Return the worst p95 over its objective and which one it is; None where nothing can be judged."""
    judged = [
        (ratio, name)
        for name, quantiles, objective_s in (
            ("TTFT", signals.ttft, slo.ttft_p95_s),
            ("TPOT", signals.tpot, slo.tpot_p95_s),
            ("queue", signals.queue, slo.queue_p95_s),
        )
        if (ratio := _over(quantiles, objective_s)) is not None
    ]
    return max(judged) if judged else (None, "")


_NO_SLO = SloSettings()


def _over(quantiles: Quantiles | None, objective_s: float | None) -> float | None:
    if quantiles is None or objective_s is None or quantiles.count < MIN_OBSERVATIONS:
        return None
    for quantile, value_s in quantiles.values:
        if quantile == JUDGED_QUANTILE:
            return value_s / objective_s if objective_s > 0 else None
    return None


def _at_red(value: float | None, settings: RuleSettings) -> bool:
    return value is not None and settings.red is not None and value >= settings.red


def _why_capped(view: EngineView, inputs: Inputs) -> str:
    """Say which condition for red does not hold; empty: all of them do."""
    semantics, signals = view.semantics, view.signals
    if semantics is None or semantics.basis is not Basis.OCCUPANCY:
        return "this server's usage is not block occupancy"
    if semantics.evictable is not Evictable.FREE:
        return "this server's usage may count cached blocks that can be evicted"
    if signals is None or not signals.waiting:
        return "no requests are waiting"
    if not _harmed(view, signals, inputs):
        return "the pool is full, but neither recomputation nor latency tells of harm"
    return ""


def _harmed(view: EngineView, signals: EngineSignals, inputs: Inputs) -> bool:
    tax_yellow = inputs.rules[RuleId.RECOMPUTE_TAX].yellow
    slo_yellow = inputs.rules[RuleId.LATENCY_SLO].yellow
    tax = signals.recompute_tax_ratio
    if tax is not None and tax_yellow is not None and tax >= tax_yellow:
        return True
    ratio, _ = slo_ratio(signals, view.server.settings.slo)
    return ratio is not None and slo_yellow is not None and ratio >= slo_yellow


def _reading(
    view: EngineView,
    value: float | None,
    *,
    red_allowed: bool = True,
    absent: Reason | None = None,
    detail: str = "",
) -> Reading:
    return Reading(
        scope=view.scope,
        value=value,
        absent=_absent(view) or absent or (Reason.NOT_REPORTED if value is None else None),
        red_allowed=red_allowed,
        period_s=view.server.settings.period_s,
        detail=detail,
    )


def _absent(view: EngineView) -> Reason | None:
    if not view.server.seen:
        return Reason.NOT_REPORTED
    if not view.server.fresh:
        return Reason.STALE
    if view.signals is None or view.signals.samples < MIN_SAMPLES:
        return Reason.TOO_FEW
    return None
