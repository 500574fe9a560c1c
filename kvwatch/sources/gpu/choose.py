"""Which source of GPU facts runs, and what stands in for NVML where it cannot be read?

`auto` reads NVML. DCGM costs a process of 20 MiB, so it is used only where it gives what NVML does not:
GPUs whose memory NVML may not read, or all of them while NVML fails. Where DCGM is not there either, an
exporter's page serves. Every GpuState says in `reported_by` where it comes from.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvwatch.model.gpu import GpuHealth, GpuState, HostGpus
from kvwatch.model.sample import FailureKind
from kvwatch.model.settings import GpuSettings, GpuSourceKind
from kvwatch.sources.base import Source, SourceError
from kvwatch.sources.gpu.dcgm import DcgmSource, find_bindings, reachable
from kvwatch.sources.gpu.nvml import NvmlSource
from kvwatch.sources.gpu.nvml_view import XidLogs

log = logging.getLogger(__name__)
NVML_SIGNS = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg", "/dev/nvgpu")
LIBRARY = "libnvidia-ml.so.1"
LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
)  # fmt: skip
NEWS_S = 2.5  # how long a value of a stand-in is news
FILLED = (
    "utilization_ratio", "memory_bandwidth_utilization_ratio", "power_watts", "temperature_celsius",
    "clock_event_reasons", "ecc_corrected_total", "ecc_uncorrected_total", "remapped_rows_pending",
    "remapped_rows_failed", "bar1_total_bytes", "bar1_used_bytes", "energy_joules",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds that `auto` waits for things."""

    retry_nvml_s: float = 10.0  # while something else serves: a failing poll of NVML takes a second
    look_again_s: float = 10.0  # for something that could stand in
    help_after_s: float = 30.0  # a GPU must have been without memory
    keep_s: float = 30.0  # a stand-in runs on after NVML is well again
    give_up_s: float = 15.0  # a stand-in may fail


def create(
    settings: GpuSettings,
    *,
    runtime_dir: Path,
    state_dir: Path,
    tick_s: float = 0.2,
    patience: Patience = Patience(),
    xids: XidLogs | None = None,
) -> Source[HostGpus]:
    """The source that the settings name. Starts no process; raises ValueError for `none`.

    `xids` keeps the Xid events where a later source shall know of them.
    """
    if settings.source is GpuSourceKind.NONE:
        raise ValueError("gpus.source is none: there is no source to make")
    if settings.source is GpuSourceKind.DCGM:
        return _dcgm(settings, runtime_dir, state_dir)
    if settings.source is GpuSourceKind.DCGM_EXPORTER:
        return _exporter(settings, state_dir)
    nvml = NvmlSource(settings, runtime_dir=runtime_dir, state_dir=state_dir, tick_s=tick_s, xids=xids)
    if settings.source is GpuSourceKind.NVML:
        return nvml
    makers = {
        GpuSourceKind.DCGM: lambda: _dcgm(settings, runtime_dir, state_dir),
        GpuSourceKind.DCGM_EXPORTER: lambda: _exporter(settings, state_dir),
    }
    name = "nvml" if nvml_plausible() else next(iter(stand_ins(settings)), GpuSourceKind.NVML).value
    return AutoSource(settings, nvml, makers, name=name, patience=patience)


def _dcgm(settings: GpuSettings, runtime_dir: Path, state_dir: Path) -> Source[HostGpus]:
    return DcgmSource(
        settings, runtime_dir=runtime_dir, state_dir=state_dir, profiling=settings.dcgm_profiling
    )


def _exporter(settings: GpuSettings, state_dir: Path) -> Source[HostGpus]:
    from kvwatch.sources.gpu.dcgm_exporter import DcgmExporterSource  # HTTP: only where it is used

    return DcgmExporterSource(settings, state_dir=state_dir)


def nvml_plausible() -> bool:
    """Whether there is any sign of an NVIDIA driver; cheap, and no proof."""
    folders = (*os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), *LIBRARY_FOLDERS)
    paths = (*NVML_SIGNS, *(f"{folder}/{LIBRARY}" for folder in folders if folder))
    return any(Path(path).exists() for path in paths)


