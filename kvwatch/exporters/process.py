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
_boot_wall_s: list[float] = []  # filled on first use: /proc/stat is long on large hosts


def readings() -> Iterator[tuple[str, float]]:
    """(name, value) of what /proc tells; nothing where it is not mounted."""
    yield "process_cpu_seconds_total", _cpu_seconds()
    fields = _stat_fields()
    if len(fields) > 21:
        yield "process_resident_memory_bytes", float(fields[21]) * _PAGE_BYTES
        yield "process_virtual_memory_bytes", float(fields[20])
    open_fds = _open_fds()
    if open_fds is not None:
        yield "process_open_fds", open_fds
    yield "process_max_fds", resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    boot = _boot_time()
    if len(fields) > 21 and boot is not None:
        yield "process_start_time_seconds", boot + float(fields[19]) / _TICKS_PER_S


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _stat_fields() -> list[str]:
    """Fields of /proc/self/stat from the third on (the second may hold blanks)."""
    try:
        text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _open_fds() -> int | None:
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208 names only; less the listing's own
    except OSError:
        return None


def _boot_time() -> float | None:
    if not _boot_wall_s:
        try:
            lines = Path("/proc/stat").read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            return None
        _boot_wall_s.extend(float(line.split()[1]) for line in lines if line.startswith("btime "))
    return _boot_wall_s[0] if _boot_wall_s else None
