"""Dashboards ask for what exists, can be read by a person, and are what current Grafana writes itself."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvwatch.catalogue.metrics import METRICS, Stability
from tests.gen.expressions import mistakes, selectors

ROOT = Path(__file__).parents[2]
BOARDS = sorted((ROOT / "dashboards").glob("*.json"))
IDS = [path.stem for path in BOARDS]
BUILTIN = {"__rate_interval", "__interval", "__range"}
RUNBOOK = re.compile(r"docs/runbooks/(\w+)\.md$")


@pytest.fixture(params=BOARDS, ids=IDS)
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    """One dashboard."""
    loaded: dict[str, Any] = json.loads(request.param.read_text())
    return loaded


def _panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        if panel["type"] != "row":
            yield panel


def _queries(board: dict[str, Any]) -> Iterator[str]:
    for panel in _panels(board):
        for target in panel["targets"]:
            yield target["expr"]
    for note in board["annotations"]["list"]:
        yield note["expr"]


def _expressions(board: dict[str, Any]) -> Iterator[str]:
    yield from _queries(board)
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def test_five_dashboards_ship() -> None:
    """The overview and the four beside it are there, each with its own uid."""
    assert set(IDS) == {"overview", "fleet", "gpu-memory", "kv-requests", "kvwatch-itself"}
    assert len({json.loads(path.read_text())["uid"] for path in BOARDS}) == len(BOARDS)


def test_every_name_exists(board: dict[str, Any]) -> None:
    """Every metric and label that is asked for is in the catalogue (D7: dashboards that drift away)."""
    found = {text: mistakes(text) for text in _expressions(board)}

    assert {text: wrong for text, wrong in found.items() if wrong} == {}


def test_case_D7_a_renamed_metric_would_be_noticed() -> None:
    """The check above can fail: a name or label that is not exported is reported."""
    assert mistakes("max(kvwatch_gpu_memory_usage)") == ["no metric kvwatch_gpu_memory_usage"]
    assert mistakes('kvwatch_gpu_up{server="a"}') == ["kvwatch_gpu_up has no label server"]
    assert mistakes("max by (rank) (kvwatch_gpu_up)") == ["nothing here has a label rank"]


@pytest.mark.needs("promtool")
def test_every_expression_parses(board: dict[str, Any], tmp_path: Path) -> None:
    """Prometheus's own parser accepts every query."""
    texts = [text.replace("$__rate_interval", "1m") for text in _queries(board)]
    rules = [{"record": f"check:{number}", "expr": text} for number, text in enumerate(texts)]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "check", "rules": rules}]}))

    done = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr + done.stdout


def test_every_panel_can_be_read(board: dict[str, Any]) -> None:
    """Each panel has a title, says how to read it, and has a unit."""
    for panel in _panels(board):
        assert panel["title"], panel
        assert len(panel.get("description", "")) > 10, panel["title"]
        assert panel["fieldConfig"]["defaults"].get("unit"), panel["title"]


def test_the_datasource_is_chosen_by_the_reader(board: dict[str, Any]) -> None:
    """One data source variable, and no panel, query or variable names another source."""
    variables = board["templating"]["list"]
    chosen = {"type": "prometheus", "uid": "${datasource}"}

    assert [v["name"] for v in variables if v["type"] == "datasource"] == ["datasource"]
    assert all(v["datasource"] == chosen for v in variables if v["type"] == "query")
    for panel in _panels(board):
        assert panel["datasource"] == chosen
        assert all(target["datasource"] == chosen for target in panel["targets"])
    assert all(note["datasource"] == chosen for note in board["annotations"]["list"])


def test_every_variable_is_defined_and_every_query_chooses_a_host(board: dict[str, Any]) -> None:
    """A query uses only variables that the dashboard has; hosts can always be told apart."""
    defined = {variable["name"] for variable in board["templating"]["list"]} | BUILTIN
    for text in _queries(board):
        used = set(re.findall(r"\$\{?(\w+)", text))
        assert used <= defined, text
        assert "instance" in used, text


def test_legends_and_notes_name_labels_that_exist(board: dict[str, Any]) -> None:
    """What stands in {{braces}} is a label of some metric, so that no legend shows a hole."""
    legends = [target.get("legendFormat", "") for panel in _panels(board) for target in panel["targets"]]
    notes = [note["textFormat"] for note in board["annotations"]["list"]]
    known = {"instance"} | {label for row in METRICS for label in row.labels}

    for text in legends + notes:
        assert set(re.findall(r"\{\{(\w+)\}\}", text)) <= known, text


def test_counters_are_read_over_the_interval_that_grafana_knows(board: dict[str, Any]) -> None:
    """Rates use $__rate_interval, so that they hold at every zoom (an hour is meant as such)."""
    for text in _expressions(board):
        for window in re.findall(r"\[([^\]]+)\]", text):
            assert window in ("$__rate_interval", "1h"), text


def test_runbook_links_lead_somewhere(board: dict[str, Any]) -> None:
    """Every linked runbook exists."""
    for panel in _panels(board):
        for link in panel.get("links", []):
            found = RUNBOOK.search(link["url"])
            assert found, link
            assert (ROOT / "docs/runbooks" / f"{found[1]}.md").is_file()


def test_the_layout_does_not_overlap(board: dict[str, Any]) -> None:
    """Panels have ids of their own, lie within 24 columns and not on each other."""
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


def test_nothing_of_an_older_grafana_is_left(board: dict[str, Any]) -> None:
    """No field makes Grafana run migrations that would overwrite units and calculations."""
    assert board["schemaVersion"] == 39
    assert not {"rows", "style", "hideControls", "sharedCrosshair", "gnetId", "__inputs"} & set(board)
    for panel in _panels(board):
        assert panel["pluginVersion"]
        assert "fieldOptions" not in panel["options"]
        steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])
        assert [step["value"] for step in steps[:1]] in ([], [None])
        assert all(isinstance(step["value"], int | float) for step in steps[1:])


def test_every_stable_metric_is_shown() -> None:
    """No exported, stable metric is missing from all dashboards."""
    shown = {
        name
        for path in BOARDS
        for text in _expressions(json.loads(path.read_text()))
        for name, _ in selectors(text)
    }
    # Times of a good load: the page of the alert is enough.
    elsewhere = {
        "kvwatch_config_last_reload_success_timestamp_seconds",
        "kvwatch_lease_expiry_timestamp_seconds",
    }

    stable = {row.name for row in METRICS if row.stability is Stability.STABLE}
    assert stable - shown - elsewhere == set()
