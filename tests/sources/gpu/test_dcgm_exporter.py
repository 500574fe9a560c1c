"""The dcgm-exporter source against a real server with pages in the form of every major version."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvwatch.model.gpu import Accounting, GpuHealth, HostGpus
from kvwatch.model.sample import FailureKind
from kvwatch.model.settings import GpuSettings
from kvwatch.sources.base import SourceError
from kvwatch.sources.gpu.dcgm_exporter import DcgmExporterSource
from tests.fakes.dcgm import uuid_of
from tests.fakes.dcgm.exporter import VERSIONS, Board, page
from tests.sources.loopback import Peer, answer, serving

MIB = 1024**2
TOTAL = 9000 + 134156 + 615


class Exporter:
    """A page that a test may change, its server, a clock that it moves, and the source."""

    def __init__(self, directory: Path) -> None:
        self.body = b""
        self.status = "200 OK"
        self.now_s = 1000.0
        self.requests = 0
        self.directory = directory
        self._port = 0
        self._sources: list[DcgmExporterSource] = []

    def handle(self, peer: Peer) -> None:
        while request := peer.request():
            assert request.startswith(b"GET /metrics ")
            self.requests += 1
            peer.send(answer(self.body, self.status))

    def use(self, port: int) -> None:
        self._port = port

    def source(self, path: str = "/metrics") -> DcgmExporterSource:
        settings = GpuSettings(dcgm_exporter_url=f"http://127.0.0.1:{self._port}{path}")
        source = DcgmExporterSource(settings, state_dir=self.directory, clock=lambda: self.now_s)
        self._sources.append(source)
        return source

    def read(self, body: bytes) -> HostGpus:
        """One poll of a page by a new source."""
        self.body = body
        return self.source().poll()

    def refuse(self, body: bytes) -> SourceError:
        """The failure that a page must cause."""
        with pytest.raises(SourceError) as caught:
            self.read(body)
        return caught.value

    def close(self) -> None:
        for source in self._sources:
            source.close()


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[Exporter]:
    """A fresh exporter on loopback."""
    exporter = Exporter(tmp_path)
    with serving(exporter.handle) as server:
        exporter.use(server.port)
        yield exporter
        exporter.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_pages_of_every_version_are_read(exporter: Exporter, version: str) -> None:
    """Identity and side values are the same whatever the version calls them."""
    for gpu in exporter.read(page(version, [Board(0), Board(1)])).gpus:
        assert (gpu.uuid, gpu.name, gpu.health) == (uuid_of(gpu.index), "NVIDIA H200", GpuHealth.OK)
        assert gpu.reported_by == "dcgm_exporter"
        assert (gpu.utilization_ratio, gpu.memory_bandwidth_utilization_ratio) == (0.37, 0.12)
        assert (gpu.power_watts, gpu.temperature_celsius, gpu.energy_joules) == (120.503, 41, 9000000.123)
        assert gpu.remapped_rows_failed is False


@pytest.mark.parametrize("version", ["4.4", "4.6"])
def test_memory_is_mib_and_its_parts_make_the_total(exporter: Exporter, version: str) -> None:
    """With RESERVED on the page, total is used + free + reserved, in bytes, up to 30 s old."""
    gpu = exporter.read(page(version, [Board(0)])).gpus[0]

    assert gpu.memory is not None
    assert (gpu.memory.used_bytes, gpu.memory.free_bytes) == (9000 * MIB, 134156 * MIB)
    assert (gpu.memory.reserved_bytes, gpu.memory.total_bytes) == (615 * MIB, TOTAL * MIB)
    assert (gpu.memory.accounting, gpu.sample_interval_s) == (Accounting.V2, 30.0)


@pytest.mark.parametrize("version", ["2.4", "3.3", "4.2"])
def test_case_A4_total_is_unknown_without_reserved(exporter: Exporter, version: str) -> None:
    """Before 4.3.1 RESERVED is not on the page: used + free is not the total; the fix is named."""
    gpu = exporter.read(page(version, [Board(0)])).gpus[0]

    assert gpu.memory is None
    assert any("add it to the exporter's counters file" in text for text in gpu.capabilities_missing)


def test_old_driver_has_no_reserved_part(exporter: Exporter) -> None:
    """Before driver 510 used includes the reserve: total is used + free, labelled v1."""
    body = page("3.3", [Board(0)]).replace(b"580.159.04", b"470.82.01")

    memory = exporter.read(body).gpus[0].memory

    assert memory is not None
    assert memory.total_bytes == (9000 + 134156) * MIB
    assert (memory.accounting, memory.reserved_bytes) == (Accounting.V1, None)


def test_case_A3_total_on_the_page_tells_what_used_counts(exporter: Exporter) -> None:
    """With FB_TOTAL a rest is the reserve; where used and free make it up alone, used includes it (v1)."""
    apart = exporter.read(page("3.3", [Board(0, more={"DCGM_FI_DEV_FB_TOTAL": TOTAL})])).gpus[0].memory
    lumped = exporter.read(page("2.4", [Board(0, more={"DCGM_FI_DEV_FB_TOTAL": 9000 + 134156})]))

    assert apart is not None
    assert (apart.reserved_bytes, apart.accounting) == (615 * MIB, Accounting.V2)
    memory = lumped.gpus[0].memory
    assert memory is not None
    assert (memory.reserved_bytes, memory.accounting) == (None, Accounting.V1)


def test_case_A10_parts_of_different_memories_are_refused(exporter: Exporter) -> None:
    """A total that used, free and reserved do not make up is no memory reading."""
    body = page("4.4", [Board(0, used=6554, free=7578, more={"DCGM_FI_DEV_FB_TOTAL": 122880})])

    assert exporter.read(body).gpus[0].memory is None


@pytest.mark.parametrize(
    "blank", ["9223372036854775794", "9.223372036854776e+18", "140737488355330", "2147483632"]
)
def test_case_C2_blanks_on_the_page_are_absent(exporter: Exporter, blank: str) -> None:
    """No kind of blank becomes a utilisation, a power or a memory."""
    more: dict[str, float | str | None] = {
        "DCGM_FI_DEV_GPU_UTIL": blank,
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE": blank,
        "DCGM_FI_DEV_POWER_USAGE": blank,
    }
    gpu = exporter.read(page("4.4", [Board(0, more=more), Board(1, reserved=int(float(blank)))])).gpus

    assert (gpu[0].utilization_ratio, gpu[0].power_watts) == (None, None)
    assert gpu[0].memory is not None
    assert gpu[1].memory is None


def mig_board(index: int = 0) -> Board:
    return Board(index, instances=[(7, "1g.18gb", 1000, 15000), (8, "2g.35gb", 2000, 30000)])


@pytest.mark.parametrize("version", ["4.4", "4.6"])
def test_mig_instances_are_devices_of_their_own(exporter: Exporter, version: str) -> None:
    """Each instance has its memory and the profiling ratio; the parent keeps the board's values only."""
    parent, small, large = exporter.read(page(version, [mig_board()])).gpus

    assert (parent.is_mig_parent, parent.memory, parent.utilization_ratio) == (True, None, None)
    assert parent.power_watts == 120.503
    assert (small.uuid, small.parent_uuid, small.index) == (f"MIG-{uuid_of(0)}/7", uuid_of(0), 0)
    assert (small.mig_profile, large.mig_profile) == ("1g.18gb", "2g.35gb")
    assert small.memory is not None
    assert small.memory.total_bytes == (1000 + 15000 + 64) * MIB
    assert (small.utilization_ratio, small.power_watts) == (0.5, None)


