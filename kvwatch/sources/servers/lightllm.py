"""What does LightLLM report? /token_load for the KV cache, /metrics for requests and latencies.

`current_load` leaves cached prompts that nobody uses out, so these count as free. `dynamic_max_load` is
the peak that LightLLM expects of the running batch; it is not what is held now.
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
from kvwatch.sources.servers._page import Page, read_page
from kvwatch.sources.servers.base import MAX_ENGINES, METRICS, Adapter, Clue, Endpoint, Pages, not_expected

SEMANTICS = Semantics(
    evictable=Evictable.FREE,
    basis=Basis.OCCUPANCY,
    fresh_within_s=3.0,
    note="token slots in use, cached prompts without a user count as free; refreshed every 3 s when idle",
)
LOAD = "token_load"
PREFIX = "lightllm_"
RUNNING, WAITING = "batch_current_size", "queue_size"  # paused requests wait in the queue
STEPS, FINISHED = "batch_inference_count", "request_success"
TTFT, TPOT = "request_first_token_duration", "request_mean_time_per_token_duration"
QUEUE = "request_queue_duration_bucket"  # that is the histogram's whole name
PROMPT_LENGTH, GENERATION_LENGTH = "request_input_length", "request_generated_tokens"
NAMES = (RUNNING, WAITING, STEPS, FINISHED, TTFT, TPOT, QUEUE, PROMPT_LENGTH, GENERATION_LENGTH)


def parse(pages: Pages, settings: ServerSettings) -> ServerState:
    """One state per data-parallel rank; the metrics page knows no ranks and counts for one engine alone."""
    del settings
    loads = _loads(pages[LOAD])
    page = read_page(pages.get(METRICS, b""), PREFIX, NAMES)
    alone = len(loads) == 1
    notes = []
    if METRICS not in pages:
        notes.append("/metrics did not answer: no requests, no latencies")
    elif not page.families:
        notes.append("no series of LightLLM (lightllm_…) on /metrics: no requests, no latencies")
    elif not alone:
        notes.append(f"/metrics adds {len(loads)} ranks up: requests and latencies per rank are unknown")
    engines = tuple(
        _engine(page, str(rank), load) if alone else _bare(str(rank), load) for rank, load in enumerate(loads)
    )
    page.refuse_disputed()
    return ServerState(
        kind="lightllm", semantics=SEMANTICS, engines=engines, notes=(*notes, *page.families.findings)
    )


def _loads(body: bytes) -> list[float | None]:
    """The load of each rank; a plain number where there is one rank."""
    answer = parse_json(body, "/token_load")
    told = answer.get("current_load") if isinstance(answer, Mapping) else None
    loads = told if isinstance(told, list) else [told]
    numbers = [load for load in loads if isinstance(load, int | float) and not isinstance(load, bool)]
    if not numbers or len(numbers) != len(loads) or len(loads) > MAX_ENGINES:
        raise not_expected(body, "number `current_load` in /token_load", "is this LightLLM?")
    return [ratio(load) for load in numbers]


def _bare(name: str, load: float | None) -> EngineState:
    return EngineState(engine=name, kv=KvCacheState(usage_ratio=load))


def _engine(page: Page, name: str, load: float | None) -> EngineState:
    """Tokens are those of finished requests; steps are live."""
    return EngineState(
        engine=name,
        kv=KvCacheState(usage_ratio=load),
        scheduler=SchedulerState(
            running=whole(page.gauge(RUNNING).get("0")),
            waiting=whole(page.gauge(WAITING).get("0")),
            prompt_tokens_total=whole(page.sums(PROMPT_LENGTH).get("0")),
            generation_tokens_total=whole(page.sums(GENERATION_LENGTH).get("0")),
            steps_total=whole(page.counter(STEPS).get("0")),
            finished_total=whole(page.counter(FINISHED).get("0")),
        ),
        ttft=page.histogram(TTFT).get("0"),
        tpot=page.histogram(TPOT).get("0"),
        queue=page.histogram(QUEUE).get("0"),
        prompt_length=page.histogram(PROMPT_LENGTH).get("0"),
        generation_length=page.histogram(GENERATION_LENGTH).get("0"),
    )


ADAPTER = Adapter(
    kind="lightllm",
    parse=parse,
    semantics=SEMANTICS,
    endpoints=(
        Endpoint(name=LOAD, path="/token_load"),
        Endpoint(name=METRICS, path="/metrics", optional=True),
    ),
    processes=(r"\blightllm\.server\.api_server\b", r"^lightllm::"),
    clues=(Clue(path="/token_load", body=re.compile(rb'"current_load"\s*:')),),
)
