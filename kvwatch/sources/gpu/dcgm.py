"""GPU facts from a DCGM host engine that runs already, read by a process of its own.

DCGM's Python bindings come with DCGM's package, not from PyPI; they are looked for in its folders. No
worker is started before bindings and engine are there, so a host without DCGM pays nothing. The tests
run against a stand-in for the bindings.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvwatch.model.gpu import HostGpus
from kvwatch.model.sample import FailureKind
from kvwatch.model.settings import GpuSettings
from kvwatch.sources.base import SourceError
from kvwatch.sources.gpu import dcgm_fields as fields
from kvwatch.sources.gpu.inventory import Inventory
from kvwatch.sources.gpu.nvml_process import WorkerProcess, describe_end
from kvwatch.sources.gpu.nvml_view import HostView

log = logging.getLogger(__name__)
MODULE = "kvwatch.sources.gpu.dcgm_worker"
BINDINGS_VARIABLE = "KVWATCH_DCGM_BINDINGS"
BINDINGS_FOLDERS = (
    "/usr/share/datacenter-gpu-manager-4/bindings/python3",  # DCGM 4
    "/usr/local/dcgm/bindings/python3",  # DCGM 2.3 to 3
    "/usr/local/dcgm/bindings",  # some images of DCGM 3
)
PERIOD_S = 1.0
FIRST_MESSAGE_S = 15.0
STUCK_AFTER_PERIODS = 5.0
REPLACE_AFTER_S = 60.0  # calls have blocked for 45 s and come back (DCGM#313)
BACKOFF_FIRST_S, BACKOFF_MAX_S = 1.0, 30.0
GOOD_RUN_S = 30.0
FAILED_POLL_S = 1.0
STOP_S = 2.5
CONNECT_S = 0.2
MAX_RSS_BYTES = 192 << 20


def find_bindings(variable: str = BINDINGS_VARIABLE) -> str | None:
    """The folder of DCGM's Python bindings; an environment variable may name another."""
    for folder in (os.environ.get(variable, ""), *BINDINGS_FOLDERS):
        if folder and (Path(folder) / "dcgm_agent.py").is_file():
            return folder
    return None


