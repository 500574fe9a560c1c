"""The table of engines in the documentation is backed by fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwatch.sources.servers import registry
from tests.sources.servers import coverage, recorded

DOCUMENT = Path(__file__).parents[3] / "docs" / "engines.md"


def test_table_of_engines_is_what_the_fixtures_say(request: pytest.FixtureRequest) -> None:
    """Every cell of docs/engines.md follows from a page here: the file is equal to what they give."""
    text = coverage.document()

    if request.config.getoption("--update"):
        DOCUMENT.write_text(text, encoding="utf-8")
    assert DOCUMENT.read_text(encoding="utf-8") == text


def test_every_engine_is_in_the_table() -> None:
    """No engine that can be configured is missing, and each has a page under tests/fixtures/servers."""
    assert set(coverage.engines()) == set(registry.known_kinds()) - {"auto", "mapped"}
    assert {case.kind for case in recorded.cases()} == set(coverage.engines())
