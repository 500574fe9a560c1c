"""How is a panel made? grafanalib's panels with kvwatch's habits, in the JSON that current Grafana writes.

grafanalib 0.7.1 still emits fields of Grafana before version 7, and some of them make Grafana run old
migrations that overwrite units and calculations. `modern` takes those out again. Every panel says how
to read it, and where there is a runbook, links it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grafanalib.core as g
from grafanalib._gen import DashboardEncoder

from kvwatch.catalogue.alerts import RUNBOOKS
from kvwatch.catalogue.promql import Expr, Match, increase, regex

# grafana/grafana, apps/dashboard/pkg/migration: 39 needs no panel migration in Grafana 10 to 12.
SCHEMA_VERSION = 39
# Any value from 7 on stops the migration of pre-7 panel options; this is the line these options belong to.
PLUGIN_VERSION = "11.0.0"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WINDOW = "$__rate_interval"

INSTANCE = regex("$instance")
SERVER = regex("$server")
GPU = regex("$gpu")
# Series that may belong to a server or a GPU leave the label of the other empty.
SERVER_OR_NONE = regex("$server|")
GPU_OR_NONE = regex("$gpu|")
SCOPE: dict[str, Match] = {"instance": INSTANCE, "server": SERVER_OR_NONE, "gpu": GPU_OR_NONE}

_COLUMNS = ("instance", "rule", "server", "engine", "gpu")  # the others follow as they come

Steps = tuple[tuple[str, float | None], ...]
PLAIN: Steps = (("blue", None),)
LEVELS: Steps = (("#808080", None), ("green", 0), ("#EAB839", 1), ("red", 2))
GOOD_IS_ONE: Steps = (("red", None), ("green", 1))
GOOD_IS_ZERO: Steps = (("green", None), ("red", 1))


def _mapping(**texts: tuple[str, str]) -> list[dict[str, Any]]:
    options = {
        value.lstrip("_").replace("minus", "-"): {"text": text, "color": color, "index": index}
        for index, (value, (text, color)) in enumerate(texts.items())
    }
    return [{"type": "value", "options": options}]


LEVEL_NAMES = _mapping(
    minus1=("unknown", "#808080"), _0=("green", "green"), _1=("yellow", "#EAB839"), _2=("red", "red")
)
UP_NAMES = _mapping(_0=("down", "red"), _1=("up", "green"))
YES_NAMES = _mapping(_0=("no", "green"), _1=("yes", "red"))
ACTIVE_NAMES = _mapping(_0=("none", "green"), _1=("active", "#EAB839"))


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel. `legend` may hold {{label}}; `dashed` draws it as a limit, not as data."""

    expr: Expr
    legend: str = ""
    dashed: str = ""  # colour of the dashed line


def _targets(queries: Sequence[Query], **kind: Any) -> list[Any]:
    return [
        g.Target(
            expr=query.expr.text,
            legendFormat=query.legend,
            refId=chr(ord("A") + index),
            datasource=DATASOURCE,
            intervalFactor=1,
            step=None,
            **kind,
        )
        for index, query in enumerate(queries)
    ]


def _steps(steps: Steps) -> list[dict[str, Any]]:
    """Plain dicts: grafanalib's Threshold writes the first value as a string."""
    return [{"color": color, "value": value} for color, value in steps]


def _common(title: str, how: str, runbook: str) -> dict[str, Any]:
    links = (
        [{"title": f"Runbook {runbook}", "url": f"{RUNBOOKS}{runbook}.md", "targetBlank": True}]
        if runbook
        else []
    )
    return {
        "title": title,
        "description": how,
        "dataSource": DATASOURCE,
        "links": links,
        "maxDataPoints": None,
    }


def _dashed(queries: Sequence[Query]) -> list[dict[str, Any]]:
    return [
        {
            "matcher": {"id": "byFrameRefID", "options": chr(ord("A") + index)},
            "properties": [
                {"id": "color", "value": {"mode": "fixed", "fixedColor": query.dashed}},
                {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [10, 10]}},
                {"id": "custom.fillOpacity", "value": 0},
                {"id": "custom.stacking", "value": {"mode": "none", "group": "A"}},
            ],
        }
        for index, query in enumerate(queries)
        if query.dashed
    ]


