"""Policy `fixed`: one limit, as long as the server is seen well."""

from __future__ import annotations

from kvwatch.control.target import Rung, TargetState
from kvwatch.control.threshold import step_up
from kvwatch.control.view import Decision, View
from kvwatch.model.action import Limit


def decide(state: TargetState, view: View, _now_s: float) -> Decision:
    """`max_running`; from a lower limit (after a stop of admission, or a reload) it is reached by steps."""
    wanted = int(state.settings.params["max_running"])
    current = None if state.limit is None else state.limit.max_running
    if current is not None and current < wanted:
        limit = Limit(server=view.server, max_running=min(wanted, step_up(current)))
        return Decision(limit=limit, rung=Rung.RESTORE, reason="towards the fixed limit by steps")
    return Decision(
        limit=Limit(server=view.server, max_running=wanted), rung=Rung.SHRINK, reason="fixed limit"
    )
