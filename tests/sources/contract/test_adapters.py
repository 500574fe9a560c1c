"""What every adapter must keep to, whatever a server sends. New adapters are found by themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch.model.server import EngineState, ServerState
from kvwatch.model.settings import ServerSettings
from kvwatch.sources.base import SourceError
from kvwatch.sources.servers import registry
from tests.sources.loopback import Handler, Peer, answer, pages, serving
from tests.sources.servers import recorded

KINDS = registry.kinds()
READERS = tuple(kind for kind in KINDS if registry.adapter(kind).endpoints)
MAPPING = {"usage_ratio": "cache_used / 100", "running": 'active{pool="kv"}', "ttft": "ttft_seconds"}
HOSTILE = ('\\"}\\n', "a" * 5000, "\x00\x1b[2J", "../../etc", "\u202e\ufeff", "1e999", "None", "-1")


def settings_of(kind: str, **options: object) -> ServerSettings:
    extra = {"mapping": MAPPING} if kind == "mapped" else {}
    return ServerSettings(name="x", kind=kind, **{**extra, **options})  # type: ignore[arg-type]


@functools.cache
def good_pages(kind: str) -> dict[str, bytes]:
    """A page per endpoint that this adapter reads: recorded where there is a recording."""
    found = recorded.cases(kind)
    if found:
        return max((case.pages() for case in found), key=len)
    histogram = b'ttft_seconds_bucket{le="1"} 2\nttft_seconds_count 2\n'
    return {"metrics": b'cache_used 50\nactive{pool="kv"} 3\n' + histogram}


def parse(kind: str, bodies: dict[str, bytes]) -> ServerState | None:
    """The state, None when refused; anything but SourceError fails the test."""
    try:
        state = registry.adapter(kind).parse(bodies, settings_of(kind, kv_unified=False))
    except SourceError as error:
        message = error.failure.message
        assert message.isprintable()
        assert 10 < len(message) < 600
        return None
    assert_sane(state)
    return state


def numbers(value: object, path: str = "") -> Iterator[tuple[str, float]]:
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from numbers(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def assert_sane(state: ServerState) -> None:
    """What the rest of kvwatch may rely on."""
    names = [engine.engine for engine in state.engines]
    assert len(names) == len(set(names))
    for text in (*names, state.model, state.version, *state.notes):
        assert text.isprintable()
        assert len(text) <= 400
    for engine in state.engines:
        assert_engine_sane(engine)


def assert_engine_sane(engine: EngineState) -> None:
    for part in (engine.kv, engine.scheduler):
        for path, number in numbers(part):
            assert not math.isnan(number), path
            assert 0 <= number < 2**63, path
    kv = engine.kv
    assert kv.usage_ratio is None or 0 <= kv.usage_ratio <= 1
    parts = (kv.used_blocks, kv.free_blocks)
    if kv.num_blocks is not None and None not in parts:
        assert sum(part or 0 for part in (*parts, kv.evictable_blocks)) <= kv.num_blocks


@pytest.mark.parametrize("kind", KINDS)
def test_adapter_declares_what_it_must(kind: str) -> None:
    """Kind and module name agree, patterns compile, a mapped or automatic one aside it can be recognised."""
    adapter = registry.adapter(kind)

    assert adapter.kind == kind
    assert adapter.semantics.note
    for pattern in registry.process_patterns(kind):
        re.compile(pattern)
    assert all(endpoint.path.startswith("/") for endpoint in adapter.endpoints)
    if kind not in ("auto", "mapped"):
        assert adapter.processes
        assert adapter.clues


@pytest.mark.parametrize("kind", KINDS)
def test_source_has_the_contract_name_and_times(kind: str) -> None:
    """Every source is called server/<name>, takes its times from the settings, and touches no network yet."""
    source = registry.create(settings_of(kind, period_s=3.0, timeout_s=0.5, url="http://127.0.0.1:1"))

    assert (source.name, source.period_s, source.expected_period_s, source.deadline_s) == (
        "server/x",
        3.0,
        3.0,
        0.5,
    )
    source.close()


@pytest.mark.parametrize("kind", READERS)
def test_good_page_is_read(kind: str) -> None:
    """The pages this suite begins with are good ones, so that the rest of it means something."""
    state = parse(kind, good_pages(kind))

    assert state is not None
    assert state.kind == kind
    assert state.engines


@pytest.mark.parametrize("kind", READERS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_random_bytes(kind: str, data: st.DataObject) -> None:
    """Random bytes at any endpoint are refused or give nothing insane."""
    names = [endpoint.name for endpoint in registry.adapter(kind).endpoints]
    bodies = data.draw(st.fixed_dictionaries({name: st.binary(max_size=200) for name in names}))

    parse(kind, bodies)


@pytest.mark.parametrize("kind", READERS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_pages(kind: str, data: st.DataObject) -> None:
    """A page cut anywhere, or with a stretch overwritten, is refused or gives nothing insane."""
    bodies = good_pages(kind)
    name = data.draw(st.sampled_from(sorted(bodies)))
    body = bodies[name]
    at = data.draw(st.integers(0, len(body)))
    junk = data.draw(st.one_of(st.none(), st.binary(max_size=30)))
    damaged = body[:at] if junk is None else body[:at] + junk + body[at + len(junk) :]

    parse(kind, {**bodies, name: damaged})


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    "body", [b"", b"\n", b"{}", b"[]", b"null", b"[" * 200_000, b"<html></html>"], ids=repr
)
def test_empty_foreign_and_deep_pages_are_refused(kind: str, body: bytes) -> None:
    """Pages without content, of another kind, or nested without end are SourceErrors everywhere."""
    endpoints = registry.adapter(kind).endpoints

    assert parse(kind, {endpoint.name: body for endpoint in endpoints}) is None


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_label_values(kind: str, value: str) -> None:
    """Names, engines and models are foreign text, and come out printable and short or not at all."""
    hostile = rb"\1=" + json.dumps(value, ensure_ascii=False).encode().replace(b"\\", b"\\\\")
    label = re.compile(rb'\b(model_name|engine|dp_rank|version|model_alias)="[^"]*"')
    bodies = {name: label.sub(hostile, body) for name, body in good_pages(kind).items()}

    parse(kind, bodies)


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("number", ["NaN", "-1", "+Inf", "9.3e18", "N/A", "1e400", "true"])
def test_absent_stays_none(kind: str, number: str) -> None:
    """When every figure is replaced by a word for "not known", none comes out as 0 or as itself."""
    bodies = {}
    for name, body in good_pages(kind).items():
        text = re.sub(r"(?m)(?<=[} ])[-+0-9.e]+$", number, body.decode())
        bodies[name] = text.encode() if name == "metrics" else body
    without = {name: body for name, body in bodies.items() if name == "metrics"}
    state = parse(kind, without if len(bodies) == 1 or kind == "sglang" else bodies)

    for engine in state.engines if state and kind in ("vllm", "mapped") else ():
        assert engine.kv.usage_ratio is None
        assert engine.scheduler.running is None


@pytest.mark.parametrize("kind", READERS)
def test_parsing_keeps_no_state(kind: str) -> None:
    """A page reads the same whatever was read before: counters may go back, pages may be foreign."""
    first = parse(kind, good_pages(kind))
    for case in recorded.cases(kind):
        parse(kind, case.pages())
    parse(kind, {endpoint.name: b"junk" for endpoint in registry.adapter(kind).endpoints})

    assert parse(kind, good_pages(kind)) == first


def answering(kind: str) -> dict[str, bytes]:
    bodies = good_pages(kind)
    return {e.path: bodies[e.name] for e in registry.adapter(kind).endpoints if e.name in bodies}


@pytest.mark.parametrize("kind", READERS)
def test_faults_leave_nothing_behind(kind: str) -> None:
    """Servers that hang up, drip, talk nonsense or answer 500 cost an error, no thread, no descriptor."""

    def drip(peer: Peer) -> None:
        peer.request()
        peer.drip(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000)

    def reply(data: bytes) -> Handler:
        def handle(peer: Peer) -> None:
            peer.request()
            peer.send(data)

        return handle

    def counts() -> tuple[int, int]:
        return threading.active_count(), sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = counts()
    faults = [
        drip,
        reply(b""),
        reply(b"junk"),
        reply(answer(b"x", "500 No")),
        reply(answer(b"<html>")),
        reply(answer(b"y" * 2**23 + b"y")),
    ]
    for fault in faults:
        with serving(fault) as server:
            source = registry.create(settings_of(kind, url=server.url, timeout_s=0.3))
            with pytest.raises(SourceError):
                source.poll()
            source.close()

    assert counts() == before


@pytest.mark.parametrize("kind", READERS)
def test_polling_over_a_real_connection(kind: str) -> None:
    """A source reads its server over one connection, and works again after the server came back."""
    with serving(pages(answering(kind))) as server:
        source = registry.create(settings_of(kind, url=server.url, timeout_s=5.0, kv_unified=False))
        first, second = source.poll(), source.poll()

        assert first == second
        assert server.connections == 1
    with contextlib.suppress(SourceError):
        source.poll()
    source.close()


@pytest.mark.parametrize("kind", [kind for kind in READERS if registry.adapter(kind).clues])
def test_auto_recognises_each_kind(kind: str) -> None:
    """`auto` finds every engine that has clues, by the pages that engine really serves."""
    with serving(pages(answering(kind))) as server:
        source = registry.create(settings_of("auto", url=server.url, timeout_s=5.0))
        state = source.poll()
        source.close()

    assert state.kind == kind


@pytest.mark.parametrize("kind", KINDS)
def test_refused_connection_is_told_as_such(kind: str) -> None:
    """With nobody listening, every kind says so, and not that a page lacks something."""
    source = registry.create(settings_of(kind, url="http://127.0.0.1:1", timeout_s=1.0))
    with pytest.raises(SourceError) as caught:
        source.poll()
    source.close()

    assert caught.value.failure.kind == "refused"
