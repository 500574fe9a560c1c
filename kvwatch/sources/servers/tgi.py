"""What does Hugging Face's Text Generation Inference (router v2 and v3) report?

It shows what the running batch has *reserved*, prompt and every token it may still generate, and not
what the cache holds: usage can be several times the real fill. A series appears at its first event, so
a server without any request so far shows next to nothing; then /info alone says that it is TGI.
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
from kvwatch.sources.servers._page import Page, read_page
from kvwatch.sources.servers.base import (
    METRICS,
    Adapter,
    Clue,
    Endpoint,
    Pages,
    not_expected,
    number,
    text,
    told,
)

SEMANTICS = Semantics(
    evictable=Evictable.UNKNOWN,
    basis=Basis.RESERVATION,
    note="tokens reserved by the running batch (prompt and max_new_tokens) over the budget found at warm-up; "
    "not what the cache holds",
)
INFO = "info"
PREFIX = "tgi_"
RUNNING, WAITING = "batch_current_size", "queue_size"
RESERVED, BUDGET = "batch_current_max_tokens", "batch_max_total_tokens"  # the second from v3
STEPS, FINISHED = "batch_inference_count", "request_success"  # counters without `_total`
QUEUE, TPOT = "request_queue_duration", "request_mean_time_per_token_duration"
PROMPT_LENGTH, GENERATION_LENGTH = "request_input_length", "request_generated_tokens"
NAMES = (
    *(RUNNING, WAITING, RESERVED, BUDGET, STEPS, FINISHED),
    *(QUEUE, TPOT, PROMPT_LENGTH, GENERATION_LENGTH),
)


def parse(pages: Pages, settings: ServerSettings) -> ServerState:
    """One engine; what has not happened yet is unknown, not 0."""
    del settings
    page = read_page(pages[METRICS], PREFIX, NAMES)
    info = _info(pages.get(INFO))
    if not page.families and info is None:
        raise not_expected(
            pages[METRICS], "series of TGI (tgi_…) and no /info of TGI", "is this TGI's router port?"
        )
    kv, notes = _pool(page)
    if not page.families:
        notes.append("no request yet: TGI shows each series from its first event on")
    engine = EngineState(
        kv=kv,
        scheduler=_scheduler(page),
        tpot=page.histogram(TPOT).get("0"),
        queue=page.histogram(QUEUE).get("0"),
        prompt_length=page.histogram(PROMPT_LENGTH).get("0"),
        generation_length=page.histogram(GENERATION_LENGTH).get("0"),
    )
    page.refuse_disputed()
    return ServerState(
        kind="tgi",
        semantics=SEMANTICS,
        engines=(engine,),
        version=text(info, "version"),
        model=text(info, "model_id"),
        notes=(*notes, *page.families.findings),
    )


def _info(body: bytes | None) -> object | None:
    """The answer of /info, if it is TGI's."""
    answer = told(body, "/info")
    # Hugging Face's embedding server has an /info as well, without max_total_tokens.
    return answer if text(answer, "model_id") and number(answer, "max_total_tokens") else None


def _pool(page: Page) -> tuple[KvCacheState, list[str]]:
    budget, reserved = page.gauge(BUDGET).get("0"), page.gauge(RESERVED).get("0")
    usage = ratio(reserved / budget) if reserved is not None and budget else None
    kv = KvCacheState(usage_ratio=usage, capacity_tokens=whole(budget) or None)
    if budget is None:
        return kv, ["no tgi_batch_max_total_tokens there (TGI shows it from v3 on): usage is unknown"]
    return kv, []


def _scheduler(page: Page) -> SchedulerState:
    """Tokens are those of finished requests, steps are live; TGI never preempts and counts no such thing."""
    return SchedulerState(
        running=whole(page.gauge(RUNNING).get("0")),
        waiting=whole(page.gauge(WAITING).get("0")),
        prompt_tokens_total=whole(page.sums(PROMPT_LENGTH).get("0")),
        generation_tokens_total=whole(page.sums(GENERATION_LENGTH).get("0")),
        steps_total=whole(page.counter(STEPS).get("0")),
        finished_total=whole(page.counter(FINISHED).get("0")),
    )


ADAPTER = Adapter(
    kind="tgi",
    parse=parse,
    semantics=SEMANTICS,
    endpoints=(
        Endpoint(name=METRICS, path="/metrics"),
        Endpoint(name=INFO, path="/info", optional=True, every_s=60.0),
    ),
    processes=(r"\btext-generation-(?:launcher|router|server)\b", r"\btext_generation_server\b"),
    clues=(
        Clue(path="/info", body=re.compile(rb'"max_total_tokens"\s*:')),
        Clue(path="/metrics", body=re.compile(rb"(?m)^(?:# TYPE )?tgi_")),
    ),
)
