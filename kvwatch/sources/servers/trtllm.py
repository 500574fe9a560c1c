"""What does TensorRT-LLM's `trtllm-serve` report? Only /prometheus/metrics is read.

Its GET /metrics, /perf_metrics and /kv_cache_events *drain*: each answer takes data from every other
reader. /metrics is read only where the configuration says `metrics_path: /metrics`. The gauges of
/prometheus/metrics are set when a request *completes*, so they may be as old as a long generation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvwatch.model.server import (
    Basis,
    EngineState,
    Evictable,
    KvCacheState,
    SchedulerState,
    Semantics,
    ServerState,
)
from kvwatch.model.settings import ServerSettings
from kvwatch.sources.exposition import ratio, whole
from kvwatch.sources.http import parse_json
from kvwatch.sources.servers._page import Page, read_page, split_blocks
from kvwatch.sources.servers.base import METRICS, Adapter, Clue, Endpoint, Pages, not_expected, number

LONG_GENERATION_S = 600.0  # nothing bounds it; past this a request that "runs" without any end is suspect
SEMANTICS = Semantics(
    evictable=Evictable.FREE,
    basis=Basis.OCCUPANCY,
    fresh_within_s=LONG_GENERATION_S,
    note="blocks of live sequences, reusable ones count as free; refreshed when a request completes",
)
SEMANTICS_JSON = Semantics(
    evictable=Evictable.FREE,
    basis=Basis.OCCUPANCY,
    destructive=True,
    note="blocks of live sequences, reusable ones count as free; of the last iteration; reading drains "
    "/metrics, so other readers lose what is read here",
)
INFO = "server_info"
PREFIX = "trtllm_"
RUNNING, WAITING = "num_requests_running", "num_requests_waiting"
LIMITS = ("max_batch_size_runtime", "max_batch_size_static")
USAGE, MAX, USED = "kv_cache_utilization", "kv_cache_max_blocks", "kv_cache_used_blocks"
TOKENS_PER_BLOCK = "kv_cache_tokens_per_block"
PROMPT, CACHED, GENERATION = "prompt_tokens", "prompt_cached_tokens", "generation_tokens"
FINISHED = ("num_requests_completed", "request_success")
TTFT, TPOT = "time_to_first_token_seconds", "time_per_output_token_seconds"
QUEUE = "request_queue_time_seconds"
NAMES = (
    *(RUNNING, WAITING, *LIMITS, USAGE, MAX, USED, TOKENS_PER_BLOCK),
    *(PROMPT, CACHED, GENERATION, *FINISHED, TTFT, TPOT, QUEUE),
)


def parse(pages: Pages, settings: ServerSettings) -> ServerState:
    """One engine, from the Prometheus page; from the JSON of /metrics where that was configured."""
    body = pages[METRICS]
    if settings.metrics_path and body.lstrip()[:1] == b"[":
        return _from_json(body)
    page = read_page(body, PREFIX, NAMES)
    if not page.families and not _is_trtllm(pages.get(INFO)):
        raise not_expected(
            body, "series of TensorRT-LLM (trtllm_…)", "start trtllm-serve with `return_perf_metrics: true`"
        )
    engine = EngineState(
        kv=_pool(page),
        scheduler=_scheduler(page),
        ttft=page.histogram(TTFT).get("0"),
        tpot=page.histogram(TPOT).get("0"),
        queue=page.histogram(QUEUE).get("0"),
    )
    return ServerState(
        kind="trtllm",
        semantics=SEMANTICS,
        engines=(engine,),
        model=page.label_values("model_name"),
        notes=(*_notes(page), *page.families.findings),
    )


def _is_trtllm(body: bytes | None) -> bool:
    return body is not None and b'"disaggregated_params"' in body


def _pool(page: Page) -> KvCacheState:
    blocks, used, free = split_blocks(page.gauge(MAX).get("0"), page.gauge(USED).get("0"))
    usage = ratio(page.gauge(USAGE).get("0"))
    if usage is None and blocks and used is not None:
        usage = used / blocks
    size = whole(page.gauge(TOKENS_PER_BLOCK).get("0")) or None
    return KvCacheState(
        usage_ratio=usage,
        num_blocks=blocks,
        used_blocks=used,
        free_blocks=free,
        block_size_tokens=size,
        capacity_tokens=blocks * size if blocks and size else None,
    )


def _scheduler(page: Page) -> SchedulerState:
    """TensorRT-LLM counts no preemption: its paused requests are a gauge."""
    limits = [page.gauge(name).get("0") for name in LIMITS]
    finished = [page.counter(name).get("0") for name in FINISHED]
    return SchedulerState(
        running=whole(page.gauge(RUNNING).get("0")),
        waiting=whole(page.gauge(WAITING).get("0")),
        max_running=next((whole(limit) for limit in limits if limit), None),
        prompt_tokens_total=whole(page.counter(PROMPT).get("0")),
        cached_prompt_tokens_total=whole(page.counter(CACHED).get("0")),
        generation_tokens_total=whole(page.counter(GENERATION).get("0")),
        finished_total=next((whole(count) for count in finished if count is not None), None),
    )


def _notes(page: Page) -> list[str]:
    if page.disputed:
        return [
            f"{len(page.disputed)} gauges differ between `pid` labels, some perhaps of ended processes: left "
            "out; empty PROMETHEUS_MULTIPROC_DIR before the server starts"
        ]
    if not page.families:
        return ["no request has completed yet: TensorRT-LLM shows its series from then on"]
    if not page.gauge(MAX) and not page.gauge(USAGE):
        return ["no KV figures there: they need `enable_iter_perf_stats: true` and a completed request"]
    return []


def _from_json(body: bytes) -> ServerState:
    """The newest of the drained iterations. An empty list means: none since the last reading."""
    answer = parse_json(body, "/metrics")
    entries = answer if isinstance(answer, list) else []
    if entries and not (isinstance(entries[-1], dict) and "numActiveRequests" in entries[-1]):
        raise not_expected(body, "list of iterations of TensorRT-LLM", "is this trtllm-serve's /metrics?")
    notes = () if entries else ("no iteration since the last reading: idle, or somebody else drains it",)
    return ServerState(
        kind="trtllm",
        semantics=SEMANTICS_JSON,
        engines=(_iteration(entries[-1]) if entries else EngineState(),),
        notes=notes,
    )


def _iteration(entry: Mapping[str, object]) -> EngineState:
    stats, batch = entry.get("kvCacheStats"), entry.get("inflightBatchingStats")
    blocks, used, free = split_blocks(number(stats, "maxNumBlocks"), number(stats, "usedNumBlocks"))
    size = whole(number(stats, "tokensPerBlock")) or None
    kv = KvCacheState(
        usage_ratio=used / blocks if blocks and used is not None else None,
        num_blocks=blocks,
        used_blocks=used,
        free_blocks=free,
        block_size_tokens=size,
        capacity_tokens=blocks * size if blocks and size else None,
    )
    scheduled = number(batch, "numScheduledRequests")
    running = SchedulerState(
        running=whole(scheduled if scheduled is not None else number(entry, "numActiveRequests")),
        waiting=whole(number(entry, "numQueuedRequests")),
        max_running=whole(number(entry, "maxBatchSizeRuntime")) or None,
        steps_total=whole(number(entry, "iter")),
    )
    return EngineState(kv=kv, scheduler=running)


ADAPTER = Adapter(
    kind="trtllm",
    parse=parse,
    semantics=SEMANTICS,
    endpoints=(
        Endpoint(name=METRICS, path="/prometheus/metrics"),
        Endpoint(name=INFO, path="/server_info", optional=True, every_s=600.0),
    ),
    processes=(r"\btrtllm-serve\b", r"\btensorrt_llm\.commands\.serve\b", r"\btrtllm-llmapi-launch\b"),
    clues=(
        Clue(path="/prometheus/metrics", body=re.compile(rb"(?m)^(?:# (?:TYPE|HELP) )?trtllm_")),
        # Before /metrics, which asking would drain.
        Clue(path="/server_info", body=re.compile(rb'"disaggregated_params"\s*:')),
    ),
)
