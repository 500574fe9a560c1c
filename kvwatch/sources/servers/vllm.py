"""What does a vLLM server report? Dialects 0.6 to 0.33, Python, Rust and Ray front ends.

Cached blocks that may be evicted count as free; usage is blocks of live requests over the pool, as of
the last engine step, in blocks and not in tokens (a half-filled block is a used block).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvwatch.model.sample import FailureKind
from kvwatch.model.server import (
    Activity,
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
from kvwatch.sources.servers.base import (
    METRICS,
    Adapter,
    Clue,
    Endpoint,
    Pages,
    clean,
    engine_names,
    not_expected,
)

SEMANTICS = Semantics(
    evictable=Evictable.FREE,
    basis=Basis.OCCUPANCY,
    note="blocks of live requests; cached blocks count as free; as of the last engine step",
)
# How vLLM's first engine counted evictable blocks depended on its allocator: not relied upon.
SEMANTICS_V0 = Semantics(
    evictable=Evictable.UNKNOWN,
    basis=Basis.OCCUPANCY,
    note="V0 engine: evictable blocks not told apart",
)

PREFIXES = ("vllm:", "ray_vllm_", "ray_vllm:")  # plain; under Ray from 2.49 and before
USAGE = "kv_cache_usage_perc"  # from 0.9.2
USAGE_OLD = "gpu_cache_usage_perc"  # up to 0.10, hidden in 0.11
RUNNING = "num_requests_running"
WAITING = "num_requests_waiting"  # deferred requests included
SWAPPED = "num_requests_swapped"  # V0 alone
CPU_USAGE = "cpu_cache_usage_perc"  # V0 alone
CONFIG = "cache_config_info"
SLEEP = "engine_sleep_state"
FINISHED = "request_success"
STEPS = "iteration_tokens_total_count"  # a histogram in spite of its name
COUNTERS = ("num_preemptions", "prompt_tokens", "prompt_tokens_cached", "generation_tokens")
TTFT = ("time_to_first_token_seconds",)
TPOT = ("inter_token_latency_seconds", "time_per_output_token_seconds")  # newest name first
QUEUE = ("request_queue_time_seconds",)
PROMPT_LENGTH = ("request_prompt_tokens",)
GENERATION_LENGTH = ("request_generation_tokens",)
STARTED = "process_start_time_seconds"
NAMES = (
    *(USAGE, USAGE_OLD, RUNNING, WAITING, SWAPPED, CPU_USAGE, CONFIG, SLEEP, FINISHED, STEPS, *COUNTERS),
    *(*TTFT, *TPOT, *QUEUE, *PROMPT_LENGTH, *GENERATION_LENGTH),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """The picked series of one page, by engine."""

    prefix: str
    families: Families
    replicas: bool  # series of several Ray replicas stand on this page

    def engine(self, labels: Labels) -> str:
        rank = clean(labels.get("engine", "0")) or "0"
        return f"{rank}@{_replica(labels)}" if self.replicas else rank

    def one(self, found: Sequence[tuple[Series, float]]) -> dict[str, float]:
        """One value per engine; refuses a page that has several."""
        values: dict[str, float] = {}
        for series, value in found:
            engine = self.engine(series.labels)
            if engine in values:
                raise SourceError(
                    FailureKind.NOT_EXPECTED,
                    f"{series.name} is there more than once for engine {engine}: "
                    "the page mixes several servers; point `url` at one server's own port",
                )
            values[engine] = value
        return values

    def gauge(self, name: str) -> dict[str, float]:
        return self.one(self.families.series(self.prefix + name))

    def counter(self, name: str) -> dict[str, float]:
        return self.one(self.families.counter(self.prefix + name))

    def summed(self, name: str) -> dict[str, float]:
        """A counter added up over its other labels."""
        sums: dict[str, float] = {}
        for series, value in self.families.counter(self.prefix + name):
            engine = self.engine(series.labels)
            sums[engine] = sums.get(engine, 0.0) + value
        return sums

    def histogram(self, names: Iterable[str]) -> dict[str, Histogram]:
        """The first of these histograms that the page has."""
        for name in names:
            found = self.families.histograms(self.prefix + name)
            if found:
                return {self.engine(labels): histogram for labels, histogram in found}
        return {}

    def declares(self, name: str) -> bool:
        return bool(self.families.series(self.prefix + name)) or self.families.declares(self.prefix + name)


def parse(pages: Pages, settings: ServerSettings) -> ServerState:
    """Translate one metrics page into a state per engine; refuse rather than guess."""
    del settings
    page = _read(pages[METRICS])
    v0 = bool(page.gauge(SWAPPED) or page.gauge(CPU_USAGE))
    configs = {
        page.engine(series.labels): series.labels for series, _ in page.families.series(page.prefix + CONFIG)
    }
    usage = page.gauge(USAGE) or page.gauge(USAGE_OLD)
    names = engine_names(_engines(page))
    kv, notes = _pools(page, names, configs, usage, v0)
    return ServerState(
        kind="vllm",
        semantics=SEMANTICS_V0 if v0 else SEMANTICS,
        engines=_engine_states(page, names, kv, v0),
        version=_version(pages.get("version")),
        model=_model(page.families),
        notes=(*_missing(page, usage), *notes, *page.families.findings),
    )


def _read(body: bytes) -> _Page:
    prefix = next((p for p in PREFIXES if _speaks(body, p.encode())), None)
    if prefix is None:
        raise not_expected(
            body,
            "series of vLLM (vllm:…)",
            "point `url` at vLLM's own port, and start it without --disable-log-stats",
        )
    families = pick(body, _wanted(prefix))
    _refuse_router(families.label_sets())
    replicas = prefix != "vllm:" and len({_replica(each) for each in families.label_sets()}) > 1
    page = _Page(prefix=prefix, families=families, replicas=replicas)
    if not any(page.declares(name) for name in (USAGE, USAGE_OLD, RUNNING, WAITING)):
        raise not_expected(
            body,
            f"{prefix}{USAGE} or {prefix}{RUNNING}",
            "vLLM shows them unless started with --disable-log-stats; if it does show KV usage under another "
            "name, use kind `mapped`",
        )
    return page


@functools.lru_cache(maxsize=len(PREFIXES))
def _wanted(prefix: str) -> frozenset[str]:
    names = frozenset(prefix + name for name in NAMES)
    return names | {STARTED} if prefix == "vllm:" else names


def _speaks(body: bytes, prefix: bytes) -> bool:
    return body.startswith(prefix) or b"\n" + prefix in body or b"# TYPE " + prefix in body


def _replica(labels: Labels) -> str:
    return clean(labels.get("ReplicaId") or labels.get("WorkerId") or "")[:16]


def _refuse_router(labels: Collection[Labels]) -> None:
    """Routers republish vllm: names with a `server` label, old names and other types."""
    for each in labels:
        if "server" in each:
            raise SourceError(
                FailureKind.NOT_EXPECTED,
                f"these vllm: series carry server={clean(each['server'])!r}: this is a router's page; "
                "list each engine behind it as a server of its own",
            )


def _engines(page: _Page) -> set[str]:
    """Every engine any series names; a page of HELP lines alone has one that has not served yet."""
    found = {page.engine(labels) for labels in page.families.label_sets() if labels}
    return found or {"0"}


def _engine_states(
    page: _Page, names: Sequence[str], kv: Mapping[str, KvCacheState], v0: bool
) -> tuple[EngineState, ...]:
    schedulers = _schedulers(page, names, v0)
    activity = _activity(page)
    ttft, tpot, queue = page.histogram(TTFT), page.histogram(TPOT), page.histogram(QUEUE)
    prompt, generation = page.histogram(PROMPT_LENGTH), page.histogram(GENERATION_LENGTH)
    started = page.families.series(STARTED)
    return tuple(
        EngineState(
            engine=name,
            kv=kv[name],
            scheduler=schedulers[name],
            ttft=ttft.get(name),
            tpot=tpot.get(name),
            queue=queue.get(name),
            prompt_length=prompt.get(name),
            generation_length=generation.get(name),
            activity=activity.get(name, Activity.UNKNOWN),
            started_wall_s=started[0][1] if len(started) == 1 else None,
        )
        for name in names
    )


def _schedulers(page: _Page, names: Sequence[str], v0: bool) -> dict[str, SchedulerState]:
    running, waiting, swapped = page.gauge(RUNNING), page.gauge(WAITING), page.gauge(SWAPPED)
    if v0:  # a request swapped out waits as well
        waiting = {name: value + swapped.get(name, 0.0) for name, value in waiting.items()}
    preemptions, prompt, cached, generation = (page.counter(name) for name in COUNTERS)
    steps, finished = page.gauge(STEPS), page.summed(FINISHED)
    return {
        name: SchedulerState(
            running=whole(running.get(name)),
            waiting=whole(waiting.get(name)),
            preemptions_total=whole(preemptions.get(name)),
            prompt_tokens_total=whole(prompt.get(name)),
            cached_prompt_tokens_total=whole(cached.get(name)),
            generation_tokens_total=whole(generation.get(name)),
            steps_total=whole(steps.get(name)),
            finished_total=whole(finished.get(name)),
        )
        for name in names
    }


def _activity(page: _Page) -> dict[str, Activity]:
    """Asleep when `awake` is 0 (or, without it, when a sleep level is 1); unknown before 0.11.2."""
    states: dict[str, Activity] = {}
    for series, value in page.families.series(page.prefix + SLEEP):
        engine, awake = page.engine(series.labels), series.labels.get("sleep_state") == "awake"
        if awake:
            states[engine] = Activity.SERVING if value > 0 else Activity.SLEEPING
        elif value > 0:
            states.setdefault(engine, Activity.SLEEPING)
    return states


def _pools(
    page: _Page, names: Sequence[str], configs: Mapping[str, Labels], usage: Mapping[str, float], v0: bool
) -> tuple[dict[str, KvCacheState], list[str]]:
    """Each engine's pool. `num_gpu_blocks` is the sum over the engines behind one front end."""
    pools: dict[str, KvCacheState] = {}
    notes: dict[str, None] = {}
    both = bool(page.gauge(USAGE)) and bool(page.gauge(USAGE_OLD))
    null_counted = None if both else not page.gauge(USAGE)
    for name in names:
        config = configs.get(name)
        if config is None:
            notes["no vllm:cache_config_info there (as with the Rust front end): KV capacity is unknown"] = (
                None
            )
            pools[name] = KvCacheState(usage_ratio=_usage(usage.get(name), notes))
            continue
        share = sum(_replica(each) == _replica(config) for each in configs.values())
        total = _per_engine(config, share, notes)
        null_blocks = 0 if v0 else 1
        blocks = total - null_blocks if total is not None and total > null_blocks else None
        level = _usage(usage.get(name), notes)
        used = _used_blocks(level, blocks, null_blocks, null_counted)
        size, capacity = _tokens(config, total, blocks, notes)
        pools[name] = KvCacheState(
            usage_ratio=level,
            num_blocks=blocks,
            used_blocks=used,
            free_blocks=blocks - used if blocks is not None and used is not None else None,
            block_size_tokens=size,
            capacity_tokens=capacity,
            pool_bytes=_pool_bytes(config),
        )
    return pools, list(notes)


