"""Which GPUs share memory with the host, and what does the host say of it?

* Integrated GPUs (GB10, Jetson, Thor) have no memory of their own: NVML answers NOT_SUPPORTED, or figures
  that mean something else on one driver than on another (nvitop#208). Theirs is the host's memory:
  MemTotal, and as free what the host could give, MemAvailable. MemFree alone counts the page cache as used
  (vllm#48140). Only devices that are recognised by name: host memory must never pass for the memory of a
  discrete GPU that fails.
* GH200, GB200 and GB300 have their own, and NVML reads it, but the operating system may keep pages there
  (the memory is a NUMA node of the host): those are within NVML's "used" (nvml.h on nvmlDeviceGetMemoryInfo).

Runs in the worker process; reads files only.
"""

from __future__ import annotations

import re

_UNIFIED = re.compile(r"\b(?:GB10|N1X|Thor|Orin|Xavier|Tegra|Jetson)\b", re.IGNORECASE)
_COHERENT = re.compile(r"\bG[BH][23]00\b")
_OS_PAGES = ("FilePages", "AnonPages", "Slab")

Memory = tuple[int, int, int, int | None]  # total, used, free, reserved (bytes)


def is_unified(name: str) -> bool:
    """Whether a device of this name is known to use the host's memory as its own."""
    return _UNIFIED.search(name) is not None


def is_coherent(name: str) -> bool:
    """Whether a device of this name is known to lend its memory to the operating system."""
    return _COHERENT.search(name) is not None


class HostMemory:
    """Reads the kernel's memory figures; `root` stands before /proc and /sys, for tests."""

    def __init__(self, root: str = "") -> None:
        self._root = root

    def unified(self) -> Memory | None:
        """(MemTotal, the rest, MemAvailable, None) in bytes; None where the kernel does not tell."""
        found = self._read("/proc/meminfo")
        total, available = found.get("MemTotal"), found.get("MemAvailable")
        if not total or available is None or available > total:
            return None
        return total, total - available, available, None

    def reclaimable(self) -> int | None:
        """The part of MemAvailable that is in use as page cache and such just now."""
        found = self._read("/proc/meminfo")
        available, free = found.get("MemAvailable"), found.get("MemFree")
        return None if available is None or free is None else max(0, available - free)

    def os_pages(self, node: int) -> int | None:
        """Bytes that the operating system keeps on a NUMA node: file, anonymous and kernel pages."""
        found = self._read(f"/sys/devices/system/node/node{node}/meminfo")
        pages = [found[name] for name in _OS_PAGES if name in found]
        return sum(pages) if len(pages) == len(_OS_PAGES) else None

    def _read(self, path: str) -> dict[str, int]:
        """Lines `[Node N ]Name: 123 kB` as bytes by name."""
        found = {}
        try:
            with open(self._root + path, "rb") as lines:  # noqa: PTH123 - pathlib costs the worker a megabyte
                for line in lines:
                    words = line.split()
                    if len(words) >= 3 and words[-1] == b"kB" and words[-2].isdigit():
                        found[words[-3].rstrip(b":").decode("ascii", "replace")] = 1024 * int(words[-2])
        except OSError:
            return {}
        return found
