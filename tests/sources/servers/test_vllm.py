"""vLLM's dialects, 0.6 to 0.33."""

from __future__ import annotations

import pytest

from kvwatch.model.sample import FailureKind
from kvwatch.model.server import Activity, Basis, EngineState, Evictable, ServerState
from kvwatch.model.settings import ServerSettings
from kvwatch.sources.base import SourceError
from kvwatch.sources.servers import vllm
from tests.sources.servers import made_vllm, recorded

SETTINGS = ServerSettings(name="chat", kind="vllm")


def parse(page: bytes | str, **pages: bytes) -> ServerState:
    body = page.encode() if isinstance(page, str) else page
    return vllm.parse({"metrics": body, **pages}, SETTINGS)


def one(page: bytes | str) -> EngineState:
    engines = parse(page).engines
    assert len(engines) == 1
    return engines[0]


def refusal(page: bytes | str) -> tuple[FailureKind, str]:
    with pytest.raises(SourceError) as caught:
        parse(page)
    return caught.value.failure.kind, caught.value.failure.message


def config(engine: str = "0", **labels: object) -> str:
    merged = {"block_size": "16", "num_gpu_blocks": "1000", **labels, "engine": engine}
    inner = ",".join(f'{key}="{value}"' for key, value in merged.items())
    return f"vllm:cache_config_info{{{inner}}} 1.0\n"


def gauges(engine: str = "0", *, usage: str = "0.5", name: str = "kv_cache_usage_perc") -> str:
    labels = f'{{engine="{engine}",model_name="m"}}'
    return (
        f"vllm:num_requests_running{labels} 3.0\nvllm:num_requests_waiting{labels} 2.0\n"
        f"vllm:{name}{labels} {usage}\n"
    )


def test_recorded_thrashing_page() -> None:
    """A real page under preemption: 29 of 32 allocatable blocks (33 less the null block), 7 preemptions."""
    state = parse(recorded.page("vllm", "0.32.0", "thrashing"))
    engine = state.engines[0]

    assert (engine.kv.num_blocks, engine.kv.used_blocks, engine.kv.free_blocks) == (32, 29, 3)
    assert (engine.kv.block_size_tokens, engine.kv.capacity_tokens) == (32, 1024)
    assert (engine.scheduler.running, engine.scheduler.waiting) == (4, 8)
    assert engine.scheduler.preemptions_total == 7
    assert engine.scheduler.steps_total == 682
    assert engine.activity is Activity.SERVING
    assert engine.started_wall_s == pytest.approx(1795990897.83)
    assert engine.ttft is not None
    assert engine.ttft.count == 15
    assert state.model == "tiny"
    assert (state.semantics.evictable, state.semantics.basis) == (Evictable.FREE, Basis.OCCUPANCY)


def test_block_counts_are_divided_by_the_engines() -> None:
    """`num_gpu_blocks` is the sum over data-parallel engines, repeated on each."""
    state = parse(recorded.page("vllm", "0.32.0", "dp2_half"))

    assert [engine.engine for engine in state.engines] == ["0", "1"]
    assert [engine.kv.num_blocks for engine in state.engines] == [32, 32]
    assert [engine.kv.used_blocks for engine in state.engines] == [15, 12]


def test_one_rank_per_page_keeps_its_rank() -> None:
    """Behind an external balancer each page has one engine with its own rank, and its own blocks."""
    engine = one(gauges("3") + config("3"))

    assert engine.engine == "3"
    assert engine.kv.num_blocks == 999


def test_engines_are_in_numeric_order() -> None:
    """Eleven engines come as 0..10, not as text sorts them."""
    page = "".join(gauges(str(rank)) for rank in range(11))

    assert [engine.engine for engine in parse(page).engines] == [str(rank) for rank in range(11)]


def test_blocks_that_do_not_divide_are_unknown() -> None:
    """Unequal engines cannot be told apart from their sum, so nothing is said."""
    labels = {"num_gpu_blocks": "1001"}
    state = parse(gauges("0") + gauges("1") + config("0", **labels) + config("1", **labels))

    assert state.engines[0].kv.num_blocks is None
    assert any("do not divide" in note for note in state.notes)


@pytest.mark.parametrize("used", [0, 1, 500, 998, 999])
def test_usage_counts_the_null_block_or_not(used: int) -> None:
    """Up to 0.10 usage is (used+1)/n, from 0.11 used/(n-1): both give the same blocks, so do both names."""
    old, new = repr((used + 1) / 1000), repr(used / 999)
    both_old = gauges(usage=old) + f'vllm:gpu_cache_usage_perc{{engine="0",model_name="m"}} {old}\n'
    both_new = gauges(usage=new) + f'vllm:gpu_cache_usage_perc{{engine="0",model_name="m"}} {new}\n'
    pages = [gauges(usage=new), gauges(usage=old, name="gpu_cache_usage_perc"), both_new, both_old]

    assert [one(page + config()).kv.used_blocks for page in pages] == [used] * 4