def test_case_C1_instance_without_memory_series_says_so(exporter: Exporter) -> None:
    """An instance that only other series know has no memory and names it as missing."""
    lines = page("4.4", [Board(1), mig_board()]).decode().splitlines(keepends=True)
    body = "".join(line for line in lines if "_FB_" not in line or 'GPU_I_ID="8"' not in line).encode()

    bare = next(gpu for gpu in exporter.read(body).gpus if gpu.uuid.endswith("/8"))

    assert (bare.memory, bare.health) == (None, GpuHealth.OK)
    assert any(text.startswith("memory") for text in bare.capabilities_missing)


def test_case_C4_profile_label_follows_the_page(exporter: Exporter) -> None:
    """A profile that changes between two pages changes at once."""
    source = exporter.source()
    exporter.body = page("4.4", [mig_board()])
    assert source.poll().gpus[1].mig_profile == "1g.18gb"
    exporter.body = exporter.body.replace(b"1g.18gb", b"1g.20gb")

    assert source.poll().gpus[1].mig_profile == "1g.20gb"


def test_case_C5_instances_come_and_go_between_pages(exporter: Exporter) -> None:
    """After a MIG reconfiguration there are the new instances and no ghosts of the old ones."""
    source = exporter.source()
    exporter.body = page("4.4", [mig_board()])
    source.poll()
    exporter.body = page("4.4", [Board(0)])

    (gpu,) = source.poll().gpus
    assert (gpu.is_mig_parent, gpu.memory is not None) == (False, True)


