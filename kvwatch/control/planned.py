"""What a tick of control hands back beside its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvwatch.model.level import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEvent:
    """A decision or a lease's change, for the audit log; core adds number and time."""

    kind: str  # decision, lease or action
    message: str
    rule: str = ""
    scope: Scope = Scope()
    fields: Mapping[str, object] = field(default_factory=dict)
