"""Shared test plumbing: tools that a test needs are declared, and what was skipped is counted aloud."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REQUIRE_ALL = os.environ.get("KVWATCH_REQUIRE_ALL") == "1"
FIXTURES = Path(__file__).parent / "tests" / "fixtures"
SHARED = Path(__file__).parent.parent / "shared"
_skipped: dict[str, int] = {}

# How long an example takes says how busy the machine is, not whether the property holds.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def _missing(tool: str) -> bool:
    if tool == "root":
        return os.geteuid() != 0
    if tool.startswith("shared/"):
        return not (SHARED / tool.removeprefix("shared/")).exists()
    return shutil.which(tool) is None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, count and name what a test lacks; with KVWATCH_REQUIRE_ALL=1 that is a failure."""
    needed = [tool for mark in item.iter_markers("needs") for tool in mark.args]
    missing = [tool for tool in needed if _missing(tool)]
    if not missing:
        return
    for tool in missing:
        _skipped[tool] = _skipped.get(tool, 0) + 1
    if REQUIRE_ALL:
        pytest.fail(f"needs {', '.join(missing)}, and KVWATCH_REQUIRE_ALL=1 forbids skipping")
    pytest.skip(f"needs {', '.join(missing)}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end what was not checked and what it lacked."""
    for tool, count in sorted(_skipped.items()):
        terminalreporter.write_line(f"not checked: {count} test(s) need {tool}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update` rewrites golden files from what the code produces now."""
    parser.addoption("--update", action="store_true", help="rewrite golden files")


@pytest.fixture
def fixtures() -> Path:
    """The folder of recorded pages and recordings."""
    return FIXTURES
