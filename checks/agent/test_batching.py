"""The agent inside real continuous batching of transformers (CPU): limit, admission, exact waste.

KVWATCH_TRANSFORMERS may name folders (separated by ":") that hold other releases to check as well.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from checks.engines.vllm import ENGINES, ROOT

pytestmark = pytest.mark.timeout(600)
OTHERS = [folder for folder in os.environ.get("KVWATCH_TRANSFORMERS", "").split(":") if folder]


@pytest.fixture(
    scope="module", params=["", *OTHERS], ids=lambda folder: folder.rpartition("/")[2] or "installed"
)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    path = f"{ROOT}:{request.param}" if request.param else str(ROOT)
    ended = subprocess.run(
        [str(ENGINES / "vllm/bin/python"), "-m", "checks.agent.batching"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    line = next((one for one in ended.stdout.splitlines() if one.startswith("RESULT ")), None)
    assert line is not None, ended.stderr[-3000:]
    return dict(json.loads(line.removeprefix("RESULT ")))


def test_limit_is_obeyed(found: dict[str, Any]) -> None:
    """With a limit of two never more are active once the others have finished; without it many are."""
    assert found["free"] >= 6
    assert found["limited"] == 2
    assert found["open"] >= 6


def test_admission_is_obeyed(found: dict[str, Any]) -> None:
    """Without admission the active ones finish and none starts; then all requests are served."""
    assert found["closed"] == 0
    assert found["done"] == found["added"] > 24
    assert found["failed"] == 0
    assert found["told"] == ["obeyed"]


def test_waste_is_exact(found: dict[str, Any]) -> None:
    """Tokens and blocks equal those counted from the manager's own block tables, at every datagram."""
    assert len(found["pairs"]) >= 8
    for told, counted in found["pairs"]:
        assert told == counted
    assert any(tokens < 32 * blocks for _, (tokens, blocks) in found["pairs"])