def _usage(value: float | None, notes: dict[str, None]) -> float | None:
    level = ratio(value)
    if value is not None and level is None:
        notes[f"KV usage {value:g} is no ratio of 0 to 1: left out"] = None
    return level


def _per_engine(config: Labels, share: int, notes: dict[str, None]) -> int | None:
    total = _number(config, "num_gpu_blocks")
    if total is None or share <= 1:
        return total
    if total % share:
        notes[f"{total} blocks do not divide by {share} engines: blocks per engine are unknown"] = None
        return None
    return total // share


def _used_blocks(
    level: float | None, blocks: int | None, null_blocks: int, null_counted: bool | None
) -> int | None:
    """Blocks in use out of `blocks`, the null block left out.

    From 0.11 usage is used/(n-1). Up to 0.10 it is (used+1)/n, the null block counted as used. Where a page
    has both names (0.9.2 to 0.11) the denominator that gives a whole number is the right one.
    """
    if level is None or blocks is None:
        return None
    if not null_blocks:
        return round(level * blocks)
    total = blocks + null_blocks
    if null_counted is None:
        new, old = level * blocks, level * total
        null_counted = abs(old - round(old)) < abs(new - round(new))
    used = round(level * total) - null_blocks if null_counted else round(level * blocks)
    return min(blocks, max(0, used))


