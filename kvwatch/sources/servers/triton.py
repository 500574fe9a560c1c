"""What does Triton with the TensorRT-LLM backend report on its metrics port?

One family has several figures told apart by a selector label: a ratio, a token count and block counts
stand under one name. The vLLM backend passes vLLM's own series through; they are read as vLLM's.
"""

from __future__ import annotations

import dataclasses
import re

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
from kvwatch.sources.exposition import Labels, pick, ratio, whole
from kvwatch.sources.servers import registry
from kvwatch.sources.servers._page import Page, split_blocks
from kvwatch.sources.servers.base import METRICS, Adapter, Clue, Endpoint, Pages, clean, not_expected

SEMANTICS = Semantics(
    evictable=Evictable.FREE,
    basis=Basis.OCCUPANCY,
    note="blocks of live sequences, reusable ones count as free; as of the last iteration",
)
PREFIX = "nv_trt_llm_"
REQUESTS, BLOCKS, GENERAL = "request_metrics", "kv_cache_block_metrics", "general_metrics"
FINISHED = "nv_inference_request_success"
WANTED = frozenset((*(PREFIX + name for name in (REQUESTS, BLOCKS, GENERAL)), FINISHED))


def parse(pages: Pages, settings: ServerSettings) -> ServerState:
    """One engine per Triton model that TensorRT-LLM runs."""
    body = pages[METRICS]
    families = pick(body, WANTED)
    if not any(families.series(PREFIX + name) for name in (REQUESTS, BLOCKS)):
        return _vllm_backend(pages, settings)
    models = {_model(labels) for labels in families.label_sets() if _is_trt(labels)}
    alone = len(models) == 1

    def engine(labels: Labels) -> str:
        return "0" if alone else _model(labels)

    page = Page(families=families, prefix=PREFIX, engine=engine)
    names = sorted({engine(labels) for labels in families.label_sets() if _is_trt(labels)})
    finished = _finished(page)
    engines = tuple(
        EngineState(engine=name, kv=_pool(page, name), scheduler=_scheduler(page, name, finished))
        for name in names
    )
    page.refuse_disputed()
    return ServerState(
        kind="triton",
        semantics=SEMANTICS,
        engines=engines,
        model=clean(", ".join(sorted(models)[:4])),
        notes=("Triton shows no latency distributions, only sums", *families.findings),
    )


def _vllm_backend(pages: Pages, settings: ServerSettings) -> ServerState:
    body = pages[METRICS]
    if b"nv_inference_" not in body or not re.search(rb"(?m)^vllm:", body):
        raise not_expected(
            body,
            "nv_trt_llm_… series",
            "point `url` at Triton's metrics port (8002), with a TensorRT-LLM or vLLM model loaded",
        )
    state = registry.adapter("vllm").parse({METRICS: body}, settings)
    return dataclasses.replace(state, kind="triton")


def _is_trt(labels: Labels) -> bool:
    return "request_type" in labels or "kv_cache_block_type" in labels


def _model(labels: Labels) -> str:
    return clean(labels.get("model", "")) or "0"


def _pool(page: Page, name: str) -> KvCacheState:
    """Used over max; Triton's own fraction only where those do not fit together."""

    def figure(selector: str) -> float | None:
        return page.gauge(BLOCKS, kv_cache_block_type=selector).get(name)

    blocks, used, free = split_blocks(figure("max"), figure("used"))
    size = whole(figure("tokens_per")) or None
    return KvCacheState(
        usage_ratio=used / blocks if blocks and used is not None else ratio(figure("fraction")),
        num_blocks=blocks,
        used_blocks=used,
        free_blocks=free,
        block_size_tokens=size,
        capacity_tokens=blocks * size if blocks and size else None,
    )


def _scheduler(page: Page, name: str, finished: dict[str, float]) -> SchedulerState:
    """Running are those scheduled in the last iteration; paused ones are active but not running."""

    def requests(selector: str) -> float | None:
        return page.gauge(REQUESTS, request_type=selector).get(name)

    scheduled = requests("scheduled")
    return SchedulerState(
        running=whole(scheduled if scheduled is not None else requests("active")),
        waiting=whole(requests("waiting")),
        max_running=whole(requests("max")) or None,
        steps_total=whole(page.gauge(GENERAL, general_type="iteration_counter").get(name)),
        finished_total=whole(finished.get(name)),
    )


def _finished(page: Page) -> dict[str, float]:
    counted: dict[str, float] = {}
    for series, value in page.families.series(FINISHED):
        engine = page.engine(series.labels)
        counted[engine] = counted.get(engine, 0.0) + value
    return counted


ADAPTER = Adapter(
    kind="triton",
    parse=parse,
    semantics=SEMANTICS,
    endpoints=(Endpoint(name=METRICS, path="/metrics"),),
    processes=(r"\btritonserver\b", r"\btriton_python_backend_stub\b", r"\btrtllmExecutorWorker\b"),
    clues=(Clue(path="/metrics", body=re.compile(rb"(?m)^(?:# (?:TYPE|HELP) )?nv_trt_llm_")),),
)