def test_case_C9_device_series_do_not_depend_on_pods(exporter: Exporter) -> None:
    """A GPU mapped to a pod and an idle one are both there, with the device's values."""
    mapped, idle = exporter.read(page("4.4", [Board(0), Board(1)], pods={0: "chat-0"})).gpus

    assert mapped.memory is not None
    assert mapped.memory == idle.memory
    assert mapped.utilization_ratio == 0.37


def shares(*used: int) -> bytes:
    """FB_USED once per pod, the rest once."""
    body = page("4.4", [Board(0)]).decode()
    line = next(line for line in body.splitlines() if line.startswith("DCGM_FI_DEV_FB_USED{"))
    head = line.rpartition("}")[0]
    rows = [f'{head},pod="p{i}",vgpu="{i}"}} {value}' for i, value in enumerate(used)]
    return body.replace(line, "\n".join(rows)).encode()


@pytest.mark.parametrize("used", [(3000, 2000), (3000, 3000), (3000,)])
def test_shares_of_pods_are_never_summed(exporter: Exporter, used: tuple[int, ...]) -> None:
    """Per-pod memory of a shared GPU is not the device's: no memory, and the reason."""
    gpu = exporter.read(shares(*used)).gpus[0]

    assert gpu.memory is None
    assert any("never summed" in text for text in gpu.capabilities_missing)


def test_series_without_pod_wins_over_those_with(exporter: Exporter) -> None:
    """Beside per-pod series the one without workload labels is the device's."""
    both = shares(3000, 2000) + page("4.4", [Board(0)])

    memory = exporter.read(both).gpus[0].memory

    assert memory is not None
    assert memory.used_bytes == 9000 * MIB


def upper(body: bytes) -> bytes:
    return (
        body.replace(b"UUID=", b"uuid=")
        .replace(b"modelName=", b"MODELNAME=")
        .replace(b"Hostname", b"HOSTNAME")
    )


@pytest.mark.parametrize("change", [lambda body: body, upper])
def test_case_D8_label_case_does_not_matter(exporter: Exporter, change: Callable[[bytes], bytes]) -> None:
    """UUID or uuid, Hostname or hostname: the same GPU."""
    gpu = exporter.read(change(page("4.4", [Board(0)]))).gpus[0]

    assert (gpu.uuid, gpu.name) == (uuid_of(0), "NVIDIA H200")


def test_case_D4_changed_default_set_is_said(exporter: Exporter, caplog: pytest.LogCaptureFixture) -> None:
    """Series that vanish with an upgrade are named as missing on each GPU and logged once."""
    source = exporter.source()
    exporter.body = page("4.4", [Board(0)])
    source.poll()
    exporter.body = page("4.4", [Board(0, more={"DCGM_FI_DEV_POWER_USAGE": None})])
    with caplog.at_level(logging.WARNING):
        gpu = source.poll().gpus[0]
        source.poll()

    assert gpu.power_watts is None
    assert "power" in gpu.capabilities_missing
    assert [record.__dict__["gone"] for record in caplog.records] == ["power"]


