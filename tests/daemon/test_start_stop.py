"""Start and stop when something is in the way: files, ports, streams, disks, descriptors, signals."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon.faulty import NVML, PATIENCE_S, Host, ended, run_kvwatch, until, wait_for_gpus, write
from tests.daemon.page_server import PageServer
from tests.daemon.test_daemon import ask, config
from tests.harness import ROOT, Daemon

EARLY_KILL = -signal.SIGTERM  # before our handler is there, the kernel's default ends the process


# Start and stop


@pytest.mark.parametrize(
    ("text", "arguments", "status", "words"),
    [
        ("tick: off\nfoo: 1\n", (), 2, ["kvwatch.yml:1:7: tick", "kvwatch.yml:2:1: foo"]),
        (NVML, ("--web.config.file", "/nonexistent"), 2, ["/nonexistent: cannot be read"]),
        (NVML, ("--web.config.file", "{folder}/tls.yml"), 2, ["tls_server_config", "/etc/hosts"]),
        (NVML, ("--web.listen-address", "127.0.0.1:{taken}"), 3, ["cannot listen on", "free the port"]),
        (NVML, ("--web.listen-address", "nowhere.invalid:1"), 3, ["cannot listen on nowhere.invalid"]),
    ],
)
def test_what_keeps_it_from_starting(
    tmp_path: Path, text: str, arguments: tuple[str, ...], status: int, words: list[str]
) -> None:
    """Bad files are status 2, a port that cannot be had is 3; each says where and never shows a traceback."""
    write(tmp_path / "tls.yml", "tls_server_config: {cert_file: /etc/passwd, key_file: /etc/hosts}\n")
    file = write(tmp_path / "kvwatch.yml", text)
    with PageServer() as taken:
        filled = [each.format(folder=tmp_path, taken=taken.port) for each in arguments]
        code, said = ended(run_kvwatch(tmp_path / "home", "--config", str(file), *filled))

    assert code == status, said
    assert [word for word in words if word not in said] == []
    assert "Traceback" not in said


def test_a_second_daemon_is_refused(tmp_path: Path) -> None:
    """Two daemons would undo each other: the second ends with 3 and names the first."""
    with Daemon(tmp_path, config()) as daemon:
        code, said = ended(run_kvwatch(tmp_path, "--config", str(daemon.config)))
        assert daemon.process is not None
        assert (code, f"pid {daemon.process.pid}" in said) == (3, True), said


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    """A file where a directory belongs is status 3, with its path."""
    (tmp_path / "home").mkdir()
    write(tmp_path / "home" / "run", "")
    code, said = ended(run_kvwatch(tmp_path / "home", "--config", str(write(tmp_path / "c.yml", NVML))))
    assert (code, str(tmp_path / "home" / "run") in said, "Traceback" in said) == (3, True, False), said


def test_a_user_without_a_home() -> None:
    """An arbitrary uid needs no home where the directories are given, and is told what to set otherwise."""
    program = """
