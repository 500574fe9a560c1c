"""Which processes hold memory on a device? Own reading of NVML's process lists.

The version 3 record changed size twice. Drivers 535.43 to 535.86 (and 525.125) have a fifth field;
they can be told by their symbols: the confidential-computing size call is there, the detail list is
not. A wrong stride gives garbage pids, so every list is checked for plausibility as well.
"""

from __future__ import annotations

import ctypes
from typing import Any

from kvwatch.sources.gpu import nvml_errors as errors

KINDS = (("Compute", "compute"), ("Graphics", "graphics"), ("MPSCompute", "mps"))
ROOM = 32
MAX_TRIES = 3


class _Record(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class _Record535(ctypes.Structure):
    _fields_ = [*_Record._fields_, ("cc_protected", ctypes.c_ulonglong)]


class ProcessLists:
    """The three lists of a loaded NVML library, with the record layout it uses."""

    def __init__(self, library: Any, pid_max: int) -> None:
        self._pid_max = pid_max
        self._calls = []
        wide = (
            hasattr(library, "nvmlDeviceGetComputeRunningProcesses_v3")
            and hasattr(library, "nvmlDeviceGetConfComputeMemSizeInfo")
            and not hasattr(library, "nvmlDeviceGetRunningProcessDetailList")
        )
        for word, kind in KINDS:
            name = f"nvmlDeviceGet{word}RunningProcesses"
            found = [f"{name}{suffix}" for suffix in ("_v3", "_v2") if hasattr(library, f"{name}{suffix}")]
            if found:
                layout = _Record535 if wide and found[0].endswith("_v3") else _Record
                self._calls.append((found[0], kind, getattr(library, found[0]), layout))

    def names(self) -> list[str]:
        """The NVML calls that `read` makes."""
        return [call[0] for call in self._calls]

    def read(self, number: int, handle: Any) -> tuple[int, list[tuple[int, int | None, str]]]:
        """(NVML return code, [(pid, used bytes, kind)]) of the list `number` in `names()`."""
        _, kind, function, layout = self._calls[number]
        room = ROOM
        code = errors.INSUFFICIENT_SIZE
        for _ in range(MAX_TRIES):
            count = ctypes.c_uint(room)
            array = (layout * room)()
            code = function(handle, ctypes.byref(count), array)
            if code != errors.INSUFFICIENT_SIZE:
                break
            room = min(65536, max(count.value, room) * 2)
        if code != 0:
            return code, []
        return 0, [(entry.pid, errors.known(entry.used), kind) for entry in array[: count.value]]

    def plausible(self, found: list[tuple[int, int | None, str]], total_bytes: int) -> bool:
        """Say whether every pid can exist and no process holds more than the device has."""
        return all(
            0 < pid <= self._pid_max and (used is None or used <= total_bytes) for pid, used, _ in found
        )


def merged(found: list[tuple[int, int | None, str]]) -> list[tuple[int, int | None, str]]:
    """One entry per pid: a process in two lists holds the same memory, not twice as much."""
    by_pid: dict[int, tuple[int, int | None, str]] = {}
    for entry in found:
        known = by_pid.get(entry[0])
        if known is None or (entry[1] or 0) > (known[1] or 0):
            by_pid[entry[0]] = entry if known is None else (entry[0], entry[1], known[2])
    return list(by_pid.values())
