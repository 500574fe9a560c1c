"""What does the web server ask of the daemon?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvwatch.model.report import Event, TickReport


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceTally:
    """How keeping evidence goes. `problem` says why the newest could not be written, "" when it was."""

    written_total: int = 0
    failed_total: int = 0
    dropped_total: int = 0  # more at once than could be taken
    unwritten: int = 0  # in memory only, until the directory takes it
    size_bytes: int = 0
    problem: str = ""


class EvidenceShelf(Protocol):
    """Pieces of evidence by name."""

    def names(self) -> list[str]:
        """All names, the newest first."""
        ...

    def read(self, name: str) -> bytes | None:
        """One piece as JSON; None where there is none. OSError where the disk fails or does not answer."""
        ...

    def tally(self) -> EvidenceTally:
        """How keeping them goes."""
        ...


class Provider(Protocol):
    """Answers from memory: everything but `reload` and reading evidence returns at once; nothing waits for
    a source."""

    def report(self) -> TickReport | None:
        """The last published report; None before the first."""
        ...

    def events(self, since_wall_s: float) -> list[Event]:
        """Events at or after this Unix time, oldest first."""
        ...

    def evidence(self) -> EvidenceShelf:
        """What was kept of the moments when a paging rule turned red."""
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
