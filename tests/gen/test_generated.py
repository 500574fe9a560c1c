"""What is committed is what the code produces, and every generated page is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwatch import gen
from kvwatch.catalogue.metrics import METRICS
from kvwatch.rules.shipped import SPECS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """Every generated file."""
    return gen.outputs()


def test_committed_files_are_current() -> None:
    """`kvwatch gen --check` finds nothing: nobody edited a generated file or forgot to run it."""
    assert gen.run(ROOT, check=True) == []


def test_files_are_written_once(tmp_path: Path, outputs: dict[str, str]) -> None:
    """The first run writes all, the second none, and a single changed byte is noticed."""
    assert set(gen.run(tmp_path, check=True)) == set(outputs)
    assert not list(tmp_path.iterdir()), "check must not write"
    assert set(gen.run(tmp_path, check=False)) == set(outputs)
    assert gen.run(tmp_path, check=False) == []

    page = tmp_path / "docs/metrics.md"
    page.write_text(page.read_text().replace("used", "uesd", 1))

    assert gen.run(tmp_path, check=True) == ["docs/metrics.md"]


def test_output_does_not_depend_on_the_run(outputs: dict[str, str]) -> None:
    """Two runs give the same bytes."""
    assert gen.outputs() == outputs


def test_every_metric_is_documented(outputs: dict[str, str]) -> None:
    """Each row of the catalogue is one row of docs/metrics.md."""
    page = outputs["docs/metrics.md"]

    assert [row.name for row in METRICS if page.count(f"| `{row.name}` |") != 1] == []


def test_every_rule_is_documented_with_its_reasons(outputs: dict[str, str]) -> None:
    """Each rule has a section with the provenance of each of its thresholds."""
    page = outputs["docs/rules.md"]

    for spec in SPECS:
        section = page.split(f"## `{spec.rule.value}`")[1].split("\n## ")[0]
        for level, why in spec.provenance:
            assert f"Why {level}: {why}" in section