def lines(
    title: str,
    how: str,
    unit: str,
    *queries: Query,
    stacked: bool = False,
    top: float | None = None,
    runbook: str = "",
) -> Any:
    """Draw series over time. `unit` is Grafana's (bytes, percentunit, s, short, ...)."""
    return g.TimeSeries(
        **_common(title, how, runbook),
        targets=_targets(queries),
        unit=unit,
        stacking={"mode": "normal" if stacked else "none", "group": "A"},
        fillOpacity=60 if stacked else 5,
        lineWidth=0 if stacked else 1,
        showPoints="never",
        spanNulls=False,
        valueMin=0,
        valueMax=top,
        legendDisplayMode="table",
        legendCalcs=["lastNotNull", "max"],
        tooltipMode="multi",
        tooltipSort="desc",
        overrides=_dashed(queries),
    )


def number(
    title: str,
    how: str,
    unit: str,
    *queries: Query,
    steps: Steps = PLAIN,
    names: list[dict[str, Any]] | None = None,
    runbook: str = "",
    nothing: str = "no data",
) -> Any:
    """Show the present value as a big number, coloured by `steps`; `nothing` where there is no series."""
    return g.Stat(
        **_common(title, how, runbook),
        targets=_targets(queries),
        format=unit,
        reduceCalc="lastNotNull",
        colorMode="background" if steps is not PLAIN else "value",
        graphMode="none",
        noValue=nothing,
        color={"mode": "thresholds"},
        thresholds=_steps(steps),
        mappings=names or [],
    )


def states(
    title: str,
    how: str,
    *queries: Query,
    steps: Steps = LEVELS,
    names: list[dict[str, Any]] | None = None,
    runbook: str = "",
) -> Any:
    """Show states over time, one row per series."""
    return g.StateTimeline(
        **_common(title, how, runbook),
        targets=_targets(queries),
        thresholds=_steps(steps),
        mappings=LEVEL_NAMES if names is None else names,
        showValue="never",
        extraJson={"fieldConfig": {"defaults": {"unit": "none"}}},
    )


def table(
    title: str, how: str, unit: str, *queries: Query, hide: Sequence[str] = (), runbook: str = ""
) -> Any:
    """Show present values with their labels, what identifies a row first and the value last."""
    hidden = dict.fromkeys(("Time", "__name__", "job", *hide), True)
    order = {name: place for place, name in enumerate(_COLUMNS)}
    return g.Table(
        **_common(title, how, runbook),
        targets=_targets(queries, format="table", instant=True),
        unit=unit,
        transformations=[
            {"id": "merge", "options": {}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": hidden,
                    "indexByName": order,
                    "renameByName": {"instance": "host", "Value": "value"},
                },
            },
        ],
    )


@dataclass(frozen=True, slots=True)
class Note:
    """What is marked on every panel's time axis while `expr` is above zero. `text` may hold {{label}}."""

    name: str
    expr: Expr
    text: str
    color: str

    def row(self) -> dict[str, Any]:
        """The annotation query as Grafana's Prometheus data source reads it."""
        return {
            "datasource": DATASOURCE,
            "enable": True,
            "expr": self.expr.text,
            "hide": False,
            "iconColor": self.color,
            "name": self.name,
            "step": "1s",  # the least; Grafana takes the panel's step where that is longer
            "tagKeys": "instance,server,engine,gpu",
            "textFormat": self.text,
            "titleFormat": self.name,
        }


def news(counter: Expr, alive: Expr, on: Sequence[str]) -> Expr:
    """Increase of a counter whose series appears with its first event, that first event included.

    `increase` knows nothing before a series' first sample, so a first event would be 0. It is new where
    a window ago the series was missing although `alive` (joined by `on`) was there to tell.
    """
    fresh = f"({counter.text} unless {counter.text} offset {WINDOW})"
    told = f"on ({', '.join(on)}) {alive.text} offset {WINDOW}"
    grown = increase(counter, WINDOW)
    return Expr(f"({grown.text} > 0) or ({fresh} and {told})", grown.labels, atomic=False)


@dataclass(frozen=True, slots=True)
class Row:
    """Panels side by side under a heading."""

    title: str
    panels: tuple[Any, ...]
    height: int = 8


def arrange(rows: Sequence[Row]) -> list[Any]:
    """Place rows of panels on Grafana's grid of 24 columns, equal widths in a row."""
    placed: list[Any] = []
    y = 0
    for row in rows:
        placed.append(g.RowPanel(title=row.title, gridPos=g.GridPos(h=1, w=24, x=0, y=y)))
        y += 1
        width = 24 // len(row.panels)
        for index, panel in enumerate(row.panels):
            panel.gridPos = g.GridPos(h=row.height, w=width, x=index * width, y=y)
            placed.append(panel)
        y += row.height
    return placed


