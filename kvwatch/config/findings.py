"""What is wrong with a configuration, and where: findings and the two errors that carry them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DOCUMENT = "(yaml)"  # the path of a finding about the text itself


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One mistake: its place (1-based line and column), the key's path, and what to write instead."""

    file: str
    line: int
    col: int
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.col}: {self.path}: {self.message}"


class ConfigError(Exception):
    """The configuration has mistakes; `findings` are all of them, in the order of the file."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings: tuple[Finding, ...] = tuple(sorted(set(findings)))
        super().__init__("\n".join(str(finding) for finding in self.findings))


class UnreadableConfig(Exception):  # noqa: N818 - a name other rooms and scripts already use
    """The file cannot be read at all: missing, no file, too large, not UTF-8, or not permitted."""


class Reject(ValueError):  # noqa: N818 - a verdict, not a failure
    """A reader refuses a value; the message says what was expected. The walk adds the place."""


class Findings:
    """Collects findings for one file."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[Finding] = []

    def add(self, line: int, col: int, path: str, message: str) -> None:
        """Note one mistake at a 1-based line and column."""
        self.found.append(Finding(self.file, line, col, path, message))

    def raise_if_any(self) -> None:
        """Raise ConfigError with everything found so far, if there is anything."""
        if self.found:
            raise ConfigError(self.found)


def quoted(text: str, limit: int = 40) -> str:
    """A value for a message: printable, in backquotes, cut to `limit` characters."""
    shown = text if len(text) <= limit else text[: limit - 1] + "…"
    return "`" + "".join(char if char.isprintable() else "?" for char in shown) + "`"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that this one is a near miss of."""
    import difflib  # only after a mistake

    near = difflib.get_close_matches(word[:64].lower(), list(known), n=1, cutoff=0.65)
    return near[0] if near else None


def suggestion(word: str, known: Iterable[str]) -> str:
    """`did you mean …?` for a near miss, else the list of what is known."""
    choices = list(known)
    near = nearest(word, choices)
    if near is not None:
        return f"did you mean `{near}`?"
    return "expected one of " + ", ".join(choices) if choices else "none is expected here"
