"""Dashboards go through Grafana's own typed models and come back whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

BOARDS = sorted((Path(__file__).parents[2] / "dashboards").glob("*.json"))
# The models have no room for what a data source adds to an annotation query; Grafana's Prometheus data
# source reads these (its processEvents).
UNMODELLED = {f"annotations.list[].{key}" for key in ("step", "tagKeys", "textFormat", "titleFormat")}


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """Places at which something that was there is gone or is something else."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            inner = f"{place}.{key}".lstrip(".")
            yield from differences(value, after[key], inner) if key in after else (inner,)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for one, other in zip(before, after, strict=True):
            yield from differences(one, other, f"{place}[]")
    elif before != after:
        yield place


def there_and_back(board: dict[str, Any]) -> dict[str, Any]:
    """The dashboard through the models, each panel and query through those of its own kind."""
    plugins.register_default_plugins()
    again: dict[str, Any] = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))
    return again


@pytest.mark.parametrize("path", BOARDS, ids=[path.stem for path in BOARDS])
def test_nothing_is_lost_in_grafanas_models(path: Path) -> None:
    """Every key that is written is one that Grafana 11's schema has, with a value of its type."""
    board = json.loads(path.read_text())

    assert set(differences(board, there_and_back(board))) - UNMODELLED == set()


def test_a_key_that_grafana_does_not_know_would_be_noticed() -> None:
    """The check above can fail: what grafanalib still writes for old versions is reported."""
    board = json.loads(BOARDS[0].read_text())
    panel = next(panel for panel in board["panels"] if panel["type"] == "timeseries")
    panel["options"]["fieldOptions"] = {"defaults": {"unit": "none"}}
    panel["targets"][0]["step"] = 10

    lost = set(differences(board, there_and_back(board)))

    assert {"panels[].options.fieldOptions", "panels[].targets[].step"} <= lost
