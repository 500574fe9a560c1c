"""Evidence on red: ten minutes are remembered, and written beside the loop when a paging rule turns red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvwatch.catalogue.alert_evidence import name as evidence_name
from kvwatch.catalogue.alert_evidence import parse
from kvwatch.core.curves import PERIOD_S, SPAN_S, Cut, Place, Ring
from kvwatch.core.evidence import QUIET_S, Taken, due, related
from kvwatch.daemon.shelf import Shelf
from kvwatch.model.level import Scope, Verdict
from kvwatch.model.report import Event, TickReport

AFTER_S = 60.0  # what came of it is added once, this long after red
MAX_WAITING = 64

EventsSince = Callable[[float], list[Event]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Later:
    """A piece that is still to learn what came after. `red_s` and `red_wall_s` are the moment of red."""

    name: str
    verdict: Verdict
    places: tuple[Place, ...]
    red_s: float
    red_wall_s: float


class Evidence:
    """The loop calls `follow` with every report, and `news` now and then; nothing of it waits.

    `events` gives the events since a Unix time. `mono_s` and `wall_s` are the time of the start.
    """

    def __init__(self, folder: Path, events: EventsSince, *, mono_s: float, wall_s: float) -> None:
        self.shelf = Shelf(folder)
        self._events = events
        self._ring = Ring()
        self._taken = Taken(at_s=_recent(self.shelf.names(), mono_s, wall_s))
        self._later: list[_Later] = []

    def follow(self, report: TickReport) -> None:
        """Keep a row, take evidence of what has just turned red, and complete what was taken a minute ago."""
        self._ring.offer(report)
        self._taken, reds = due(self._taken, report)
        if reds:
            self._take(report, reds)
        while self._later and report.clock.mono_s - self._later[0].red_s >= AFTER_S:
            self._complete(report, self._later.pop(0))

    def news(self, wall_s: float) -> list[Event]:
        """Events to tell, not yet numbered: evidence that was written, or why it cannot be."""
        found = []
        for each in self.shelf.news():
            known = parse(each.name)
            fields = {"evidence": each.name}
            rule, scope = ("", Scope()) if known is None else (known.rule, Scope(**known.shown()))
            found.append(
                Event(
                    seq=0,
                    wall_s=wall_s,
                    kind="evidence",
                    message=each.message,
                    rule=rule,
                    scope=scope,
                    fields=fields,
                )
            )
        return found

    def close(self, report: TickReport | None) -> None:
        """Complete what waits, with what is known by now, and let the thread finish for a moment."""
        if report is not None:
            for later in self._later:
                self._complete(report, later)
        self._later.clear()
        self.shelf.close()

    def _take(self, report: TickReport, reds: tuple[Verdict, ...]) -> None:
        self._ring.keep(report)
        now_s, wall_s = report.clock.mono_s, report.clock.wall_s
        events = tuple(self._events(wall_s - SPAN_S))
        known = set(self.shelf.names())
        for verdict in reds:
            places = related(report, verdict.scope)
            cut = self._ring.cut(places, now_s - SPAN_S, zero_s=now_s)
            name = _new_name(known, wall_s, verdict)
            known.add(name)
            self.shelf.put(name, _writer(name, report, verdict, cut, events))
            if len(self._later) < MAX_WAITING:
                later = _Later(name=name, verdict=verdict, places=places, red_s=now_s, red_wall_s=wall_s)
                self._later.append(later)

    def _complete(self, report: TickReport, later: _Later) -> None:
        # A full period after red, so that no row is in both parts.
        cut = self._ring.cut(later.places, later.red_s + PERIOD_S / 2, zero_s=later.red_s)
        events = tuple(event for event in self._events(later.red_wall_s) if event.wall_s > later.red_wall_s)
        self.shelf.change(later.name, _completer(report, later.verdict, cut, events))


def _recent(names: list[str], mono_s: float, wall_s: float) -> dict[str, float]:
    """When the last pieces of earlier runs were taken, on this run's clock: a restart is no new red."""
    found: dict[str, float] = {}
    for name in reversed(names):
        known = parse(name)
        age_s = QUIET_S if known is None else wall_s - known.wall_s
        if 0.0 <= age_s < QUIET_S:
            found[name.partition("-")[2]] = mono_s - age_s
    return found


def _new_name(known: set[str], wall_s: float, verdict: Verdict) -> str:
    """A name nobody has: a wall clock that was set back may give one twice."""
    while (name := evidence_name(wall_s, verdict.rule.value, verdict.scope)) in known:
        wall_s += 1.0
    return name


def _writer(
    name: str, report: TickReport, verdict: Verdict, cut: Cut, events: tuple[Event, ...]
) -> Callable[[], bytes]:
    """What makes the document; runs in the shelf's thread, and only there its code is loaded."""

    def make() -> bytes:
        from kvwatch.catalogue.alerts import RUNBOOKS, of_rule
        from kvwatch.core.evidence import gpus_of
        from kvwatch.core.evidence_words import cause, next_step
        from kvwatch.exporters import evidence_doc

        alert, step = of_rule(verdict.rule), next_step(report, verdict)
        words = evidence_doc.Words(
            cause=cause(report, verdict, cut),
            command=step.command,
            command_why=step.why,
            alert="" if alert is None else alert.name,
            runbook="" if alert is None else f"{RUNBOOKS}{alert.name}.md",
        )
        made = evidence_doc.document(
            name=name,
            report=report,
            verdict=verdict,
            words=words,
            curve=cut.plain(),
            uuids={gpu.state.uuid for gpu in gpus_of(report, verdict.scope)},
            events=events,
        )
        return evidence_doc.encoded(made)

    return make


def _completer(
    report: TickReport, verdict: Verdict, cut: Cut, events: tuple[Event, ...]
) -> Callable[[bytes], bytes]:
    """What adds the minute after to a document; a damaged one is left as it is."""

    def edit(data: bytes) -> bytes:
        import json

        from kvwatch.exporters import evidence_doc

        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            return data
        if not isinstance(found, dict):
            return data
        later = evidence_doc.after(report, verdict.scope, verdict.rule.value, cut.plain(), events)
        return evidence_doc.encoded({**found, "after": later})

    return edit
