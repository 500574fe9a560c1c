"""Requests as bytes, without a network."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.exporters.web_http import (
    HttpError,
    Response,
    accepts_gzip,
    head_length,
    http_date,
    parse,
    wants_openmetrics,
    wire,
)


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5", True),
        ("application/openmetrics-text;version=2.0.0", False),
        ("application/openmetrics-text;version=1.0.0;q=0.2,text/plain;q=0.5", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=x", False),
        (
            "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6,"
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
            "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;q=0.3,*/*;q=0.1",
            True,
        ),
    ],
)
def test_format_by_accept(accept: str, wanted: bool) -> None:
    """OpenMetrics is chosen when it is asked for in our version and not less than text."""
    assert wants_openmetrics(accept) is wanted


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("gzip", True),
        ("GZIP, br", True),
        ("*", True),
        ("", False),
        ("br", False),
        ("gzip;q=0", False),
        ("gzip;q=0.0, *", False),
        ("identity, *;q=0", False),
    ],
)
def test_gzip_by_accept_encoding(header: str, accepted: bool) -> None:
    """Gzip is used when it is accepted, by name or by a star."""
    assert accepts_gzip(header) is accepted


@given(
    st.binary(max_size=400)
    | st.binary(max_size=200).map(lambda b: b"GET / HTTP/1.1\r\nHost: a\r\n" + b + b"\r\n\r\n")
)
def test_any_bytes_parse_or_are_refused(data: bytes) -> None:
    """Parsing ends in a request or an HttpError, and a request's head is within the bytes."""
    with contextlib.suppress(HttpError):
        length = head_length(data)
        if length is not None:
            request = parse(data, length)
            assert 0 < length <= len(data)
            assert request.size >= length
            assert request.path.startswith("/")


@given(st.binary(max_size=100), st.integers(0, 100))
def test_searching_in_pieces_finds_the_same_end(data: bytes, cut: int) -> None:
    """Where the search goes on from an earlier piece, it finds the end that one look at everything finds."""
    whole = data + b"\r\n\r\n"
    first = whole[:cut]

    if head_length(first) is None:
        assert head_length(whole, len(first)) == head_length(whole)


def test_absolute_form_and_query() -> None:
    """A proxy's absolute form and a query are taken apart."""
    raw = b"GET http://host:1/metrics?x=1&y HTTP/1.1\r\nHost: host\r\n\r\n"
    request = parse(raw, len(raw))

    assert (request.path, request.query) == ("/metrics", "x=1&y")


def test_dates_are_in_english_and_gmt() -> None:
    """The Date header has HTTP's form whatever the locale."""
    assert http_date(784111777) == "Sun, 06 Nov 1994 08:49:37 GMT"


def test_configured_headers_replace_ours_and_stay_single() -> None:
    """A header of the web configuration is sent once, in place of the default."""
    data = wire(
        Response(headers=(("X-Frame-Options", "DENY"),)),
        wall_s=0,
        keep_alive=True,
        head_only=False,
        extra=(("X-Frame-Options", "sameorigin"),),
    )

    assert data.count(b"X-Frame-Options") == 1
    assert b"X-Frame-Options: sameorigin\r\n" in data
