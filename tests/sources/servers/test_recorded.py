"""What adapters read from recorded pages of real servers."""

from __future__ import annotations

import json

import pytest

from kvwatch.sources.servers import registry
from tests.sources.servers import recorded

CASES = [case for case in recorded.cases() if case.kind in registry.kinds()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_recorded_page_is_read_as_before(case: recorded.Case, request: pytest.FixtureRequest) -> None:
    """A recorded page gives exactly the state that was checked by hand and stored beside it."""
    state = recorded.as_json(registry.adapter(case.kind).parse(case.pages(), case.settings()))

    if request.config.getoption("--update"):
        case.expected_file.write_text(json.dumps(state, indent=1) + "\n")
    assert state == json.loads(case.expected_file.read_text())


def test_every_engine_with_recordings_has_an_adapter_or_is_promised() -> None:
    """No recording lies here for a kind that nothing knows."""
    assert {case.kind for case in recorded.cases()} <= set(registry.known_kinds())
