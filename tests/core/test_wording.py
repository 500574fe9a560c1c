"""Verdicts in words."""

from __future__ import annotations

import pytest

from kvwatch.core.wording import amount, why
from kvwatch.model.level import Level, Reason, RuleId, Scope, Verdict
from kvwatch.model.settings import GIB, MIB
from kvwatch.rules.spec import Unit


def verdict(rule: RuleId, level: Level, reason: Reason, value: float | None, detail: str = "") -> Verdict:
    return Verdict(
        rule=rule, scope=Scope(), level=level, since_s=0.0, since_wall_s=0.0, value=value, yellow=2.0 * GIB,
        red=0.5 * GIB, reason=reason, detail=detail,
    )  # fmt: skip


def test_a_crossed_threshold_is_told_with_both_figures_and_its_direction() -> None:
    """Headroom is bad when it is low: value, threshold and "at most" are in the sentence."""
    low = verdict(RuleId.DEVICE_HEADROOM, Level.RED, Reason.CROSSED, 218.0 * MIB)

    assert why(low) == "218 MiB; red is at most 512 MiB"


def test_the_rule_s_own_detail_goes_first() -> None:
    """What a rule says of its facts is not replaced by figures."""
    assert why(verdict(RuleId.GPU_LOST, Level.RED, Reason.CROSSED, 1.0, "GPU is lost")) == "GPU is lost"


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_words(reason: Reason) -> None:
    """No reason is shown as its code."""
    said = why(verdict(RuleId.DEVICE_HEADROOM, Level.GREEN, reason, None))

    assert " " in said
    assert "_" not in said


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        (Unit.RATIO, 0.0249, "2.49 %"),
        (Unit.BYTES, 3.0 * GIB, "3 GiB"),
        (Unit.SECONDS, 120.0, "120 s"),
        (Unit.PER_MINUTE, 4.0, "4 /min"),
        (Unit.COUNT, 1.0, "1"),
    ],
)
def test_an_amount_has_its_unit(unit: Unit, value: float, text: str) -> None:
    """Figures for people carry what they are counted in."""
    assert amount(unit, value) == text
