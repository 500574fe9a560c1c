"""docs/cases.md and the tests that are named after cases say the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cases.md"
ROW = re.compile(r"^\| ([A-Z]\d+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
TEST = re.compile(r"^def (test_case_([A-Z]\d+)_\w+)\(", re.MULTILINE)
NAME = re.compile(r"`(test_case_\w+)`")
REPORT = re.compile(r"[\w.-]+(/[\w.-]+)?#\d+")


def _rows() -> list[tuple[str, str, str]]:
    return ROW.findall(PAGE.read_text(encoding="utf-8"))


def _tests() -> Iterator[tuple[str, str]]:
    """(name, case) of every test that is named after a case."""
    for folder in ("tests", "checks"):
        for path in (ROOT / folder).rglob("test_*.py"):
            yield from TEST.findall(path.read_text(encoding="utf-8"))


def test_every_test_of_a_case_is_listed_with_it_and_exists() -> None:
    """The names in a row are exactly the tests that carry the row's case in their names."""
    wanted: dict[str, set[str]] = {case: set() for case, _, _ in _rows()}
    for name, case in _tests():
        wanted.setdefault(case, set()).add(name)
    listed = {case: set(NAME.findall(cell)) for case, _, cell in _rows()}

    assert listed == wanted


def test_a_case_without_a_test_says_why() -> None:
    """A row holds tests or a sentence, never nothing, and every case stands once."""
    rows = _rows()

    assert len(rows) > 80
    assert len({case for case, _, _ in rows}) == len(rows)
    assert [case for case, _, cell in rows if not NAME.search(cell) and not cell.strip().endswith(".")] == []


def test_reports_are_cited_by_repository_and_number() -> None:
    """The middle column names public reports, or says that it is advice; it holds no other address."""
    odd = [
        (case, one)
        for case, cited, _ in _rows()
        for one in cited.split(", ")
        if one != "common advice" and not REPORT.fullmatch(one)
    ]

    assert odd == []


def test_no_row_is_written_in_a_way_that_is_not_read() -> None:
    """Every line of a table but its head is a row that the tests above have seen."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    heads = [line for line in lines if line.startswith(("| case |", "|---"))]

    assert len(lines) - len(heads) == len(_rows())
