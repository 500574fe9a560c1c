"""What does an SGLang server report? `/v1/loads` first, `/metrics` for histograms, retractions and page size.

Evictable (radix-cached) tokens count as free. Figures are refreshed at each prefill, every 40 decode
steps, and every 30 s when idle. /v1/loads (0.5.10 and later) works without --enable-metrics.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from kvwatch.sources.exposition import Families, Labels, Series, pick, ratio, whole
from kvwatch.sources.http import parse_json
from kvwatch.sources.servers._page import add_histograms
from kvwatch.sources.servers.base import (
    METRICS,
    Adapter,
    Clue,
    Endpoint,
    Pages,
    clean,
    engine_names,
    label_values,
    not_expected,
    number,
    text,
)

SEMANTICS = Semantics(
    evictable=Evictable.FREE,
    basis=Basis.OCCUPANCY,
    fresh_within_s=30.0,
    note="locked pages; radix-cached tokens count as free; refreshed at prefill, every 40 decodes, 30 s idle",
)
LOADS = "loads"
GB = 1024**3  # SGLang divides by 1 << 30 and says GB

PREFIX = "sglang:"
USAGE = ("full_token_usage", "token_usage")  # the first is not rounded to two decimals
CAPACITY, USED, FREE, EVICTABLE = (
    "max_total_num_tokens",
    "kv_used_tokens",
    "kv_available_tokens",
    "kv_evictable_tokens",
)
PAGE_SIZE = "page_size"
RUNNING, WAITING = "num_running_reqs", "num_queue_reqs"
RETRACTED = "num_retracted_requests"  # the counter; the gauge num_retracted_reqs stays 0
RETRACTED_TOKENS = ("num_retracted_input_tokens", "num_retracted_output_tokens")
LIVE_TOKENS = "realtime_tokens"  # prompt_tokens and generation_tokens move only when a request ends
PROMPT, CACHED, GENERATION, FINISHED = "prompt_tokens", "cached_tokens", "generation_tokens", "num_requests"
HISTOGRAMS = {
    "ttft": "time_to_first_token_seconds",
    "tpot": "inter_token_latency_seconds",
    "queue": "queue_time_seconds",
}
MEMORY = {"weights_bytes": "weight_memory_usage_gb", "pool_bytes": "kv_cache_memory_usage_gb"}
WANTED = frozenset(
    PREFIX + name
    for name in (
        *(*USAGE, CAPACITY, USED, FREE, EVICTABLE, PAGE_SIZE, RUNNING, WAITING, RETRACTED, *RETRACTED_TOKENS),
        *(LIVE_TOKENS, PROMPT, GENERATION, FINISHED, *HISTOGRAMS.values(), *MEMORY.values()),
    )
)
_SUMMED = (RETRACTED, *RETRACTED_TOKENS, PROMPT, GENERATION, FINISHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """The metrics page: gauges by rank, copies of other tensor ranks and priorities left out."""

    families: Families

    def gauge(self, *names: str) -> dict[str, float]:
        """By engine, the first of these gauges that the page has."""
        for name in names:
            found = self.families.series(PREFIX + name)
            if found:
                return {_rank(series.labels): value for series, value in found if _counts(series)}
        return {}

    def counter(self, name: str, **labels: str) -> dict[str, float]:
        """By engine, added up over all labels but rank; only series that have `labels`."""
        sums: dict[str, float] = {}
        for series, value in self.families.counter(PREFIX + name):
            if _counts(series) and all(series.labels.get(key) == want for key, want in labels.items()):
                sums[_rank(series.labels)] = sums.get(_rank(series.labels), 0.0) + value
        return sums

    def histogram(self, name: str) -> Histogram | None:
        """The server's histogram, added up over labels: the tokenizer that observes it knows no ranks."""
        return add_histograms(
            h for labels, h in self.families.histograms(PREFIX + name) if _first_rank(labels)
        )