def _tokens(
    config: Labels, total: int | None, blocks: int | None, notes: dict[str, None]
) -> tuple[int | None, int | None]:
    """Block size and capacity in tokens.

    With several kinds of attention layers (hybrid models) blocks x size is not the capacity: then the
    server's own figure counts, and no block size is given, lest somebody multiplies by it.
    """
    size, told = _number(config, "block_size"), _number(config, "kv_cache_size_tokens")
    hints = ("sliding_window", "mamba_block_size", "mamba_page_size_padded")
    if told is not None and total is not None and size is not None:
        hybrid = told != total * size
    else:
        hybrid = any(_number(config, name) is not None for name in hints)
    if hybrid:
        notes["a hybrid model: blocks do not convert to tokens"] = None
        return None, told
    if size is not None and blocks is not None:
        return size, size * blocks
    return size, told


def _pool_bytes(config: Labels) -> int | None:
    """The configured pool size, unless the number of blocks was set by hand, which overrides it."""
    overridden = _number(config, "num_gpu_blocks_override") is not None
    return None if overridden else _number(config, "kv_cache_memory_bytes")


def _number(config: Labels, name: str) -> int | None:
    """A label's whole number; "None" and anything else is no number."""
    text = config.get(name, "")
    if not re.fullmatch(r"\d{1,18}(\.0)?", text, re.ASCII):
        return None
    return int(float(text)) if "." in text else int(text)


