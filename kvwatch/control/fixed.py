"""Policy `fixed`: one limit, as long as the server is seen well."""

from __future__ import annotations

from kvwatch.control.target import Rung, TargetState
from kvwatch.control.view import Decision, View
from kvwatch.model.action import Limit


def decide(state: TargetState, view: View, _now_s: float) -> Decision:
    """`max_running`, never above the ceiling nor below the floor."""
    settings = state.settings
    wanted = max(settings.floor, int(settings.params["max_running"]))
    if view.ceiling is not None:
        wanted = min(wanted, view.ceiling)
    return Decision(
        limit=Limit(server=view.server, max_running=wanted), rung=Rung.SHRINK, reason="fixed limit"
    )
