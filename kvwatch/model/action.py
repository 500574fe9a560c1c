"""Limits, requests to act, and what came of them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvwatch.model.level import Level, RuleId, Scope


class Outcome(enum.StrEnum):
    """What became of one action (the outcomes of `kvwatch_actions_total`)."""

    APPLIED = "applied"
    NOOP = "noop"
    REFUSED = "refused"
    TIMED_OUT = "timed_out"
    FAILED = "failed"
    SKIPPED_RECOVERED = "skipped_recovered"
    DRY_RUN = "dry_run"


class EventKind(enum.StrEnum):
    """What an action is told about (KVWATCH_EVENT of the hook contract)."""

    LIMIT = "limit"
    RESTORE = "restore"
    RED = "red"
    YELLOW = "yellow"
    GREEN = "green"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """An absolute limit on one server, per engine. All defaults = no limit."""

    server: str
    max_running: int | None = None
    admit: bool = True
    compact: int = 0

    @property
    def restricts(self) -> bool:
        """Whether this limits anything at all."""
        return self.max_running is not None or not self.admit


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRequest:
    """One thing to do. `target` names the single-flight lane; limits are absolute, so a retry is harmless.

    `expires_in_s` is the lease's length for limits. `dry_run` requests are logged, never applied.
    """

    request_id: str
    target: str
    action: str  # module name in actions/
    params: Mapping[str, object] = field(default_factory=dict)
    event: EventKind = EventKind.LIMIT
    rule: RuleId | None = None
    scope: Scope = Scope()
    level: Level = Level.UNKNOWN
    limit: Limit | None = None
    expires_in_s: float | None = None
    deadline_s: float = 5.0
    reason: str = ""
    evidence: Mapping[str, object] = field(default_factory=dict)
    decided_s: float = 0.0
    dry_run: bool = False
    step: int = 0  # position in the target's `via` list, so that the next can be tried


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionResult:
    """What came of one request."""

    request_id: str
    target: str
    action: str
    event: EventKind
    outcome: Outcome
    started_s: float
    took_s: float
    finished_wall_s: float
    detail: str = ""  # capped output or the error
    limit: Limit | None = None
    read_back: Limit | None = None  # what the target itself says now, where it can
    self_expiring: bool = False
    step: int = 0