def _missing(page: _Page, usage: Mapping[str, float]) -> list[str]:
    if usage:
        return []
    if page.declares(USAGE) or page.declares(USAGE_OLD):
        return ["no KV usage yet: with several API servers vLLM shows it after the first request"]
    return ["this page has no KV usage under a known name: usage is unknown"]


def _model(families: Families) -> str:
    names = {labels["model_name"] for labels in families.label_sets() if "model_name" in labels}
    return clean(", ".join(sorted(names)[:4]))


def _version(body: bytes | None) -> str:
    if body is None:
        return ""
    try:
        answer = parse_json(body, "/version")
    except SourceError:
        return ""
    version = answer.get("version") if isinstance(answer, dict) else None
    return clean(version) if isinstance(version, str) else ""


ADAPTER = Adapter(
    kind="vllm",
    parse=parse,
    semantics=SEMANTICS,
    endpoints=(
        Endpoint(name=METRICS, path="/metrics"),
        Endpoint(name="version", path="/version", optional=True, every_s=600.0),
    ),
    processes=(r"\bvllm(?:\.exe)?\s+serve\b", r"\bvllm\.entrypoints\.", r"^VLLM::", r"\bvllm_worker\b"),
    clues=(
        Clue(path="/metrics", body=re.compile(rb"(?m)^(?:# (?:TYPE|HELP) )?(?:ray_vllm_|(?:ray_)?vllm:)")),
    ),
)