def variable(name: str, label: str, query: str) -> Any:
    """Offer the values of a label; all of them at first."""
    return g.Template(
        name=name,
        label=label,
        query=query,
        dataSource=DATASOURCE,
        multi=True,
        includeAll=True,
        allValue=".*",
        refresh=2,
        sort=1,
    )


def dashboard(
    uid: str,
    title: str,
    about: str,
    variables: Sequence[Any],
    rows: Sequence[Row],
    notes: Sequence[Note] = (),
) -> str:
    """Write one dashboard as JSON text."""
    board = g.Dashboard(
        title=title,
        uid=uid,
        description=about,
        tags=["kvwatch"],
        timezone="browser",
        schemaVersion=SCHEMA_VERSION,
        refresh="10s",
        editable=False,
        graphTooltip=1,
        time=g.Time("now-1h", "now"),
        panels=arrange(rows),
        links=[_others()],
        annotations=g.Annotations(list=[note.row() for note in notes]),
        templating=g.Templating(
            list=[
                g.Template(name="datasource", type="datasource", query="prometheus", label="Data source"),
                *variables,
            ]
        ),
    ).auto_panel_ids()
    raw = json.loads(json.dumps(board.to_json_data(), cls=DashboardEncoder))
    return json.dumps(modern(raw), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _others() -> dict[str, Any]:
    return {
        "title": "kvwatch",
        "type": "dashboards",
        "tags": ["kvwatch"],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
        "icon": "external link",
        "targetBlank": False,
        "tooltip": "",
        "url": "",
    }


# What grafanalib writes for Grafana versions before 7, and nothing reads any more.
_OLD_BOARD = {"__inputs", "gnetId", "hideControls", "rows", "sharedCrosshair", "style"}
_OLD_PANEL = {
    "cacheTimeout", "color", "columns", "editable", "error", "fontSize", "height", "hideTimeOverride",
    "mappings", "minSpan", "span",
}  # fmt: skip
_OLD_TARGET = {"intervalFactor", "metric", "query", "step", "target"}
_OLD_VARIABLE = {"tagValuesQuery", "tagsQuery", "useTags"}
_ONLY_INTERVAL = {"auto", "auto_count", "auto_min"}


def modern(board: dict[str, Any]) -> dict[str, Any]:
    """Bring grafanalib's output to the present schema; nulls go, except a threshold's first value."""
    result = _without(board, _OLD_BOARD)
    result["timepicker"] = {}
    result["templating"] = {"list": [_variable(v) for v in board["templating"]["list"]]}
    result["panels"] = [_panel(panel) for panel in board["panels"]]
    pruned: dict[str, Any] = _prune(result)
    return pruned


def _without(mapping: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}


def _variable(raw: dict[str, Any]) -> dict[str, Any]:
    result = _without(raw, _OLD_VARIABLE | _ONLY_INTERVAL)
    result["current"] = {}
    if raw["type"] == "query":
        result["query"] = {"query": raw["query"], "refId": f"variable-{raw['name']}"}
    return result


def _panel(raw: dict[str, Any]) -> dict[str, Any]:
    if raw["type"] == "row":
        return {key: raw[key] for key in ("collapsed", "gridPos", "id", "panels", "title", "type")}
    result = _without(raw, _OLD_PANEL)
    result["pluginVersion"] = PLUGIN_VERSION
    result["targets"] = [_without(target, _OLD_TARGET) for target in raw["targets"]]
    if "legend" in result.get("options", {}):
        result["options"]["legend"]["showLegend"] = True
    config = result["fieldConfig"]
    custom = config["defaults"].get("custom", {})
    if not config["defaults"].get("thresholds", {}).get("steps"):
        config["defaults"].pop("thresholds", None)
    if custom.get("scaleDistribution") == {"type": "linear", "log": 2}:
        custom["scaleDistribution"] = {"type": "linear"}
    if raw["type"] == "table":
        custom["cellOptions"] = {"type": custom.pop("displayMode", "auto")}
        custom["minWidth"] = 70  # instead of 150: every column of a third of the screen is in sight
    return result


def _prune(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            k: _prune(v) for k, v in value.items() if v is not None or (k == "value" and "color" in value)
        }
    return [_prune(item) for item in value] if isinstance(value, list) else value
