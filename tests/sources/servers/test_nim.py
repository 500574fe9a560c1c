"""NIM: names without a prefix, or vLLM's."""

from __future__ import annotations

from kvwatch.model.sample import FailureKind
from kvwatch.model.server import Evictable
from tests.sources.servers.reading import only, parse, read, refusal


def test_names_without_prefix() -> None:
    """NIM 1.x: usage, requests and the limit; what cached blocks count as is unknown."""
    state = read("nim", "1.x", "busy")
    engine = only(state)

    assert engine.kv.usage_ratio == 0.62
    assert (engine.scheduler.running, engine.scheduler.waiting, engine.scheduler.max_running) == (9, 2, 256)
    assert engine.scheduler.generation_tokens_total == 22000
    assert state.semantics.evictable is Evictable.UNKNOWN
    assert state.model == "meta/llama-3.1-8b-instruct"


def test_newer_nim_speaks_vllm() -> None:
    """NIM 2.x shows vLLM's series, with vLLM's semantics."""
    state = read("nim", "2.x", "half")

    assert (state.kind, only(state).kv.num_blocks) == ("nim", 32)
    assert state.semantics.evictable is Evictable.FREE


def test_router_behind_the_same_names_is_refused() -> None:
    """vLLM's series with a `server` label are a router's page, under this kind as well."""
    failure = refusal("nim", metrics=b'vllm:num_requests_running{server="http://a",model_name="m"} 3\n')

    assert failure.kind is FailureKind.NOT_EXPECTED
    assert "router" in failure.message


def test_two_models_on_one_page_are_refused() -> None:
    """Names without prefix and two values: several servers were mixed."""
    text = b'num_requests_running{model_name="a"} 1\nnum_requests_running{model_name="b"} 2\n'

    assert "mixes several" in refusal("nim", metrics=text).message


def test_limit_alone_is_not_a_server() -> None:
    """Without usage or running requests the page is refused, with the path to look at."""
    assert "/v1/metrics" in refusal("nim", metrics=b"num_request_max 5\n").message
    assert only(parse("nim", metrics=b"num_requests_running 0\n")).kv.usage_ratio is None
