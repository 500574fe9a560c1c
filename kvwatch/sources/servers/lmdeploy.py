"""What does LMDeploy's api_server report (PyTorch and TurboMind engines)?

Cached prefixes keep their blocks, so with prefix caching on usage climbs to 1 and stays there: that is a
warm cache, no danger. The schedule gauges are set by a timer, every 10 s.
"""

from __future__ import annotations

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
from kvwatch.sources.servers._page import Page, engine_label, read_page
from kvwatch.sources.servers.base import METRICS, Adapter, Clue, Endpoint, Pages, not_expected

SEMANTICS = Semantics(
    evictable=Evictable.USED,
    basis=Basis.OCCUPANCY,
    fresh_within_s=10.0,
    note="cached prefixes count as used, so usage near 1 is a warm cache; gauges are set every 10 s",
)
PREFIX = "lmdeploy:"
USAGE, RUNNING, WAITING = "gpu_cache_usage_perc", "num_requests_running", "num_requests_waiting"
PROMPT, CACHED, GENERATION, FINISHED = (
    "prompt_tokens",
    "cached_tokens",
    "generation_tokens",
    "request_success",
)
STEPS = "iteration_tokens_total"  # a histogram in spite of its name
TTFT, TPOT = "time_to_first_token_seconds", "time_per_output_token_seconds"
QUEUE = "request_queue_time_seconds"
PROMPT_LENGTH, GENERATION_LENGTH = "request_prompt_tokens", "request_generation_tokens"
NAMES = (
    *(USAGE, RUNNING, WAITING, PROMPT, CACHED, GENERATION, FINISHED, STEPS),
    *(TTFT, TPOT, QUEUE, PROMPT_LENGTH, GENERATION_LENGTH),
)


def parse(pages: Pages, settings: ServerSettings) -> ServerState:
    """One state per data-parallel rank (LMDeploy's label `engine`)."""
    del settings
    page = read_page(pages[METRICS], PREFIX, NAMES, engine_label)
    found = page.gauge(USAGE) or page.gauge(RUNNING) or page.gauge(WAITING)
    page.refuse_disputed()
    if not found:
        raise not_expected(
            pages[METRICS],
            "gauges of LMDeploy (lmdeploy:num_requests_running …)",
            "start api_server without --disable-metrics",
        )
    engines = tuple(_engine(page, name) for name in page.engines())
    page.refuse_disputed()
    missing = () if page.gauge(USAGE) else ("no lmdeploy:gpu_cache_usage_perc there: usage is unknown",)
    return ServerState(
        kind="lmdeploy",
        semantics=SEMANTICS,
        engines=engines,
        model=page.label_values("model_name"),
        notes=(*missing, *page.families.findings),
    )


def _engine(page: Page, name: str) -> EngineState:
    return EngineState(
        engine=name,
        kv=KvCacheState(usage_ratio=ratio(page.gauge(USAGE).get(name))),
        scheduler=SchedulerState(
            running=whole(page.gauge(RUNNING).get(name)),
            waiting=whole(page.gauge(WAITING).get(name)),
            prompt_tokens_total=whole(page.counter(PROMPT).get(name)),
            cached_prompt_tokens_total=whole(page.counter(CACHED).get(name)),
            generation_tokens_total=whole(page.counter(GENERATION).get(name)),
            steps_total=whole(page.gauge(STEPS + "_count").get(name)),
            finished_total=whole(page.counter(FINISHED).get(name)),
        ),
        ttft=page.histogram(TTFT).get(name),
        tpot=page.histogram(TPOT).get(name),
        queue=page.histogram(QUEUE).get(name),
        prompt_length=page.histogram(PROMPT_LENGTH).get(name),
        generation_length=page.histogram(GENERATION_LENGTH).get(name),
    )


ADAPTER = Adapter(
    kind="lmdeploy",
    parse=parse,
    semantics=SEMANTICS,
    endpoints=(Endpoint(name=METRICS, path="/metrics"),),
    processes=(r"\blmdeploy\s+serve\s+api_server\b", r"\blmdeploy\.serve\.openai\.api_server\b"),
    clues=(Clue(path="/metrics", body=re.compile(rb"(?m)^(?:# (?:TYPE|HELP) )?lmdeploy:")),),
)
