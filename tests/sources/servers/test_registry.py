"""Adapters are found by module name alone; polling, optional pages, and `auto`."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import kvwatch.sources.servers as package
from kvwatch.model.sample import FailureKind
from kvwatch.model.settings import ServerSettings
from kvwatch.sources.base import SourceError
from kvwatch.sources.servers import auto, registry
from kvwatch.sources.servers.base import PolledServer
from tests.sources.loopback import Handler, Peer, always, answer, pages, serving
from tests.sources.servers import recorded

MADE_UP = '''
"""A made-up engine."""
import re
from kvwatch.model.server import EngineState, SchedulerState, Semantics, ServerState
from kvwatch.sources.servers.base import Adapter, Clue, Endpoint, not_expected

def parse(pages, settings):
    if not pages["status"].isdigit():
        raise not_expected(pages["status"], "number", "use a real one")
    state = EngineState(scheduler=SchedulerState(running=int(pages["status"])))
    return ServerState(kind="madeup", semantics=Semantics(note="made up"), engines=(state,))

ADAPTER = Adapter(
    kind="madeup", parse=parse, semantics=Semantics(note="made up"), processes=("^madeup-server",),
    endpoints=(Endpoint(name="status", path="/status"),),
    clues=(Clue(path="/status", body=re.compile(rb"^[0-9]+$")),),
)
'''
GAUGES = b'vllm:num_requests_running{engine="0",model_name="m"} 3\n'


def settings_for(url: str, kind: str = "vllm", **options: object) -> ServerSettings:
    return ServerSettings(name="chat", kind=kind, url=url, timeout_s=5.0, **options)  # type: ignore[arg-type]


def test_engine_dropped_in_as_one_file_is_found_and_gone_when_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One new module is enough for kinds, sources, `auto` and process patterns; removing it removes them."""
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    module = tmp_path / "madeup.py"
    module.write_text(MADE_UP)
    importlib.invalidate_caches()
    try:
        assert "madeup" in registry.kinds()
        assert "madeup" in registry.known_kinds()
        assert registry.process_patterns("madeup") == ("^madeup-server",)
        assert "^madeup-server" in registry.process_patterns("auto")
        with serving(pages({"/status": b"7"})) as server:
            for kind in ("madeup", "auto"):
                source = registry.create(settings_for(server.url, kind))
                assert source.poll().engines[0].scheduler.running == 7
                source.close()
        module.unlink()

        assert "madeup" not in registry.kinds()
        with pytest.raises(SourceError, match="unknown"):
            registry.create(settings_for("http://127.0.0.1:1", "madeup"))
    finally:
        sys.modules.pop("kvwatch.sources.servers.madeup", None)


def test_kinds_of_the_contract_without_adapter_say_so() -> None:
    """A kind that is promised but not here yet is one clear error with a way out."""
    missing = [kind for kind in registry.CONTRACT_KINDS if kind not in registry.kinds()]
    for kind in missing:
        with pytest.raises(SourceError, match=r"not supported yet.*mapped"):
            registry.create(settings_for("http://127.0.0.1:1", kind))
        assert registry.process_patterns(kind) == ()


