"""What does any metrics page report, read by a table in the configuration?

`metrics: {usage_ratio: 'my_cache_percent{pool="kv"} / 100', running: my_active_requests}`
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvwatch.model.sample import FailureKind
from kvwatch.model.server import (
    Basis,
    EngineState,
    Evictable,
    Histogram,
    KvCacheState,
    SchedulerState,
    Semantics,
    ServerState,
)
from kvwatch.model.settings import ServerSettings
from kvwatch.sources.base import SourceError
from kvwatch.sources.exposition import Families, Labels, pick, ratio, whole
from kvwatch.sources.servers.base import METRICS, Adapter, Endpoint, Pages, clean, engine_names, not_expected

KV_FIELDS = (
    *("usage_ratio", "num_blocks", "used_blocks", "free_blocks", "evictable_blocks"),
    *("block_size_tokens", "capacity_tokens", "pool_bytes", "tokens"),
)
SCHEDULER_FIELDS = (
    *("running", "waiting", "max_running", "preemptions_total", "recomputed_tokens_total"),
    *("prompt_tokens_total", "cached_prompt_tokens_total", "generation_tokens_total", "steps_total"),
    "finished_total",
)
HISTOGRAM_FIELDS = ("ttft", "tpot", "queue", "prompt_length", "generation_length")
FIELDS = KV_FIELDS + SCHEDULER_FIELDS + HISTOGRAM_FIELDS  # what the `metrics:` table may have
_SINGLE = frozenset({"usage_ratio", "block_size_tokens"})  # adding these up means nothing

_SELECTOR = re.compile(r"\s*([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\})?\s*(?:([/*])\s*([0-9.eE+-]+)\s*)?", re.ASCII)
_MATCHER = re.compile(r'\s*([a-zA-Z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,|$)', re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """One series selector: name, labels that must be equal, and a factor for the value."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()
    factor: float = 1.0

    def matches(self, labels: Labels) -> bool:
        """Whether a series has all these labels."""
        return all(labels.get(name) == value for name, value in self.labels)


@functools.lru_cache(maxsize=256)
def parse_selector(text: str) -> Selector:
    """Parse `name{label="value"} / 100`; raises ValueError with the fix."""
    found = _SELECTOR.fullmatch(text)
    if not found:
        raise ValueError(f'{text!r} is no selector; write it like my_metric{{label="x"}} or my_metric / 100')
    labels, at, inside = [], 0, found[2] or ""
    while at < len(inside):
        matcher = _MATCHER.match(inside, at)
        if not matcher:
            raise ValueError(f'the labels {{{inside}}} are not like label="x", other="y"')
        labels.append((matcher[1], matcher[2].replace('\\"', '"').replace("\\\\", "\\")))
        at = matcher.end()
    return Selector(name=found[1], labels=tuple(labels), factor=_factor(found[3], found[4]))


def _factor(operator: str | None, number: str | None) -> float:
    if operator is None or number is None:
        return 1.0
    value = float(number)
    if not 0 < value < float("inf"):
        raise ValueError(f"{number} is no factor; it must be over 0")
    return 1 / value if operator == "/" else value


def parse(pages: Pages, settings: ServerSettings) -> ServerState:
    """Read the mapped series; refuses a page that has none of them."""
    selectors = _selectors(settings.mapping)
    families = pick(pages[METRICS], frozenset(selector.name for selector in selectors.values()))
    numbers = {f: _numbers(f, s, families) for f, s in selectors.items() if f not in HISTOGRAM_FIELDS}
    histograms = {f: _histograms(s, families) for f, s in selectors.items() if f in HISTOGRAM_FIELDS}
    names = engine_names([*_keys(numbers), *_keys(histograms)])
    if not names:
        wanted = ", ".join(sorted({selector.name for selector in selectors.values()})[:4])
        raise not_expected(pages[METRICS], wanted, "correct the names under `metrics`, or the `metrics_path`")
    missing = [field for field in selectors if not (numbers.get(field) or histograms.get(field))]
    return ServerState(
        kind="mapped",
        semantics=Semantics(
            evictable=Evictable(settings.mapping_evictable),
            basis=Basis(settings.mapping_basis),
            note="as configured",
        ),
        engines=tuple(_engine(name, numbers, histograms) for name in names),
        notes=(*(f"no series for {field}" for field in missing), *families.findings),
    )


def _selectors(mapping: Mapping[str, str]) -> dict[str, Selector]:
    unknown = sorted(set(mapping) - set(FIELDS))
    if unknown or not mapping:
        what = f"`metrics` has {', '.join(unknown)}" if unknown else "`metrics` is empty"
        raise SourceError(FailureKind.NOT_EXPECTED, f"{what}; a mapped server may have {', '.join(FIELDS)}")
    try:
        return {field: parse_selector(text) for field, text in mapping.items()}
    except ValueError as error:
        raise SourceError(FailureKind.NOT_EXPECTED, f"`metrics`: {error}") from None


def _numbers(field: str, selector: Selector, families: Families) -> dict[str, float]:
    """The field's value per engine, added up over other labels where that has a meaning."""
    values: dict[str, float] = {}
    for series, value in families.series(selector.name) or families.counter(selector.name):
        if not selector.matches(series.labels):
            continue
        engine = _engine_name(series.labels)
        if engine in values and field in _SINGLE:
            raise SourceError(
                FailureKind.NOT_EXPECTED,
                f"{selector.name} for {field} matches several series of engine {engine}; "
                "add labels to the selector",
            )
        values[engine] = values.get(engine, 0.0) + value * selector.factor
    return values


def _histograms(selector: Selector, families: Families) -> dict[str, Histogram]:
    found: dict[str, Histogram] = {}
    for labels, histogram in families.histograms(selector.name):
        if selector.matches(labels):
            found.setdefault(_engine_name(labels), _scaled(histogram, selector.factor))
    return found


def _scaled(histogram: Histogram, factor: float) -> Histogram:
    return Histogram(
        bounds=tuple(bound * factor for bound in histogram.bounds),
        counts=histogram.counts,
        count=histogram.count,
        sum=None if histogram.sum is None else histogram.sum * factor,
    )


def _keys(found: Mapping[str, Mapping[str, object]]) -> list[str]:
    return [name for values in found.values() for name in values]


def _engine_name(labels: Labels) -> str:
    return clean(labels.get("engine", labels.get("dp_rank", "0"))) or "0"


def _engine(
    name: str, numbers: Mapping[str, Mapping[str, float]], histograms: Mapping[str, Mapping[str, Histogram]]
) -> EngineState:
    kv = _whole_fields(KV_FIELDS[1:], name, numbers)
    kv["usage_ratio"] = ratio(numbers.get("usage_ratio", {}).get(name))
    if "usage_ratio" not in numbers and kv["used_blocks"] is not None and kv["num_blocks"]:
        kv["usage_ratio"] = ratio(kv["used_blocks"] / kv["num_blocks"])
    latencies: dict[str, Any] = {field: histograms.get(field, {}).get(name) for field in HISTOGRAM_FIELDS}
    return EngineState(
        engine=name,
        kv=KvCacheState(**kv),
        scheduler=SchedulerState(**_whole_fields(SCHEDULER_FIELDS, name, numbers)),
        **latencies,
    )


def _whole_fields(
    fields: Sequence[str], engine: str, numbers: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    return {field: whole(numbers.get(field, {}).get(engine)) for field in fields}


ADAPTER = Adapter(
    kind="mapped",
    parse=parse,
    semantics=Semantics(note="as configured: `evictable` and `basis`"),
    endpoints=(Endpoint(name=METRICS, path="/metrics"),),
)
