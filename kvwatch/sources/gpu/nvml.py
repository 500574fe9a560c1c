"""GPU facts from NVML, read by a process of its own that may hang, crash and be replaced."""

from __future__ import annotations

import json
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvwatch.model.gpu import HostGpus
from kvwatch.model.sample import FailureKind
from kvwatch.model.settings import GpuSettings
from kvwatch.sources.base import SourceError
from kvwatch.sources.gpu.inventory import Inventory
from kvwatch.sources.gpu.nvml_process import WorkerProcess, describe_end
from kvwatch.sources.gpu.nvml_view import HostView

log = logging.getLogger(__name__)
STUCK_AFTER_S = 2.0  # or ten ticks
HEARTBEAT_S = 1.0  # what the worker keeps while nothing moves
FIRST_MESSAGE_S = 15.0  # opening many GPUs without persistence mode takes seconds
BACKOFF_FIRST_S, BACKOFF_MAX_S = 1.0, 60.0
GOOD_RUN_S = 30.0  # after such a run the backoff starts anew
FAST_CRASH_S = 60.0
MEMORY_ONLY_AFTER = 3  # fast crashes
MEMORY_ONLY_FOR_S = 3600.0
FAILED_POLL_S = 1.0  # a poll that can only repeat a failure takes this long
STOP_S = 2.5
_KINDS = {
    4: FailureKind.DENIED,
    9: FailureKind.NO_DRIVER,
    12: FailureKind.NO_DRIVER,
    18: FailureKind.VERSION_MISMATCH,
    27: FailureKind.NO_DRIVER,
    999: FailureKind.NO_DRIVER,
}


