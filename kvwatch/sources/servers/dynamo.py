"""What does NVIDIA Dynamo report: a worker on its system port, or the front end?

A worker passes its engine's series through (vLLM, SGLang, TensorRT-LLM, the mocker's as vLLM's): these are
read as that engine's, and Dynamo's own gauges fill what is missing. A front end knows queue and latencies per
model, and the workers' limits, but KV usage only as the router's guess, which is left out. What is said here
of labels and of series that come late was seen on 1.6.1.
"""

from __future__ import annotations

import dataclasses
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
from kvwatch.sources.exposition import Labels, ratio, whole
from kvwatch.sources.servers import registry
from kvwatch.sources.servers._page import Page, read_page
from kvwatch.sources.servers.base import METRICS, Adapter, Clue, Endpoint, Pages, clean, not_expected

SEMANTICS = Semantics(
    evictable=Evictable.UNKNOWN,
    basis=Basis.OCCUPANCY,
    note="whether the engine behind counts cached blocks as free is unknown",
)
SEMANTICS_FRONTEND = Semantics(
    evictable=Evictable.UNKNOWN,
    basis=Basis.OCCUPANCY,
    fresh_within_s=60.0,  # while long prompts are computed no counter of a front end moves
    note="a front end has no KV usage; its counters move with output tokens only",
)
ENGINES = {"vllm": b"vllm:", "sglang": b"sglang:", "trtllm": b"trtllm_"}  # kind: how its series begin
COMPONENT = "dynamo_component_"
# DYN_METRICS_PREFIX replaces all of "dynamo_frontend", and nothing on a worker. `disconnected_clients` is
# there before there is any model.
_FRONT = re.compile(rb"(?m)^([a-zA-Z]\w{0,60}?_)(?:disconnected_clients|model_ready|queued_requests)[ {]")
BLOCKS, USAGE, REQUESTS = "total_blocks", "gpu_cache_usage_percent", "requests"
INFLIGHT, ACTIVE = "inflight_requests", "active_requests"  # the same twice; the first is the older name
QUEUED, STARTED, FINISHED = "queued_requests", "requests_started", "requests"
CLIENTS, READY = "disconnected_clients", "model_ready"
NO_MODEL = "unknown_model"  # the label of requests for a model that nobody serves
GENERATED = "output_tokens"
TTFT, TPOT = "time_to_first_token_seconds", "inter_token_latency_seconds"
PROMPT_LENGTH, GENERATION_LENGTH = "input_sequence_tokens", "output_sequence_tokens"
MAX_RUNNING = "model_max_num_seqs"
WORKER = (BLOCKS, USAGE, REQUESTS, INFLIGHT)
FRONTEND = (
    *(INFLIGHT, ACTIVE, QUEUED, STARTED, FINISHED, GENERATED, CLIENTS, READY, MAX_RUNNING),
    *(TTFT, TPOT, PROMPT_LENGTH, GENERATION_LENGTH),
)


def parse(pages: Pages, settings: ServerSettings) -> ServerState:
    """A worker's engines by rank, or one entry per model of a front end."""
    body = pages[METRICS]
    inside = _engine_kind(body)
    front = _front_prefix(body) if inside is None else None
    if front is not None:
        return _frontend(read_page(body, front, FRONTEND, _model))
    own = read_page(body, COMPONENT, WORKER, _rank)
    if inside is None and not own.families:
        raise not_expected(
            body,
            "series of Dynamo (dynamo_component_… or dynamo_frontend_…)",
            "point `url` at a worker's system port (DYN_SYSTEM_PORT) or at the front end",
        )
    state = _worker(own) if inside is None else _passed_through(inside, body, own, settings)
    own.refuse_disputed()
    return state


def _front_prefix(body: bytes) -> str | None:
    found = _FRONT.search(body)
    return found[1].decode() if found else None


def _engine_kind(body: bytes) -> str | None:
    return next((kind for kind, start in ENGINES.items() if b"\n" + start in b"\n" + body), None)


def _passed_through(kind: str, body: bytes, own: Page, settings: ServerSettings) -> ServerState:
    """The engine's own state, with Dynamo's figures where the engine's are missing."""
    plain = dataclasses.replace(settings, metrics_path=None)
    state = registry.adapter(kind).parse({METRICS: body}, plain)
    blocks, usage = _blocks(own, kind), own.gauge(USAGE)
    engines = tuple(
        dataclasses.replace(each, kv=_filled(each.kv, blocks.get(each.engine), usage.get(each.engine)))
        for each in state.engines
    )
    return dataclasses.replace(
        state, kind="dynamo", engines=engines, notes=(f"a Dynamo worker; the engine is {kind}", *state.notes)
    )


