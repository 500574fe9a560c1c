"""What does the web server ask of the daemon?"""

from __future__ import annotations

from typing import Protocol

from kvwatch.model.report import Event, TickReport


class Provider(Protocol):
    """Answers from memory: everything but `reload` returns at once and never waits for a source."""

    def report(self) -> TickReport | None:
        """The last published report; None before the first."""
        ...

    def events(self, since_wall_s: float) -> list[Event]:
        """Events at or after this Unix time, oldest first."""
        ...

    def healthy(self) -> bool:
        """Whether the loop ticks."""
        ...

    def ready(self) -> tuple[bool, list[str]]:
        """Whether every configured source has given a good sample since start, and what is missing."""
        ...

    def reload(self) -> list[str]:
        """Read the configuration again; the findings that kept it from being used, [] when loaded."""
        ...
