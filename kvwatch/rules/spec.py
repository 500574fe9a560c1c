"""What is a rule? Its unit and direction, its thresholds with their provenance, and how it is read."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvwatch.model.level import Reason, RuleId, Scope
from kvwatch.model.settings import RuleSettings
from kvwatch.rules.views import Inputs

RATIO_CLEAR = 0.02  # contract: default margin `clear` of a ratio
OTHER_CLEAR_SHARE = 0.05  # contract: default margin `clear` of any other unit, as a share of the threshold


class Unit(enum.StrEnum):
    """What a rule's value and thresholds are counted in."""

    RATIO = "ratio"
    SECONDS = "seconds"
    BYTES = "bytes"
    COUNT = "count"
    PER_MINUTE = "per_minute"


class Direction(enum.StrEnum):
    """Which side of a threshold is the bad one."""

    HIGH = "high"  # bad at or above
    LOW = "low"  # bad at or below


@dataclass(slots=True, kw_only=True)
class Reading:
    """One rule's value in one scope, as read in one tick. Not frozen only because that makes it slow to make.

    `absent` says why there is no value that may be judged (None: there is one). `red_allowed` is
    False where red needs more than the value and that does not hold. `yellow` and `red` replace
    the configured thresholds in this scope. `period_s` is the interval at which the input is
    expected: a stale level is held for three of them.
    """

    scope: Scope
    value: float | None = None
    absent: Reason | None = None
    red_allowed: bool = True
    yellow: float | None = None
    red: float | None = None
    period_s: float = 1.0
    detail: str = ""


Reader = Callable[[Inputs], Iterable[Reading]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSpec:
    """One row of the table of rules.

    `strict` means that a level begins beyond its threshold, not at it. `pages`: red of this rule
    pages. `provenance` holds (threshold, where its number comes from); docs/rules.md is made of it.
    """

    rule: RuleId
    unit: Unit
    defaults: RuleSettings
    read: Reader
    sentence: str
    provenance: tuple[tuple[str, str], ...]
    direction: Direction = Direction.HIGH
    strict: bool = False
    pages: bool = False