def _blocks(own: Page, kind: str) -> dict[str, float]:
    """Allocatable blocks by rank; Dynamo counts vLLM's null block too."""
    extra = 1 if kind == "vllm" else 0
    return {rank: blocks - extra for rank, blocks in own.gauge(BLOCKS).items()}


def _filled(kv: KvCacheState, blocks: float | None, usage: float | None) -> KvCacheState:
    return dataclasses.replace(
        kv,
        usage_ratio=kv.usage_ratio if kv.usage_ratio is not None else ratio(usage),
        num_blocks=kv.num_blocks if kv.num_blocks is not None else whole(blocks) or None,
    )


def _worker(own: Page) -> ServerState:
    """A worker whose engine's series are not passed through: blocks and usage by rank."""
    blocks, usage = own.gauge(BLOCKS), own.gauge(USAGE)
    notes = ["the engine's own series are not passed through: no requests, no latencies"]
    if not usage:
        notes.append("no KV usage there, as on prefill workers, or before the first request")
    return ServerState(
        kind="dynamo",
        semantics=SEMANTICS,
        engines=tuple(
            EngineState(engine=name, kv=_filled(KvCacheState(), blocks.get(name), usage.get(name)))
            for name in own.engines()
        ),
        model=own.label_values("model"),
        notes=(*notes, *own.families.findings),
    )


def _frontend(page: Page) -> ServerState:
    names = tuple(name for name in page.engines() if name != NO_MODEL) or ("0",)
    alone = len(names) == 1
    engines = tuple(_of_model(page, name, "0" if alone else name) for name in names)
    page.refuse_disputed()
    served = [name for name in names if name in page.gauge(READY) or name in page.gauge(QUEUED)]
    notes = [
        "a Dynamo front end: KV usage is on each worker's system port (DYN_SYSTEM_PORT); limits are per "
        "worker; waiting counts requests before their first token",
    ]
    if not served:
        notes.append("it serves no model yet: no worker has registered one")
    return ServerState(
        kind="dynamo",
        semantics=SEMANTICS_FRONTEND,
        engines=engines,
        model=clean(", ".join(served[:4])),
        notes=(*notes, *page.families.findings),
    )


def _of_model(page: Page, name: str, engine: str) -> EngineState:
    return EngineState(
        engine=engine,
        scheduler=_scheduler(page, name),
        ttft=page.histogram(TTFT).get(name),
        tpot=page.histogram(TPOT).get(name),
        prompt_length=page.histogram(PROMPT_LENGTH).get(name),
        generation_length=page.histogram(GENERATION_LENGTH).get(name),
    )


def _scheduler(page: Page, name: str) -> SchedulerState:
    limit = whole(page.gauge(MAX_RUNNING).get(name)) or None
    inflight, queued = _inflight(page, name), page.gauge(QUEUED).get(name)
    if inflight is None and queued is None and _unused(page, name):
        return SchedulerState(
            running=0, waiting=0, max_running=limit, generation_tokens_total=0, finished_total=0
        )
    # Requests in flight include those queued.
    running = max(0.0, inflight - queued) if inflight is not None and queued is not None else None
    return SchedulerState(
        running=whole(running),
        waiting=whole(queued),
        max_running=limit,
        generation_tokens_total=whole(page.counter(GENERATED).get(name)),
        finished_total=whole(page.counter(FINISHED).get(name)),
    )


def _inflight(page: Page, name: str) -> float | None:
    inflight = page.gauge(INFLIGHT).get(name)
    return page.gauge(ACTIVE).get(name) if inflight is None else inflight


def _unused(page: Page, name: str) -> bool:
    """Whether the model is served and has had no request: its series of requests come with the first."""
    asked = (page.counter(STARTED), page.counter(FINISHED), page.counter(GENERATED))
    return name in page.gauge(READY) and not any(name in counts for counts in asked)


def _rank(labels: Mapping[str, str]) -> str:
    return clean(labels.get("dp_rank", "0")) or "0"


def _model(labels: Labels) -> str:
    return clean(labels.get("model", "0")) or "0"


ADAPTER = Adapter(
    kind="dynamo",
    parse=parse,
    semantics=SEMANTICS,
    endpoints=(Endpoint(name=METRICS, path="/metrics"),),
    processes=(r"\bdynamo\.(?:frontend|vllm|sglang|trtllm|mocker)\b", r"\bdynamo-run\b"),
    clues=(
        Clue(path="/metrics", body=re.compile(rb"(?m)^(?:# (?:TYPE|HELP) )?dynamo_(?:component|frontend)_")),
    ),
)
