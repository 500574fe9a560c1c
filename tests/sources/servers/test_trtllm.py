"""TensorRT-LLM: nothing is drained unasked, and leftovers of dead processes are no figures."""

from __future__ import annotations

from kvwatch.model.server import Evictable, KvCacheState, ServerState
from tests.sources.loopback import Handler, Peer, answer
from tests.sources.servers import recorded
from tests.sources.servers.reading import only, parse, poll, read, refusal

DRAINING = {"/metrics", "/perf_metrics", "/kv_cache_events"}


def noting(asked: list[str], bodies: dict[str, bytes]) -> Handler:
    def handle(peer: Peer) -> None:
        while request := peer.request():
            path = request.split()[1].decode()
            asked.append(path)
            peer.send(answer(bodies[path]) if path in bodies else answer(b"", "404 Not Found"))

    return handle


def test_blocks_limits_and_counters() -> None:
    """Blocks are disjoint and add up; the limit in force comes before the static one."""
    state = read("trtllm", "main", "busy")
    engine = only(state)

    assert (engine.kv.num_blocks, engine.kv.used_blocks, engine.kv.free_blocks) == (2048, 1536, 512)
    assert engine.kv.capacity_tokens == 2048 * 32
    assert (engine.scheduler.running, engine.scheduler.waiting, engine.scheduler.max_running) == (17, 4, 64)
    assert engine.scheduler.preemptions_total is None
    assert state.semantics.evictable is Evictable.FREE
    assert not state.semantics.destructive
    assert state.semantics.fresh_within_s >= 60


def test_draining_endpoints_are_never_asked() -> None:
    """Neither the adapter nor `auto` asks for a path whose answer takes data from other readers."""
    asked: list[str] = []
    found = recorded.Case(recorded.ROOT / "trtllm" / "main", "busy").pages()
    for bodies in ({"/prometheus/metrics": found["metrics"]}, {"/server_info": found["server_info"]}):
        for kind in ("trtllm", "auto"):
            poll(kind, noting(asked, {**bodies, "/metrics": b"[]"}))

    assert "/prometheus/metrics" in asked
    assert not DRAINING & set(asked)


def test_metrics_switched_off_says_what_to_switch_on() -> None:
    """Without return_perf_metrics the page is missing: one error that names the path."""
    failure = poll("trtllm", noting([], {"/server_info": b'{"disaggregated_params":null}'}))

    assert not isinstance(failure, ServerState)
    assert "/prometheus/metrics" in failure.message
    assert "return_perf_metrics" in refusal("trtllm", metrics=b"python_info 1\n").message


def test_gauges_of_dead_processes_are_left_out() -> None:
    """Where series with several `pid`s disagree nobody can tell which lives: unknown, with a note."""
    state = read("trtllm", "main", "dead_pid")

    assert only(state).scheduler.running is None
    assert only(state).kv == KvCacheState(num_blocks=2048, block_size_tokens=32, capacity_tokens=65536)
    assert only(state).scheduler.waiting == 4
    assert any("pid" in note for note in state.notes)


def test_equal_copies_are_one_figure() -> None:
    """Copies of a gauge that agree are not added up."""
    text = b'trtllm_num_requests_running{pid="1"} 5\ntrtllm_num_requests_running{pid="2"} 5\n'

    assert only(parse("trtllm", metrics=text)).scheduler.running == 5


def test_cold_and_old_servers_have_no_figures_yet() -> None:
    """Before the first completed request, and in 1.1, there is no KV figure; nothing is 0."""
    for version, case in (("main", "cold"), ("1.1.0rc5", "after")):
        state = read("trtllm", version, case)

        assert only(state).kv == KvCacheState()
        assert only(state).scheduler.running is None
        assert state.notes


def test_json_only_where_configured_and_declared_destructive() -> None:
    """With `metrics_path: /metrics` the newest iteration is read, and its semantics say that this drains."""
    state = read("trtllm", "json", "busy")

    assert state.semantics.destructive
    assert (only(state).scheduler.running, only(state).scheduler.steps_total) == (16, 4711)
    assert only(state).kv.usage_ratio == 0.5
    assert only(read("trtllm", "json", "idle")).kv == KvCacheState()
    assert "trtllm_" in refusal("trtllm", metrics=b"[]").message
