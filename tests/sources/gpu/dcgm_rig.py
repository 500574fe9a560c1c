"""A DCGM source with its real worker process, on a stand-in for the vendor's bindings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvwatch.model.gpu import GpuState, HostGpus
from kvwatch.model.settings import GpuSettings
from kvwatch.sources.gpu.dcgm import DcgmSource
from tests.fakes.dcgm import BINDINGS, Scenario, listening

MIB = 1024**2


class Rig:
    """A scenario, an address where something listens, and the sources started on them."""

    def __init__(self, directory: Path, address: str) -> None:
        self.directory = directory
        self.address = address
        self.scenario = Scenario(directory / "scenario.json")
        self.sources: list[DcgmSource] = []

    def start(self, **options: object) -> DcgmSource:
        """A source that ticks five times as fast as the real one."""
        self.scenario.write()
        settings = GpuSettings(dcgm_address=self.address)
        options = {"period_s": 0.2, **options}
        directory = self.directory
        source = DcgmSource(
            settings,
            runtime_dir=directory / "run",
            state_dir=directory / "state",
            **options,  # type: ignore[arg-type]
        )
        self.sources.append(source)
        return source


@contextmanager
def rigged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A fresh rig; afterwards no worker is left."""
    monkeypatch.setenv("KVWATCH_DCGM_BINDINGS", str(BINDINGS))
    monkeypatch.setenv("KVWATCH_FAKE_DCGM", str(tmp_path / "scenario.json"))
    with listening() as address:
        rig = Rig(tmp_path, address)
        yield rig
        for source in rig.sources:
            source.close()
            assert source.worker_pid is None


def first(host: HostGpus) -> GpuState:
    return host.gpus[0]