def test_case_D5_usage_under_its_old_and_new_name() -> None:
    """The renamed gauge is read under both names; under a third it is unknown, never 0."""
    assert one(gauges(name="gpu_cache_usage_perc")).kv.usage_ratio == 0.5
    assert one(gauges(name="kv_cache_usage_perc")).kv.usage_ratio == 0.5

    state = parse(gauges(name="kv_cache_fill"))
    assert state.engines[0].kv.usage_ratio is None
    assert state.engines[0].scheduler.running == 3
    assert any("usage is unknown" in note for note in state.notes)


def test_case_H1_idle_with_a_warm_cache_is_empty() -> None:
    """After load the cache is full of blocks that are free to take: usage 0, and the semantics say so."""
    state = parse(recorded.page("vllm", "0.32.0", "after"))

    assert state.engines[0].kv.usage_ratio == 0.0
    assert state.engines[0].kv.free_blocks == state.engines[0].kv.num_blocks
    assert state.semantics.evictable is Evictable.FREE


def test_case_H2_usage_is_blocks_not_tokens() -> None:
    """Usage is a share of blocks; how many tokens are held is not reported and not invented."""
    engine = one(gauges(usage="0.6666666666666666") + config())

    assert engine.kv.used_blocks == 666
    assert engine.kv.tokens is None


@pytest.mark.parametrize(
    ("page", "seen"),
    [
        ("", "an empty page"),
        ('# HELP python_info x\npython_info{a="b"} 1.0\nprocess_cpu_seconds_total 3\n', "process, python"),
        ("<!DOCTYPE html><html><body>Welcome to nginx</body></html>", "an HTML page"),
        ('{"detail":"Not Found"}', "JSON"),
        ("sglang:token_usage 0.5\n", "sglang"),
    ],
    ids=["empty", "python", "html", "json", "other"],
)
def test_case_H5_page_without_the_series_is_a_failure(page: str, seen: str) -> None:
    """A 200 without vLLM's series is NOT_EXPECTED, and the text says what came instead and what to do."""
    kind, message = refusal(page)

    assert kind is FailureKind.NOT_EXPECTED
    assert seen in message
    assert "--disable-log-stats" in message


def test_case_H5_vllm_series_without_the_needed_ones() -> None:
    """vllm: series alone are not enough: those of the engine must be there."""
    kind, message = refusal('vllm:lora_requests_info{max_lora="1"} 1.7e9\n')

    assert kind is FailureKind.NOT_EXPECTED
    assert "kv_cache_usage_perc" in message


@pytest.mark.parametrize(
    ("labels", "capacity"),
    [
        ({"kv_cache_size_tokens": "48000"}, 48000),
        ({"sliding_window": "4096"}, None),
        ({"mamba_block_size": "512"}, None),
    ],
    ids=["told", "sliding", "mamba"],
)
def test_case_H8_hybrid_models_have_no_derived_tokens(labels: dict[str, str], capacity: int | None) -> None:
    """Where layers differ, blocks x size is not the capacity: the server's own figure or none."""
    state = parse(gauges() + config(**labels))
    kv = state.engines[0].kv

    assert (kv.capacity_tokens, kv.block_size_tokens) == (capacity, None)
    assert kv.num_blocks == 999
    assert any("hybrid" in note for note in state.notes)


def test_case_H9_no_hit_rate_is_read() -> None:
    """Prefix hits, which count recomputed requests as well, are not taken for cached prompt tokens."""
    page = gauges() + 'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 900.0\n'

    assert one(page).scheduler.cached_prompt_tokens_total is None


@pytest.mark.parametrize(
    ("values", "activity"),
    [
        ((1, 0, 0), Activity.SERVING),
        ((0, 1, 0), Activity.SLEEPING),
        ((0, 0, 1), Activity.SLEEPING),
        ((0, 0, 0), Activity.SLEEPING),
        (None, Activity.UNKNOWN),
    ],
)
def test_case_H11_sleeping_engine_is_not_idle(values: tuple[int, ...] | None, activity: Activity) -> None:
    """A sleeping engine says so; where the series is missing, activity is unknown and not "serving"."""
    states = ("awake", "weights_offloaded", "discard_all")
    lines = "".join(
        f'vllm:engine_sleep_state{{engine="0",model_name="m",sleep_state="{state}"}} {value}\n'
        for state, value in zip(states, values or (), strict=False)
    )

    assert one(gauges(usage="0.0") + lines).activity is activity


