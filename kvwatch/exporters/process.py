"""What does this process itself use? The `process_*` series that Prometheus users expect, from /proc.

Read here and not by prometheus_client's ProcessCollector: importing that library costs about
5 MiB more than everything else that the daemon loads.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

# (name, kind, help), in the order of `readings`.
PROCESS_SERIES: tuple[tuple[str, str, str], ...] = (
    ("process_cpu_seconds_total", "counter", "User and system CPU time of this process."),
    ("process_resident_memory_bytes", "gauge", "Resident memory of this process."),
    ("process_virtual_memory_bytes", "gauge", "Virtual memory of this process."),
    ("process_open_fds", "gauge", "Open file descriptors of this process."),
    ("process_max_fds", "gauge", "File descriptors that this process may open."),
    ("process_start_time_seconds", "gauge", "When this process started, as Unix time."),
)

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_statm: list[int] = []  # its descriptor, kept open
_started_wall_s: list[float] = []  # filled on first use: it never changes, and /proc/stat is long


_sampled: list[list[tuple[str, float]]] = []  # the loop's last sample, so that no scrape waits for /proc


def sample() -> None:
    """Take the readings that `readings` tells from now on; the loop does so with every report."""
    _sampled[:] = [list(_read())]


def readings() -> list[tuple[str, float]]:
    """(name, value) as of the last report; read now where nobody samples."""
    return _sampled[0] if _sampled else list(_read())


def _read() -> Iterator[tuple[str, float]]:
    """What /proc tells; nothing where it is not mounted."""
    yield "process_cpu_seconds_total", _cpu_seconds()
    pages = _memory_pages()
    if pages is not None:
        yield "process_resident_memory_bytes", pages[1] * _PAGE_BYTES
        yield "process_virtual_memory_bytes", pages[0] * _PAGE_BYTES
    open_fds = _open_fds()
    if open_fds is not None:
        yield "process_open_fds", open_fds
    yield "process_max_fds", resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    started = _started()
    if started is not None:
        yield "process_start_time_seconds", started


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _memory_pages() -> tuple[int, int] | None:
    """(virtual, resident) pages; /proc/self/statm is the cheapest file that has them."""
    try:
        if not _statm:
            _statm.append(os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC))
        virtual, resident = os.pread(_statm[0], 256, 0).split()[:2]
    except OSError:
        return None
    return int(virtual), int(resident)


def _open_fds() -> int | None:
    """Linux 6.2 and newer tell the number as the directory's size; before that the names are counted."""
    try:
        told = os.stat("/proc/self/fd").st_size  # noqa: PTH116 one call, many times
        return told or len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208 less the listing's own
    except OSError:
        return None


def _started() -> float | None:
    """Boot time and the ticks after it at which this process started (fields of proc(5))."""
    if not _started_wall_s:
        try:
            own = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
            lines = Path("/proc/stat").read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            return None
        ticks = float(own.rpartition(")")[2].split()[19])
        boots = [float(line.split()[1]) for line in lines if line.startswith("btime ")]
        _started_wall_s.extend(boot + ticks / _TICKS_PER_S for boot in boots)
    return _started_wall_s[0] if _started_wall_s else None
