"""GPU facts from a DCGM host engine that runs already, read by a process of its own.

DCGM's Python bindings come with DCGM's package, not from PyPI; they are looked for in its folders. No
worker is started before bindings and engine are there, so a host without DCGM pays nothing. The tests
run against a stand-in for the bindings.
"""

from __future__ import annotations

import logging
import os
import socket
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
from kvwatch.sources.gpu.nvml_process import WorkerProcess
from kvwatch.sources.gpu.nvml_view import HostView
from kvwatch.sources.gpu.worker_source import BACKOFF_FIRST_S, WorkerSource

log = logging.getLogger(__name__)
MODULE = "kvwatch.sources.gpu.dcgm_worker"
BINDINGS_VARIABLE = "KVWATCH_DCGM_BINDINGS"
BINDINGS_FOLDERS = (
    "/usr/share/datacenter-gpu-manager-4/bindings/python3",  # DCGM 4
    "/usr/local/dcgm/bindings/python3",  # DCGM 2.3 to 3
    "/usr/local/dcgm/bindings",  # some images of DCGM 3
)
PERIOD_S = 1.0
STUCK_AFTER_PERIODS = 5.0
REPLACE_AFTER_S = 60.0  # calls have blocked for 45 s and come back (DCGM#313)
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


class DcgmSource(WorkerSource):
    """The GPUs by a DCGM host engine: one message every second.

    Raises SourceError: NO_DRIVER (no bindings, no library), REFUSED (no engine), BROKEN, TIMED_OUT (the
    engine's data is old), VERSION_MISMATCH, STUCK (a call has not returned), CRASHED, PAUSED. After a
    lost connection a new worker connects, with backoff from 1 to 30 s. `pause` ends our connection; the
    engine itself still holds the GPUs (`dcgmi` frees them).
    """

    label = "DCGM"
    backoff_max_s = 30.0

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
        inventory = Inventory(state_dir / "inventory.json")
        view = HostView(settings, inventory, lister="DCGM", reported_by="dcgm")
        super().__init__("dcgm", view, runtime_dir, STUCK_AFTER_PERIODS * period_s, clock)
        self.expected_period_s = period_s
        self._address = settings.dcgm_address
        self._arguments = ("profiling" if profiling else "", str(max_rss_bytes))
        self._stale_s = 0.0  # how old all of the engine's readings are; 0: they are not

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
        self._launch(
            self.expected_period_s, module=MODULE, arguments=(folder, self._address, *self._arguments)
        )

    def _note(self, message: dict[str, Any]) -> None:
        if "s" in message:
            self._stale_s = float(message.get("stale", 0.0))

    def _value(self) -> HostGpus:
        if self._stale_s > 0:
            raise self._remember(
                FailureKind.TIMED_OUT,
                f"the host engine's newest memory reading is {self._stale_s:.0f} s old: it hangs, or its "
                "clock is another one; look at the log of nvidia-dcgm",
            )
        return super()._value()

    def _stuck(self, worker: WorkerProcess) -> SourceError:
        silent_s = self._clock() - self._last_line_s
        message = (
            f"no reading from the DCGM worker (process {worker.pid}) for {silent_s:.1f} s: the host engine "
            "does not answer. A GPU with a storm of ECC errors can block it: see `dcgmi health`"
        )
        # TERM ends it even inside a call: it has no driver handle that could be left in a bad state.
        if silent_s >= REPLACE_AFTER_S and self._stop_worker():
            return self._fail(FailureKind.STUCK, message + "; the worker is replaced")
        return self._remember(FailureKind.STUCK, message)

    def _unending(self, worker: WorkerProcess) -> SourceError:
        return self._remember(FailureKind.STUCK, f"the DCGM worker (process {worker.pid}) cannot be ended")

    def _gone(self, farewell: dict[str, Any]) -> SourceError:
        if farewell["bye"] == "large":
            log.warning("DCGM worker replaced", extra={"why": farewell["why"]})
            self._backoff_s = BACKOFF_FIRST_S
            return self._remember(FailureKind.CRASHED, farewell["why"])
        return self._fail(fields.GONE.get(farewell["code"], FailureKind.BROKEN), farewell["why"])