def test_cold_multiprocess_server_is_known_but_unknown() -> None:
    """Several API servers, no request yet: the engine and its pool are there, usage is None and not 0."""
    state = parse(recorded.page("vllm", "0.32.0", "api2_cold"))
    engine = state.engines[0]

    assert engine.kv.usage_ratio is None
    assert engine.scheduler.running is None
    assert engine.kv.num_blocks == 32
    assert any("first request" in note for note in state.notes)


def test_help_lines_alone_are_an_engine_without_figures() -> None:
    """A page of HELP and TYPE lines is up, with nothing known."""
    engine = one("# TYPE vllm:kv_cache_usage_perc gauge\n# TYPE vllm:num_requests_running gauge\n")

    assert engine == EngineState(engine="0")


@pytest.mark.parametrize("dialect", made_vllm.DIALECTS, ids=lambda dialect: dialect.name)
def test_every_dialect_tells_the_same_engine(dialect: made_vllm.Dialect) -> None:
    """Whatever the names and denominators of a release: 250 of 1000 blocks, the same queue and counters."""
    engine = one(recorded.page("vllm", dialect.name, "busy"))

    blocks = (made_vllm.BLOCKS, made_vllm.USED) if dialect.info else (None, None)
    assert (engine.kv.num_blocks, engine.kv.used_blocks) == blocks
    assert engine.kv.usage_ratio == pytest.approx(0.25, abs=0.001)
    assert engine.scheduler.running == made_vllm.RUNNING
    assert engine.scheduler.waiting == made_vllm.WAITING + dialect.v0  # one is swapped out
    assert engine.scheduler.preemptions_total == 5
    assert engine.scheduler.finished_total == 100
    assert engine.tpot is not None
    assert engine.tpot.count == (210 if dialect.new_tpot else 200)


@pytest.mark.parametrize("version", ["0.9.2", "0.24.0"])
def test_summed_blocks_of_older_releases_are_divided(version: str) -> None:
    """Two data-parallel engines repeat the sum of their blocks: each has its own thousand."""
    engines = parse(recorded.page("vllm", version, "dp2")).engines

    assert [(each.engine, each.kv.num_blocks, each.kv.used_blocks) for each in engines] == [
        ("0", 1000, 250),
        ("1", 1000, 250),
    ]


def test_v0_engine() -> None:
    """Up to 0.7: no engine label, no null block, swapped requests wait, evictable blocks not told apart."""
    page = (
        'vllm:num_requests_running{model_name="m"} 3\nvllm:num_requests_waiting{model_name="m"} 2\n'
        'vllm:num_requests_swapped{model_name="m"} 4\nvllm:gpu_cache_usage_perc{model_name="m"} 0.25\n'
        'vllm:cpu_cache_usage_perc{model_name="m"} 0\nvllm:num_preemptions_total{model_name="m"} 9\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000",sliding_window="None"} 1\n'
        'vllm:time_per_output_token_seconds_bucket{model_name="m",le="0.1"} 5\n'
        'vllm:time_per_output_token_seconds_bucket{model_name="m",le="+Inf"} 6\n'
    )
    state = parse(page)
    engine = state.engines[0]

    assert (engine.kv.num_blocks, engine.kv.used_blocks) == (1000, 250)
    assert (engine.scheduler.running, engine.scheduler.waiting) == (3, 6)
    assert engine.tpot is not None
    assert engine.tpot.count == 6
    assert state.semantics.evictable is Evictable.UNKNOWN


def test_rust_front_end() -> None:
    """OpenMetrics without cache_config_info: usage and counters are there, capacity is said to be unknown."""
    page = gauges() + 'vllm:num_preemptions_total{engine="0",model_name="m"} 7\n# EOF\n'
    state = parse("# TYPE vllm:num_preemptions counter\n" + page)

    assert state.engines[0].scheduler.preemptions_total == 7
    assert state.engines[0].kv.capacity_tokens is None
    assert any("Rust front end" in note for note in state.notes)


@pytest.mark.parametrize("prefix", ["ray_vllm_", "ray_vllm:"])
def test_ray_names(prefix: str) -> None:
    """Under Ray names are prefixed and counters stand there with and without `_total`."""
    extra = 'ReplicaId="abc",WorkerId="w1"'
    page = (gauges() + config()).replace("vllm:", prefix).replace("{", "{" + extra + ",")
    for name in ("generation_tokens", "generation_tokens_total"):
        page += f'{prefix}{name}{{engine="0",model_name="m",{extra}}} 55\n'
    engine = one(page)

    assert engine.kv.usage_ratio == 0.5
    assert engine.kv.num_blocks == 999
    assert engine.scheduler.generation_tokens_total == 55


