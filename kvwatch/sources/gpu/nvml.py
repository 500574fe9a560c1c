"""GPU facts from NVML, read by a process of its own that may hang, crash and be replaced."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvwatch.model.gpu import HostGpus
from kvwatch.model.sample import FailureKind
from kvwatch.model.settings import GpuSettings
from kvwatch.sources.base import SourceError
from kvwatch.sources.gpu.inventory import Inventory
from kvwatch.sources.gpu.nvml_process import WorkerProcess
from kvwatch.sources.gpu.nvml_view import HostView, XidLogs
from kvwatch.sources.gpu.worker_source import WorkerSource

log = logging.getLogger(__name__)
STUCK_AFTER_S = 2.0  # or ten ticks
HEARTBEAT_S = 1.0  # what the worker keeps while nothing moves
FAST_CRASH_S = 60.0
MEMORY_ONLY_AFTER = 3  # fast crashes
MEMORY_ONLY_FOR_S = 3600.0
_KINDS = {
    4: FailureKind.DENIED,
    9: FailureKind.NO_DRIVER,
    12: FailureKind.NO_DRIVER,
    18: FailureKind.VERSION_MISMATCH,
    27: FailureKind.NO_DRIVER,
    999: FailureKind.NO_DRIVER,
}


class NvmlSource(WorkerSource):
    """The GPUs by NVML: one message every tick, or every second while nothing moves.

    Raises SourceError: STUCK (a driver call has not returned: no second worker is started beside it),
    CRASHED, NO_DRIVER, VERSION_MISMATCH, DENIED (restarted with backoff, 1 to 60 s), PAUSED.
    """

    label = "NVML"
    backoff_max_s = 60.0

    def __init__(
        self,
        settings: GpuSettings,
        *,
        runtime_dir: Path,
        state_dir: Path,
        tick_s: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
        xids: XidLogs | None = None,
    ) -> None:
        view = HostView(settings, Inventory(state_dir / "inventory.json"), xids=xids)
        super().__init__("nvml", view, runtime_dir, max(STUCK_AFTER_S, 10 * tick_s), clock)
        self.quiet = False  # the last reading was a heartbeat: nothing has moved
        self.expected_period_s = max(tick_s, HEARTBEAT_S)
        self._tick_s = tick_s
        self._fast_crashes = 0
        self._memory_only_since_s: float | None = None
        self._greeted = ""

    def resume(self) -> None:
        """Take NVML up again with the next poll, earlier crashes forgotten."""
        with self._lock:
            self._fast_crashes = 0
        super().resume()

    def _paused(self) -> SourceError:
        """PAUSED, or STUCK while a worker inside a driver call keeps NVML from being released."""
        worker = self._worker
        if worker is not None and worker.abandoned:
            if not worker.ended():
                return self._stuck(worker)
            self._worker = None
        return super()._paused()

    def _start(self) -> None:
        self._launch(self._tick_s, memory_only=self._wants_memory_only())

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
        gone = super()._stop_worker()
        if not gone:
            log.warning(
                "NVML worker is inside a driver call and was left to end by itself",
                extra={"pid": self.worker_pid},
            )
        return gone

    def _take(self, lines: list[bytes]) -> bool:
        self.quiet = True
        return super()._take(lines)

    def _note(self, message: dict[str, Any]) -> None:
        self.quiet &= "q" in message

    def _value(self) -> HostGpus:
        self.quiet &= self._failure is None
        return super()._value()

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

    def _crashed(self, worker: WorkerProcess) -> SourceError:
        if self._clock() - self._started_s < FAST_CRASH_S:
            self._fast_crashes += 1
        return super()._crashed(worker)

    def _gone(self, farewell: dict[str, Any]) -> SourceError:
        return self._fail(_KINDS.get(farewell["code"], FailureKind.CRASHED), farewell["why"])
