"""What does NVIDIA NIM for LLMs report at /v1/metrics? vLLM-like names without any prefix (NIM 1.x).

NIM 2.x shows vLLM's own series, which are read as vLLM's. How 1.x counts cached blocks depends on the
engine inside (vLLM or TensorRT-LLM), which the page does not tell.
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
from kvwatch.sources.exposition import ratio, whole
from kvwatch.sources.servers import registry
from kvwatch.sources.servers._page import Page, read_page
from kvwatch.sources.servers.base import METRICS, Adapter, Clue, Endpoint, Pages, not_expected

SEMANTICS = Semantics(
    evictable=Evictable.UNKNOWN,
    basis=Basis.OCCUPANCY,
    note="NIM does not tell which engine is inside, so whether cached blocks count as free is unknown",
)
USAGE, RUNNING, WAITING = "gpu_cache_usage_perc", "num_requests_running", "num_requests_waiting"
LIMIT = "num_request_max"
PROMPT, GENERATION, FINISHED = "prompt_tokens", "generation_tokens", "request_finish"
TTFT, TPOT = "time_to_first_token_seconds", "time_per_output_token_seconds"
PROMPT_LENGTH, GENERATION_LENGTH = "request_prompt_tokens", "request_generation_tokens"
NAMES = (
    *(USAGE, RUNNING, WAITING, LIMIT, PROMPT, GENERATION, FINISHED),
    *(TTFT, TPOT, PROMPT_LENGTH, GENERATION_LENGTH),
)


def parse(pages: Pages, settings: ServerSettings) -> ServerState:
    """One engine; vLLM's dialect where the page speaks it."""
    body = pages[METRICS]
    if re.search(rb"(?m)^vllm:", body):
        state = registry.adapter("vllm").parse({METRICS: body}, settings)
        return dataclasses.replace(state, kind="nim")
    page = read_page(body, "", NAMES)
    found = page.gauge(USAGE) or page.gauge(RUNNING)
    page.refuse_disputed()
    if not found:
        raise not_expected(
            body,
            "gpu_cache_usage_perc or num_requests_running, without prefix, nor vLLM's series",
            "NIM shows them at /v1/metrics; is there another `metrics_path`?",
        )
    engine = EngineState(
        kv=KvCacheState(usage_ratio=ratio(page.gauge(USAGE).get("0"))),
        scheduler=_scheduler(page),
        ttft=page.histogram(TTFT).get("0"),
        tpot=page.histogram(TPOT).get("0"),
        prompt_length=page.histogram(PROMPT_LENGTH).get("0"),
        generation_length=page.histogram(GENERATION_LENGTH).get("0"),
    )
    page.refuse_disputed()
    return ServerState(
        kind="nim",
        semantics=SEMANTICS,
        engines=(engine,),
        model=page.label_values("model_name"),
        notes=page.families.findings,
    )


def _scheduler(page: Page) -> SchedulerState:
    return SchedulerState(
        running=whole(page.gauge(RUNNING).get("0")),
        waiting=whole(page.gauge(WAITING).get("0")),
        max_running=whole(page.gauge(LIMIT).get("0")) or None,
        prompt_tokens_total=whole(page.counter(PROMPT).get("0")),
        generation_tokens_total=whole(page.counter(GENERATION).get("0")),
        finished_total=whole(page.counter(FINISHED).get("0")),
    )


ADAPTER = Adapter(
    kind="nim",
    parse=parse,
    semantics=SEMANTICS,
    endpoints=(Endpoint(name=METRICS, path="/v1/metrics"),),
    processes=(r"\bvllm_nvext\.entrypoints\b", r"\bnim_llm(?:_sdk)?\b", r"/opt/nim/"),
    clues=(
        Clue(path="/v1/metrics", body=re.compile(rb"(?m)^(?:gpu_cache_usage_perc|num_request_max|vllm:)")),
    ),
)
