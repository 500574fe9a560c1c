"""A source with its real worker process on the fake NVML library, for the tests of this folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvwatch.model.gpu import GpuState, HostGpus
from kvwatch.model.sample import FailureKind
from kvwatch.model.settings import GpuSettings
from kvwatch.sources.base import Source, SourceError
from kvwatch.sources.gpu.nvml import NvmlSource
from tests.fakes.nvml import Scenario, environment

MIB = 1024**2
GIB = 1024**3


class Rig:
    """A scenario, the sources started on it, and waiting for what they say."""

    def __init__(self, library: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.monkeypatch = monkeypatch
        self.scenario = Scenario(directory / "scenario")
        self.sources: list[NvmlSource] = []
        self.use(library)

    def use(self, library: Path) -> None:
        """Let workers load this build of the fake."""
        for name, value in environment(library, self.scenario.path).items():
            self.monkeypatch.setenv(name, value)

    def start(self, settings: GpuSettings | None = None, tick_s: float = 0.2) -> NvmlSource:
        """Write the scenario and make a source; its worker starts with the first poll."""
        self.scenario.write()
        return self.start_again(settings, tick_s)

    def start_again(self, settings: GpuSettings | None = None, tick_s: float = 0.2) -> NvmlSource:
        """Make a source on the scenario as it is, with the directories of the one before."""
        source = NvmlSource(
            settings or GpuSettings(),
            runtime_dir=self.directory / "run",
            state_dir=self.directory / "state",
            tick_s=tick_s,
        )
        self.sources.append(source)
        return source

    def calls(self) -> list[tuple[float, str, int]]:
        """The call log: (monotonic seconds, function, GPU)."""
        assert self.scenario.call_log is not None
        rows = [line.split() for line in self.scenario.call_log.read_text().splitlines()]
        return [(float(row[0]), row[1], int(row[2])) for row in rows]

    def close(self) -> None:
        """End every source; no worker may be left."""
        self.scenario.healed().write()
        for source in self.sources:
            pid = source.worker_pid
            for _ in range(5):  # a worker that was hung may need a while on a busy machine
                source.close()
            assert source.worker_pid is None, f"worker {pid} did not end"


def until(
    source: Source[HostGpus], condition: Callable[[HostGpus], bool], timeout_s: float = 20.0
) -> HostGpus:
    """Poll until a value meets the condition; errors on the way are passed over."""
    deadline_s = time.monotonic() + timeout_s
    last: object = None
    while time.monotonic() < deadline_s:
        try:
            last = host = source.poll()
        except SourceError as error:
            last = error
            continue
        if condition(host):
            return host
    raise AssertionError(f"not within {timeout_s} s; last: {last!r}")


def until_error(source: Source[HostGpus], kind: FailureKind, timeout_s: float = 20.0) -> str:
    """Poll until this kind of failure; returns its message."""
    deadline_s = time.monotonic() + timeout_s
    last: object = None
    while time.monotonic() < deadline_s:
        try:
            last = source.poll()
        except SourceError as error:
            if error.failure.kind is kind:
                return error.failure.message
            last = error
    raise AssertionError(f"no {kind} within {timeout_s} s; last: {last!r}")


def after(source: NvmlSource, polls: int) -> HostGpus:
    """The value after so many good polls (a starved test machine may look stuck in between)."""
    for _ in range(polls):
        host = until(source, lambda _: True)
    return host


def by_index(host: HostGpus, index: int) -> GpuState:
    """The whole GPU of an index."""
    return next(gpu for gpu in host.gpus if gpu.index == index and not gpu.parent_uuid)


def read(host: HostGpus) -> bool:
    """Condition: every GPU has memory, a process pass and slow values."""
    return all(
        gpu.memory is not None and gpu.ledger_pass is not None and gpu.power_watts is not None
        for gpu in host.gpus
    )


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, timeout_s: float = 10.0) -> None:
    """Wait for a process that is not our child to end."""
    deadline_s = time.monotonic() + timeout_s
    while alive(pid):
        assert time.monotonic() < deadline_s, f"process {pid} is still there"
        time.sleep(0.02)
