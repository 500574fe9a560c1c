"""How the worker process starts, stops, is paused, is left alone and never doubled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvwatch.model.sample import FailureKind
from kvwatch.model.settings import GpuSettings
from kvwatch.sources.base import SourceError
from kvwatch.sources.gpu.nvml import NvmlSource
from tests.fakes.nvml import ANY, uuid_of
from tests.sources.gpu.rig import (
    Rig,
    alive,
    read,
    until,
    until_error,
    wait_until_gone,
)

pytestmark = pytest.mark.needs("gcc")
V2 = "nvmlDeviceGetMemoryInfo_v2"


def test_new_daemon_starts_no_worker_beside_a_stuck_one(rig: Rig) -> None:
    """A second source on the same runtime directory finds the lock held and says by whom."""
    first = rig.start()
    until(first, read)
    rig.scenario.hang().write()
    until_error(first, FailureKind.STUCK)
    second = rig.start_again()

    message = until_error(second, FailureKind.STUCK)

    assert str(first.worker_pid) in message
    assert second.worker_pid is None


def test_case_E9_worker_inside_a_driver_call_is_not_killed(rig: Rig) -> None:
    """close() returns within 3 s, leaves a worker that is inside NVML alive, and it ends by itself later."""
    source = rig.start()
    until(source, read)
    pid = source.worker_pid
    rig.scenario.hang().write()
    until_error(source, FailureKind.STUCK)

    started_s = time.monotonic()
    source.close()

    assert time.monotonic() - started_s < 3.0
    assert alive(pid)
    rig.scenario.healed().write()
    wait_until_gone(pid)
    source.close()
    assert source.worker_pid is None


def test_graceful_stop_shuts_nvml_down(rig: Rig) -> None:
    """An ordinary stop lets the worker call nvmlShutdown before it ends."""
    rig.scenario.call_log = rig.directory / "calls"
    source = rig.start()
    until(source, read)

    source.close()

    assert source.worker_pid is None
    assert rig.calls()[-1][1] == "nvmlShutdown"


@pytest.mark.parametrize("init_works", [True, False], ids=["after_init", "failed_init"])
def test_case_E16_init_and_shutdown_are_paired(rig: Rig, init_works: bool) -> None:
    """One nvmlInit per worker life, and nvmlShutdown exactly when it had succeeded."""
    rig.scenario.call_log = rig.directory / "calls"
    if not init_works:
        rig.scenario.error(ANY, "nvmlInitWithFlags", 9)
    source = rig.start()
    if init_works:
        until(source, read)
    else:
        until_error(source, FailureKind.NO_DRIVER)
    source.close()

    names = [name for _, name, _ in rig.calls()]
    assert names.count("nvmlInitWithFlags") == 1
    assert names.count("nvmlShutdown") == int(init_works)


def test_case_E10_failing_starts_are_backed_off(rig: Rig) -> None:
    """Attempts at a driver that refuses come 1 s, then 2 s apart, and each poll in between is calm."""
    rig.scenario.call_log = rig.directory / "calls"
    rig.scenario.error(ANY, "nvmlInitWithFlags", 27)
    source = rig.start()
    deadline_s = time.monotonic() + 4.5
    polls = 0
    while time.monotonic() < deadline_s:
        with pytest.raises(SourceError):
            source.poll()
        polls += 1

    times = [at for at, name, _ in rig.calls() if name == "nvmlInitWithFlags"]
    assert 2 <= len(times) <= 3
    assert times[1] - times[0] >= 0.9
    assert polls <= 8


def test_case_E17_pause_releases_nvml(rig: Rig) -> None:
    """In maintenance no process holds NVML and polls say so; afterwards reading goes on."""
    source = rig.start()
    until(source, read)
    pid = source.worker_pid

    released = source.pause()
    with pytest.raises(SourceError, match="maintenance"):
        source.poll()

    assert released
    assert not alive(pid)
    source.resume()
    until(source, read)


def test_pause_interrupts_a_waiting_poll(rig: Rig) -> None:
    """`pause` from another thread does not wait for the next message."""
    source = rig.start()
    until(source, read)
    rig.scenario.slow(1_500_000).write()
    kinds: list[FailureKind] = []

    def poll_until_failure() -> None:
        while not kinds:
            try:
                source.poll()
            except SourceError as error:
                kinds.append(error.failure.kind)

    poller = threading.Thread(target=poll_until_failure)
    poller.start()
    time.sleep(0.4)
    source.pause()
    poller.join(timeout=5)

    assert kinds == [FailureKind.PAUSED]
    rig.scenario.healed().write()
    source.resume()


ORPHAN = """
import sys, time
from pathlib import Path
from kvwatch.model.settings import GpuSettings
from kvwatch.sources.gpu.nvml import NvmlSource
folder = Path(sys.argv[1])
source = NvmlSource(GpuSettings(), runtime_dir=folder / "run", state_dir=folder / "state")
source.poll()
print(source.worker_pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("hung", [False, True], ids=["working", "hung"])
def test_case_E20_killed_daemon_leaves_no_worker(rig: Rig, hung: bool) -> None:
    """When the daemon is killed its worker ends; one inside a driver call as soon as that returns."""
    rig.scenario.write()
    daemon = subprocess.Popen([sys.executable, "-c", ORPHAN, str(rig.directory)], stdout=subprocess.PIPE)
    with daemon:
        pid = int(daemon.stdout.readline())
        if hung:
            rig.scenario.hang().write()
            time.sleep(0.5)
        daemon.send_signal(signal.SIGKILL)
    if hung:
        time.sleep(0.5)
        assert alive(pid)
        rig.scenario.healed().write()

    wait_until_gone(pid)


def test_case_E20_worker_ends_when_its_input_closes(rig: Rig) -> None:
    """The worker alone: end of stdin is the order to end, with status 0."""
    rig.scenario.write()
    command = [sys.executable, "-m", "kvwatch.sources.gpu.nvml_worker", "", "0.2", str(os.getpid()), "all"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with worker:
        assert b"hello" in worker.stdout.readline()
        worker.stdin.close()
        worker.stdout.read()
    assert worker.returncode == 0


def test_term_ends_the_worker_between_calls(rig: Rig) -> None:
    """TERM lets the worker shut NVML down, and the source replaces it."""
    rig.scenario.call_log = rig.directory / "calls"
    source = rig.start()
    until(source, read)
    os.kill(source.worker_pid, signal.SIGTERM)

    message = until_error(source, FailureKind.CRASHED)

    assert "status 0" in message
    assert rig.calls()[-1][1] == "nvmlShutdown"


@pytest.mark.parametrize("content", ["{", "[]", '{"v": 1, "gpus": {"a": 3}}', "\x00"])
def test_corrupt_inventory_breaks_nothing(rig: Rig, content: str) -> None:
    """Whatever the inventory file holds, GPUs are read and the file is written anew."""
    state = rig.directory / "state"
    state.mkdir()
    (state / "inventory.json").write_text(content)

    until(rig.start(), read)

    assert uuid_of(0) in (state / "inventory.json").read_text()


def test_unwritable_directories_break_nothing(rig: Rig) -> None:
    """Without a place for inventory and lock, GPUs are still read."""
    blocker = rig.directory / "file"
    blocker.write_text("")
    rig.scenario.write()
    source = NvmlSource(GpuSettings(), runtime_dir=blocker / "run", state_dir=blocker / "state")
    rig.sources.append(source)

    until(source, read)


def test_mps_enumeration_variable_does_not_reach_the_worker(rig: Rig) -> None:
    """NVML_MPS_DEVICE_ENUMERATION would change what is enumerated, so the worker never has it."""
    rig.monkeypatch.setenv("NVML_MPS_DEVICE_ENUMERATION", "1")
    source = rig.start()
    until(source, read)

    environment = Path(f"/proc/{source.worker_pid}/environ").read_bytes()

    assert b"NVML_MPS_DEVICE_ENUMERATION" not in environment
    assert b"KVWATCH_FAKE_NVML" in environment


def test_pause_cannot_release_a_hung_driver_call_and_recovers_later(rig: Rig) -> None:
    """Maintenance during a hang says that NVML is not released; nothing is started before it returns."""
    source = rig.start()
    until(source, read)
    pid = source.worker_pid
    rig.scenario.hang().write()
    until_error(source, FailureKind.STUCK)

    released = source.pause()
    source.resume()

    assert not released
    assert str(pid) in until_error(source, FailureKind.STUCK)
    assert source.worker_pid == pid
    rig.scenario.healed().write()
    until(source, read)
    assert source.worker_pid != pid
