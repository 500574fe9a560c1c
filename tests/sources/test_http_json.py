"""JSON from a foreign server: a value or one clear error, in bounded time and depth."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.model.sample import FailureKind
from kvwatch.sources.base import SourceError
from kvwatch.sources.http import parse_json


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"a":' * 100, b'["\\"[[[", ' * 70 + b"1", b"[{" * 40],
    ids=["flat", "objects", "mixed", "both"],
)
def test_deep_json_is_refused_before_parsing(body: bytes) -> None:
    """Nesting over the cap is TOO_LARGE, whatever stands around it."""
    with pytest.raises(SourceError) as caught:
        parse_json(body)
    assert caught.value.failure.kind is FailureKind.TOO_LARGE


def test_brackets_in_strings_are_no_depth() -> None:
    """Text that has brackets and escaped quotes does not count as nesting."""
    assert parse_json(b'["' + b'\\"[{' * 500 + b'", NaN, Infinity]') == ['"[{' * 500, None, None]


def test_unclosed_string_costs_linear_time() -> None:
    """A megabyte of escaped quotes without an end is refused at once."""
    with pytest.raises(SourceError) as caught:
        parse_json(b'["' + b'\\"' * 500_000)
    assert caught.value.failure.kind is FailureKind.MALFORMED


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_json_reads_back(value: object) -> None:
    """What json writes is read back, at any allowed depth."""
    import json

    assert parse_json(json.dumps(value).encode()) == value


@given(body=st.binary(max_size=200))
def test_any_bytes_as_json(body: bytes) -> None:
    """Any bytes give a value or a SourceError."""
    with contextlib.suppress(SourceError):
        parse_json(body)
