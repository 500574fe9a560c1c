"""A verdict in words: what its value is, against which threshold, and why its level is what it is."""

from __future__ import annotations

from kvwatch.model.level import Level, Reason, Verdict
from kvwatch.rules.shipped import BY_RULE
from kvwatch.rules.spec import Direction, Unit

_WORDS = {
    Reason.BELOW: "within its thresholds",
    Reason.CROSSED: "at or beyond its threshold",
    Reason.CAPPED: "beyond red, but what else red needs does not hold",
    Reason.HOLDING: "recovered, and waits out `hold`",
    Reason.PENDING: "beyond its threshold, and waits out `for`",
    Reason.STALE_HELD: "its input is old, the last level is kept for now",
    Reason.STALE: "its input is too old",
    Reason.NOT_REPORTED: "nothing reports its value",
    Reason.TOO_FEW: "too few samples yet",
    Reason.STARTING: "the server is starting",
    Reason.MAINTENANCE: "the GPU is in maintenance",
    Reason.DISABLED: "switched off in the configuration",
}


def why(verdict: Verdict) -> str:
    """Return the reason for people: the rule's own detail, or its figures, or the reason in words."""
    if verdict.detail:
        return verdict.detail
    threshold = {Level.YELLOW: verdict.yellow, Level.RED: verdict.red}.get(verdict.level)
    if verdict.reason is Reason.CROSSED and verdict.value is not None and threshold is not None:
        spec = BY_RULE[verdict.rule]
        word = "at most" if spec.direction is Direction.LOW else "at least"
        place = verdict.level.name.lower()
        return f"{amount(spec.unit, verdict.value)}; {place} is {word} {amount(spec.unit, threshold)}"
    return _WORDS[verdict.reason]


def amount(unit: Unit, value: float) -> str:
    """Return `value` (in `unit`) with its unit, at three significant digits."""
    if unit is Unit.RATIO:
        return f"{100 * value:.3g} %"
    if unit is Unit.BYTES:
        return f"{value / 2**30:.3g} GiB" if abs(value) >= 2**30 else f"{value / 2**20:.3g} MiB"
    return f"{value:.3g}" + {Unit.SECONDS: " s", Unit.PER_MINUTE: " /min"}.get(unit, "")
