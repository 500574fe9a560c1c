"""The demo's level changes as lines for a terminal: few enough to read while they scroll."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from kvwatch.model.level import Level
from kvwatch.model.report import Event

LISTED = 6  # of one tick; more at once is one happening (a start, a host that slept) and is told as a sum
MARGIN = " " * 9  # under the times of the story's own lines


def level_lines(events: Sequence[Event]) -> Iterator[str]:
    """One line for each level change; none for a first green, one for all where many come at once."""
    levels = [event for event in events if event.kind == "level"]
    if len(levels) > LISTED:
        sums = Counter(event.level_to.name.lower() for event in levels if event.level_to is not None)
        told = ", ".join(f"{count} now {level}" for level, count in sums.items())
        yield f"{MARGIN}{len(levels)} rules changed at once: {told}"
        return
    for event in levels:
        if not (event.level_from is Level.UNKNOWN and event.level_to is Level.GREEN):
            yield f"{MARGIN}{event.message}"
