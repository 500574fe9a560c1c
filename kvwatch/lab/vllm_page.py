"""What does a simulated engine's `/metrics` page look like? vLLM 0.32's dialect, family by family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvwatch.lab.sim_stats import PARAMS_N, Tally
from kvwatch.lab.vllm_sim import VllmSim

VERSION = "0.32.0"
_FINISHED = ("stop", "length", "abort", "error", "repetition")
_TIERS = ("device", "host", "p2p", "disk", "external_unspecified")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageInfo:
    """What the page says beside the engine's figures."""

    model: str
    created_wall_s: float  # Unix seconds at which the engine's counters began
    kv_cache_memory_bytes: int
    gpu_memory_utilization: float = 0.92


class Writer:
    """Collects lines of the Prometheus text format; every value is written as vLLM writes it, as a float."""

    def __init__(self, created_wall_s: float) -> None:
        self._lines: list[str] = []
        self._created = repr(created_wall_s)

    def family(self, name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> None:
        """One family; each sample is (labels with braces or "", value)."""
        self._lines += (f"# HELP {name} {text}", f"# TYPE {name} {kind}")
        self._lines += [f"{name}{labels} {float(value)!r}" for labels, value in samples]

    def counter(self, name: str, text: str, samples: Iterable[tuple[str, float]]) -> None:
        """A counter and its `_created` gauge."""
        rows = list(samples)
        self.family(f"{name}_total", "counter", text, rows)
        self._begun(name, text, [labels for labels, _ in rows])

    def histogram(self, name: str, text: str, labels: str, tally: Tally) -> None:
        """A histogram and its `_created` gauge; `labels` without braces."""
        inner = f"{labels}," if labels else ""
        outer = f"{{{labels}}}" if labels else ""
        self._lines += (f"# HELP {name} {text}", f"# TYPE {name} histogram")
        bounds = (*map(repr, tally.bounds), "+Inf")
        self._lines += [
            f'{name}_bucket{{{inner}le="{bound}"}} {count}.0'
            for bound, count in zip(bounds, tally.cumulative(), strict=True)
        ]
        self._lines += (f"{name}_count{outer} {tally.count}.0", f"{name}_sum{outer} {float(tally.sum)!r}")
        self._begun(name, text, [outer])

    def _begun(self, name: str, text: str, labels: list[str]) -> None:
        self._lines += (f"# HELP {name}_created {text}", f"# TYPE {name}_created gauge")
        self._lines += [f"{name}_created{label} {self._created}" for label in labels]

    def text(self) -> str:
        """The page."""
        return "\n".join(self._lines) + "\n"


def render(sim: VllmSim, info: PageInfo) -> str:
    """The whole page of one engine (rank 0)."""
    page = Writer(info.created_wall_s)
    base = f'engine="0",model_name="{info.model}"'
    _process(page, sim, info)
    _gauges(page, sim, base)
    _counters(page, sim, base, info)
    _lengths(page, sim, base)
    _latencies(page, sim, base)
    _config(page, sim, info)
    _http(page, sim)
    return page.text()


def _process(page: Writer, sim: VllmSim, info: PageInfo) -> None:
    for name, kind, value, text in (
        ("process_virtual_memory_bytes", "gauge", 6.1e10, "Virtual memory of the API process."),
        ("process_resident_memory_bytes", "gauge", 1.9e9, "Resident memory of the API process."),
        (
            "process_start_time_seconds",
            "gauge",
            info.created_wall_s - 42.0,
            "Unix time of the process start.",
        ),
        ("process_cpu_seconds_total", "counter", 61.0 + 0.2 * sim.stats.busy_s, "CPU time spent."),
        ("process_open_fds", "gauge", 71.0 + sim.gauges.running + sim.gauges.waiting, "Open descriptors."),
        ("process_max_fds", "gauge", 65535.0, "Most descriptors allowed."),
    ):
        page.family(name, kind, text, [("", value)])
    python = '{implementation="CPython",major="3",minor="12",patchlevel="11",version="3.12.11"}'
    page.family("python_info", "gauge", "The interpreter.", [(python, 1.0)])


def _labelled(base: str, label: str, values: Mapping[str, float]) -> list[tuple[str, float]]:
    """Samples that differ in one label; labels stand in alphabetical order, as vLLM writes them."""
    fixed = base.split(",")
    return [
        ("{" + ",".join(sorted((*fixed, f'{label}="{value}"'))) + "}", count)
        for value, count in values.items()
    ]


def _gauges(page: Writer, sim: VllmSim, base: str) -> None:
    only = "{" + base + "}"
    for work in ("flops", "read_bytes", "write_bytes"):
        page.counter(f"vllm:estimated_{work}_per_gpu", f"Estimated {work} of one GPU.", [(only, 0.0)])
    running, waiting = sim.gauges.running, sim.gauges.waiting
    page.family("vllm:num_requests_running", "gauge", "Requests in the running batch.", [(only, running)])
    page.family("vllm:num_requests_waiting", "gauge", "Requests in the queue.", [(only, waiting)])
    page.family(
        "vllm:num_requests_waiting_by_reason", "gauge", "Requests in the queue, by what they wait for.",
        _labelled(base, "reason", {"capacity": waiting, "deferred": 0}),
    )  # fmt: skip
    page.family(
        "vllm:engine_sleep_state", "gauge", "Whether the engine is awake; 1 = in this state.",
        _labelled(base, "sleep_state", {"awake": 1, "weights_offloaded": 0, "discard_all": 0}),
    )  # fmt: skip
    page.family(
        "vllm:kv_cache_usage_perc", "gauge", "KV-cache usage; 1 = 100 percent.", [(only, sim.usage_ratio)]
    )


def _counters(page: Writer, sim: VllmSim, base: str, info: PageInfo) -> None:
    stats, only = sim.stats, "{" + base + "}"
    for name, value, text in (
        ("prefix_cache_queries", stats.prefix_queries_total, "Tokens looked up in the prefix cache."),
        ("prefix_cache_hits", stats.prefix_hits_total, "Tokens found in the prefix cache."),
        ("external_prefix_cache_queries", 0, "Tokens looked up in a remote prefix cache."),
        ("external_prefix_cache_hits", 0, "Tokens found in a remote prefix cache."),
        ("mm_cache_queries", 0, "Items looked up in the multi-modal cache."),
        ("mm_cache_hits", 0, "Items found in the multi-modal cache."),
        ("num_preemptions", stats.preemptions_total, "Preemptions since start."),
        ("prompt_tokens", stats.prompt_tokens_total, "Prompt tokens processed."),
    ):
        page.counter(f"vllm:{name}", text, [(only, value)])
    sources = {"local_compute": stats.prompt_tokens_total, "local_cache_hit": 0, "external_kv_transfer": 0}
    page.counter(
        "vllm:prompt_tokens_by_source", "Prompt tokens by source.", _labelled(base, "source", sources)
    )
    page.counter("vllm:prompt_tokens_cached", "Prompt tokens found in a cache.", [(only, 0)])
    page.counter(
        "vllm:prompt_tokens_cached_by_source", "Cached prompt tokens by the tier that had them.",
        _labelled(base, "source", dict.fromkeys(_TIERS, 0.0)),
    )  # fmt: skip
    page.counter("vllm:generation_tokens", "Tokens generated.", [(only, stats.generation_tokens_total)])
    reasons = dict.fromkeys(_FINISHED, 0.0) | {"length": float(stats.finished_total)}
    page.counter(
        "vllm:request_success", "Requests finished, by reason.", _labelled(base, "finished_reason", reasons)
    )
    page.counter(
        "vllm:admission_rejections", "Requests refused at the door, by the limit they met.",
        _labelled(
            f'model_name="{info.model}"', "reason", {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}
        ),
    )  # fmt: skip


def _lengths(page: Writer, sim: VllmSim, base: str) -> None:
    stats = sim.stats
    n = Tally(PARAMS_N)
    n.observe(1.0, stats.finished_total)
    for name, tally, text in (
        ("request_prompt_tokens", stats.prompt_length, "Prompt tokens of finished requests."),
        ("request_generation_tokens", stats.generation_length, "Output tokens of finished requests."),
        ("iteration_tokens_total", stats.iteration_tokens, "Tokens of each engine step."),
        ("request_max_num_generation_tokens", stats.generation_length, "Most output tokens of a request."),
        ("request_params_n", n, "The requests' parameter n."),
        ("request_params_max_tokens", stats.generation_length, "The requests' parameter max_tokens."),
        ("request_num_preemptions", stats.preemptions, "How often a finished request was preempted."),
        ("request_prefill_kv_computed_tokens", stats.prompt_length, "Prompt tokens that were computed."),
    ):
        page.histogram(f"vllm:{name}", text, base, tally)


def _latencies(page: Writer, sim: VllmSim, base: str) -> None:
    stats = sim.stats
    for name, tally, text in (
        ("time_to_first_token_seconds", stats.ttft, "Time to the first token."),
        ("inter_token_latency_seconds", stats.itl, "Time between two tokens."),
        ("request_time_per_output_token_seconds", stats.tpot, "Mean time per output token of a request."),
        ("e2e_request_latency_seconds", stats.e2e, "Time from arrival to the last token."),
        ("request_queue_time_seconds", stats.queue, "Time in the queue before the first scheduling."),
        ("request_inference_time_seconds", stats.inference, "Time from the first scheduling to the end."),
        ("request_prefill_time_seconds", stats.prefill, "Time from the first scheduling to the first token."),
        ("request_decode_time_seconds", stats.decode, "Time from the first token to the last."),
    ):
        page.histogram(f"vllm:{name}", text, base, tally)


def _config(page: Writer, sim: VllmSim, info: PageInfo) -> None:
    """`cache_config_info`: the configuration as labels, every value as Python prints it."""
    config = sim.config
    labels: dict[str, object] = {
        "_block_size_resolved": True,
        "block_size": config.block_size,
        "cache_dtype": "auto",
        "cache_hit_alignment_tokens": None,
        "effective_attention_block_size": config.block_size,
        "enable_prefix_caching": config.prefix_caching,
        "engine": 0,
        "gpu_memory_utilization": info.gpu_memory_utilization,
        "hash_block_size": None,
        "is_attention_free": False,
        "kv_cache_dtype_skip_layers": [],
        "kv_cache_layout": None,
        "kv_cache_max_concurrency": config.num_blocks * config.block_size / config.max_model_len,
        "kv_cache_memory_bytes": info.kv_cache_memory_bytes,
        "kv_cache_size_tokens": config.num_blocks * config.block_size,
        "kv_offloading_backend": "native",
        "kv_offloading_size": None,
        "kv_sharing_fast_prefill": False,
        "mamba_block_size": None,
        "mamba_cache_dtype": "auto",
        "mamba_cache_mode": "none",
        "num_cpu_blocks": None,
        "num_gpu_blocks": config.num_blocks,
        "num_gpu_blocks_override": None,
        "prefix_caching_hash_algo": "sha256",
        "sliding_window": None,
        "user_specified_block_size": False,
    }
    text = ",".join(f'{name}="{value}"' for name, value in labels.items())
    page.family("vllm:cache_config_info", "gauge", "The cache's configuration.", [("{" + text + "}", 1.0)])


def _http(page: Writer, sim: VllmSim) -> None:
    done = sim.stats.finished_total
    page.counter(
        "http_requests", "HTTP requests by method, status and handler.",
        [
            ('{handler="/v1/completions",method="POST",status="2xx"}', done),
            ('{handler="/v1/models",method="GET",status="2xx"}', 1),
        ],
    )  # fmt: skip
    page.histogram(
        "http_request_duration_highr_seconds", "HTTP latency, fine buckets.", "", sim.stats.http_duration
    )
