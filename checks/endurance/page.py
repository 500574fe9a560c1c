"""One scraped page and what must be true of every page, whatever happens around kvwatch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

Labels = Mapping[str, str]
# Counters that kvwatch passes through from a server: they begin anew when that does.
PASSED_THROUGH = ("kvwatch_preemptions_total", "kvwatch_allocator_", "kvwatch_recomputed_tokens_total")
NO_GREEN_WITHOUT = {"kv_usage": "kvwatch_kv_usage_ratio", "device_headroom": "kvwatch_gpu_memory_free_bytes"}


class Page:
    """A page parsed by the official parser. ValueError when it is not one."""

    def __init__(self, body: bytes, *, openmetrics: bool = False) -> None:
        self.series: dict[str, list[tuple[Labels, float]]] = {}
        read = read_openmetrics if openmetrics else read_text
        for family in read(body.decode("utf-8")):
            for sample in family.samples:
                self.series.setdefault(sample.name, []).append((sample.labels, sample.value))

    def all(self, name: str, **labels: str) -> list[tuple[Labels, float]]:
        """Every series of this name whose labels include these."""
        return [
            (found, value)
            for found, value in self.series.get(name, [])
            if all(found.get(key) == text for key, text in labels.items())
        ]

    def get(self, name: str, **labels: str) -> float | None:
        """The first series of this name with these labels; None when there is none."""
        found = self.all(name, **labels)
        return found[0][1] if found else None


def complaints(page: Page) -> Iterator[str]:
    """What every page must keep to, by itself."""
    yield from _no_nan(page)
    yield from _ledgers(page)
    yield from _no_green_without_a_value(page)


def _no_nan(page: Page) -> Iterator[str]:
    for name, found in page.series.items():
        if any(value != value for _, value in found):
            yield f"{name} is NaN"


def _ledgers(page: Page) -> Iterator[str]:
    """The parts of each ledger add up to that GPU's total, and none is below zero."""
    parts: dict[str, list[float]] = {}
    for labels, value in page.all("kvwatch_gpu_memory_ledger_bytes"):
        parts.setdefault(labels["uuid"], []).append(value)
    for uuid, values in parts.items():
        total = page.get("kvwatch_gpu_memory_total_bytes", uuid=uuid)
        if total is None:
            yield f"GPU {uuid} has a ledger and no total"
        elif sum(values) != total:
            yield f"the ledger of GPU {uuid} adds up to {sum(values):.0f}, not to {total:.0f}"
        if min(values) < 0:
            yield f"the ledger of GPU {uuid} has a part below zero"


def _no_green_without_a_value(page: Page) -> Iterator[str]:
    """A rule whose input is not on the page is not green on it."""
    for rule, source in NO_GREEN_WITHOUT.items():
        key = "uuid" if "gpu" in source else "server"
        shown = {labels[key] for labels, _ in page.all(source)}
        for labels, level in page.all("kvwatch_rule_level", rule=rule):
            if level == 0 and labels[key] not in shown:
                yield f"rule {rule} of {labels[key]} is green without a value"


@dataclass
class Counters:
    """Sees that kvwatch's own counters never go back while one process of it lives."""

    last: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)

    def forget_sources(self) -> None:
        """After a reload a source may be another one of the same name, which counts from zero."""
        self.last = {key: value for key, value in self.last.items() if "source" not in dict(key[1])}

    def complaints(self, page: Page) -> Iterator[str]:
        """Counters of this page below those of an earlier page of the same process."""
        for name, found in page.series.items():
            if not name.endswith("_total") or name.startswith(PASSED_THROUGH):
                continue
            for labels, value in found:
                key = (name, tuple(sorted(labels.items())))
                if value < self.last.get(key, value):
                    yield f"{name}{dict(labels)} went back from {self.last[key]:g} to {value:g}"
                self.last[key] = value


def strict_json(body: bytes) -> object:
    """JSON as everybody else reads it: ValueError for NaN and Infinity."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(body, parse_constant=refuse)
