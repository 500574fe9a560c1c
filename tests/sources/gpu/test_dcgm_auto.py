"""`gpus.source`: what each kind makes, and what stands in for NVML, with real workers and servers."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvwatch.model.gpu import GpuHealth, GpuMemory, GpuState, HostGpus
from kvwatch.model.sample import FailureKind
from kvwatch.model.settings import GpuSettings, GpuSourceKind
from kvwatch.sources.base import Source, SourceError
from kvwatch.sources.gpu import choose
from kvwatch.sources.gpu.choose import AutoSource, Patience, fill, wants_help
from kvwatch.sources.gpu.dcgm import DcgmSource
from kvwatch.sources.gpu.dcgm_exporter import DcgmExporterSource
from kvwatch.sources.gpu.nvml import NvmlSource
from tests.fakes.dcgm import BINDINGS, Scenario, listening, uuid_of
from tests.fakes.dcgm.exporter import Board, page
from tests.sources.gpu.rig import Rig
from tests.sources.loopback import always, answer, serving

GIB = 1024**3
NOWHERE = "127.0.0.1:9"  # discard: nobody listens there


class Host:
    """What a host has: settings that name what is there, and the sources made of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.dcgm = Scenario(directory / "dcgm.json")
        self.dcgm.write()
        self.sources: list[Source[HostGpus]] = []

    def create(
        self,
        kind: GpuSourceKind = GpuSourceKind.AUTO,
        *,
        engine: str = NOWHERE,
        exporter: str = NOWHERE,
        **patience: float,
    ) -> Source[HostGpus]:
        settings = GpuSettings(
            source=kind, dcgm_address=engine, dcgm_exporter_url=f"http://{exporter}/metrics"
        )
        source = choose.create(
            settings,
            runtime_dir=self.directory / "run",
            state_dir=self.directory / "state",
            patience=Patience(**patience),
        )
        self.sources.append(source)
        return source

    def close(self) -> None:
        for source in self.sources:
            source.close()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host whose DCGM bindings are the stand-in; what it has of NVML is up to the test."""
    monkeypatch.setenv("KVWATCH_DCGM_BINDINGS", str(BINDINGS))
    monkeypatch.setenv("KVWATCH_FAKE_DCGM", str(tmp_path / "dcgm.json"))
    host = Host(tmp_path)
    yield host
    host.close()


@pytest.fixture
def no_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that finds a libnvidia-ml.so.1 which is none, whatever the machine has."""
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "libnvidia-ml.so.1").write_bytes(b"no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))


def until(
    source: Source[HostGpus], condition: Callable[[HostGpus], bool], timeout_s: float = 30.0
) -> HostGpus:
    """Poll until a value meets the condition; errors on the way are passed over."""
    deadline_s, last = time.monotonic() + timeout_s, None
    while time.monotonic() < deadline_s:
        try:
            last = source.poll()
        except SourceError as error:
            last = error
            continue
        if condition(last):
            return last
    raise AssertionError(f"not within {timeout_s} s; last: {last!r}")


def by(name: str) -> Callable[[HostGpus], bool]:
    """Condition: every GPU has memory and was reported by this source."""
    return lambda host: (
        bool(host.gpus) and all(gpu.reported_by == name and gpu.memory is not None for gpu in host.gpus)
    )


@pytest.mark.parametrize(
    ("kind", "made", "name"),
    [
        (GpuSourceKind.NVML, NvmlSource, "nvml"),
        (GpuSourceKind.DCGM, DcgmSource, "dcgm"),
        (GpuSourceKind.DCGM_EXPORTER, DcgmExporterSource, "dcgm_exporter"),
        (GpuSourceKind.AUTO, AutoSource, "nvml"),
    ],
)
def test_each_kind_makes_its_source(host: Host, kind: GpuSourceKind, made: type, name: str) -> None:
    """The kinds of the configuration make sources under the contract's names, and start nothing yet."""
    source = host.create(kind)

    assert isinstance(source, made)
    assert source.name == name


def test_none_makes_no_source(host: Host) -> None:
    """`none` is the caller's to handle, and says so."""
    with pytest.raises(ValueError, match="none"):
        host.create(GpuSourceKind.NONE)


@pytest.mark.usefixtures("no_nvml")
def test_without_nvml_dcgm_serves(host: Host) -> None:
    """NVML cannot be loaded and an engine runs: DCGM's values come, each saying so."""
    with listening() as engine:
        source = host.create(engine=engine)
        gpu = until(source, by("dcgm")).gpus[0]
        source.close()

    assert gpu.uuid == uuid_of(0)


@pytest.mark.usefixtures("no_nvml")
def test_without_nvml_and_dcgm_the_exporter_serves(host: Host) -> None:
    """Neither NVML nor an engine, but a page: its values come."""
    with serving(always(answer(page("4.4", [Board(0)])))) as server:
        until(host.create(exporter=f"127.0.0.1:{server.port}"), by("dcgm_exporter"))
        host.close()


@pytest.mark.usefixtures("no_nvml")
def test_with_nothing_the_error_is_nvmls_own(host: Host) -> None:
    """Nothing to read GPUs from is a failure that names the driver, and no DCGM worker is started."""
    source = host.create()
    with pytest.raises(SourceError) as caught:
        source.poll()

    assert caught.value.failure.kind is FailureKind.NO_DRIVER
    assert host.dcgm.calls() == []


@pytest.mark.usefixtures("no_nvml")
def test_case_G12_lost_engine_is_followed_by_the_page(host: Host) -> None:
    """A stand-in that only fails is given up for the next one."""
    host.dcgm.write(errors={"dcgmConnect_v2": -21})
    with serving(always(answer(page("4.4", [Board(0)])))) as server, listening() as engine:
        exporter = f"127.0.0.1:{server.port}"
        source = host.create(engine=engine, exporter=exporter, give_up_s=1.0, look_again_s=0.0)
        until(source, by("dcgm_exporter"))
        host.close()


def test_stand_ins_are_what_listens_the_best_first(host: Host) -> None:
    """An engine before a page, and nothing where nobody listens."""
    with listening() as engine, listening() as exporter:
        both = GpuSettings(dcgm_address=engine, dcgm_exporter_url=f"http://{exporter}/metrics")
        assert choose.stand_ins(both) == [GpuSourceKind.DCGM, GpuSourceKind.DCGM_EXPORTER]
    assert choose.stand_ins(both) == []


@pytest.mark.needs("gcc")
def test_auto_reads_nvml_and_starts_no_dcgm_worker(host: Host, rig: Rig) -> None:
    """While NVML gives everything, a running engine costs nothing: no connection is made to it."""
    rig.scenario.write()
    with listening() as engine:
        source = host.create(engine=engine)
        for _ in range(4):
            until(source, by("nvml"))

    assert host.dcgm.calls() == []


@pytest.mark.needs("gcc")
def test_case_E8_hanging_nvml_is_stood_in_for_and_taken_back(host: Host, rig: Rig) -> None:
    """NVML hangs: DCGM serves within seconds, without a gap; NVML returns: its values are back."""
    rig.scenario.write()
    with listening() as engine:
        source = host.create(engine=engine, retry_nvml_s=1.0)
        until(source, by("nvml"))
        rig.scenario.hang().write()
        until(source, by("dcgm"))
        times = []
        for _ in range(4):
            until(source, by("dcgm"))
            times.append(time.monotonic())
        rig.scenario.healed().write()
        until(source, by("nvml"))
        source.close()

    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 2.5


@pytest.mark.needs("gcc")
def test_denied_gpu_is_filled_from_dcgm(host: Host, rig: Rig) -> None:
    """A GPU that NVML may not open is read through the engine, which runs as root; the others stay NVML's."""
    rig.scenario.gpus = 2
    rig.scenario.error(0, "nvmlDeviceGetHandleByIndex_v2", 4).error(0, "nvmlDeviceGetUUID", 4).write()
    state = rig.directory / "state"
    state.mkdir()
    known = {uuid_of(0): {"index": 0, "name": "NVIDIA H200"}}
    (state / "inventory.json").write_text(json.dumps({"v": 1, "gpus": known}))
    with listening() as engine:
        source = host.create(engine=engine, help_after_s=0.0)
        gpus = until(source, lambda host: any(gpu.reported_by == "dcgm" for gpu in host.gpus)).gpus
        source.close()

    assert {gpu.index: gpu.reported_by for gpu in gpus} == {0: "dcgm", 1: "nvml"}
    assert all(gpu.memory is not None for gpu in gpus)


@pytest.mark.needs("gcc")
@pytest.mark.parametrize("end", [{"errors": {"dcgmEntitiesGetLatestValues": -21}}, {"hang": True}])
def test_case_G12_engine_that_dies_or_hangs_costs_nvml_nothing(
    host: Host, rig: Rig, end: dict[str, object]
) -> None:
    """DCGM helped with a denied GPU and ends: NVML's readings go on in their rhythm, the help goes."""
    rig.scenario.gpus = 2
    rig.scenario.error(0, "nvmlDeviceGetMemoryInfo_v2", 4).memory(1, 5 * GIB).write()
    with listening() as engine:
        source = host.create(engine=engine, help_after_s=0.0)
        until(source, lambda found: any(gpu.reported_by == "dcgm" for gpu in found.gpus))
        host.dcgm.write(**end)
        rig.scenario.memory(1, 6 * GIB).write()
        times, helped = [time.monotonic()], True
        while helped:
            found = source.poll()
            times.append(time.monotonic())
            helped = any(gpu.memory is not None for gpu in found.gpus if gpu.index == 0)
            assert times[-1] - times[0] < 30
        source.close()

    nvml = next(gpu for gpu in found.gpus if gpu.index == 1)
    assert (nvml.reported_by, nvml.memory and nvml.memory.used_bytes) == ("nvml", 6 * GIB)
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 2.0


@pytest.mark.usefixtures("no_nvml")
def test_maintenance_lets_go_of_the_stand_in_too(host: Host) -> None:
    """Paused, neither is read and the failure is "paused"; resumed, the stand-in serves again."""
    with listening() as engine:
        source = host.create(engine=engine)
        assert isinstance(source, AutoSource)
        until(source, by("dcgm"))
        assert source.pause() is True
        with pytest.raises(SourceError) as caught:
            source.poll()
        connects = sum(" connect " in line for line in host.dcgm.calls())
        source.resume()
        until(source, by("dcgm"))
        source.close()

    assert caught.value.failure.kind is FailureKind.PAUSED
    assert sum(" connect " in line for line in host.dcgm.calls()) == connects + 1


MEMORY = GpuMemory(total_bytes=140 * GIB, used_bytes=GIB, free_bytes=139 * GIB)


def test_fill_never_replaces_what_nvml_said() -> None:
    """Only gaps are filled, only from the same UUID, and never for a GPU that NVML calls lost."""
    nvml = HostGpus(
        gpus=(
            GpuState(uuid="a", index=0, memory=MEMORY, power_watts=100.0),
            GpuState(uuid="b", index=1, health=GpuHealth.LOST),
            GpuState(uuid="c", index=2, health=GpuHealth.DENIED, xid_events_total=((79, 1),)),
        )
    )
    extra = HostGpus(
        gpus=tuple(
            GpuState(
                uuid=uuid, index=7, memory=MEMORY, power_watts=50.0, energy_joules=5.0, reported_by="dcgm"
            )
            for uuid in "abc"
        )
    )

    well, lost, denied = fill(nvml, extra).gpus

    assert (well.power_watts, well.energy_joules, well.reported_by) == (100.0, 5.0, "nvml")
    assert (lost.memory, lost.power_watts) == (None, None)
    assert (denied.memory, denied.reported_by, denied.index) == (MEMORY, "dcgm", 2)
    assert denied.xid_events_total == ((79, 1),)


def test_only_what_nvml_may_not_read_wants_help() -> None:
    """A lost GPU and a MIG parent without memory are no reason to start DCGM; a denied one is."""
    denied = GpuState(uuid="a", index=0, health=GpuHealth.DENIED)
    lost = GpuState(uuid="a", index=0, health=GpuHealth.LOST)
    parent = GpuState(uuid="a", index=0, is_mig_parent=True)

    assert wants_help(denied)
    assert not wants_help(lost)
    assert not wants_help(parent)
    assert not wants_help(GpuState(uuid="a", index=0, memory=MEMORY))