def parse(pages: Pages, settings: ServerSettings) -> ServerState:
    """One state per data-parallel rank, from whichever of the two pages there are."""
    del settings
    if not pages:
        raise SourceError(
            FailureKind.NOT_EXPECTED,
            "neither /v1/loads nor /metrics answered; SGLang before 0.5.10 needs --enable-metrics",
        )
    loads, version = _loads(pages[LOADS]) if LOADS in pages else ({}, "")
    page = _metrics(pages, bool(loads))
    ranks = {_rank(labels) for labels in page.families.label_sets() if _placed(labels)}
    names = engine_names(loads or ranks or {"0"})
    return ServerState(
        kind="sglang",
        semantics=SEMANTICS,
        engines=_engines(names, loads, page),
        version=version,
        model=label_values(page.families, "model_name"),
        notes=(*_notes(pages), *page.families.findings),
    )


def _metrics(pages: Pages, optional: bool) -> _Page:
    body = pages.get(METRICS, b"")
    families = pick(body, WANTED)
    needed = (*USAGE, RUNNING, CAPACITY)
    if not optional and not any(families.series(PREFIX + name) for name in needed):
        raise not_expected(
            body, "/v1/loads and no series of SGLang (sglang:…)", "start SGLang with --enable-metrics"
        )
    return _Page(families=families)


def _loads(body: bytes) -> tuple[dict[str, Mapping[str, object]], str]:
    """/v1/loads by rank, and the version."""
    answer = parse_json(body, "/v1/loads")
    entries = answer.get("loads") if isinstance(answer, dict) else None
    if not isinstance(answer, dict) or not isinstance(entries, list):
        raise not_expected(body, "list `loads` in /v1/loads", "is this SGLang 0.5.10 or later?")
    found: dict[str, Mapping[str, object]] = {}
    for entry in entries:
        rank = entry.get("dp_rank") if isinstance(entry, dict) else None
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 or str(rank) in found:
            raise SourceError(FailureKind.MALFORMED, "/v1/loads has an entry without a `dp_rank` of its own")
        found[str(rank)] = entry
    return found, text(answer, "version")


def _engines(
    names: Sequence[str], loads: Mapping[str, Mapping[str, object]], page: _Page
) -> tuple[EngineState, ...]:
    pools = {name: _pool(name, loads.get(name, {}), page) for name in names}
    schedulers = {name: _scheduler(name, loads.get(name, {}), page, len(names) == 1) for name in names}
    # Latencies carry no rank: with several engines they belong to none of them.
    histograms = {
        field: page.histogram(name) if len(names) == 1 else None for field, name in HISTOGRAMS.items()
    }
    return tuple(
        EngineState(
            engine=name,
            kv=pools[name],
            scheduler=schedulers[name],
            ttft=histograms["ttft"],
            tpot=histograms["tpot"],
            queue=histograms["queue"],
        )
        for name in names
    )


def _pool(name: str, load: Mapping[str, object], page: _Page) -> KvCacheState:
    def gauge(*names: str) -> float | None:
        return page.gauge(*names).get(name)

    memory = load.get("memory")
    size, used = whole(gauge(PAGE_SIZE)), _first_whole(number(load, "num_used_tokens"), gauge(USED))
    capacity = _first_whole(number(load, "max_total_num_tokens"), gauge(CAPACITY))
    usage = number(load, "token_usage")
    blocks = _blocks(capacity, used, whole(gauge(EVICTABLE)), size)
    return KvCacheState(
        usage_ratio=ratio(usage if usage is not None else gauge(*USAGE)),
        num_blocks=blocks[0],
        used_blocks=blocks[1],
        free_blocks=blocks[2],
        evictable_blocks=blocks[3],
        block_size_tokens=size,
        capacity_tokens=capacity,
        pool_bytes=_bytes(gauge(MEMORY["pool_bytes"]), number(memory, "kv_cache_gb")),
        weights_bytes=_bytes(gauge(MEMORY["weights_bytes"]), number(memory, "weight_gb")),
    )


