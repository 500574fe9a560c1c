"""One booted systemd for all tests of the service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.lab import Lab

CONFIG = """\
gpus: {source: none}
servers:
  - {name: chat, kind: vllm, url: "http://127.0.0.1:8000"}
"""


@pytest.fixture(scope="session")
def booted() -> Iterator[Lab]:
    """A container with kvwatch installed by `make install`."""
    with Lab() as lab:
        lab.write("/etc/kvwatch/kvwatch.yml", CONFIG)
        lab.install()
        yield lab


@pytest.fixture
def lab(booted: Lab) -> Iterator[Lab]:
    """The lab with the shipped unit, no drop-ins and the good configuration; the service runs."""
    booted.reset()
    booted.write("/etc/kvwatch/kvwatch.yml", CONFIG)
    booted.run("systemctl", "daemon-reload", check=True)
    booted.run("systemctl", "restart", "kvwatch", check=True)
    yield booted
    booted.run("systemctl", "stop", "kvwatch")
