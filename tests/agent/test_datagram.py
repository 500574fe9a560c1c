"""The datagram: what goes in comes out, and nothing else comes in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.wire_datagram import MAX_BYTES, MAX_DEPTH, DatagramError, decode
from tests.agent.build import agent, allocator, arena, encode


def record(**change: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode(agent(), 12.5))
    return found | change


def dumped(**change: Any) -> bytes:
    return json.dumps(record(**change)).encode()


def part(name: str, **change: Any) -> bytes:
    whole = record()
    whole[name] |= change
    return json.dumps(whole).encode()


def test_round_trip() -> None:
    """A state comes out as it went in, with its time."""
    found = decode(encode(agent(), 12.5))

    assert found.state == agent()
    assert found.mono_s == 12.5


def test_names_of_the_contract() -> None:
    """The names outside are those of the contract, PyTorch's own among them."""
    found = record()

    assert {"v", "server", "engine", "rank", "pid", "seq", "mono_s", "gpu_uuid"} <= found.keys()
    assert {"largest_free_bytes", "releasable_bytes", "num_alloc_retries"} <= found["allocator"].keys()
    assert found["allocator"]["reserved_bytes.all.current"] == 10 << 30
    assert {"num_blocks", "free_blocks", "evictable_blocks", "block_size", "tokens"} <= found["kv"].keys()
    assert found["kv"]["bytes_per_block"] == 1 << 20
    assert found["scheduler"] == {"running": 5, "waiting": 2, "max_running": 16, "effective_max_running": 8}


def test_absent_is_not_zero() -> None:
    """What is not known is left out, and comes back as not known."""
    found = decode(encode(agent(kv=None, scheduler=None, allocator=allocator(num_ooms=None)), 1.0)).state

    assert found.kv is None
    assert found.scheduler is None
    assert found.allocator is not None
    assert found.allocator.num_ooms is None


def test_fits() -> None:
    """However many arenas and however long the texts, what is sent is small enough to be taken."""
    arenas = tuple(arena(name="x" * 500, reserved_bytes=2**53) for _ in range(40))
    content = encode(agent(allocator=allocator(arenas=arenas), limits="[{" * 400), 1.0)

    assert len(content) <= MAX_BYTES
    assert decode(content).state.allocator is not None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b"[" * 5000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b" " * (MAX_BYTES + 1),
        dumped(v=2),
        dumped(v=True),
        dumped(server="../../etc"),
        dumped(server="chat\n"),
        dumped(server=7),
        dumped(engine=-1),
        dumped(engine="0"),
        dumped(rank=2**40),
        dumped(pid=0),
        dumped(seq=-1),
        dumped(seq=1.5),
        dumped(seq=2**60),
        dumped(mono_s=-1),
        dumped(mono_s=True),
        dumped(gpu_uuid="x" * 500),
        dumped(gpu_uuid="\u001b[31m"),
        dumped(kv=[]),
        dumped(allocator=None, kv=None, scheduler=None),
        part("kv", num_blocks=-1),
        part("kv", free_blocks=101),
        part("kv", tokens=1.5),
        part("kv", bytes_per_block=2**52),
        part("allocator", num_ooms=-3),
        part("allocator", soft_ratio=1.5),
        part("allocator", soft_ratio="0.5"),
        part("allocator", arenas=[{}]),
        part("allocator", arenas=[{"name": "x"}] * 100),
        part("scheduler", running=2**60),
        dumped().replace(b'"soft_ratio": 0.2', b'"soft_ratio": NaN'),
        dumped().replace(b'"soft_ratio": 0.2', b'"soft_ratio": Infinity'),
        dumped().replace(b'"soft_ratio": 0.2', b'"soft_ratio": 1e999'),
        dumped().replace(b'"mono_s": 12.5', b'"mono_s": 1e400'),
        dumped().replace(b'"seq": 1,', b'"seq": ' + b"9" * 6000 + b","),
    ],
    ids=lambda content: repr(content[:40]),
)
def test_refused(content: bytes) -> None:
    """What is not exactly a datagram is refused in the one declared way."""
    with pytest.raises(DatagramError):
        decode(content)


def test_depth() -> None:
    """Nesting up to the bound is read, one more is not."""

    def nested(levels: int) -> bytes:
        deep: Any = 1
        for _ in range(levels - 1):
            deep = [deep]
        return dumped(extra=deep)

    assert decode(nested(MAX_DEPTH)).state.server == "chat"
    with pytest.raises(DatagramError):
        decode(nested(MAX_DEPTH + 1))


def test_later_names_are_let_through() -> None:
    """A newer agent may tell more: unknown names are ignored."""
    assert decode(dumped(tomorrow=1)).state == agent()


@given(st.binary(max_size=400))
def test_random_bytes(content: bytes) -> None:
    """Random bytes raise nothing but the declared error."""
    with pytest.raises(DatagramError):
        decode(content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(record())), JSON)
def test_any_value_in_any_place(key: str, value: Any) -> None:
    """A field of any type and size is taken as a sane value or refused."""
    content = json.dumps(record(**{key: value})).encode()
    try:
        found = decode(content).state
    except DatagramError:
        return
    assert found.rank >= 0
    assert found.seq >= 0
    kv = found.kv
    assert kv is None or kv.used_blocks is None or kv.used_blocks >= 0