class NvmlSource:
    """Source[HostGpus] that paces itself: `poll` returns with each message of the worker (every tick).

    Raises SourceError: STUCK (a driver call has not returned: no second worker is started beside it),
    CRASHED, NO_DRIVER, VERSION_MISMATCH, DENIED (restarted with backoff, 1 to 60 s), PAUSED.
    `poll` belongs to one thread, which must live as long as the source (the worker is told to end
    when the thread that started it does); `pause`, `resume` and `close` may be called from any.
    """

    def __init__(
        self,
        settings: GpuSettings,
        *,
        runtime_dir: Path,
        state_dir: Path,
        tick_s: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = "nvml"
        self.period_s = 0.0
        self.quiet = False  # the last reading was a heartbeat: nothing has moved
        self.expected_period_s = max(tick_s, HEARTBEAT_S)
        self.deadline_s = FIRST_MESSAGE_S + FAILED_POLL_S
        self.stuck_after_s = max(STUCK_AFTER_S, 10 * tick_s)
        self._clock = clock
        self._tick_s = tick_s
        self._runtime_dir = runtime_dir
        self._view = HostView(settings, Inventory(state_dir / "inventory.json"))
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._resumed = threading.Event()
        self._resumed.set()
        self._closed = False
        self._worker: WorkerProcess | None = None
        self._started_s = 0.0
        self._last_line_s = 0.0
        self._heard = False
        self._failure: SourceError | None = None
        self._farewell: dict[str, Any] | None = None
        self._restart_s = 0.0
        self._backoff_s = BACKOFF_FIRST_S
        self._fast_crashes = 0
        self._memory_only_since_s: float | None = None
        self._greeted = ""

    # -- the source protocol -------------------------------------------------------------------

    def poll(self) -> HostGpus:
        """Wait for the worker's next message, at most 15 s at its start and 2 s later."""
        if not self._resumed.is_set():
            self._resumed.wait(FAILED_POLL_S)
        with self._lock:
            if not self._resumed.is_set():
                raise self._paused()
            if self._closed:
                raise SourceError(FailureKind.CRASHED, "the source is closed")
            if self._worker is None:
                self._wait_for_restart()
                self._start()
            return self._next_value()

    def close(self) -> None:
        """End the worker gently within three seconds; one inside a driver call is left to end by itself."""
        self._closed = True
        self._resumed.set()
        self._wake()
        with self._lock:
            self._stop_worker()
            if self._wake_read >= 0:
                os.close(self._wake_read)
                os.close(self._wake_write)
                self._wake_read = self._wake_write = -1

    def pause(self) -> bool:
        """Release NVML for maintenance; say whether it is released (a stuck worker cannot be)."""
        self._resumed.clear()
        self._wake()
        with self._lock:
            return self._stop_worker()

    def resume(self) -> None:
        """Take NVML up again with the next poll."""
        with self._lock:
            self._restart_s = 0.0
            self._backoff_s = BACKOFF_FIRST_S
            self._fast_crashes = 0
        self._resumed.set()

    @property
    def paused(self) -> bool:
        """Whether NVML is released for maintenance."""
        return not self._resumed.is_set()

    @property
    def worker_pid(self) -> int | None:
        """Process id of the present worker, stuck or not."""
        worker = self._worker
        return None if worker is None else worker.pid

    def known(self) -> HostGpus:
        """The GPUs known of while NVML cannot be read: identities in state unknown, no values."""
        reason = "NVML is not being read" if self._failure is None else self._failure.failure.message
        return self._view.known(reason)

    # -- the worker's life ---------------------------------------------------------------------

    def _wake(self) -> None:
        if self._wake_write >= 0:
            os.write(self._wake_write, b"x")

    def _paused(self) -> SourceError:
        """PAUSED, or STUCK while a worker inside a driver call keeps NVML from being released."""
        worker = self._worker
        if worker is not None and worker.abandoned:
            if not worker.ended():
                return self._stuck(worker)
            self._worker = None
        return SourceError(
            FailureKind.PAUSED, "NVML is released for maintenance: `kvwatch maintenance off` ends it"
        )

    def _wait_for_restart(self) -> None:
        wait_s = self._restart_s - self._clock()
        if wait_s <= 0:
            return
        self._sleep(min(wait_s, FAILED_POLL_S))
        if self._failure is not None and self._clock() < self._restart_s:
            raise SourceError(self._failure.failure.kind, self._failure.failure.message)

    def _sleep(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        if poll.poll(seconds * 1000):
            self._woken()

    def _woken(self) -> None:
        try:
            os.read(self._wake_read, 64)
        except BlockingIOError:
            return
        if not self._resumed.is_set():
            raise self._paused()
        if self._closed:
            raise SourceError(FailureKind.CRASHED, "the source is closed")

    def _start(self) -> None:
        self._view.reset()
        memory_only = self._wants_memory_only()
        try:
            self._worker = WorkerProcess(self._lock_path(), self._tick_s, memory_only=memory_only)
        except OSError as error:
            raise self._fail(FailureKind.CRASHED, f"the NVML worker could not be started: {error}") from error
        self._started_s = self._last_line_s = self._clock()
        self._heard = False
        self._farewell = None

    def _lock_path(self) -> Path | None:
        path = self._runtime_dir / "nvml.lock"
        try:
            self._runtime_dir.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            log.warning("no NVML lock file", extra={"path": str(path), "error": str(error)})
            return None
        return path

    def _wants_memory_only(self) -> bool:
        if self._fast_crashes < MEMORY_ONLY_AFTER:
            self._memory_only_since_s = None
            return False
        now = self._clock()
        if self._memory_only_since_s is None:
            self._memory_only_since_s = now
            log.warning(
                "NVML worker crashed repeatedly: only memory is read", extra={"crashes": self._fast_crashes}
            )
        elif now - self._memory_only_since_s > MEMORY_ONLY_FOR_S:
            self._fast_crashes, self._memory_only_since_s = 0, None
            return False
        return True

    def _stop_worker(self) -> bool:
        worker = self._worker
        if worker is None:
            return True
        gone = worker.stop(STOP_S)
        if gone:
            self._worker = None
        else:
            log.warning(
                "NVML worker is inside a driver call and was left to end by itself", extra={"pid": worker.pid}
            )
        self._view.reset()
        return gone

    # -- messages ------------------------------------------------------------------------------

    def _next_value(self) -> HostGpus:
        worker = self._worker
        if worker is None or worker.abandoned:
            raise self._check_abandoned(worker)
        while True:
            limit_s = self.stuck_after_s if self._heard else FIRST_MESSAGE_S
            left_s = self._last_line_s + limit_s - self._clock()
            already_stuck = left_s <= 0
            if not worker.wait_for_output(self._wake_read, FAILED_POLL_S if already_stuck else left_s):
                self._woken()
                if self._clock() - self._last_line_s >= limit_s:
                    raise self._stuck(worker)
                continue
            lines = worker.read_lines()
            if lines is None:
                raise self._ended(worker)
            if self._take(lines):
                self.quiet &= self._failure is None
                self._failure = None
                return self._view.build(self._last_line_s)

    def _check_abandoned(self, worker: WorkerProcess | None) -> SourceError:
        """After a pause that could not end the worker: wait for it, start no second one."""
        self._sleep(FAILED_POLL_S)
        if worker is not None and not worker.ended():
            return self._stuck(worker)
        self._worker = None
        return SourceError(FailureKind.CRASHED, "the stuck NVML worker has ended; a new one is started")

    def _take(self, lines: list[bytes]) -> bool:
        """Take in lines; say whether readings came with them."""
        news = False
        self.quiet = True
        for line in lines:
            try:
                message = json.loads(line)
                if "bye" in message:
                    self._farewell = message
                elif "hello" in message:
                    self._greet(message["hello"])
                else:
                    self._view.apply(self._clock(), message)
                    news |= "s" in message
                    self.quiet &= "q" in message
            except (ValueError, TypeError, KeyError, IndexError) as error:
                log.warning("NVML worker sent an unreadable line", extra={"error": repr(error)})
        if news:
            self._heard = True
            self._last_line_s = self._clock()
            if self._last_line_s - self._started_s > GOOD_RUN_S:
                self._backoff_s = BACKOFF_FIRST_S
        return news

    def _greet(self, hello: dict[str, Any]) -> None:
        """Log which bindings are used (another package has shadowed them before); a retry says it once."""
        again = self._failure is not None and self._greeted == hello["bindings_path"]
        self._greeted = hello["bindings_path"]
        log.log(logging.DEBUG if again else logging.INFO, "NVML worker started", extra=hello)
        if not hello["memory_v2"]:
            message = (
                "NVML bindings without memory info v2 count reserved memory as used: install nvidia-ml-py"
            )
            log.warning(message, extra={"bindings_path": hello["bindings_path"]})

    def _stuck(self, worker: WorkerProcess) -> SourceError:
        silent_s = self._clock() - self._last_line_s
        message = (
            f"no reading from the NVML worker (process {worker.pid}) for {silent_s:.1f} s: a driver call "
            "has not returned. Look for Xid and NVRM lines in the kernel log; no second worker is started"
        )
        return self._remember(FailureKind.STUCK, message)

    def _ended(self, worker: WorkerProcess) -> SourceError:
        """The output ended: collect the process, plan the restart, say why."""
        worker.stop(STOP_S)
        if worker.abandoned:
            return self._stuck(worker)
        self._worker = None
        self._view.reset()
        if self._farewell is None:
            if self._clock() - self._started_s < FAST_CRASH_S:
                self._fast_crashes += 1
            how = describe_end(worker.status or 0)
            return self._fail(FailureKind.CRASHED, f"the NVML worker {how}; it is restarted with backoff")
        if self._farewell["bye"] == "locked":
            return self._fail(FailureKind.STUCK, self._farewell["why"])
        kind = _KINDS.get(self._farewell["code"], FailureKind.CRASHED)
        return self._fail(kind, self._farewell["why"])

    def _fail(self, kind: FailureKind, message: str) -> SourceError:
        """Plan the next start and make the error."""
        self._restart_s = self._clock() + self._backoff_s
        self._backoff_s = min(BACKOFF_MAX_S, 2 * self._backoff_s)
        return self._remember(kind, message)

    def _remember(self, kind: FailureKind, message: str) -> SourceError:
        error = SourceError(kind, message)
        self._failure = error
        return error
