"""The fake NVML library, built once, and a rig on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml import build
from tests.sources.gpu.rig import Rig


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the fake libnvidia-ml.so.1."""
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def rig(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A fresh rig; afterwards every source is closed and every worker gone."""
    rig = Rig(nvml_library, tmp_path, monkeypatch)
    yield rig
    rig.close()
