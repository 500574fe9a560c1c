"""Public bug reports that concern how engines are read, whatever the engine."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

import pytest

from kvwatch.model.server import Basis, Evictable, KvCacheState, SchedulerState, ServerState
from kvwatch.signals import liveness
from kvwatch.sources.base import SourceError
from kvwatch.sources.servers import registry
from tests.signals.build import Run
from tests.sources.loopback import pages
from tests.sources.servers import coverage, recorded
from tests.sources.servers.reading import only, parse, poll, read

PLAIN = tuple(
    case
    for case in recorded.cases()
    if case.kind not in ("vllm", "sglang", "llamacpp") and b"\n" in case.pages().get("metrics", b"")
)
COMMANDS = {
    "tgi": "text-generation-launcher --model-id org/model --port 3000",
    "trtllm": "python /usr/local/bin/trtllm-serve org/model --port 8000",
    "triton": "tritonserver --model-repository=/models",
    "lmdeploy": "python /usr/bin/lmdeploy serve api_server internlm --server-port 23333",
    "ollama": "/usr/local/bin/ollama serve",
    "dynamo": "python3 -m dynamo.frontend --http-port 8000",
    "nim": "python3 -m vllm_nvext.entrypoints.openai.api_server",
    "lmcache": "lmcache_server localhost 65432",
    "lightllm": "python -m lightllm.server.api_server --model_dir /m",
    "mlc": "python -m mlc_llm serve HF://mlc-ai/m",
    "transformers": "python /usr/bin/transformers serve --continuous-batching",
    "vllm": "python /usr/bin/vllm serve org/model",
    "sglang": "python -m sglang.launch_server --model-path m",
    "llamacpp": "/opt/llama-server -m m.gguf",
}


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.id)
def test_case_D4_renamed_series_are_missed(case: recorded.Case) -> None:
    """When an upgrade renames everything, the page is refused or the state says what is missing: no 0."""
    bodies = case.pages()
    bodies["metrics"] = re.sub(rb"(?m)^((?:# (?:TYPE|HELP) )?[a-z_:]+)", rb"\1_v2", bodies["metrics"])
    with contextlib.suppress(SourceError):
        state = registry.adapter(case.kind).parse(bodies, case.settings())
        assert_all_missed(state)


def assert_all_missed(state: ServerState) -> None:
    assert state.notes
    for engine in state.engines:
        assert engine.scheduler == SchedulerState()
        assert engine.kv.num_blocks is None


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.id)
def test_no_number_is_no_figure(case: recorded.Case) -> None:
    """With NaN for every value, nothing that the page reported comes out as a figure."""
    bodies = case.pages()
    bodies["metrics"] = re.sub(rb"(?m)(?<=[} ])[-+0-9.e]+$", b"NaN", bodies["metrics"])
    with contextlib.suppress(SourceError):
        state = registry.adapter(case.kind).parse(bodies, case.settings())
        for engine in state.engines:
            assert engine.scheduler == SchedulerState()
            assert (engine.ttft, engine.tpot, engine.kv.num_blocks) == (None, None, None)


def test_case_H12_gauge_that_lags_at_rest_is_believed_late() -> None:
    """SGLang's gauges may be 30 s old at rest: only after that do still counters mean a stall."""
    semantics = registry.adapter("sglang").semantics

    assert liveness.limit_s(1.0, semantics.fresh_within_s) == 30.0
    assert liveness.limit_s(1.0, registry.adapter("vllm").semantics.fresh_within_s) == 5.0


def stalls(seconds: int, *, moving: bool) -> list[bool | None]:
    """What is said of a recorded SGLang page whose gauges stay as they are, second by second."""
    engine = read("sglang", "0.5.23", "half").engines[0]
    assert (engine.scheduler.running or 0) > 0
    run, said = Run(), []
    for second in range(seconds):
        tokens = (engine.scheduler.generation_tokens_total or 0) + (second if moving else 0)
        now = replace(engine, scheduler=replace(engine.scheduler, generation_tokens_total=tokens))
        shown = run.page(1000.0 + second, now, semantics=registry.adapter("sglang").semantics)
        said.append(shown.stalled)
    return said


def test_case_H12_stuck_gauges_are_confirmed_by_counters() -> None:
    """Requests that only a gauge calls running are no stall for 30 s; counters that move end the doubt."""
    still, moving = stalls(60, moving=False), stalls(60, moving=True)

    assert not any(still[:30])
    assert all(still[31:])
    assert not any(moving)


def test_case_H15_old_server_without_usage() -> None:
    """A version that has no KV usage yet is read without it."""
    text = b'sglang:num_running_reqs{model_name="m"} 4\nsglang:num_queue_reqs{model_name="m"} 0\n'
    engine = only(parse("sglang", metrics=text))

    assert engine.kv == KvCacheState()
    assert (engine.scheduler.running, engine.scheduler.waiting) == (4, 0)


@pytest.mark.parametrize("kind", sorted(COMMANDS))
def test_processes_are_recognised_as_one_kind(kind: str) -> None:
    """A server's command line is recognised as its own kind, and as no other."""
    matching = [
        name
        for name in registry.kinds()
        if any(re.search(pattern, COMMANDS[kind]) for pattern in registry.adapter(name).processes)
    ]

    assert matching == [kind]


@pytest.mark.parametrize("case", recorded.cases(), ids=lambda case: case.id)
def test_every_page_is_recognised(case: recorded.Case) -> None:
    """`auto` takes every server here for what it is; where vLLM's page is all there is, for vLLM."""
    if case.folder.name == "json":
        return  # the draining endpoint, which `auto` does not read
    found = case.pages()
    bodies = {e.path: found[e.name] for e in registry.adapter(case.kind).endpoints if e.name in found}
    if not any(clue.path in bodies for clue in registry.adapter(case.kind).clues):
        return  # not all of this server's pages were recorded
    read = poll("auto", pages(bodies))

    assert isinstance(read, ServerState)
    assert read.kind == ("vllm" if case.id == "triton-vllm-half" else case.kind)


def test_every_engine_is_found_by_its_process() -> None:
    """There is a command line here for every engine that ships, and a pattern in every adapter."""
    assert set(COMMANDS) == set(coverage.NAMES)
    assert all(registry.process_patterns(kind) for kind in coverage.engines())


@pytest.mark.parametrize("kind", coverage.NAMES)
def test_red_is_possible_only_where_usage_means_fill(kind: str) -> None:
    """Only these engines' usage may turn red: live blocks, with evictable ones counted as free."""
    semantics = registry.adapter(kind).semantics
    may_be_red = semantics.basis is Basis.OCCUPANCY and semantics.evictable is Evictable.FREE

    assert may_be_red == (kind in ("vllm", "sglang", "trtllm", "triton", "lightllm"))