@pytest.mark.parametrize(
    "body",
    [b"", b"\n", b"# HELP DCGM_FI_DEV_FB_USED x\n# TYPE DCGM_FI_DEV_FB_USED gauge\n",
     b'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1"} 40\n', b"<html>hello</html>\n", b"python_info 1\n"],
)  # fmt: skip
def test_page_without_memory_is_a_failure_not_no_gpus(exporter: Exporter, body: bytes) -> None:
    """200 and empty, as during a reload, or another program's page: a failure with a hint."""
    assert exporter.refuse(body).failure.kind is FailureKind.NOT_EXPECTED


def test_case_G1_page_that_stands_still_is_refused(exporter: Exporter) -> None:
    """Energy counters that do not move for two minutes are old values, whatever the page looks like."""
    source = exporter.source()
    exporter.body = page("4.4", [Board(0)])
    source.poll()
    exporter.now_s += 119
    source.poll()
    exporter.now_s += 2
    with pytest.raises(SourceError) as caught:
        source.poll()
    assert caught.value.failure.kind is FailureKind.TIMED_OUT
    exporter.body = page("4.4", [Board(0, more={"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 9000000999})])

    assert source.poll().gpus[0].memory is not None


def test_failed_scrape_leaves_no_values_behind(exporter: Exporter) -> None:
    """After a 500 (one lost GPU does that) nothing of the page before is known any more."""
    source = exporter.source()
    exporter.body = page("4.4", [Board(0)])
    source.poll()
    exporter.status = "500 Internal Server Error"
    with pytest.raises(SourceError):
        source.poll()

    (gpu,) = source.known().gpus
    assert (gpu.memory, gpu.used_peak_bytes, gpu.health) == (None, None, GpuHealth.UNKNOWN)


def test_case_G6_xid_gauge_is_not_read(exporter: Exporter) -> None:
    """The sticky gauge neither counts nor shows anything, and the lack of events is said."""
    gpu = exporter.read(page("4.4", [Board(0)])).gpus[0]

    assert (gpu.xid_events_total, gpu.last_xid) == ((), None)
    assert any("xid" in text for text in gpu.capabilities_missing)


def test_case_G14_unknown_and_repeated_series_are_tolerated(exporter: Exporter) -> None:
    """Counters of one's own, switches, odd MIG lines and exact repetitions do no harm."""
    body = page("4.4", [Board(0)])
    plain = exporter.read(body).gpus
    repeated = [line for line in body.splitlines(keepends=True) if not line.startswith(b"#")]
    body += b'DCGM_FI_DEV_MY_OWN{gpu="0",UUID="GPU-x"} 1\nDCGM_FI_DEV_FB_USED{nvswitch="0"} 5\n'
    body += b"".join(repeated) + b"".join(repeated).replace(b'Hostname="', b'Hostname="another-')
    body += b'DCGM_FI_PROF_GR_ENGINE_ACTIVE{gpu="0",UUID="%s",GPU_I_ID="",GPU_I_PROFILE=""} 0.372914\n' % (
        uuid_of(0).encode()
    )

    assert plain[0].memory is not None
    assert exporter.read(body).gpus == plain


def test_gpu_that_vanishes_from_the_page_is_missing(exporter: Exporter) -> None:
    """A GPU seen before and gone from the page is reported as missing, with who no longer lists it."""
    source = exporter.source()
    exporter.body = page("4.4", [Board(0), Board(1)])
    source.poll()
    exporter.body = page("4.4", [Board(0)])

    gone = source.poll().gpus[1]
    assert (gone.uuid, gone.health, gone.memory) == (uuid_of(1), GpuHealth.MISSING, None)
    assert "dcgm-exporter" in gone.health_detail


def test_url_without_a_path_means_metrics(exporter: Exporter) -> None:
    """http://host:9400 is read as http://host:9400/metrics."""
    exporter.body = page("4.4", [Board(0)])

    assert exporter.source(path="").poll().gpus[0].memory is not None
