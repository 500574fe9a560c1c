"""A host with fake GPUs for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.faulty import Host, until
from tests.fakes.nvml import build


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake NVML, built once."""
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def host(tmp_path: Path, library: Path) -> Iterator[Host]:
    """A host whose workers are let go at the end, whatever the test did."""
    made = Host(tmp_path, library)
    yield made
    made.gpus.healed().write()
    until(made.no_worker_left, "the workers' end")
