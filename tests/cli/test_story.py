"""The demo's lines on the terminal."""

from __future__ import annotations

from kvwatch.cli.story import LISTED, level_lines
from kvwatch.model.level import Level
from kvwatch.model.report import Event


def change(before: Level, after: Level, kind: str = "level") -> Event:
    return Event(seq=1, wall_s=0.0, kind=kind, message="m", level_from=before, level_to=after)


def test_a_change_is_told_and_a_first_green_is_not() -> None:
    """Yellow and a green that was yellow are news; a rule that has just begun to know is none."""
    events = [
        change(Level.GREEN, Level.YELLOW),
        change(Level.UNKNOWN, Level.GREEN),
        change(Level.YELLOW, Level.GREEN),
        change(Level.GREEN, Level.RED, kind="server"),
    ]

    assert len(list(level_lines(events))) == 2


def test_many_at_once_are_one_line() -> None:
    """A start or a host that slept does not scroll the story away."""
    events = [change(Level.GREEN, Level.UNKNOWN)] * LISTED + [change(Level.UNKNOWN, Level.RED)]

    lines = list(level_lines(events))

    assert [line.strip() for line in lines] == ["7 rules changed at once: 6 now unknown, 1 now red"]
