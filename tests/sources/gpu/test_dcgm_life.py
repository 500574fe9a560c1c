"""What the DCGM source makes of an engine that fails, hangs or goes, and of a worker that does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwatch.model.gpu import GpuHealth
from kvwatch.model.sample import FailureKind
from kvwatch.sources.gpu.dcgm import find_bindings
from tests.fakes.dcgm import listening
from tests.sources.gpu.dcgm_rig import Rig, first, rigged
from tests.sources.gpu.rig import until, until_error


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A fresh rig; afterwards no worker is left."""
    with rigged(tmp_path, monkeypatch) as rig:
        yield rig


def test_case_G1_old_values_of_the_engine_are_never_served(rig: Rig) -> None:
    """An engine that answers with old cache fails the source; fresh values bring it back."""
    source = rig.start()
    source.poll()
    rig.scenario.write(age_s=60.0)
    message = until_error(source, FailureKind.TIMED_OUT)
    rig.scenario.write(age_s=0.0)

    assert "60 s old" in message
    assert first(until(source, lambda host: first(host).memory is not None)).health is GpuHealth.OK


def test_case_G1_lost_connection_is_made_anew(rig: Rig) -> None:
    """After "connection not valid" a new worker connects, and nothing of the old one is shown meanwhile."""
    source = rig.start()
    source.poll()
    first_pid = source.worker_pid
    rig.scenario.write(errors={"dcgmEntitiesGetLatestValues": -21})
    message = until_error(source, FailureKind.BROKEN)
    assert source.known().gpus[0].memory is None
    rig.scenario.write(errors={})

    until(source, lambda host: first(host).memory is not None)
    assert "DCGM -21" in message
    assert source.worker_pid not in (None, first_pid)


def test_case_G12_engine_that_is_gone_costs_no_worker(rig: Rig) -> None:
    """With nobody at the address the failure is "refused" with the fix, and no process is started."""
    with listening() as address:
        rig.address = address
    source = rig.start()

    message = until_error(source, FailureKind.REFUSED, 3.0)

    assert "systemctl start nvidia-dcgm" in message
    assert source.worker_pid is None
    assert rig.scenario.calls() == []


def test_missing_bindings_are_no_driver(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bindings the failure names the package and the folders looked in."""
    monkeypatch.setenv("KVWATCH_DCGM_BINDINGS", str(rig.directory))
    if find_bindings() is not None:
        pytest.fail("this machine has DCGM's bindings: the test needs one without")

    assert "datacenter-gpu-manager-4-core" in until_error(rig.start(), FailureKind.NO_DRIVER, 3.0)


@pytest.mark.parametrize(
    ("engine", "kind", "text"),
    [
        ({"errors": {"dcgmConnect_v2": -12}}, FailureKind.VERSION_MISMATCH, "different DCGM versions"),
        ({"errors": {"dcgmInit": -25}}, FailureKind.NO_DRIVER, "libdcgm was not found"),
        ({"library": -25}, FailureKind.NO_DRIVER, "libdcgm was not found"),
        ({"errors": {"dcgmGetAllDevices": -57}}, FailureKind.TIMED_OUT, "driver does not answer"),
        ({"errors": {"dcgmGetAllDevices": -67}}, FailureKind.NO_DRIVER, "let go of the GPUs"),
        ({"import": "exit"}, FailureKind.NO_DRIVER, "cannot be imported"),
    ],
)
def test_each_failure_at_the_start_has_its_kind(
    rig: Rig, engine: dict[str, object], kind: FailureKind, text: str
) -> None:
    """Wrong versions, missing libraries and bindings that exit at import are told apart."""
    rig.scenario.write(**engine)

    assert text in until_error(rig.start(), kind, 5.0)


def test_case_G8_broken_packaging_of_bindings_is_one_clear_failure(rig: Rig) -> None:
    """A module that the package forgot to ship fails the source with its name, not the daemon."""
    rig.scenario.write(**{"import": "error"})

    assert "No module named 'logger'" in until_error(rig.start(), FailureKind.NO_DRIVER, 5.0)


def test_case_G11_bug_inside_the_bindings_is_contained(rig: Rig) -> None:
    """A TypeError raised by the bindings themselves is a version problem, and the source recovers."""
    rig.scenario.write(errors={"dcgmGetAllDevices": "type"})
    source = rig.start()
    message = until_error(source, FailureKind.VERSION_MISMATCH, 5.0)
    rig.scenario.write(errors={})

    assert "dcgmGetAllDevices" in message
    until(source, lambda host: first(host).memory is not None)


def test_case_E7_hanging_engine_is_stuck_then_recovers(rig: Rig) -> None:
    """A call that does not return makes the source stuck within seconds; no second worker is started."""
    source = rig.start()
    source.poll()
    pid = source.worker_pid
    rig.scenario.write(hang=True)
    message = until_error(source, FailureKind.STUCK)
    assert source.known().gpus[0].memory is None
    assert source.worker_pid == pid
    rig.scenario.write(hang=False)

    until(source, lambda host: first(host).memory is not None)
    assert "does not answer" in message
    assert source.worker_pid == pid


def test_case_E8_engine_hung_for_good_costs_one_worker_at_a_time(rig: Rig) -> None:
    """After a minute of silence the worker is ended, even inside its call, and replaced."""
    now = time.monotonic
    shift = [0.0]
    source = rig.start(clock=lambda: now() + shift[0])
    source.poll()
    pid = source.worker_pid
    assert pid is not None
    rig.scenario.write(hang=True)
    shift[0] = 61.0

    assert "replaced" in until_error(source, FailureKind.STUCK)
    assert not Path(f"/proc/{pid}").exists()
    assert source.worker_pid is None


def test_case_G7_worker_that_grows_is_replaced(rig: Rig) -> None:
    """A leak of the vendor's library ends the worker at its limit, and the next one starts at once."""
    source = rig.start(max_rss_bytes=100 << 20)
    source.poll()
    pid = source.worker_pid
    rig.scenario.write(leak_mib=120)
    message = until_error(source, FailureKind.CRASHED)
    rig.scenario.write(leak_mib=0)

    assert "grown to" in message
    until(source, lambda host: first(host).memory is not None, 5.0)
    assert source.worker_pid != pid


def test_killed_worker_is_restarted(rig: Rig) -> None:
    """A worker that dies is reported with the signal and replaced."""
    source = rig.start()
    source.poll()
    pid = source.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    assert "SIGKILL" in until_error(source, FailureKind.CRASHED)
    until(source, lambda host: first(host).memory is not None)


def test_second_worker_is_not_started_beside_one(rig: Rig) -> None:
    """The lock file keeps two daemons from each holding a connection."""
    source = rig.start()
    source.poll()

    assert "dcgm.lock" in until_error(rig.start(), FailureKind.STUCK)


def test_maintenance_lets_go_and_takes_up_again(rig: Rig) -> None:
    """Paused, no worker runs and the failure is "paused"; resumed, values come back."""
    source = rig.start()
    source.poll()
    assert source.pause() is True
    assert source.worker_pid is None
    until_error(source, FailureKind.PAUSED, 3.0)
    source.resume()

    until(source, lambda host: first(host).memory is not None)
