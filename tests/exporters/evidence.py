"""Pieces of evidence of the sample host, made as the daemon makes them."""

from __future__ import annotations

from array import array

from kvwatch.catalogue.alert_evidence import name
from kvwatch.core.curves import Cut, Track, place_of
from kvwatch.exporters import evidence_doc
from kvwatch.exporters.state import Json
from kvwatch.model.level import Level, RuleId, Verdict
from kvwatch.model.report import TickReport
from tests.exporters import sample

ROWS = 600


def red(rule: RuleId, report: TickReport) -> Verdict:
    """The red verdict of a rule on the sample host."""
    return next(v for v in report.verdicts if v.rule is rule and v.level is Level.RED)


def cut(verdict: Verdict, **figures: list[float]) -> Cut:
    """Ten minutes of these figures in the verdict's scope, red at the end."""
    levels = array("b", [0] * (ROWS - 60) + [1] * 59 + [2])
    track = Track(
        place=place_of(verdict.scope),
        values={each: array("f", values) for each, values in figures.items()},
        levels={verdict.rule.value: levels},
    )
    return Cut(t_s=tuple(float(second - ROWS + 1) for second in range(ROWS)), tracks=(track,))


def piece(rule: RuleId, *, cause: str = "GPU 0 has 380 MiB left.", **figures: list[float]) -> Json:
    """A piece of the sample host at the moment of red."""
    report = sample.report()
    verdict = red(rule, report)
    words = evidence_doc.Words(
        cause=cause,
        command="ps -o pid,user,lstart,args -p 31337",
        command_why="Whose process is it?",
        alert="KvwatchDeviceHeadroomLow",
        runbook="https://example.org/runbooks/KvwatchDeviceHeadroomLow.md",
    )
    return evidence_doc.document(
        name=name(report.clock.wall_s, rule.value, verdict.scope),
        report=report,
        verdict=verdict,
        words=words,
        curve=cut(verdict, **figures).plain(),
        uuids={verdict.scope.uuid or sample.uuid(0)},
        events=sample.events(),
    )
