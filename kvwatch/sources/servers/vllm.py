"""What does a vLLM server report? Dialects 0.6 to 0.33, Python, Rust and Ray front ends.

Cached blocks that may be evicted count as free; usage is blocks of live requests over the pool, as of
the last engine step, in blocks and not in tokens (a half-filled block is a used block).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
from kvwatch.sources.families import Shape
from kvwatch.sources.servers._vllm_pool import Size, replica, used_blocks
from kvwatch.sources.servers._vllm_pool import sizes as pool_sizes
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
    text,
    told,
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
# Histograms of whose buckets nothing is made: their sum and count are read alone.
PROMPT_LENGTH = "request_prompt_tokens"
GENERATION_LENGTH = "request_generation_tokens"
STARTED = "process_start_time_seconds"
NAMES = (
    *(USAGE, USAGE_OLD, RUNNING, WAITING, SWAPPED, CPU_USAGE, CONFIG, SLEEP, FINISHED, STEPS, *COUNTERS),
    *(*TTFT, *TPOT, *QUEUE),
    *(length + part for length in (PROMPT_LENGTH, GENERATION_LENGTH) for part in ("_sum", "_count")),
)


_NO_LABELS = Labels({})


def _no_counts(_values: Sequence[float]) -> tuple[float, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """The picked series of one page, by engine."""

    prefix: str
    families: Families
    ranks: Mapping[int, str]  # the engine of each label set, by its identity

    def engine(self, labels: Labels) -> str:
        return self.ranks[id(labels)]

    def one(self, found: Sequence[tuple[Series, int]]) -> dict[str, int]:
        """One place per engine; refuses a page that has several."""
        places: dict[str, int] = {}
        for series, place in found:
            engine = self.engine(series.labels)
            if engine in places:
                raise SourceError(
                    FailureKind.NOT_EXPECTED,
                    f"{series.name} is there more than once for engine {engine}: "
                    "the page mixes several servers; point `url` at one server's own port",
                )
            places[engine] = place
        return places

    def gauge(self, name: str) -> dict[str, int]:
        """Where the gauge of each engine stands."""
        return self.one(self.families.places(self.prefix + name))

    def counter(self, name: str) -> dict[str, int]:
        """Where the counter of each engine stands, written with `_total` or without."""
        return self.one(self.series(name))

    def parts(self, name: str) -> dict[str, tuple[int, ...]]:
        """Where the series stand that a counter is added up from."""
        found = [(self.engine(series.labels), place) for series, place in self.series(name)]
        return {engine: tuple(place for each, place in found if each == engine) for engine, _ in found}

    def series(self, name: str) -> Sequence[tuple[Series, int]]:
        """The series of a counter."""
        name = self.prefix + name
        return self.families.places(name + "_total") or self.families.places(name)

    def histogram(self, names: Iterable[str]) -> dict[str, Shape]:
        """Where the first of these histograms stands that the page has."""
        for name in names:
            found = self.families.shapes(self.prefix + name)
            if found:
                return {self.engine(shape.labels): shape for shape in found}
        return {}

    def length(self, name: str) -> dict[str, Shape]:
        """A histogram whose buckets are not read."""
        sums = self.gauge(name + "_sum")
        return {
            engine: Shape(_NO_LABELS, (), _no_counts, place, sums.get(engine))
            for engine, place in self.gauge(name + "_count").items()
        }

    def declares(self, name: str) -> bool:
        return bool(self.families.series(self.prefix + name)) or self.families.declares(self.prefix + name)


def parse(pages: Pages, settings: ServerSettings) -> ServerState:
    """Translate one metrics page into a state per engine; refuse rather than guess."""
    del settings
    page = _read(pages[METRICS])
    plan = page.families.fact(f"{page.prefix} plan", lambda: _plan(page))
    values = page.families.values
    notes = dict.fromkeys(plan.notes)
    return ServerState(
        kind="vllm",
        semantics=SEMANTICS_V0 if plan.v0 else SEMANTICS,
        engines=tuple([_engine_state(plan, each, values, notes) for each in plan.engines]),
        version=_version(pages.get("version")),
        model=plan.model,
        notes=(*_missing(page, plan), *notes, *page.families.findings),
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
    ranks = families.fact(f"{prefix} ranks", lambda: _ranks(prefix, families.label_sets()))
    page = _Page(prefix=prefix, families=families, ranks=ranks)
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


def _ranks(prefix: str, labels: Collection[Labels]) -> Mapping[int, str]:
    """The engine that each label set names; with the replica, where Ray shows several on one page."""
    _refuse_router(labels)
    replicas = prefix != "vllm:" and len({replica(each) for each in labels}) > 1
    ranks = {id(each): clean(each.get("engine", "0")) or "0" for each in labels}
    return {id(each): f"{ranks[id(each)]}@{replica(each)}" for each in labels} if replicas else ranks


def _refuse_router(labels: Collection[Labels]) -> None:
    """Routers republish vllm: names with a `server` label, old names and other types."""
    for each in labels:
        if "server" in each:
            raise SourceError(
                FailureKind.NOT_EXPECTED,
                f"these vllm: series carry server={clean(each['server'])!r}: this is a router's page; "
                "list each engine behind it as a server of its own",
            )


def _configs(page: _Page) -> dict[str, Labels]:
    """What vllm:cache_config_info says of each engine, in its labels."""
    found = page.families.series(page.prefix + CONFIG)
    return {page.engine(series.labels): series.labels for series, _ in found}


def _engines(page: _Page) -> set[str]:
    """Every engine any series names; a page of HELP lines alone has one that has not served yet."""
    found = {page.engine(labels) for labels in page.families.label_sets() if labels}
    return found or {"0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Where one engine's figures stand among the values of a page; None where they are not there."""

    engine: str
    size: Size
    usage: int | None
    running: int | None
    waiting: int | None
    swapped: int | None
    preemptions: int | None
    prompt_tokens: int | None
    cached_tokens: int | None
    generation_tokens: int | None
    steps: int | None
    finished: tuple[int, ...] | None
    ttft: Shape | None
    tpot: Shape | None
    queue: Shape | None
    prompt_length: Shape | None
    generation_length: Shape | None
    sleep: tuple[tuple[bool, int], ...]  # whether the series is `awake`, and its place
    started: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What follows from the series of a page alone. `has_usage`: under one of its names."""

    engines: tuple[_Places, ...]
    v0: bool
    null_counted: bool | None
    has_usage: bool
    model: str
    notes: tuple[str, ...]


def _plan(page: _Page) -> _Plan:
    """Find every figure's place; refuses a page on which one engine has a figure twice."""
    v0 = bool(page.gauge(SWAPPED) or page.gauge(CPU_USAGE))
    new, old = page.gauge(USAGE), page.gauge(USAGE_OLD)
    sizes = pool_sizes(engine_names(_engines(page)), _configs(page), 0 if v0 else 1)
    return _Plan(
        engines=tuple(_places(page, sizes, new or old)),
        v0=v0,
        null_counted=None if new and old else not new,
        has_usage=bool(new or old),
        model=label_values(page.families, "model_name"),
        notes=tuple(dict.fromkeys(note for size in sizes.values() for note in size.notes)),
    )


