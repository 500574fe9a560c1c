"""Pages made up from each project's documentation and source, for engines that cannot be run here.

`pages()` gives every generated fixture; `test_made.py` keeps the files under `tests/fixtures/servers` equal
to it. Engines that pass vLLM's series through get those lines from a page recorded from vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from tests.sources.servers import recorded

Lines = list[str]

# vLLM's bucket sets, which TensorRT-LLM, LMDeploy, NIM and Dynamo took over.
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TPOT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
GEOMETRIC = tuple(round(1.5e-4 * 1.5**k, 10) for k in range(35))  # TGI and, near enough, LightLLM
PASSED_THROUGH = re.compile(
    r"^(?:# TYPE )?vllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc|cache_config_info"
    r"|num_preemptions_total|prompt_tokens_total|generation_tokens_total|time_to_first_token_seconds\w*)[ {]"
)


def sample(name: str, value: float, **labels: object) -> str:
    inner = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return f"{name}{{{inner}}} {float(value)}" if inner else f"{name} {float(value)}"


def gauge(name: str, value: float, **labels: object) -> Lines:
    return [f"# HELP {name} {name}", f"# TYPE {name} gauge", sample(name, value, **labels)]


def counter(name: str, value: float, **labels: object) -> Lines:
    return [f"# HELP {name} {name}", f"# TYPE {name} counter", sample(name, value, **labels)]


def histogram(name: str, bounds: Sequence[float], observed: Sequence[float], **labels: object) -> Lines:
    lines = [f"# HELP {name} {name}", f"# TYPE {name} histogram"]
    for bound in bounds:
        count = sum(value <= bound for value in observed)
        lines.append(sample(name + "_bucket", count, **labels, le=float(bound)))
    lines.append(sample(name + "_bucket", len(observed), **labels, le="+Inf"))
    lines.append(sample(name + "_sum", sum(observed), **labels))
    lines.append(sample(name + "_count", len(observed), **labels))
    return lines


def page(*parts: Lines) -> bytes:
    return ("\n".join(line for part in parts for line in part) + "\n").encode()


def answer(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def from_vllm(case: str) -> Lines:
    """The lines of a page recorded from vLLM that a passing-through server shows as well."""
    text = recorded.page("vllm", "0.32.0", case).decode()
    return [line for line in text.splitlines() if PASSED_THROUGH.match(line)]


def pages() -> Iterator[tuple[str, bytes]]:
    """(path under tests/fixtures/servers, content) of every generated fixture."""
    for make in (tgi, trtllm, triton, lmdeploy, ollama, dynamo, nim, lmcache, lightllm, mlc):
        for path, body in make():
            yield f"{make.__name__}/{path}", body
    from tests.sources.servers import made_vllm  # which builds on this module

    for path, body in made_vllm.pages():
        yield f"vllm/{path}", body


def tgi() -> Iterator[tuple[str, bytes]]:
    info = {
        "model_id": "org/model",
        "max_concurrent_requests": 128,
        "max_input_tokens": 4095,
        "max_total_tokens": 4096,
        "max_client_batch_size": 4,
        "router": "text-generation-router",
        "version": "3.3.6",
    }
    budget = gauge("tgi_batch_max_total_tokens", 65536)
    busy = (
        gauge("tgi_batch_current_size", 12),
        gauge("tgi_batch_current_max_tokens", 49152),
        gauge("tgi_queue_size", 3),
        counter("tgi_request_count", 250),
        counter("tgi_request_success", 231, method="generate"),
        counter("tgi_batch_inference_count", 40, method="prefill"),
        [sample("tgi_batch_inference_count", 5100, method="decode")],
        histogram("tgi_request_queue_duration", GEOMETRIC, [0.0004, 0.002, 0.4]),
        histogram("tgi_request_mean_time_per_token_duration", GEOMETRIC, [0.021, 0.024, 0.03]),
        histogram("tgi_request_input_length", range(41, 4100, 41), [120, 300, 2000]),
        histogram("tgi_request_generated_tokens", range(41, 4100, 41), [64, 256, 256]),
    )
    done = [
        line
        for name in ("batch_current_size", "batch_current_max_tokens", "queue_size")
        for line in gauge("tgi_" + name, 0)
    ]
    for version in ("v3", "v2"):
        for case in ("cold", "busy"):
            yield f"{version}/{case}.info.json", answer({**info, "version": f"{version[1]}.3.6"})
    yield "v3/cold.metrics.prom", page(budget)
    yield "v2/cold.metrics.prom", b""
    yield "v3/busy.metrics.prom", page(budget, *busy)
    yield "v2/busy.metrics.prom", page(*busy)
    yield "v3/after.metrics.prom", page(budget, done, *busy[3:])


def trtllm() -> Iterator[tuple[str, bytes]]:
    labels = {"model_name": "llama", "engine_type": "trtllm"}
    latencies = (
        histogram("trtllm_time_to_first_token_seconds", TTFT, [0.03, 0.05, 0.2], **labels),
        histogram("trtllm_time_per_output_token_seconds", TPOT, [0.02, 0.02, 0.04], **labels),
        histogram("trtllm_request_queue_time_seconds", LATENCY, [0.0, 0.1, 0.4], **labels),
        histogram("trtllm_e2e_request_latency_seconds", LATENCY, [1.1, 2.0, 9.0], **labels),
        counter("trtllm_request_success_total", 3, **labels, finished_reason="length"),
    )
    figures = {
        "num_requests_running": 17,
        "num_requests_waiting": 4,
        "max_num_active_requests": 256,
        "max_batch_size_static": 128,
        "max_batch_size_runtime": 64,
        "num_paused_requests": 0,
        "kv_cache_utilization": 0.75,
        "kv_cache_max_blocks": 2048,
        "kv_cache_free_blocks": 512,
        "kv_cache_used_blocks": 1536,
        "kv_cache_tokens_per_block": 32,
        "gpu_memory_usage_bytes": 60e9,
    }

    def gauges(pid: int, **other: float) -> Lines:
        merged = {**figures, **other}
        return [line for name, v in merged.items() for line in gauge(f"trtllm_{name}", v, **labels, pid=pid)]

    counters = (
        counter("trtllm_num_requests_completed_total", 41, **labels),
        counter("trtllm_prompt_tokens_total", 90000, **labels),
        counter("trtllm_prompt_cached_tokens_total", 12000, **labels),
        counter("trtllm_generation_tokens_total", 7000, **labels),
    )
    info = answer({"disaggregated_params": None})
    yield "main/cold.metrics.prom", b""
    yield "main/busy.metrics.prom", page(*latencies, gauges(71), *counters)
    yield (
        "main/dead_pid.metrics.prom",
        page(
            *latencies,
            gauges(71),
            gauges(12, num_requests_running=3, kv_cache_utilization=0.99, kv_cache_used_blocks=2027),
            *counters,
        ),
    )
    for case in ("cold", "busy", "dead_pid"):
        yield f"main/{case}.server_info.json", info
    yield "1.1.0rc5/after.metrics.prom", page(*latencies)
    iteration = {
        "iter": 4711,
        "iterLatencyMS": 21.5,
        "numActiveRequests": 18,
        "numQueuedRequests": 2,
        "maxBatchSizeRuntime": 64,
        "kvCacheStats": {
            "maxNumBlocks": 2048,
            "freeNumBlocks": 1024,
            "usedNumBlocks": 1024,
            "tokensPerBlock": 32,
        },
        "inflightBatchingStats": {"numContextRequests": 1, "numGenRequests": 15, "numScheduledRequests": 16},
    }
    for case, body in (("busy", [{**iteration, "iter": 4710}, iteration]), ("idle", [])):
        yield f"json/{case}.metrics.json", answer(body)
        yield f"json/{case}.settings.json", answer({"metrics_path": "/metrics"})


def triton() -> Iterator[tuple[str, bytes]]:
    labels = {"model": "tensorrt_llm", "version": "1"}

    def family(name: str, selector: str, **values: float) -> Lines:
        samples = [sample(f"nv_trt_llm_{name}", v, **labels, **{selector: key}) for key, v in values.items()]
        return [f"# HELP nv_trt_llm_{name} TRT LLM", f"# TYPE nv_trt_llm_{name} gauge", *samples]

    def metrics(used: float, free: float, most: float, fraction: float) -> bytes:
        return page(
            counter("nv_inference_request_success", 900, **labels),
            family("request_metrics", "request_type", waiting=5, context=1, scheduled=20, max=64, active=22),
            family("runtime_memory_metrics", "memory_type", gpu=1.6e10, cpu=0, pinned=2e8),
            family(
                "kv_cache_block_metrics",
                "kv_cache_block_type",
                fraction=fraction,
                tokens_per=64,
                used=used,
                free=free,
                max=most,
            ),
            family(
                "inflight_batcher_metrics",
                "inflight_batcher_specific_metric",
                micro_batch_id=0,
                generation_requests=19,
                total_context_tokens=128,
            ),
            family("general_metrics", "general_type", iteration_counter=88123, timestamp=1.7e9),
        )

    yield "tensorrtllm/busy.metrics.prom", metrics(3000, 3239, 6239, 0.4808)
    yield "tensorrtllm/inconsistent.metrics.prom", metrics(1, 6239, 6239, 0.4875)
    requests = counter("nv_inference_request_success", 7, model="vllm", version="1")
    yield "vllm/half.metrics.prom", page(requests, from_vllm("half"))


def lmdeploy() -> Iterator[tuple[str, bytes]]:
    def engine(rank: int, usage: float, running: int, waiting: int, tokens: int) -> Lines:
        labels = {"model_name": "internlm", "engine": rank}
        parts = (
            gauge("lmdeploy:num_requests_running", running, **labels),
            gauge("lmdeploy:num_requests_waiting", waiting, **labels),
            gauge("lmdeploy:gpu_cache_usage_perc", usage, **labels),
            counter("lmdeploy:prompt_tokens_total", 10 * tokens, **labels),
            counter("lmdeploy:cached_tokens_total", 4 * tokens, **labels),
            counter("lmdeploy:generation_tokens_total", tokens, **labels),
            counter("lmdeploy:request_success_total", 30, **labels, finished_reason="stop"),
            [sample("lmdeploy:request_success_total", 2, **labels, finished_reason="length")],
            histogram("lmdeploy:iteration_tokens_total", TOKENS, [12, 12, 300], **labels),
            histogram("lmdeploy:time_to_first_token_seconds", TTFT, [0.05, 0.3], **labels),
            histogram("lmdeploy:time_per_output_token_seconds", (0.005, *TPOT), [0.02, 0.03], **labels),
            histogram("lmdeploy:request_queue_time_seconds", LATENCY, [0.0, 0.2], **labels),
            histogram("lmdeploy:request_prompt_tokens", TOKENS, [300, 900], **labels),
            histogram("lmdeploy:request_generation_tokens", TOKENS, [30, 90], **labels),
        )
        return [line for part in parts for line in part]

    yield "0.18.0/warm.metrics.prom", page(engine(0, 0.991, 3, 0, 5000))
    yield "0.18.0/dp2.metrics.prom", page(engine(0, 0.4, 3, 0, 5000), engine(1, 0.9, 9, 2, 7000))


def ollama() -> Iterator[tuple[str, bytes]]:
    model = {
        "name": "llama3.1:8b",
        "model": "llama3.1:8b",
        "size": 6_654_289_920,
        "digest": "0" * 64,
        "expires_at": "2026-11-29T12:00:00Z",
        "size_vram": 6_654_289_920,
        "context_length": 8192,
    }
    for case, models in (("loaded", [model]), ("empty", [])):
        yield f"0.12/{case}.ps.json", answer({"models": models})
        yield f"0.12/{case}.version.json", answer({"version": "0.12.3"})


def dynamo() -> Iterator[tuple[str, bytes]]:
    own = {"dynamo_component": "backend", "dynamo_namespace": "ns", "model": "m"}
    worker = (
        counter("dynamo_component_requests_total", 12, **own, dynamo_endpoint="generate"),
        gauge("dynamo_component_inflight_requests", 5, **own, dynamo_endpoint="generate"),
    )
    pool = (
        gauge("dynamo_component_total_blocks", 32, **own, dp_rank=0),
        gauge("dynamo_component_gpu_cache_usage_percent", 0.5, **own, dp_rank=0),
    )
    yield "1.6.1-worker/alone.metrics.prom", page(*worker, *pool)
    yield "1.6.1-worker/prefill.metrics.prom", page(*worker)


def nim() -> Iterator[tuple[str, bytes]]:
    model = {"model_name": "meta/llama-3.1-8b-instruct"}
    yield (
        "1.x/busy.metrics.prom",
        page(
            gauge("num_requests_running", 9, **model),
            gauge("num_requests_waiting", 2, **model),
            gauge("num_request_max", 256, **model),
            gauge("gpu_cache_usage_perc", 0.62, **model),
            counter("prompt_tokens_total", 81000, **model),
            counter("generation_tokens_total", 22000, **model),
            counter("request_finish_total", 310, **model, finished_reason="stop"),
            histogram("time_to_first_token_seconds", TTFT, [0.05, 0.09], **model),
            histogram("time_per_output_token_seconds", TPOT, [0.011, 0.02], **model),
            histogram("request_prompt_tokens", TOKENS, [200, 700], **model),
            histogram("request_generation_tokens", TOKENS, [50, 90], **model),
        ),
    )
    yield "2.x/half.metrics.prom", page(from_vllm("half"))


def lmcache() -> Iterator[tuple[str, bytes]]:
    labels = {"model_name": "m", "worker_id": 0, "role": "worker"}
    yield (
        "0.5.6/busy.metrics.prom",
        page(
            gauge("lmcache:local_cache_usage", 3 * 1024**3, **labels),
            gauge("lmcache:remote_cache_usage", 0, **labels),
            gauge("lmcache:local_storage_usage", 12 * 1024**3, **labels),
            gauge("lmcache:retrieve_hit_rate", 0.4, **labels),
            counter("lmcache:num_requested_tokens_total", 120000, **labels),
        ),
    )
    yield "0.5.6/busy.conf.json", answer({"chunk_size": 256, "local_cpu": True, "max_local_cpu_size": 5.0})
    yield (
        "0.5.6-mp/busy.metrics.prom",
        page(gauge("lmcache_mp_l1_usage_ratio", 0.83), gauge("lmcache_mp_l1_memory_usage_bytes", 8.9e9)),
    )


def lightllm() -> Iterator[tuple[str, bytes]]:
    yield (
        "2026/busy.token_load.json",
        answer({"current_load": 0.41, "logical_max_load": 0.77, "dynamic_max_load": 0.77}),
    )
    yield (
        "2026/busy.metrics.prom",
        page(
            gauge("lightllm_queue_size", 2),
            gauge("lightllm_batch_current_size", 14),
            gauge("lightllm_batch_pause_size", 1),
            gauge("lightllm_batch_current_max_tokens", 77000),
            counter("lightllm_request_success_total", 90),
            counter("lightllm_batch_inference_count_total", 30, method="prefill"),
            [sample("lightllm_batch_inference_count_total", 4000, method="decode")],
            histogram("lightllm_request_first_token_duration", GEOMETRIC, [0.04, 0.2]),
            histogram("lightllm_request_mean_time_per_token_duration", GEOMETRIC, [0.02, 0.03]),
            histogram("lightllm_request_queue_duration_bucket", GEOMETRIC, [0.001, 0.05]),
            histogram("lightllm_request_input_length", range(0, 2000, 100), [300, 900]),
            histogram("lightllm_request_generated_tokens", range(0, 2000, 100), [30, 90]),
        ),
    )
    yield (
        "2026-dp2/busy.token_load.json",
        answer({"current_load": [0.2, 0.9], "dynamic_max_load": [0.3, 0.9]}),
    )
    yield "2026-dp2/busy.metrics.prom", page(gauge("lightllm_batch_current_size", 20))


def mlc() -> Iterator[tuple[str, bytes]]:
    model = {"id": "Llama-3-8B-q4f16_1", "created": 1764000000, "object": "model", "owned_by": "MLC-LLM"}
    yield "0.20/up.models.json", answer({"object": "list", "data": [model]})