def test_several_ray_replicas_stay_apart() -> None:
    """One Ray node's page may have several replicas with one engine rank: each is an engine of its own."""
    page = "".join(
        (gauges(usage=usage) + config())
        .replace("vllm:", "ray_vllm_")
        .replace("{", f'{{ReplicaId="{replica}",')
        for replica, usage in (("aaa", "0.25"), ("bbb", "0.75"))
    )
    engines = parse(page).engines

    assert {engine.engine: engine.kv.usage_ratio for engine in engines} == {"0@aaa": 0.25, "0@bbb": 0.75}
    assert {engine.kv.num_blocks for engine in engines} == {999}


def test_router_page_is_refused_with_the_fix() -> None:
    """A router republishes vLLM's names with a `server` label: it must not pass for an engine."""
    page = 'vllm:num_requests_running{server="http://h:8000"} 3\nvllm:gpu_cache_usage_perc{server="a"} 0\n'
    kind, message = refusal(page)

    assert kind is FailureKind.NOT_EXPECTED
    assert "router" in message
    assert "each engine" in message


def test_page_of_two_servers_is_refused() -> None:
    """Two models under one engine rank cannot be told apart, so nothing is guessed."""
    page = gauges() + gauges().replace('model_name="m"', 'model_name="n"')

    assert refusal(page)[0] is FailureKind.NOT_EXPECTED


def test_none_and_broken_config_labels_are_unknown() -> None:
    """Labels are Python's text: "None", "True" or anything odd is no number."""
    odd = config(
        num_gpu_blocks="None", block_size="True", kv_cache_memory_bytes="1e9", kv_cache_size_tokens="٣"
    )
    kv = one(gauges() + odd).kv

    assert (kv.num_blocks, kv.block_size_tokens, kv.pool_bytes, kv.capacity_tokens) == (
        None,
        None,
        None,
        None,
    )
    assert kv.usage_ratio == 0.5


def test_pool_bytes_only_where_they_hold() -> None:
    """A configured pool size counts, unless the number of blocks was set by hand and overrides it."""
    size = {"kv_cache_memory_bytes": "1073741824"}

    assert one(gauges() + config(**size)).kv.pool_bytes == 1073741824
    assert one(gauges() + config(**size, num_gpu_blocks_override="33")).kv.pool_bytes is None


@pytest.mark.parametrize("value", ["NaN", "-1", "57.3", "+Inf"])
def test_impossible_usage_is_unknown(value: str) -> None:
    """Usage that is no ratio is left out, not clipped to full or empty."""
    assert one(gauges(usage=value) + config()).kv.usage_ratio is None


def test_scientific_notation_and_any_label_order() -> None:
    """Small ratios come as 8.34e-05, and labels in any order."""
    page = 'vllm:kv_cache_usage_perc{model_name="m",engine="0"} 8.34e-05\n'

    assert one(page).kv.usage_ratio == 8.34e-05


def test_version_comes_from_its_own_page() -> None:
    """The version is read where it answers, and its absence or nonsense costs nothing."""
    assert parse(gauges(), version=b'{"version":"0.32.0"}').version == "0.32.0"
    for body in (b"", b"<html>", b"[]", b'{"version":3}'):
        assert parse(gauges(), version=body).version == ""


def test_frozen_gauges_of_a_hung_engine_are_still_read() -> None:
    """A hung engine answers with the same figures: reading succeeds, and no token counter moves."""
    first, last = (one(recorded.page("vllm", "0.32.0", f"engine_stopped_{i}")) for i in (1, 3))

    assert first.kv == last.kv
    assert first.scheduler.running == last.scheduler.running == 1
    assert first.scheduler.generation_tokens_total == last.scheduler.generation_tokens_total


def test_flood_of_engines_is_refused() -> None:
    """A page that invents engines cannot make kvwatch export without bound."""
    page = "".join(f'vllm:num_requests_running{{engine="{i}",model_name="m"}} 1\n' for i in range(300))

    assert refusal(page)[0] is FailureKind.TOO_LARGE


def test_a_name_with_control_characters_is_made_harmless() -> None:
    """Model names are foreign text: printable, on one line, not long."""
    page = 'vllm:num_requests_running{engine="0",model_name="a\\nb\x1b[2J' + "x" * 500 + '"} 1\n'

    model = parse(page).model
    assert model.isprintable()
    assert len(model) <= 129