def _places(page: _Page, sizes: Mapping[str, Size], usage: Mapping[str, int]) -> Iterator[_Places]:
    running, waiting, swapped = page.gauge(RUNNING), page.gauge(WAITING), page.gauge(SWAPPED)
    preemptions, prompt, cached, generation = (page.counter(name) for name in COUNTERS)
    steps, finished = page.gauge(STEPS), page.parts(FINISHED)
    ttft, tpot, queue = page.histogram(TTFT), page.histogram(TPOT), page.histogram(QUEUE)
    prompt_length, generation_length = page.length(PROMPT_LENGTH), page.length(GENERATION_LENGTH)
    started = page.families.places(STARTED)
    for name, size in sizes.items():
        yield _Places(
            engine=name,
            size=size,
            usage=usage.get(name),
            running=running.get(name),
            waiting=waiting.get(name),
            swapped=swapped.get(name),
            preemptions=preemptions.get(name),
            prompt_tokens=prompt.get(name),
            cached_tokens=cached.get(name),
            generation_tokens=generation.get(name),
            steps=steps.get(name),
            finished=finished.get(name),
            ttft=ttft.get(name),
            tpot=tpot.get(name),
            queue=queue.get(name),
            prompt_length=prompt_length.get(name),
            generation_length=generation_length.get(name),
            sleep=_sleep(page, name),
            started=started[0][1] if len(started) == 1 else None,
        )


