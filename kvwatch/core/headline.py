"""What colour is this host? The worst of the rules that page, and why."""

from __future__ import annotations

from dataclasses import dataclass

from kvwatch.model.level import Level, Reason, Scope, Verdict
from kvwatch.model.settings import Settings

NAMED = 3  # so many verdicts are named in the detail, the rest are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The colour and one sentence for people."""

    level: Level
    detail: str


def judge(verdicts: tuple[Verdict, ...], settings: Settings) -> Headline:
    """Return the worst known level of the paging rules.

    Unknown never hides yellow or red. It comes before green only where sight was lost: a stale
    source of something that ought to be there; a rule that has nothing to judge yet says nothing.
    """
    paging = [each for each in verdicts if each.pages and each.reason is not Reason.DISABLED]
    worst = max((each.level for each in paging), default=Level.UNKNOWN)
    if worst >= Level.YELLOW:
        return Headline(level=worst, detail=_named(worst, [v for v in paging if v.level is worst]))
    unconfigured = {server.name for server in settings.servers if not server.configured}
    blind = [v for v in paging if v.reason is Reason.STALE and v.scope.server not in unconfigured]
    if blind:
        return Headline(level=Level.UNKNOWN, detail=_named(Level.UNKNOWN, blind, "no current data for "))
    unknown = sum(each.level is Level.UNKNOWN for each in paging)
    if worst is Level.UNKNOWN:
        return Headline(level=worst, detail=f"unknown: none of {len(paging)} paging rules can be judged yet")
    detail = f"green: {len(paging) - unknown} paging rules are fine"
    return Headline(level=worst, detail=detail + (f", {unknown} unknown" if unknown else ""))


def scope_text(scope: Scope) -> str:
    """Return a scope as people read it: chat/0, GPU 3, nvml, or this host."""
    if scope.source:
        return scope.source
    gpu = f"GPU {scope.gpu or scope.uuid}" if scope.gpu or scope.uuid else ""
    server = "/".join(part for part in (scope.server, scope.engine) if part)
    return " on ".join(part for part in (server, gpu) if part) or "this host"


def _named(level: Level, verdicts: list[Verdict], lead: str = "") -> str:
    texts = [f"{verdict.rule.value} of {scope_text(verdict.scope)}" for verdict in verdicts[:NAMED]]
    more = f" and {len(verdicts) - NAMED} more" if len(verdicts) > NAMED else ""
    return f"{level.name.lower()}: {lead}{', '.join(texts)}{more}"
