"""What have the sources with a worker process in common? Hearing it, starting it again, letting it go."""

from __future__ import annotations

import abc
import contextlib
import json
import logging
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvwatch.model.gpu import HostGpus
from kvwatch.model.sample import FailureKind
from kvwatch.sources.base import SourceError
from kvwatch.sources.gpu.nvml_process import MODULE, WorkerProcess, describe_end
from kvwatch.sources.gpu.nvml_view import HostView

log = logging.getLogger(__name__)
FIRST_MESSAGE_S = 15.0  # opening many GPUs without persistence mode takes seconds
BACKOFF_FIRST_S = 1.0
GOOD_RUN_S = 30.0  # after such a run the backoff starts anew
FAILED_POLL_S = 1.0  # a poll that can only repeat a failure takes this long
STOP_S = 2.5


class WorkerSource(abc.ABC):
    """A source that paces itself: `poll` returns with each message of its worker (Source[HostGpus]).

    `poll` belongs to one thread, which must live as long as the source (the worker is told to end
    when the thread that started it does); `pause`, `resume` and `close` may be called from any.
    """

    label: str  # what is read, for people
    backoff_max_s: float

    def __init__(
        self, name: str, view: HostView, runtime_dir: Path, stuck_after_s: float, clock: Callable[[], float]
    ) -> None:
        self.name = name
        self.period_s = 0.0
        self.deadline_s = FIRST_MESSAGE_S + FAILED_POLL_S
        self.stuck_after_s = stuck_after_s
        self._view = view
        self._runtime_dir = runtime_dir
        self._clock = clock
        self._lock = threading.Lock()
        self._pipe_lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._resumed = threading.Event()
        self._resumed.set()
        self._closed = False
        self._worker: WorkerProcess | None = None
        self._started_s = self._last_line_s = 0.0
        self._heard = False
        self._farewell: dict[str, Any] | None = None
        self._failure: SourceError | None = None
        self._restart_s = 0.0
        self._backoff_s = BACKOFF_FIRST_S

    # -- the source protocol -------------------------------------------------------------------

    def poll(self) -> HostGpus:
        """Wait for the worker's next message: at most 15 s at its start, `stuck_after_s` later."""
        if not self._resumed.is_set():
            self._resumed.wait(FAILED_POLL_S)
        with self._lock:
            self._refuse_when_off()
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
            with self._pipe_lock:
                if self._wake_read >= 0:
                    os.close(self._wake_read)
                    os.close(self._wake_write)
                    self._wake_read = self._wake_write = -1

    def pause(self) -> bool:
        """End the worker for maintenance; say whether it has ended (a stuck one cannot be)."""
        self._resumed.clear()
        self._wake()
        with self._lock:
            return self._stop_worker()

    def resume(self) -> None:
        """Start anew with the next poll."""
        with self._lock:
            self._restart_s, self._backoff_s = 0.0, BACKOFF_FIRST_S
        self._resumed.set()

    @property
    def paused(self) -> bool:
        """Whether it is released for maintenance."""
        return not self._resumed.is_set()

    @property
    def worker_pid(self) -> int | None:
        """Process id of the present worker, stuck or not."""
        worker = self._worker
        return None if worker is None else worker.pid

    def known(self) -> HostGpus:
        """The GPUs known of while they cannot be read: identities in state unknown, no values."""
        failure = self._failure
        return self._view.known(
            f"{self.label} is not being read" if failure is None else failure.failure.message
        )

    # -- what may differ ----------------------------------------------------------------------

    @abc.abstractmethod
    def _start(self) -> None:
        """`_launch` a worker; raises SourceError where that is no use."""

    @abc.abstractmethod
    def _stuck(self, worker: WorkerProcess) -> SourceError:
        """Nothing has come for too long."""

    @abc.abstractmethod
    def _gone(self, farewell: dict[str, Any]) -> SourceError:
        """The worker has ended and said why."""

    @abc.abstractmethod
    def _note(self, message: dict[str, Any]) -> None:
        """Keep what a message says beside the GPUs' values."""

    def _crashed(self, worker: WorkerProcess) -> SourceError:
        how = describe_end(worker.status or 0)
        return self._fail(FailureKind.CRASHED, f"the {self.label} worker {how}; it is restarted with backoff")

    def _unending(self, worker: WorkerProcess) -> SourceError:
        """The worker was told to end and has not."""
        return self._stuck(worker)

    def _paused(self) -> SourceError:
        return SourceError(
            FailureKind.PAUSED,
            f"{self.label} is released for maintenance: `kvwatch maintenance off` ends it",
        )

    def _greet(self, hello: dict[str, Any]) -> None:
        log.info("%s worker started", self.label, extra=hello)

    def _value(self) -> HostGpus:
        self._failure = None
        return self._view.build(self._last_line_s)

    # -- the worker's life ---------------------------------------------------------------------

    def _refuse_when_off(self) -> None:
        if not self._resumed.is_set():
            raise self._paused()
        if self._closed:
            raise SourceError(FailureKind.CRASHED, "the source is closed")

    def _wake(self) -> None:
        with self._pipe_lock:  # else another thread may close it, and the number be another file's
            if self._wake_write >= 0:
                os.write(self._wake_write, b"x")

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 64)
        self._refuse_when_off()

    def _sleep(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.poll(seconds * 1000)
        self._woken()

    def _wait_for_restart(self) -> None:
        wait_s = self._restart_s - self._clock()
        if wait_s <= 0:
            return
        self._sleep(min(wait_s, FAILED_POLL_S))
        if self._failure is not None and self._clock() < self._restart_s:
            raise SourceError(self._failure.failure.kind, self._failure.failure.message)

    def _launch(
        self,
        tick_s: float,
        *,
        memory_only: bool = False,
        module: str = MODULE,
        arguments: tuple[str, ...] = (),
    ) -> None:
        self._view.reset()
        try:
            self._worker = WorkerProcess(
                self._lock_path(), tick_s, memory_only=memory_only, module=module, arguments=arguments
            )
        except OSError as error:
            raise self._fail(
                FailureKind.CRASHED, f"the {self.label} worker could not be started: {error}"
            ) from error
        self._started_s = self._last_line_s = self._clock()
        self._heard = False
        self._farewell = None

    def _lock_path(self) -> Path | None:
        path = self._runtime_dir / f"{self.name}.lock"
        try:
            self._runtime_dir.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            log.warning("no %s lock file", self.label, extra={"path": str(path), "error": str(error)})
            return None
        return path

    def _stop_worker(self) -> bool:
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
            limit_s = self.stuck_after_s if self._heard else FIRST_MESSAGE_S
            left_s = self._last_line_s + limit_s - self._clock()
            if not worker.wait_for_output(self._wake_read, left_s if left_s > 0 else FAILED_POLL_S):
                self._woken()
                if self._clock() - self._last_line_s >= limit_s:
                    raise self._stuck(worker)
                continue
            lines = worker.read_lines()
            if lines is None:
                raise self._ended(worker)
            if self._take(lines):
                return self._value()

    def _check_abandoned(self, worker: WorkerProcess | None) -> SourceError:
        """After a pause that could not end the worker: wait for it, start no second one."""
        self._sleep(FAILED_POLL_S)
        if worker is not None and not worker.ended():
            return self._unending(worker)
        self._worker = None
        return SourceError(
            FailureKind.CRASHED, f"the stuck {self.label} worker has ended; a new one is started"
        )

    def _take(self, lines: list[bytes]) -> bool:
        """Take in lines; say whether readings came with them."""
        news = False
        for line in lines:
            try:
                news |= self._understand(json.loads(line))
            except (ValueError, TypeError, KeyError, IndexError) as error:
                log.warning("%s worker sent an unreadable line", self.label, extra={"error": repr(error)})
        if news:
            self._heard = True
            self._last_line_s = self._clock()
            if self._last_line_s - self._started_s > GOOD_RUN_S:
                self._backoff_s = BACKOFF_FIRST_S
        return news

    def _understand(self, message: dict[str, Any]) -> bool:
        if "bye" in message:
            self._farewell = message
        elif "hello" in message:
            self._greet(message["hello"])
        else:
            now_s = self._clock()
            # Lines wait in the pipe while this process is stopped: they are as old as they say.
            self._view.apply(min(now_s, message.get("s", now_s)), message)
            self._note(message)
            return "s" in message
        return False

    def _ended(self, worker: WorkerProcess) -> SourceError:
        """The output ended: collect the process, plan the restart, say why."""
        worker.stop(STOP_S)
        if worker.abandoned:
            return self._unending(worker)
        self._worker = None
        self._view.reset()
        if self._farewell is None:
            return self._crashed(worker)
        if self._farewell["bye"] == "locked":
            return self._fail(FailureKind.STUCK, self._farewell["why"])
        return self._gone(self._farewell)

    def _fail(self, kind: FailureKind, message: str) -> SourceError:
        """Plan the next start and make the error."""
        self._restart_s = self._clock() + self._backoff_s
        self._backoff_s = min(self.backoff_max_s, 2 * self._backoff_s)
        return self._remember(kind, message)

    def _remember(self, kind: FailureKind, message: str) -> SourceError:
        error = SourceError(kind, message)
        self._failure = error
        return error
