"""What does llama.cpp's llama-server report? Slots say what the KV cache holds; /metrics only counts.

A slot keeps its last prompt while idle, so what it holds counts as used. /metrics resets the server's
throughput averages at every read; kvwatch uses none of them. Either can be switched off (--no-slots;
/metrics is off unless asked for): the other then tells the requests, and /props that the server is there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kvwatch.model.sample import FailureKind
from kvwatch.model.server import (
    Activity,
    Basis,
    EngineState,
    Evictable,
    KvCacheState,
    SchedulerState,
    Semantics,
    ServerState,
)
from kvwatch.model.settings import ServerSettings
from kvwatch.sources.base import SourceError
from kvwatch.sources.exposition import Families, pick, ratio, whole
from kvwatch.sources.http import parse_json
from kvwatch.sources.servers.base import (
    METRICS,
    Adapter,
    Clue,
    Endpoint,
    Pages,
    clean,
    not_expected,
    text,
    told,
)

SEMANTICS = Semantics(
    evictable=Evictable.USED,
    basis=Basis.SLOTS,
    note="tokens held by slots over their context; idle slots keep their prompt; reading /metrics resets "
    "llama.cpp's own throughput averages",
    destructive=True,
)
SLOTS, PROPS = "slots", "props"
PREFIX = "llamacpp:"
RUNNING, WAITING = "requests_processing", "requests_deferred"
PROMPT, CACHED, GENERATION, STEPS = "prompt_tokens", "prompt_tokens_cached", "tokens_predicted", "n_decode"
NO_SLOTS = "/slots did not answer (llama-server was started with --no-slots?): KV usage is unknown"
WANTED = frozenset(PREFIX + name for name in (RUNNING, WAITING, PROMPT, CACHED, GENERATION, STEPS))


def parse(pages: Pages, settings: ServerSettings) -> ServerState:
    """One engine from /slots, with counters from /metrics where it is switched on."""
    slots = _slots(pages[SLOTS]) if SLOTS in pages else []
    families = pick(pages.get(METRICS, b""), WANTED)
    props = _props(pages.get(PROPS))
    if not slots and not families and "total_slots" not in props:
        raise not_expected(
            pages.get(METRICS, b""), "/slots, no series of llama.cpp (llamacpp:…)", "is this llama-server?"
        )
    kv, notes = _pool(slots, settings.kv_unified) if slots else (KvCacheState(), [NO_SLOTS])
    if METRICS not in pages:
        notes.append("/metrics is off (llama-server needs --metrics): no counters, no queue length")
    sleeping = props.get("is_sleeping")
    activity = Activity.UNKNOWN
    if isinstance(sleeping, bool):
        activity = Activity.SLEEPING if sleeping else Activity.SERVING
    engine = EngineState(kv=kv, scheduler=_scheduler(slots, families, props), activity=activity)
    return ServerState(
        kind="llamacpp",
        semantics=SEMANTICS,
        engines=(engine,),
        version=text(props, "build_info"),
        model=_model(props),
        notes=(*notes, *families.findings),
    )


def _slots(body: bytes) -> list[Mapping[str, object]]:
    answer = parse_json(body, "/slots")
    entries = answer if isinstance(answer, list) else []
    slots: list[Mapping[str, object]] = [slot for slot in entries if isinstance(slot, dict)]
    if not slots or any(not isinstance(slot.get("is_processing"), bool) for slot in slots):
        raise not_expected(
            body, "list of slots in /slots", "is this llama-server, started without --no-slots?"
        )
    return slots


def _props(body: bytes | None) -> Mapping[str, object]:
    answer = told(body, "/props")
    return answer if isinstance(answer, dict) else {}


def _pool(slots: Sequence[Mapping[str, object]], unified: bool | None) -> tuple[KvCacheState, list[str]]:
    """Tokens held over capacity. In a unified pool every slot's context is the whole pool.

    Nothing in the API tells the two apart, and dividing wrongly hides a full pool; so without
    `kv_unified` in the configuration usage is unknown when it would matter (several slots).
    """
    contexts = [_count(slot, "n_ctx") for slot in slots]
    held = [_held(slot) for slot in slots]
    tokens = sum(count for count in held if count is not None) if None not in held else None
    if any(context is None or context == 0 for context in contexts):
        return KvCacheState(tokens=tokens), ["slots without n_ctx: KV capacity is unknown"]
    known = [context for context in contexts if context is not None]
    if unified is None and len(known) > 1:
        return KvCacheState(tokens=tokens), [
            "set `kv_unified: true` or `false` for this server (llama-server's --kv-unified): without it the "
            "KV capacity is unknown"
        ]
    capacity = max(known) if unified else sum(known)
    # A slot counts its newest token before the pool has it.
    if unified and tokens is not None and tokens > capacity + len(slots):
        return KvCacheState(tokens=tokens), [
            "the slots hold more than one context, so the pool is larger (--kv-unified-per-slot?) and its "
            "capacity is unknown; with the pool sized by --kv-unified-per-slot set `kv_unified: false`"
        ]
    usage = ratio(min(tokens, capacity) / capacity) if tokens is not None else None
    return KvCacheState(usage_ratio=usage, capacity_tokens=capacity, tokens=tokens), []


def _held(slot: Mapping[str, object]) -> int | None:
    """Tokens in a slot, generated ones included; a slot that never had a task has no such key and none."""
    if "n_prompt_tokens" in slot:
        return _count(slot, "n_prompt_tokens")
    return None if slot["is_processing"] or "id_task" in slot else 0


def _scheduler(
    slots: Sequence[Mapping[str, object]], families: Families, props: Mapping[str, object]
) -> SchedulerState:
    def gauge(name: str) -> float | None:
        found = families.series(PREFIX + name)
        return found[0][1] if len(found) == 1 else None

    def counter(name: str) -> float | None:
        found = families.counter(PREFIX + name)
        return found[0][1] if len(found) == 1 else None

    prompt, cached = whole(counter(PROMPT)), whole(counter(CACHED))
    running = sum(slot["is_processing"] is True for slot in slots)
    return SchedulerState(
        running=running if slots else whole(gauge(RUNNING)),
        waiting=whole(gauge(WAITING)),
        max_running=len(slots) or _count(props, "total_slots"),
        prompt_tokens_total=prompt + (cached or 0)
        if prompt is not None
        else None,  # told without cached ones
        cached_prompt_tokens_total=cached,
        generation_tokens_total=whole(counter(GENERATION)),
        steps_total=whole(counter(STEPS)),
    )


def _count(entry: Mapping[str, object], name: str) -> int | None:
    value = entry.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**40:
        raise SourceError(FailureKind.MALFORMED, f"{name} is {clean(str(value)[:40])!r}, which is no count")
    return value


def _model(props: Mapping[str, object]) -> str:
    """The alias; without --alias some builds repeat the file's whole path there: then the file's name."""
    alias, path = text(props, "model_alias"), text(props, "model_path")
    return alias if alias and alias != path else path.rsplit("/", 1)[-1]


ADAPTER = Adapter(
    kind="llamacpp",
    parse=parse,
    semantics=SEMANTICS,
    endpoints=(
        Endpoint(name=SLOTS, path="/slots", optional=True),
        Endpoint(name=METRICS, path="/metrics", optional=True),
        Endpoint(name=PROPS, path="/props", optional=True, every_s=60.0),
    ),
    processes=(r"\bllama-server\b", r"\bllama_cpp\.server\b"),
    clues=(Clue(path="/props", body=re.compile(rb'"default_generation_settings"\s*:')),),
)
