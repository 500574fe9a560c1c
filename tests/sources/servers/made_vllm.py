"""vLLM's older dialects, one page or more for each, after its released sources.

What changed from release to release, as far as anything here is read from it; `Dialect` names each point.
One engine has `BLOCKS` blocks besides the null block, and `USED` of them hold live requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.sources.servers import made
from tests.sources.servers.made import Lines, counter, gauge, histogram

BLOCKS, USED, BLOCK_SIZE = 1000, 250, 16
MODEL = "org/model"
RUNNING, WAITING = 8, 3


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One release. `name` is the folder."""

    name: str
    v0: bool = False  # no engine label, no null block, swapping; the last release with it by default: 0.7.3
    old_usage: bool = False  # gpu_cache_usage_perc, to 0.10
    new_usage: bool = True  # kv_cache_usage_perc, from 0.9.2
    null_counted: bool = False  # usage is (used+1)/n, to 0.10
    old_tpot: bool = False  # time_per_output_token_seconds, to 0.14
    new_tpot: bool = True  # inter_token_latency_seconds, from 0.11
    sleep: bool = True  # engine_sleep_state, from 0.11.2
    cached_tokens: bool = True  # prompt_tokens_cached_total, from 0.17
    by_reason: bool = True  # num_requests_waiting_by_reason, from 0.20
    size_tokens: bool = True  # kv_cache_size_tokens in cache_config_info, from 0.24
    num_preemptions: bool = False  # request_num_preemptions, from 0.30
    created: bool = True  # `_created` series beside counters
    info: bool = True  # cache_config_info at all (not on the Rust front end)

    def usage(self) -> float:
        """The gauge's value at `USED` blocks."""
        if self.v0:
            return USED / BLOCKS
        return (USED + 1) / (BLOCKS + 1) if self.null_counted else USED / BLOCKS


_TO_0_11 = {"sleep": False, "cached_tokens": False, "by_reason": False, "size_tokens": False}
_V0 = _TO_0_11 | {"v0": True, "old_usage": True, "new_usage": False, "old_tpot": True, "new_tpot": False}
_TO_0_10 = _TO_0_11 | {"old_usage": True, "null_counted": True, "old_tpot": True, "new_tpot": False}
_TO_0_14 = {"old_tpot": True, "cached_tokens": False, "by_reason": False, "size_tokens": False}
DIALECTS = (
    Dialect(name="0.6.6", **_V0),
    Dialect(name="0.7.3", **_V0),
    Dialect(name="0.8.5-v0", **_V0),
    Dialect(name="0.8.5", **(_TO_0_10 | {"new_usage": False})),
    Dialect(name="0.9.2", **_TO_0_10),
    Dialect(name="0.10.2", **_TO_0_10),
    Dialect(name="0.11.0", **(_TO_0_11 | {"old_tpot": True})),
    Dialect(name="0.12.0", **_TO_0_14),
    Dialect(name="0.14.0", **_TO_0_14),
    Dialect(name="0.17.0", by_reason=False, size_tokens=False),
    Dialect(name="0.20.0", size_tokens=False),
    Dialect(name="0.24.0"),
    Dialect(name="0.28.0"),
    Dialect(name="0.31.0", num_preemptions=True),
    Dialect(name="0.31.0-rust", num_preemptions=True, info=False, sleep=False, created=False),
)


def pages() -> Iterator[tuple[str, bytes]]:
    """(path under tests/fixtures/servers/vllm, content) of every page."""
    for dialect in DIALECTS:
        version = dialect.name.partition("-")[0]
        body = _page(*_engine(dialect, 0, engines=1))
        if dialect.name.endswith("-rust"):
            body += b"# EOF\n"
        yield f"{dialect.name}/busy.metrics.prom", body
        yield f"{dialect.name}/busy.version.json", made.answer({"version": version})
    by_name = {dialect.name: dialect for dialect in DIALECTS}
    for name in ("0.9.2", "0.24.0"):
        two = (*_engine(by_name[name], 0, engines=2), *_engine(by_name[name], 1, engines=2))
        yield f"{name}/dp2.metrics.prom", _page(*two)
    hybrid = {"kv_cache_size_tokens": 9000, "mamba_block_size": 512, "sliding_window": 4096}
    yield "0.24.0/hybrid.metrics.prom", _page(*_engine(by_name["0.24.0"], 0, engines=1, config=hybrid))
    speculative = counter("vllm:spec_decode_num_drafts_total", 90, model_name=MODEL, engine="0")
    yield "0.17.0/speculative.metrics.prom", _page(*_engine(by_name["0.17.0"], 0, engines=1), speculative)
    yield "0.31.0/offload.metrics.prom", _page(*_engine(by_name["0.31.0"], 0, engines=1), *_tiers())


def _page(*parts: Lines) -> bytes:
    """A page on which each family stands once, with all its series."""
    families: dict[str, Lines] = {}
    for head, kind, *samples in parts:
        families.setdefault(head, [head, kind]).extend(samples)
    return made.page(*families.values())