import os, sys
from kvwatch.daemon import paths
os.setuid(54321) if os.getuid() == 0 else None
for name in ("HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "STATE_DIRECTORY"):
    os.environ.pop(name, None)
import pwd; pwd.getpwuid = lambda uid: (_ for _ in ()).throw(KeyError(uid))
try:
    paths.find()
except paths.DirectoryError as error:
    print(error)
os.environ["RUNTIME_DIRECTORY"], os.environ["STATE_DIRECTORY"] = "/r", "/s"
print(paths.find().state)
"""
    if os.getuid() != 0:
        program = program.replace("os.geteuid()", "1")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    assert "set STATE_DIRECTORY" in first
    assert second == "/s"


def test_sigterm_at_any_moment_of_the_start(host: Host) -> None:
    """However early it comes, the daemon ends quickly and quietly, and leaves no worker."""
    moments = random.Random(7)
    file = write(host.folder / "kvwatch.yml", NVML)
    for _ in range(8):
        process = run_kvwatch(host.folder, "--config", str(file), **host.environment)
        time.sleep(moments.uniform(0.0, 1.5))
        process.terminate()
        code, said = ended(process)
        assert code in (0, EARLY_KILL), said
        assert "Traceback" not in said
        assert code == 0 or "serving" not in said
        until(host.no_worker_left, "the worker's end")


def test_sigkill_leaves_nothing_in_the_way(host: Host) -> None:
    """After a kill the worker ends by itself, the locks are free, and the next start works at once."""
    with host.daemon() as daemon:
        wait_for_gpus(daemon)
        daemon.signal(signal.SIGKILL)
        assert daemon.process is not None
        daemon.process.wait()
        daemon.start()
        wait_for_gpus(daemon)
        assert len(host.workers()) == 1
        assert daemon.stop() == 0
        assert host.no_worker_left()


# Standard streams, disks and descriptors


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_closed_standard_streams(tmp_path: Path, closed: tuple[int, ...]) -> None:
    """Without standard streams it runs all the same, and writes into no file that got their number."""

    def close() -> None:
        for number in closed:
            os.close(number)

    with PageServer() as page:
        file = write(tmp_path / "c.yml", config(("chat", page.url)))
        process = run_kvwatch(tmp_path / "home", "--config", str(file), before=close)
        until(lambda: page.pages > 2, "polls")
        process.terminate()
        code, said = ended(process)

    assert (code, "Traceback" in said) == (0, False), said
    lock = (tmp_path / "home" / "run" / "daemon.lock").read_text()
    assert lock == f"{process.pid}\n"


@pytest.mark.parametrize(("stream", "demo"), [("stdout", True), ("stderr", False), ("stderr", True)])
def test_a_pipe_that_nobody_reads(tmp_path: Path, stream: str, demo: bool) -> None:
    """When the journal hangs, the loop goes on, reloads and stops."""
    read, full = full_pipe()
    daemon = Daemon(tmp_path, None if demo else config(), *(("--demo", "faults") if demo else ()))

    def loaded() -> float | None:
        return daemon.metrics().get("kvwatch_config_last_reload_success_timestamp_seconds")

    try:
        streams = {"stdout": full} if stream == "stdout" else {"stderr": full}
        with daemon_started(daemon, **streams):
            daemon.until(lambda: loaded() is not None, PATIENCE_S, "the first report")
            for _ in range(5):
                before = loaded()
                daemon.signal(signal.SIGHUP)
                until(lambda before=before: loaded() != before, "a reload")  # type: ignore[misc]
            assert ask(daemon, "/-/healthy")[0] == 200
            assert daemon.stop(PATIENCE_S) == 0
    finally:
        os.close(read)
        os.close(full)


def full_pipe() -> tuple[int, int]:
    """A pipe that takes no byte more."""
    read, full = os.pipe()
    os.set_blocking(full, False)
    try:
        while True:
            os.write(full, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(full, True)
    return read, full


@contextlib.contextmanager
def daemon_started(
    daemon: Daemon,
    *,
    stdout: int | None = None,
    stderr: int | None = None,
    before: Callable[[], None] | None = None,
) -> Iterator[Daemon]:
    """A daemon started in an odd way, ended whatever happens."""
    try:
        yield daemon.start(stdout=stdout, stderr=stderr, before=before, seconds=PATIENCE_S)
    finally:
        daemon.__exit__()


def test_a_full_disk(host: Host) -> None:
    """When no file can be written, GPUs are watched all the same and the loss is said."""

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    read, write_end = os.pipe()
    daemon = host.daemon()
    with daemon_started(daemon, stdout=write_end, stderr=write_end, before=full):
        wait_for_gpus(daemon)
        code = daemon.stop()
    os.close(write_end)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    assert (code, "Traceback" in said) == (0, False), said
    assert "inventory not written" in said
    assert str(host.folder / "state" / "inventory.json") in said


@pytest.mark.parametrize("limit", [16, 24])
def test_few_descriptors(tmp_path: Path, limit: int) -> None:
    """With hardly any descriptors, and clients that hold the rest, it does not die, and stops when asked."""

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    servers = [(f"s{i}", "http://127.0.0.1:1") for i in range(8)]
    daemon = Daemon(tmp_path, config(*servers, more=NVML))
    with daemon_started(daemon, before=few):
        held = [socket.create_connection(("127.0.0.1", daemon.port), 10) for _ in range(60)]
        for _ in range(10):
            daemon.signal(signal.SIGHUP)
            time.sleep(0.1)
        for each in held:
            each.close()
        until(lambda: _scraped(daemon), "an answer again")
        assert daemon.stop() == 0
    assert "Traceback" not in daemon.log.read_text(), daemon.log.read_text()


def _scraped(daemon: Daemon) -> bool:
    try:
        return ask(daemon, "/metrics")[0] == 200
    except OSError:
        return False