def _sleep(page: _Page, engine: str) -> tuple[tuple[bool, int], ...]:
    found = page.families.places(page.prefix + SLEEP)
    return tuple(
        (series.labels.get("sleep_state") == "awake", place)
        for series, place in found
        if page.engine(series.labels) == engine
    )


def _engine_state(
    plan: _Plan, places: _Places, values: Sequence[float], notes: dict[str, None]
) -> EngineState:
    return EngineState(
        engine=places.engine,
        kv=_pool(plan, places, values, notes),
        scheduler=_scheduler(plan, places, values),
        ttft=_histogram(places.ttft, values),
        tpot=_histogram(places.tpot, values),
        queue=_histogram(places.queue, values),
        prompt_length=_histogram(places.prompt_length, values),
        generation_length=_histogram(places.generation_length, values),
        activity=_activity(places.sleep, values),
        started_wall_s=_at(places.started, values),
    )


def _at(place: int | None, values: Sequence[float]) -> float | None:
    return None if place is None else values[place]


def _histogram(shape: Shape | None, values: Sequence[float]) -> Histogram | None:
    return None if shape is None else shape.of(values)


def _scheduler(plan: _Plan, places: _Places, values: Sequence[float]) -> SchedulerState:
    waiting, swapped = _at(places.waiting, values), _at(places.swapped, values)
    if plan.v0 and waiting is not None:  # a request swapped out waits as well
        waiting += swapped or 0.0
    finished = None if places.finished is None else sum([values[place] for place in places.finished])
    return SchedulerState(
        running=whole(_at(places.running, values)),
        waiting=whole(waiting),
        preemptions_total=whole(_at(places.preemptions, values)),
        prompt_tokens_total=whole(_at(places.prompt_tokens, values)),
        cached_prompt_tokens_total=whole(_at(places.cached_tokens, values)),
        generation_tokens_total=whole(_at(places.generation_tokens, values)),
        steps_total=whole(_at(places.steps, values)),
        finished_total=whole(finished),
    )


def _activity(sleep: tuple[tuple[bool, int], ...], values: Sequence[float]) -> Activity:
    """Asleep when `awake` is 0 (or, without it, when a sleep level is 1); unknown before 0.11.2."""
    state = Activity.UNKNOWN
    for awake, place in sleep:
        if awake:
            return Activity.SERVING if values[place] > 0 else Activity.SLEEPING
        if values[place] > 0:
            state = Activity.SLEEPING
    return state


def _pool(plan: _Plan, places: _Places, values: Sequence[float], notes: dict[str, None]) -> KvCacheState:
    """One engine's pool. `num_gpu_blocks` is the sum over the engines behind one front end."""
    size = places.size
    level = _usage(_at(places.usage, values), notes)
    used = used_blocks(level, size.blocks, 0 if plan.v0 else 1, plan.null_counted)
    return KvCacheState(
        usage_ratio=level,
        num_blocks=size.blocks,
        used_blocks=used,
        free_blocks=size.blocks - used if size.blocks is not None and used is not None else None,
        block_size_tokens=size.block_tokens,
        capacity_tokens=size.capacity_tokens,
        pool_bytes=size.pool_bytes,
    )


def _usage(value: float | None, notes: dict[str, None]) -> float | None:
    level = ratio(value)
    if value is not None and level is None:
        notes[f"KV usage {value:g} is no ratio of 0 to 1: left out"] = None
    return level


def _missing(page: _Page, plan: _Plan) -> list[str]:
    if plan.has_usage:
        return []
    if page.declares(USAGE) or page.declares(USAGE_OLD):
        return ["no KV usage yet: with several API servers vLLM shows it after the first request"]
    return ["this page has no KV usage under a known name: usage is unknown"]


@functools.lru_cache(maxsize=64)
def _version(body: bytes | None) -> str:
    return text(told(body, "/version"), "version")


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