def _engine(
    dialect: Dialect, rank: int, *, engines: int, config: dict[str, object] | None = None
) -> Iterator[Lines]:
    labels: dict[str, object] = {"model_name": MODEL} if dialect.v0 else {"engine": rank, "model_name": MODEL}
    yield from _scheduler(dialect, labels)
    yield from _counters(dialect, labels)
    yield from _histograms(dialect, labels)
    if dialect.info:
        told = _config(dialect, engines) | (config or {})
        if not dialect.v0:
            told["engine"] = rank
        yield gauge("vllm:cache_config_info", 1, **told)


def _scheduler(dialect: Dialect, labels: dict[str, object]) -> Iterator[Lines]:
    yield gauge("vllm:num_requests_running", RUNNING, **labels)
    yield gauge("vllm:num_requests_waiting", WAITING, **labels)
    if dialect.v0:
        yield gauge("vllm:num_requests_swapped", 1, **labels)
        yield gauge("vllm:cpu_cache_usage_perc", 0.125, **labels)
    if dialect.old_usage:
        yield gauge("vllm:gpu_cache_usage_perc", dialect.usage(), **labels)
    if dialect.new_usage:
        yield gauge("vllm:kv_cache_usage_perc", dialect.usage(), **labels)
    if dialect.by_reason:
        for reason, value in (("capacity", 2), ("deferred", 1)):
            yield gauge("vllm:num_requests_waiting_by_reason", value, **labels, reason=reason)
    if dialect.sleep:
        for state in ("awake", "weights_offloaded", "discard_all"):
            yield gauge("vllm:engine_sleep_state", state == "awake", **labels, sleep_state=state)


def _counters(dialect: Dialect, labels: dict[str, object]) -> Iterator[Lines]:
    values = {"num_preemptions": 5, "prompt_tokens": 90_000, "generation_tokens": 30_000}
    if dialect.cached_tokens:
        values["prompt_tokens_cached"] = 12_000
    if not dialect.v0:
        old = dialect.old_usage
        values |= {"gpu_prefix_cache_queries" if old else "prefix_cache_queries": 90_000}
    for name, value in values.items():
        yield counter(f"vllm:{name}_total", value, **labels)
        if dialect.created:
            yield gauge(f"vllm:{name}_created", 1.7e9, **labels)
    for reason, value in (("stop", 70), ("length", 30)):
        yield counter("vllm:request_success_total", value, **labels, finished_reason=reason)


def _histograms(dialect: Dialect, labels: dict[str, object]) -> Iterator[Lines]:
    yield histogram("vllm:iteration_tokens_total", (1, 8, 16, 32, 64), [8.0] * 900, **labels)
    yield histogram("vllm:time_to_first_token_seconds", made.TTFT, [0.05] * 80 + [0.7] * 20, **labels)
    if dialect.old_tpot:
        yield histogram("vllm:time_per_output_token_seconds", made.TPOT, [0.03] * 200, **labels)
    if dialect.new_tpot:
        yield histogram("vllm:inter_token_latency_seconds", made.TPOT, [0.03] * 210, **labels)
    yield histogram("vllm:request_queue_time_seconds", made.LATENCY, [0.2] * 100, **labels)
    yield histogram("vllm:request_prompt_tokens", made.TOKENS, [900.0] * 100, **labels)
    yield histogram("vllm:request_generation_tokens", made.TOKENS, [300.0] * 100, **labels)
    if dialect.num_preemptions:
        observed = [0.0] * 95 + [1.0] * 5
        yield histogram("vllm:request_num_preemptions", (1, 2, 3, 4, 5, 10, 20), observed, **labels)


def _config(dialect: Dialect, engines: int) -> dict[str, object]:
    """Labels as Python's str() writes them; `num_gpu_blocks` is the sum over the engines."""
    told: dict[str, object] = {
        "block_size": BLOCK_SIZE,
        "cache_dtype": "auto",
        "enable_prefix_caching": not dialect.v0,
        "gpu_memory_utilization": 0.9,
        "num_gpu_blocks": engines * (BLOCKS if dialect.v0 else BLOCKS + 1),
        "num_gpu_blocks_override": None,
        "sliding_window": None,
    }
    if dialect.v0:
        told |= {"num_cpu_blocks": 512, "swap_space_bytes": 4 * 2**30}
    if dialect.size_tokens:
        told |= {"kv_cache_size_tokens": (BLOCKS + 1) * BLOCK_SIZE, "kv_cache_max_concurrency": 3.9}
    return told


def _tiers() -> Iterator[Lines]:
    """Series of KV offloading: other tiers than the pool on the GPU, and not read as it."""
    labels = {"engine": 0, "model_name": MODEL}
    for source in ("device", "host", "disk"):
        yield counter("vllm:prompt_tokens_cached_by_source_total", 4000, **labels, source=source)
    yield counter("vllm:external_prefix_cache_queries_total", 90_000, **labels)
    yield counter("vllm:external_prefix_cache_hits_total", 8_000, **labels)
