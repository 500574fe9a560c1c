"""The documentation and the tables that read the file say the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwatch import config
from kvwatch.config import reference, rulebook
from kvwatch.config.findings import Findings
from kvwatch.config.nodes import compose
from kvwatch.config.readers import ListOf, Place
from kvwatch.config.table import Field, Table
from kvwatch.model.level import RuleId
from kvwatch.rules.shipped import SPECS
from kvwatch.rules.spec import Direction, Unit

DOCS = Path(__file__).parent.parent.parent / "docs" / "config.md"
PAGE = reference.render()
UNITS = {
    Unit.RATIO: ("ratio", "factor"),
    Unit.SECONDS: ("duration",),
    Unit.BYTES: ("size",),
    Unit.PER_MINUTE: ("count per minute",),
    Unit.COUNT: ("count of periods", None),
}


def shown_defaults() -> Iterator[tuple[str, Field, str]]:
    """Every default the page shows in backquotes, with the field that reads it."""
    for table in reference.tables():
        for field in table.fields:
            row = re.search(
                rf"^\| `{re.escape(field.key)}` \| .*? \| `([^`]+)`\S* \| {re.escape(field.help)} \|$",
                PAGE,
                re.M,
            )
            if row and not isinstance(field.kind, Table):
                yield f"{table.title} {field.key}", field, row.group(1)


def test_the_page_is_up_to_date() -> None:
    """docs/config.md is what the tables say now; `kvwatch gen` writes it."""
    assert DOCS.read_text() == PAGE


@pytest.mark.parametrize(
    ("title", "field", "shown"), [pytest.param(*one, id=one[0]) for one in shown_defaults()]
)
def test_a_shown_default_can_be_written(title: str, field: Field, shown: str) -> None:
    """A default can be copied from the page into a file: it is read without a finding."""
    findings = Findings("f")
    node = compose(shown if shown != "[::1]:9843" else f'"{shown}"', findings)
    assert node is not None

    Place(node, title, findings).value(field.kind)

    assert findings.found == []


def test_every_key_is_on_the_page() -> None:
    """A key that is read is documented, with a sentence."""
    for table in reference.tables():
        for field in table.fields:
            assert field.help
            assert f"`{field.key}`" in PAGE
            assert not isinstance(field.kind, ListOf) or field.kind.expected


def test_rules_are_written_in_the_unit_and_direction_they_are_judged_in() -> None:
    """The shapes of rules agree with the rules themselves: unit, worse side, and whether red exists."""
    for spec in SPECS:
        shape = rulebook.SHAPES[spec.rule]
        assert (shape.unit.name if shape.unit else None) in UNITS[spec.unit]
        assert shape.worse == {Direction.HIGH: "above", Direction.LOW: "below"}[spec.direction]
        assert shape.red == (spec.defaults.red is not None)
    assert {spec.rule for spec in SPECS} == set(rulebook.SHAPES) == set(RuleId)


def test_shipped_thresholds_can_be_written_in_the_file() -> None:
    """Writing every shipped threshold out gives the shipped settings."""
    lines = ["rules:"]
    for rule, default in rulebook.shipped().items():
        unit = rulebook.SHAPES[rule].unit
        shown = [
            f"{key}: {unit.show(value)}"
            for key, value in (("yellow", default.yellow), ("red", default.red))
            if unit is not None and value is not None
        ]
        lines.append(f"  {rule}: {{{', '.join(shown)}}}")

    assert config.parse("\n".join(lines), "f") == config.default_settings()