def reachable(address: str, timeout_s: float = CONNECT_S) -> str:
    """ "" where something listens at `host:port` or a socket path, else the reason."""
    try:
        if address.startswith("/"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(timeout_s)
                probe.connect(address)
        else:
            host, _, port = address.rpartition(":")
            with socket.create_connection((host.strip("[]"), int(port)), timeout_s):
                pass
    except (OSError, ValueError, OverflowError) as error:
        return str(error)
    return ""


class DcgmSource:
    """Source[HostGpus] that paces itself: `poll` returns with each message of the worker (every second).

    Raises SourceError: NO_DRIVER (no bindings, no library), REFUSED (no engine), BROKEN, TIMED_OUT (the
    engine's data is old), VERSION_MISMATCH, STUCK (a call has not returned), CRASHED, PAUSED. After a
    lost connection a new worker connects, with backoff from 1 to 30 s. `poll` belongs to one thread;
    `pause`, `resume` and `close` may be called from any.
    """

    def __init__(
        self,
        settings: GpuSettings,
        *,
        runtime_dir: Path,
        state_dir: Path,
        clock: Callable[[], float] = time.monotonic,
        max_rss_bytes: int = MAX_RSS_BYTES,
        profiling: bool = False,
        period_s: float = PERIOD_S,
    ) -> None:
        self.name = "dcgm"
        self.period_s = 0.0
        self.expected_period_s = period_s
        self.deadline_s = FIRST_MESSAGE_S + FAILED_POLL_S
        self._stuck_after_s = STUCK_AFTER_PERIODS * period_s
        self._address = settings.dcgm_address
        self._clock = clock
        self._runtime_dir = runtime_dir
        self._arguments = ("profiling" if profiling else "", str(max_rss_bytes))
        inventory = Inventory(state_dir / "inventory.json")
        self._view = HostView(settings, inventory, lister="DCGM", reported_by="dcgm")
        self._lock = threading.Lock()
        self._pipe_lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._is_paused = self._closed = False
        self._worker: WorkerProcess | None = None
        self._started_s = self._last_line_s = 0.0
        self._heard = False
        self._farewell: dict[str, Any] | None = None
        self._failure: SourceError | None = None
        self._restart_s = 0.0
        self._backoff_s = BACKOFF_FIRST_S

    # -- the source protocol -------------------------------------------------------------------

    def poll(self) -> HostGpus:
        """Wait for the worker's next message, at most 15 s at its start and 5 s later."""
        with self._lock:
            self._refuse_when_off()
            if self._worker is None:
                self._wait_for_restart()
                self._start()
            return self._next_value()

    def close(self) -> None:
        """End the worker, within three seconds."""
        self._closed = True
        self._wake()
        with self._lock:
            self._stop_worker()
            with self._pipe_lock:
                if self._wake_read >= 0:
                    os.close(self._wake_read)
                    os.close(self._wake_write)
                    self._wake_read = self._wake_write = -1

    def pause(self) -> bool:
        """End our connection for maintenance. The engine itself still holds the GPUs (`dcgmi` frees them)."""
        self._is_paused = True
        self._wake()
        with self._lock:
            return self._stop_worker()

    def resume(self) -> None:
        """Connect again with the next poll."""
        self._restart_s, self._backoff_s = 0.0, BACKOFF_FIRST_S
        self._is_paused = False
        self._wake()

    @property
    def worker_pid(self) -> int | None:
        """Process id of the present worker."""
        worker = self._worker
        return None if worker is None else worker.pid

    def known(self) -> HostGpus:
        """The GPUs known of while DCGM cannot be read: identities in state unknown, no values."""
        reason = "DCGM is not being read" if self._failure is None else self._failure.failure.message
        return self._view.known(reason)

    # -- the worker's life ---------------------------------------------------------------------

    def _refuse_when_off(self) -> None:
        if self._closed:
            raise SourceError(FailureKind.CRASHED, "the source is closed")
        if self._is_paused:
            raise SourceError(FailureKind.PAUSED, "DCGM is released: `kvwatch maintenance off` ends it")

    def _wake(self) -> None:
        with self._pipe_lock:  # else another thread may close it, and the number be another file's
            if self._wake_write >= 0:
                os.write(self._wake_write, b"x")

    def _drain(self) -> None:
        try:
            os.read(self._wake_read, 64)
        except BlockingIOError:
            return

    def _sleep(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        if poll.poll(max(0.0, seconds) * 1000):
            self._drain()

    def _wait_for_restart(self) -> None:
        wait_s = self._restart_s - self._clock()
        if wait_s <= 0:
            return
        self._sleep(min(wait_s, FAILED_POLL_S))
        self._refuse_when_off()
        if self._failure is not None and self._clock() < self._restart_s:
            raise SourceError(self._failure.failure.kind, self._failure.failure.message)

    def _start(self) -> None:
        folder = find_bindings()
        if folder is None:
            raise self._fail(
                FailureKind.NO_DRIVER,
                "DCGM's Python bindings were not found: install datacenter-gpu-manager-4-core, or name their "
                f"folder in {BINDINGS_VARIABLE} (looked in {', '.join(BINDINGS_FOLDERS)})",
            )
        why = reachable(self._address)
        if why:
            self._backoff_s = BACKOFF_FIRST_S  # nothing was started: asking again is cheap
            raise self._fail(
                FailureKind.REFUSED,
                f"no DCGM host engine at {self._address} ({why}): systemctl start nvidia-dcgm, or set "
                "gpus.dcgm_address",
            )
        self._view.reset()
        arguments = (folder, self._address, *self._arguments)
        try:
            self._worker = WorkerProcess(
                self._lock_path(), self.expected_period_s, module=MODULE, arguments=arguments
            )
        except OSError as error:
            raise self._fail(FailureKind.CRASHED, f"the DCGM worker could not be started: {error}") from error
        self._started_s = self._last_line_s = self._clock()
        self._heard = False
        self._farewell = None

    def _lock_path(self) -> Path | None:
        path = self._runtime_dir / "dcgm.lock"
        try:
            self._runtime_dir.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            log.warning("no DCGM lock file", extra={"path": str(path), "error": str(error)})
            return None
        return path

    def _stop_worker(self) -> bool:
        """TERM ends it even inside a call: it has no driver handle that could be left in a bad state."""
        gone = self._worker is None or self._worker.stop(STOP_S)
        if gone:
            self._worker = None
        self._view.reset()
        return gone

    # -- messages ------------------------------------------------------------------------------

    def _next_value(self) -> HostGpus:
        worker = self._worker
        if worker is None or worker.abandoned:
            raise self._check_abandoned(worker)
        while True:
            limit_s = self._stuck_after_s if self._heard else FIRST_MESSAGE_S
            left_s = self._last_line_s + limit_s - self._clock()
            wait_s = left_s if left_s > 0 else FAILED_POLL_S
            if not worker.wait_for_output(self._wake_read, wait_s):
                self._drain()
                self._refuse_when_off()
                if self._clock() - self._last_line_s >= limit_s:
                    raise self._stuck(worker)
                continue
            lines = worker.read_lines()
            if lines is None:
                raise self._ended(worker)
            stale_s = self._take(lines)
            if stale_s is not None:
                return self._fresh_value(stale_s)

    def _fresh_value(self, stale_s: float) -> HostGpus:
        if stale_s > 0:
            raise self._remember(
                FailureKind.TIMED_OUT,
                f"the host engine's newest memory reading is {stale_s:.0f} s old: it hangs, or its clock is "
                "another one; look at the log of nvidia-dcgm",
            )
        self._failure = None
        return self._view.build(self._last_line_s)

    def _check_abandoned(self, worker: WorkerProcess | None) -> SourceError:
        self._sleep(FAILED_POLL_S)
        if worker is not None and not worker.ended():
            return self._remember(
                FailureKind.STUCK, f"the DCGM worker (process {worker.pid}) cannot be ended"
            )
        self._worker = None
        return SourceError(FailureKind.CRASHED, "the stuck DCGM worker has ended; a new one is started")

    def _take(self, lines: list[bytes]) -> float | None:
        """Take in lines; None without readings, else how stale all of them are (0: they are not)."""
        news: float | None = None
        for line in lines:
            try:
                message = json.loads(line)
                if "bye" in message:
                    self._farewell = message
                elif "hello" in message:
                    log.info("DCGM worker started", extra=message["hello"])
                else:
                    self._view.apply(self._clock(), message)
                    if "s" in message:
                        news = float(message.get("stale", 0.0))
            except (ValueError, TypeError, KeyError, IndexError) as error:
                log.warning("DCGM worker sent an unreadable line", extra={"error": repr(error)})
        if news is not None:
            self._heard = True
            self._last_line_s = self._clock()
            if self._last_line_s - self._started_s > GOOD_RUN_S:
                self._backoff_s = BACKOFF_FIRST_S
        return news

    def _stuck(self, worker: WorkerProcess) -> SourceError:
        silent_s = self._clock() - self._last_line_s
        message = (
            f"no reading from the DCGM worker (process {worker.pid}) for {silent_s:.1f} s: the host engine "
            "does not answer. A GPU with a storm of ECC errors can block it: see `dcgmi health`"
        )
        if silent_s >= REPLACE_AFTER_S and self._stop_worker():
            return self._fail(FailureKind.STUCK, message + "; the worker is replaced")
        return self._remember(FailureKind.STUCK, message)

    def _ended(self, worker: WorkerProcess) -> SourceError:
        """The output ended: collect the process, plan the restart, say why."""
        worker.stop(STOP_S)
        self._worker = None
        self._view.reset()
        farewell = self._farewell
        if farewell is None:
            how = describe_end(worker.status or 0)
            return self._fail(FailureKind.CRASHED, f"the DCGM worker {how}; it is restarted with backoff")
        if farewell["bye"] == "large":
            log.warning("DCGM worker replaced", extra={"why": farewell["why"]})
            self._backoff_s = BACKOFF_FIRST_S
            return self._remember(FailureKind.CRASHED, farewell["why"])
        if farewell["bye"] == "locked":
            return self._fail(FailureKind.STUCK, farewell["why"])
        return self._fail(fields.GONE.get(farewell["code"], FailureKind.BROKEN), farewell["why"])

    def _fail(self, kind: FailureKind, message: str) -> SourceError:
        """Plan the next start and make the error."""
        self._restart_s = self._clock() + self._backoff_s
        self._backoff_s = min(BACKOFF_MAX_S, 2 * self._backoff_s)
        return self._remember(kind, message)

    def _remember(self, kind: FailureKind, message: str) -> SourceError:
        error = SourceError(kind, message)
        self._failure = error
        return error
