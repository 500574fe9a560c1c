"""Every dashboard on a real Prometheus that has scraped the demo through all of its scenarios."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from checks.dashboards.grafana import View, annotations, panels, variables
from checks.dashboards.hosts import LONG, SCENARIOS, Fleet
from tests.harness import ROOT

pytestmark = [pytest.mark.timeout(200), pytest.mark.needs("prometheus")]

SECONDS = 50.0
BOARDS = sorted((ROOT / "dashboards").glob("*.json"))
HOSTS = [*SCENARIOS, "acting", LONG]


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> Iterator[View]:
    """All hosts, over the time since they began."""
    with Fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        time.sleep(SECONDS)
        yield View(url=fleet.prometheus.url, from_s=fleet.from_s, to_s=time.time())


@pytest.fixture(params=BOARDS, ids=[path.stem for path in BOARDS])
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    """One dashboard."""
    loaded: dict[str, Any] = json.loads(request.param.read_text())
    return loaded


def test_every_panel_query_returns_data(view: View, board: dict[str, Any]) -> None:
    """No target of any panel is empty or in error: nothing is listed as an exception."""
    asked = [(panel["title"], target) for panel in panels(board) for target in panel["targets"]]

    counts = [(title, target["expr"], len(view.series(target, board))) for title, target in asked]

    print(f"{board['title']}: {len(counts)} queries, {sum(n for *_, n in counts)} series")
    assert [(title, text) for title, text, found in counts if not found] == []


def test_every_annotation_has_something_to_mark(view: View, board: dict[str, Any]) -> None:
    """Each annotation query gives a value above zero, which is what Grafana marks."""
    for row in annotations(board):
        found = view.over_time(view.expand(row["expr"], board))
        marked = [one for one in found if any(float(value) > 0 for _, value in one["values"])]
        print(f"{board['title']}: annotation `{row['name']}`: {len(marked)} series")
        assert marked, row


def test_every_variable_offers_values(view: View, board: dict[str, Any]) -> None:
    """Hosts, servers and GPUs can be chosen; every host is offered."""
    offered = {row["name"]: view.values(row, board) for row in variables(board)}

    assert all(offered.values()), offered
    assert sorted(offered["instance"]) == sorted(HOSTS)


def test_choosing_every_host_by_name_shows_the_same(view: View, board: dict[str, Any]) -> None:
    """The values in the queries are matched as Grafana writes several of them."""
    chosen = View(url=view.url, from_s=view.from_s, to_s=view.to_s, chosen={"instance": HOSTS})
    for panel in panels(board):
        for target in panel["targets"]:
            assert len(chosen.series(target, board)) == len(view.series(target, board)), target["expr"]


def test_a_host_that_is_not_chosen_is_not_shown(view: View, board: dict[str, Any]) -> None:
    """With one host chosen, no series of another one comes back."""
    one = View(url=view.url, from_s=view.from_s, to_s=view.to_s, chosen={"instance": ["calm"]})
    found = [
        series["metric"].get("instance", "calm")
        for panel in panels(board)
        for target in panel["targets"]
        for series in one.series(target, board)
    ]

    assert set(found) == {"calm"}