def _scheduler(name: str, load: Mapping[str, object], page: _Page, alone: bool) -> SchedulerState:
    sums = {counter: page.counter(counter).get(name) for counter in _SUMMED}
    retracted = [sums[counter] for counter in RETRACTED_TOKENS]
    told = {
        mode: page.counter(LIVE_TOKENS, mode=mode).get(name)
        for mode in ("prefill_compute", "prefill_cache", "decode")
    }
    prompt = _sum(told["prefill_compute"], told["prefill_cache"])
    there = bool(page.families)
    return SchedulerState(
        running=_first_whole(number(load, "num_running_reqs"), page.gauge(RUNNING).get(name)),
        waiting=_first_whole(number(load, "num_waiting_reqs"), page.gauge(WAITING).get(name)),
        max_running=whole(number(load, "max_running_requests")),
        # The counters of retractions are made at the first one: on a page without them it is 0.
        preemptions_total=whole(sums[RETRACTED] or 0.0) if there else None,
        recomputed_tokens_total=whole(sum(v or 0.0 for v in retracted)) if there else None,
        prompt_tokens_total=_first_whole(prompt, sums[PROMPT] if alone else None),
        cached_prompt_tokens_total=whole(told["prefill_cache"]),
        generation_tokens_total=_first_whole(told["decode"], sums[GENERATION] if alone else None),
        finished_total=whole(sums[FINISHED]) if alone else None,
    )


def _blocks(
    capacity: int | None, used: int | None, evictable: int | None, size: int | None
) -> tuple[int | None, int | None, int | None, int | None]:
    """Pages in all, used, free and evictable, disjoint.

    Used and evictable tokens may come from two pages read one after the other, so the evictable ones are
    clipped to what is left, and free is the rest (pages held by sessions count as free here).
    """
    if capacity is None or not size:
        return None, None, None, None
    total = capacity // size
    if used is None or used > capacity:
        return total, None, None, None
    used_pages = min(total, -(-used // size))
    if evictable is None:
        return total, used_pages, total - used_pages, None
    evictable_pages = min(evictable // size, total - used_pages)
    return total, used_pages, total - used_pages - evictable_pages, evictable_pages


def _bytes(*gigabytes: float | None) -> int | None:
    return next((round(value * GB) for value in gigabytes if value is not None and 0 < value < 1e6), None)


def _first_whole(*values: float | None) -> int | None:
    return next((whole(value) for value in values if value is not None), None)


def _sum(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _rank(labels: Labels) -> str:
    return clean(labels.get("dp_rank", "0")) or "0"


def _placed(labels: Labels) -> bool:
    """Whether a scheduler wrote this: the tokenizer's series have no tensor rank and no place."""
    return "tp_rank" in labels


def _first_rank(labels: Labels) -> bool:
    return (
        labels.get("tp_rank", "0") == "0" and labels.get("pp_rank", "0") == "0" and not labels.get("priority")
    )


def _counts(series: Series) -> bool:
    """One copy of each: other tensor ranks repeat the first's figures, priorities are parts of the whole."""
    return _first_rank(series.labels)


def _notes(pages: Pages) -> list[str]:
    if METRICS not in pages:
        return ["/metrics did not answer (SGLang needs --enable-metrics): no latencies, no retractions"]
    return []


ADAPTER = Adapter(
    kind="sglang",
    parse=parse,
    semantics=SEMANTICS,
    endpoints=(
        Endpoint(name=LOADS, path="/v1/loads", optional=True),
        Endpoint(name=METRICS, path="/metrics", optional=True),
    ),
    processes=(r"\bsglang\.launch_server\b", r"^sglang::", r"\bsglang\s+serve\b"),
    clues=(
        Clue(path="/v1/loads", body=re.compile(rb'^\s*\{.*"loads"\s*:\s*\[', re.DOTALL)),
        Clue(path="/metrics", body=re.compile(rb"(?m)^(?:# TYPE )?sglang:")),
    ),
)