def stand_ins(settings: GpuSettings) -> list[GpuSourceKind]:
    """What could serve instead of NVML just now, the best first; asks the sockets, at most 0.2 s each."""
    found = []
    if find_bindings() is not None and not reachable(settings.dcgm_address):
        found.append(GpuSourceKind.DCGM)
    host_and_port = settings.dcgm_exporter_url.partition("://")[2].partition("/")[0]
    if ":" not in host_and_port.rpartition("]")[2]:
        host_and_port += ":443" if settings.dcgm_exporter_url.startswith("https") else ":80"
    if not reachable(host_and_port):
        found.append(GpuSourceKind.DCGM_EXPORTER)
    return found


class Follower:
    """Polls another source in a thread of its own, so that no hang of one delays the other."""

    def __init__(self, kind: GpuSourceKind, source: Source[HostGpus]) -> None:
        self.kind = kind
        self.failing_since_s: float | None = time.monotonic()
        self._source = source
        self._news = threading.Condition()
        self._value: HostGpus | None = None
        self._value_s = 0.0
        self._taken = True
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"follow-{source.name}", daemon=True)
        self._thread.start()

    def next_value(self, timeout_s: float) -> HostGpus | None:
        """A value that was not handed out before; None where none comes in time."""
        with self._news:
            self._news.wait_for(lambda: not self._taken or self._stop.is_set(), timeout_s)
            if self._taken or time.monotonic() - self._value_s > NEWS_S:
                return None
            self._taken = True
            return self._value

    def newest(self) -> HostGpus | None:
        """The newest value, handed out before or not; None once it is old."""
        with self._news:
            return self._value if time.monotonic() - self._value_s <= 2 * NEWS_S else None

    def close(self) -> None:
        """End the source, within a few seconds."""
        self._stop.set()
        with self._news:
            self._news.notify_all()
        if isinstance(self._source, DcgmSource):
            self._source.close()  # ends a poll that waits for its worker
        self._thread.join(3.0)

    def _run(self) -> None:
        period_s = self._source.period_s
        try:
            while not self._stop.is_set():
                try:
                    self._take(self._source.poll())
                    wait_s = period_s
                except SourceError:
                    self.failing_since_s = self.failing_since_s or time.monotonic()
                    wait_s = max(period_s, 0.5)
                if self._stop.wait(wait_s):
                    return
        finally:
            self._source.close()

    def _take(self, value: HostGpus) -> None:
        self.failing_since_s = None
        with self._news:
            self._value, self._value_s, self._taken = value, time.monotonic(), False
            self._news.notify_all()


