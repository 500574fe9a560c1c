"""What does Grafana ask Prometheus when it draws a dashboard? Variables filled in, steps chosen."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WIDTH = 1000  # pixels of a panel: no more points than that
# Grafana rounds the step to one of these (seconds).
STEPS = (0.2, 0.5, 1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600)
MOMENTS = 12  # ends of the range at which a table is looked at

Board = Mapping[str, Any]
_VARIABLE = re.compile(r"\$\{(\w+)(?::\w+)?\}|\$(\w+)|\[\[(\w+)\]\]")
_LABEL_VALUES = re.compile(r"label_values\((?:(?P<selector>.+),\s*)?(?P<label>\w+)\)")
_SPECIAL = re.compile(r"[$^*{}\[\]'+?.()|]")


class QueryError(AssertionError):
    """Prometheus refused a query; the text is its reason and the query."""


def escaped(value: str) -> str:
    """A value as Grafana puts it into a regular expression within a quoted label value."""
    return _SPECIAL.sub(r"\\\\\g<0>", value.replace("\\", "\\\\\\\\"))


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A dashboard opened on a time range (Unix seconds). Of a variable that is not in `chosen`, all values.

    `scrape_s` is the scrape interval that the data source is configured with.
    """

    url: str
    from_s: float
    to_s: float
    scrape_s: float = 1.0
    chosen: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """`$__interval`."""
        wanted = (self.to_s - self.from_s) / WIDTH
        return max(self.scrape_s, next((step for step in STEPS if step >= wanted), STEPS[-1]))

    def expand(self, text: str, board: Board) -> str:
        """The text with every variable filled in; QueryError for one that the dashboard does not have."""
        rate_s = max(self.step_s + self.scrape_s, 4 * self.scrape_s)
        known = {
            "__interval": f"{self.step_s:g}s",
            "__rate_interval": f"{rate_s:g}s",
            "__range": f"{self.to_s - self.from_s:.0f}s",
        } | {row["name"]: self._value(row) for row in board["templating"]["list"]}

        def value(found: re.Match[str]) -> str:
            name = next(filter(None, found.groups()))
            if name not in known:
                raise QueryError(f"no variable ${name}: {text}")
            return known[name]

        return _VARIABLE.sub(value, text)

    def _value(self, variable: Mapping[str, Any]) -> str:
        if variable["type"] == "datasource":
            return "prometheus"
        values = [escaped(value) for value in self.chosen.get(variable["name"], ())]
        if not values:
            return str(variable["allValue"])
        return values[0] if len(values) == 1 else f"({'|'.join(values)})"

    def series(self, target: Mapping[str, Any], board: Board) -> list[dict[str, Any]]:
        """What a panel's target returns. Tables show one moment: the latest at which there is anything."""
        text = self.expand(target["expr"], board)
        if not target.get("instant"):
            return self.over_time(text)
        for number in range(MOMENTS):
            at_s = self.to_s - number * (self.to_s - self.from_s) / MOMENTS
            found = self._ask("query", query=text, time=f"{at_s:.3f}")
            if found:
                return list(found)
        return []

    def over_time(self, text: str) -> list[dict[str, Any]]:
        """Every series of an expanded expression over the range."""
        found = self._ask(
            "query_range",
            query=text,
            start=f"{self.from_s:.3f}",
            end=f"{self.to_s:.3f}",
            step=f"{self.step_s:g}",
        )
        return list(found)

    def values(self, variable: Mapping[str, Any], board: Board) -> list[str]:
        """What a query variable offers."""
        text = self.expand(variable["query"]["query"], board)
        found = _LABEL_VALUES.fullmatch(text)
        if found is None:
            raise QueryError(f"not label_values(...): {text}")
        selector = {"match[]": found["selector"]} if found["selector"] else {}
        limits = {"start": f"{self.from_s:.3f}", "end": f"{self.to_s:.3f}"}
        return list(self._ask(f"label/{found['label']}/values", **selector, **limits))

    def _ask(self, path: str, **parameters: str) -> Any:
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=20) as reply:
                data = json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise QueryError(f"{json.load(error).get('error')}: {parameters}") from error
        return data["result"] if isinstance(data, dict) else data


def panels(board: Board) -> Iterator[Mapping[str, Any]]:
    """Every panel but the headings, those in folded rows included."""
    for panel in board["panels"]:
        yield from panels(panel) if panel.get("panels") else ()
        if panel["type"] != "row":
            yield panel


def annotations(board: Board) -> list[Mapping[str, Any]]:
    """The annotation queries, without Grafana's own."""
    return [row for row in board.get("annotations", {}).get("list", []) if not row.get("builtIn")]


def variables(board: Board) -> list[Mapping[str, Any]]:
    """The variables whose values are asked for."""
    return [row for row in board["templating"]["list"] if row["type"] == "query"]
