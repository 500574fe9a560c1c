"""The whole tick as one pure function: `step(state, snapshot, results, clock) -> (state, report)`."""

from __future__ import annotations

from kvwatch.core.state import CoreState, initial, numbered, reconfigure
from kvwatch.core.tick import step

__all__ = ["CoreState", "initial", "numbered", "reconfigure", "step"]
