"""How bad is it for an engine's requests? KV pool, recomputation, latency, page waste, stalls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

from kvwatch.model.level import Reason, RuleId
from kvwatch.model.server import Basis, Evictable
from kvwatch.model.settings import RuleSettings, SloSettings
from kvwatch.model.signal import EngineSignals, Quantiles
from kvwatch.rules.spec import Reading
from kvwatch.rules.views import EngineView, Inputs

MIN_OBSERVATIONS = 20  # contract: latency is unknown under this many observations in the window
JUDGED_QUANTILE = 0.95
MIN_SAMPLES = 2  # contract: fewer good samples since start, restart or reset never trigger anything

Rules = Mapping[RuleId, RuleSettings]
EngineReader = Callable[[EngineView, Rules], Reading | None]


def _per_engine(rule: RuleId) -> Callable[[EngineReader], Callable[[Inputs], Iterator[Reading]]]:
    """Make a rule of a function that reads one engine: an engine that has not changed is not read again."""

    def made(read: EngineReader) -> Callable[[Inputs], Iterator[Reading]]:
        @functools.wraps(read)
        def readings(inputs: Inputs) -> Iterator[Reading]:
            for view in inputs.engines:
                known = view.readings
                if rule not in known:
                    known[rule] = read(view, inputs.rules)
                reading = known[rule]
                if reading is not None:
                    yield reading

        return readings

    return made


@_per_engine(RuleId.KV_USAGE)
def kv_usage(view: EngineView, rules: Rules) -> Reading:
    """Share of the KV pool in use; red needs a queue and a sign of harm, since a full pool is normal."""
    signals = view.signals
    value = signals.kv_usage_ratio if signals is not None else None
    why = _why_capped(view, rules) if _at_red(value, rules[RuleId.KV_USAGE]) else ""
    return _reading(view, value, red_allowed=not why, detail=why)


@_per_engine(RuleId.RECOMPUTE_TAX)
def recompute_tax(view: EngineView, rules: Rules) -> Reading:
    """Share of engine time spent on recomputing preempted requests; red needs requests waiting."""
    signals = view.signals
    value = signals.recompute_tax_ratio if signals is not None else None
    allowed = bool(signals is not None and signals.waiting)
    silent = allowed or not _at_red(value, rules[RuleId.RECOMPUTE_TAX])
    return _reading(view, value, red_allowed=allowed, detail="" if silent else "no requests are waiting")


@_per_engine(RuleId.LATENCY_SLO)
def latency_slo(view: EngineView, _rules: Rules) -> Reading | None:
    """The worst p95 as a multiple of its objective; engines of servers without objectives have no rule."""
    slo = view.server.settings.slo
    if slo == _NO_SLO:
        return None
    ratio, name = slo_ratio(view.signals, slo) if view.signals is not None else (None, "")
    absent = Reason.TOO_FEW if ratio is None else None
    detail = f"{name} p95 is {ratio:.2f} × its objective" if ratio is not None and ratio >= 1.0 else ""
    return _reading(view, ratio, absent=absent, detail=detail)


@_per_engine(RuleId.KV_BLOCK_WASTE)
def kv_block_waste(view: EngineView, _rules: Rules) -> Reading:
    """Share of the KV slots in use that page tails waste."""
    waste = view.signals.waste if view.signals is not None else None
    return _reading(view, waste.ratio if waste is not None else None)


@_per_engine(RuleId.SERVER_STALLED)
def server_stalled(view: EngineView, _rules: Rules) -> Reading:
    """1 while requests run or wait and no token counter moves; 0 otherwise."""
    signals = view.signals
    stalled = signals.stalled if signals is not None else None
    for_s = signals.stalled_for_s if signals is not None else None
    detail = f"no token for {for_s:.0f} s with requests at hand" if stalled and for_s is not None else ""
    return _reading(view, None if stalled is None else float(stalled), detail=detail)


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


def _why_capped(view: EngineView, rules: Rules) -> str:
    """Say which condition for red does not hold; empty: all of them do."""
    semantics, signals = view.semantics, view.signals
    if semantics is None or semantics.basis is not Basis.OCCUPANCY:
        return "this server's usage is not block occupancy"
    if semantics.evictable is not Evictable.FREE:
        return "this server's usage may count cached blocks that can be evicted"
    if signals is None or not signals.waiting:
        return "no requests are waiting"
    if not _harmed(view, signals, rules):
        return "the pool is full, but neither recomputation nor latency tells of harm"
    return ""


def _harmed(view: EngineView, signals: EngineSignals, rules: Rules) -> bool:
    tax_yellow = rules[RuleId.RECOMPUTE_TAX].yellow
    slo_yellow = rules[RuleId.LATENCY_SLO].yellow
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
