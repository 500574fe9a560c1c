"""The documents of acting say what is true: the tests they cite exist, their examples work."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvwatch.actions.base import payload
from kvwatch.model.action import EventKind
from kvwatch.model.level import Level, RuleId, Scope
from tests.actions.build import limit_request, restore_request
from tests.harness import ROOT

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def names() -> set[str]:
    """Every test function of the tree."""
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found |= set(re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE))
    return found


@pytest.mark.parametrize("document", ["safety.md", "situations.md", "policies.md", "hooks.md", "leases.md"])
def test_every_test_that_a_document_cites_exists(document: str, names: set[str]) -> None:
    """A promise without its test is not made."""
    cited = set(re.findall(r"`(test_\w+)`", (DOCS / document).read_text()))

    assert cited - names == set()
    if document in ("safety.md", "situations.md"):
        assert len(cited) >= 10


def test_every_row_of_the_safety_case_names_a_test() -> None:
    """No line of the table stands on words alone."""
    rows = [line for line in (DOCS / "safety.md").read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith(("| ---", "| what can go wrong"))]

    assert len(rows) > 40
    assert [row for row in rows if "`test_" not in row] == []


def test_every_situation_names_a_test() -> None:
    """Ten questions, each answered by something that runs."""
    parts = re.split(r"^## ", (DOCS / "situations.md").read_text(), flags=re.MULTILINE)[1:]

    assert len(parts) == 10
    assert all("`test_" in part for part in parts)


def schema() -> dict[str, dict[str, object]]:
    text = (DOCS / "hooks.md").read_text()
    found: dict[str, dict[str, object]] = json.loads(text.split("```json schema\n")[1].split("```")[0])
    return found


@pytest.mark.parametrize("kind", ["limit", "restore", "notice"])
def test_requests_have_exactly_the_documented_shape(kind: str) -> None:
    """Each key is in the schema with its type, and what is required is there."""
    notice = limit_request(
        event=EventKind.RED, rule=RuleId.GPU_LOST, level=Level.RED, limit=None, expires_in_s=None,
        scope=Scope(server="chat", engine="0", uuid="GPU-1", gpu="0"), evidence={"value": 1.0},
    )  # fmt: skip
    requests = {"limit": limit_request(), "restore": restore_request(), "notice": notice}
    told = payload(requests[kind])
    properties = schema()["properties"]
    types = {"integer": int, "number": float, "string": str, "boolean": bool, "object": dict}

    for key, value in told.items():
        kind_of = properties[key]["type"]  # type: ignore[index]
        assert isinstance(value, types[kind_of]), key
    assert set(schema()["required"]) <= set(told)


def test_the_recipe_is_executable() -> None:
    """It is installed as it stands in the tree."""
    recipe = Path(ROOT / "packaging/recipes/haproxy-maxconn.py")

    assert recipe.stat().st_mode & 0o111
    assert recipe.read_text().startswith("#!/usr/bin/env python3\n")