class AutoSource:
    """Source[HostGpus]: NVML, with DCGM or an exporter in its place or beside it where that helps.

    `name` stays what it is at the start (the catalogue knows sources by name); which source serves is in
    each GpuState. Raises what NVML raises, where nothing stands in. `poll` belongs to one thread.
    """

    def __init__(
        self,
        settings: GpuSettings,
        nvml: NvmlSource,
        makers: dict[GpuSourceKind, Callable[[], Source[HostGpus]]],
        *,
        name: str = "nvml",
        patience: Patience = Patience(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.period_s = 0.0
        self.expected_period_s = nvml.expected_period_s if name == "nvml" else 2.0
        self.deadline_s = nvml.deadline_s + NEWS_S
        self._settings = settings
        self._nvml = nvml
        self._makers = makers
        self._patience = patience
        self._clock = clock
        self._follower: Follower | None = None
        self._look_again_s = 0.0
        self._nvml_due_s = 0.0
        self._nvml_error: SourceError | None = None
        self._nvml_well_since_s: float | None = None
        self._wanting_since_s: float | None = None
        self._switch = threading.Lock()

    # -- the source protocol -------------------------------------------------------------------

    def poll(self) -> HostGpus:
        """NVML's next message, or the stand-in's next one while NVML fails."""
        if self._follower is not None and self._clock() < self._nvml_due_s and not self._nvml.paused:
            value = self._follower.next_value(NEWS_S)
            if value is not None:
                return value
        try:
            host = self._nvml.poll()
        except SourceError as error:
            if error.failure.kind is FailureKind.PAUSED:
                raise
            return self._stand_in(error)
        if self._nvml_error is not None:
            log.info("NVML is read again")
        self._nvml_error, self._nvml_due_s = None, 0.0
        return self._helped(host)

    def close(self) -> None:
        """End both."""
        self._drop_follower()
        self._nvml.close()

    def pause(self) -> bool:
        """Release NVML and our connection to DCGM for maintenance."""
        released = self._nvml.pause()
        self._drop_follower()
        return released

    def resume(self) -> None:
        """Take them up again with the next poll."""
        self._nvml_due_s = self._look_again_s = 0.0
        self._nvml.resume()

    @property
    def paused(self) -> bool:
        """Whether it is released for maintenance."""
        return self._nvml.paused

    @property
    def quiet(self) -> bool:
        """Whether the last reading was NVML's heartbeat: nothing has moved."""
        return self._nvml_error is None and self._follower is None and self._nvml.quiet

    @property
    def worker_pid(self) -> int | None:
        """Process id of the NVML worker."""
        return self._nvml.worker_pid

    def known(self) -> HostGpus:
        """The GPUs known of while nothing can be read."""
        return self._nvml.known()

    # -- standing in and helping ---------------------------------------------------------------

    def _stand_in(self, error: SourceError) -> HostGpus:
        """A value of something else while NVML fails; raises NVML's error where there is none."""
        self._nvml_well_since_s = None
        follower = self._follow((GpuSourceKind.DCGM, GpuSourceKind.DCGM_EXPORTER))
        value = None if follower is None else follower.next_value(NEWS_S)
        if follower is None or value is None:
            self._nvml_error = error
            raise error
        if self._nvml_due_s == 0.0:
            log.warning("NVML fails, %s serves", follower.kind.value, extra={"error": str(error)})
        self._nvml_error = error
        self._nvml_due_s = self._clock() + self._patience.retry_nvml_s
        return value

    def _helped(self, host: HostGpus) -> HostGpus:
        """NVML's value, with what only DCGM may read filled in."""
        now_s = self._clock()
        if self._nvml_well_since_s is None:
            self._nvml_well_since_s = now_s
        if not any(wants_help(gpu) for gpu in host.gpus):
            self._wanting_since_s = None
            if self._follower is not None and now_s - self._nvml_well_since_s > self._patience.keep_s:
                self._drop_follower()
            return host
        if self._wanting_since_s is None:
            self._wanting_since_s = now_s
        if now_s - self._wanting_since_s < self._patience.help_after_s:
            return host
        follower = self._follow((GpuSourceKind.DCGM,))
        extra = None if follower is None or follower.kind is not GpuSourceKind.DCGM else follower.newest()
        return host if extra is None else fill(host, extra)

    def _follow(self, kinds: tuple[GpuSourceKind, ...]) -> Follower | None:
        """The running follower, or a new one where its like is there; one that only fails is replaced."""
        now_s = self._clock()
        follower = self._follower
        if follower is not None:
            since_s = follower.failing_since_s
            if since_s is None or time.monotonic() - since_s < self._patience.give_up_s:
                return follower
            self._drop_follower()
        if now_s < self._look_again_s:
            return None
        self._look_again_s = now_s + self._patience.look_again_s
        there = [kind for kind in stand_ins(self._settings) if kind in kinds]
        there.sort(key=lambda kind: follower is not None and kind is follower.kind)
        with self._switch:
            if there and not self._nvml.paused:
                self._follower = Follower(there[0], self._makers[there[0]]())
            return self._follower

    def _drop_follower(self) -> None:
        with self._switch:
            follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()


def wants_help(gpu: GpuState) -> bool:
    """Whether NVML may not read what DCGM, which runs as root, may."""
    if gpu.health is GpuHealth.DENIED:
        return True
    return gpu.health is GpuHealth.OK and gpu.memory is None and not gpu.is_mig_parent


def fill(host: HostGpus, extra: HostGpus) -> HostGpus:
    """`host` with the gaps of each GPU filled from `extra`, by UUID; what is there is never replaced."""
    others = {gpu.uuid: gpu for gpu in extra.gpus if gpu.health is GpuHealth.OK}
    gpus = tuple(_filled(gpu, others.get(gpu.uuid)) for gpu in host.gpus)
    return replace(host, gpus=gpus)


def _filled(gpu: GpuState, other: GpuState | None) -> GpuState:
    if other is None or gpu.health not in (GpuHealth.OK, GpuHealth.DENIED):
        return gpu
    if wants_help(gpu) and other.memory is not None:
        kept: dict[str, Any] = {
            "index": gpu.index,
            "xid_events_total": gpu.xid_events_total,
            "last_xid": gpu.last_xid,
            "last_xid_s": gpu.last_xid_s,
        }
        return replace(other, **kept)
    gaps = {name: getattr(other, name) for name in FILLED if getattr(gpu, name) is None}
    return replace(gpu, **gaps)