def test_asking_for_kinds_imports_no_adapter() -> None:
    """Listing kinds costs no import of theirs."""
    code = (
        "import sys; from kvwatch.sources.servers import registry; registry.kinds(); "
        "print([m for m in sys.modules if m.startswith('kvwatch.sources.servers.') "
        "and m.rsplit('.', 1)[1] in registry.kinds()])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )

    assert done.stdout.strip() == "[]"


def test_rare_endpoint_is_asked_rarely_and_again_after_a_failure() -> None:
    """/version is asked once in ten minutes, and anew when the server was away."""
    healthy, now_s = [True], [0.0]

    def handle(peer: Peer) -> None:
        while request := peer.request():
            asked.append(request.split()[1])
            body = GAUGES if asked[-1] == b"/metrics" else b'{"version":"0.32.0"}'
            peer.send(answer(body) if healthy[0] else answer(b"", "500 No"))

    asked: list[bytes] = []
    with serving(handle) as server:
        source = PolledServer(registry.adapter("vllm"), settings_for(server.url), now=lambda: now_s[0])
        for now_s[0] in (0.0, 1.0, 599.0):
            assert source.poll().version == "0.32.0"
        assert asked.count(b"/version") == 1
        now_s[0] = 601.0
        source.poll()
        assert asked.count(b"/version") == 2
        healthy[0] = False
        with pytest.raises(SourceError):
            source.poll()
        healthy[0] = True
        source.poll()
        source.close()

    assert asked.count(b"/version") == 3


def test_missing_optional_endpoint_costs_nothing() -> None:
    """A server without /version is up all the same."""
    with serving(pages({"/metrics": GAUGES})) as server:
        source = registry.create(settings_for(server.url))
        state = source.poll()
        source.close()

    assert (state.version, state.engines[0].scheduler.running) == ("", 3)


def test_metrics_path_is_configurable() -> None:
    """`metrics_path` replaces /metrics, with or without the slash."""
    with serving(pages({"/v1/metrics": GAUGES})) as server:
        for path in ("/v1/metrics", "v1/metrics"):
            source = registry.create(settings_for(server.url, metrics_path=path))
            assert source.poll().engines
            source.close()


def test_case_H5_wrong_page_and_missing_path() -> None:
    """A 200 with HTML and a 404 are both "not that engine", with what to check."""
    cases: list[tuple[Handler, str]] = [
        (always(answer(b"<html>hello</html>")), "HTML"),
        (pages({}), "switched on"),
    ]
    for handler, part in cases:
        with serving(handler) as server:
            source = registry.create(settings_for(server.url))
            with pytest.raises(SourceError) as caught:
                source.poll()
            source.close()
        assert caught.value.failure.kind is FailureKind.NOT_EXPECTED
        assert part in caught.value.failure.message


def test_case_H6_metrics_500_is_a_failure_of_this_source_alone() -> None:
    """/metrics answering 500 while inference works gives no state at all, so nothing can act on it."""
    with serving(always(answer(b"FileNotFoundError: /mnt/prom", "500 Oops"))) as server:
        source = registry.create(settings_for(server.url))
        with pytest.raises(SourceError) as caught:
            source.poll()
        source.close()

    assert caught.value.failure.kind is FailureKind.HTTP_STATUS
    assert "FileNotFoundError" in caught.value.failure.message


def test_case_A7_bandwidth_activity_is_never_memory_usage() -> None:
    """A figure of memory bandwidth is no part of a server's state: no field takes it, mapped or not."""
    with pytest.raises(SourceError, match="may have"):
        registry.adapter("mapped").parse(
            {"metrics": b"DCGM_FI_DEV_MEM_COPY_UTIL 2\n"},
            settings_for(
                "http://x", "mapped", mapping={"memory_bandwidth_activity": "DCGM_FI_DEV_MEM_COPY_UTIL"}
            ),
        )


def test_auto_forgets_after_several_failures() -> None:
    """When another engine takes over a port, `auto` finds it after five failures."""
    bodies: dict[str, bytes] = {"/metrics": GAUGES}
    with serving(pages(bodies)) as server:
        source = registry.create(settings_for(server.url, "auto"))
        assert source.poll().kind == "vllm"
        del bodies["/metrics"]
        bodies.update({"/v1/loads": recorded.page("sglang", "0.5.23", "half", "loads")})
        for _ in range(auto.FORGET_AFTER):
            with pytest.raises(SourceError):
                source.poll()
        assert source.poll().kind == "sglang"
        source.close()


def test_auto_tells_loading_from_unknown() -> None:
    """A server that is loading its model is LOADING; one that nobody knows is NOT_EXPECTED."""
    loading = answer(b'{"error":{"message":"Loading model"}}', "503 Unavailable")
    cases = [
        (always(loading), FailureKind.LOADING, "Loading"),
        (pages({}), FailureKind.NOT_EXPECTED, "mapped"),
    ]
    for handler, kind, part in cases:
        with serving(handler) as server:
            source = registry.create(settings_for(server.url, "auto"))
            with pytest.raises(SourceError) as caught:
                source.poll()
            source.close()
        assert caught.value.failure.kind is kind
        assert part in caught.value.failure.message


def test_auto_is_not_stopped_by_a_guarded_path() -> None:
    """vLLM with an API key answers 401 to every /v1 path and shows /metrics to all: `auto` still finds it."""

    def guarded(peer: Peer) -> None:
        while request := peer.request():
            path = request.split()[1]
            found = answer(GAUGES) if path == b"/metrics" else answer(b"", "404 Not Found")
            peer.send(answer(b"", "401 Unauthorized") if path.startswith(b"/v1") else found)

    with serving(guarded) as server:
        source = registry.create(settings_for(server.url, "auto"))
        assert source.poll().kind == "vllm"
        source.close()
    with serving(always(answer(b"", "401 Unauthorized"))) as server:
        source = registry.create(settings_for(server.url, "auto"))
        with pytest.raises(SourceError) as caught:
            source.poll()
        source.close()
    assert caught.value.failure.kind is FailureKind.UNAUTHORISED
