"""Texts with units to numbers, and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.config import units
from kvwatch.config.findings import Reject

PARSERS = (
    units.duration_s,
    units.size_bytes,
    units.ratio,
    units.share,
    units.number,
    units.integer,
    units.listen_address,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("200ms", 0.2),
        ("1s", 1.0),
        ("5m", 300.0),
        ("1h", 3600.0),
        ("1m30s", 90.0),
        ("1h1m1s1ms", 3661.001),
        ("1.5s", 1.5),
        ("0s", 0.0),
        ("5m5ms", 300.005),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    """Durations are whole or broken numbers with units, the larger ones first."""
    assert units.duration_s(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "5", "s", "5 s", "-5s", "5S", "5sec", "1s1m", "1s1s", "٣s", "1e3s", "infs", "9999999h", "1" * 40],
)
def test_bad_durations(text: str) -> None:
    """Anything else is refused, other alphabets' digits and absurd lengths too."""
    with pytest.raises(Reject):
        units.duration_s(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * 2**20),
        ("2GiB", 2**31),
        ("80GB", 80 * 10**9),
        ("0.5KiB", 512),
        ("7B", 7),
        ("1TiB", 2**40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    """Binary and decimal units are told apart."""
    assert units.size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "5", "2G", "2gib", "2 GiB", "-1GiB", "GiB", "9999999TiB"])
def test_bad_sizes(text: str) -> None:
    """Sizes without a unit, with an ambiguous one, or beyond reason are refused."""
    with pytest.raises(Reject):
        units.size_bytes(text)


@pytest.mark.parametrize(
    ("text", "value"), [("0.7", 0.7), ("70%", 0.7), ("1", 1.0), ("0%", 0.0), (".5", 0.5)]
)
def test_ratios(text: str, value: float) -> None:
    """A ratio is written as such or as a percentage."""
    assert units.ratio(text) == value


@pytest.mark.parametrize("text", ["70", "101%", "-1%", "nan", ".inf", "1.1", "half", "", "%", "1%%"])
def test_bad_ratios(text: str) -> None:
    """Outside 0 to 1, or no number, is refused."""
    with pytest.raises(Reject):
        units.ratio(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9843", ("127.0.0.1", 9843)),
        ("[::1]:9843", ("::1", 9843)),
        ("localhost:1", ("localhost", 1)),
        (":9843", ("0.0.0.0", 9843)),
        ("[::]:0", ("::", 0)),
    ],
)
def test_listen_addresses(text: str, address: tuple[str, int]) -> None:
    """IPv4, IPv6 in brackets, names, and all addresses."""
    assert units.listen_address(text) == address


@pytest.mark.parametrize(
    "text", ["", "9843", "127.0.0.1:", "::1:9843", "[]:1", "[x]:1", "a b:1", "h:65536", "h:-1"]
)
def test_bad_listen_addresses(text: str) -> None:
    """A missing port, a bare IPv6 address and ports out of range are refused."""
    with pytest.raises(Reject):
        units.listen_address(text)


@given(st.integers(0, int(units.MAX_SECONDS * 1000)))
def test_durations_survive_being_shown(milliseconds: int) -> None:
    """What show_duration writes is read back as the same duration."""
    assert units.duration_s(units.show_duration(milliseconds / 1000)) == pytest.approx(
        milliseconds / 1000, abs=1e-6
    )


@given(st.integers(0, units.MAX_BYTES))
def test_sizes_survive_being_shown(size: int) -> None:
    """What show_size writes is read back as the same size (to a float's precision)."""
    assert units.size_bytes(units.show_size(size)) == pytest.approx(size, rel=1e-12)


@given(st.text(max_size=80) | st.from_regex(r"[-+]?[0-9.eE]{0,50}(ms|s|%|GiB)?", fullmatch=True))
def test_parsers_refuse_and_never_break(text: str) -> None:
    """Any text is either read as something finite or refused with a sentence on one line."""
    for parse in PARSERS:
        value, refusal = _either(parse, text)

        assert refusal.isprintable()
        assert refusal or isinstance(value, tuple) or math.isfinite(value)


def _either(parse: Callable[[str], Any], text: str) -> tuple[Any, str]:
    try:
        return parse(text), ""
    except Reject as error:
        return None, str(error)
