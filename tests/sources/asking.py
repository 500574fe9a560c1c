"""Asking a server once with the HTTP client, for what it answers or how it fails."""

from __future__ import annotations

import pytest

from kvwatch.model.sample import FailureKind
from kvwatch.sources.base import SourceError
from kvwatch.sources.http import Deadline, HttpClient, Response

PLENTY_S = 5.0


def get(url: str, path: str = "/metrics", total_s: float = PLENTY_S, **options: object) -> Response:
    client = HttpClient(url, **options)  # type: ignore[arg-type]
    try:
        return client.get(path, deadline=Deadline(total_s))
    finally:
        client.close()


def failure(url: str, total_s: float = PLENTY_S, **options: object) -> tuple[FailureKind, str]:
    with pytest.raises(SourceError) as caught:
        get(url, total_s=total_s, **options)
    return caught.value.failure.kind, caught.value.failure.message
