"""The maintenance switch: a file that any kvwatch command may write and that ends by itself."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from kvwatch import wire
from kvwatch.daemon.paths import replace_file

MAX_BYTES = 4096
MAX_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Maintenance:
    """Until when NVML and DCGM are released: seconds since boot to decide, Unix seconds to show."""

    until_boot_s: float
    until_wall_s: float


def boot_id() -> str:
    """The kernel's identifier of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def since_boot_s() -> float:
    """Seconds since boot, suspend included, the same for every process of this host."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def switch_on(path: Path, for_s: float) -> Maintenance:
    """Begin maintenance for `for_s` seconds (at most a day)."""
    for_s = min(max(for_s, 1.0), MAX_S)
    state = Maintenance(until_boot_s=since_boot_s() + for_s, until_wall_s=time.time() + for_s)
    record = {
        "v": 1,
        "boot_id": boot_id(),
        "until_boot_s": state.until_boot_s,
        "until_wall_s": state.until_wall_s,
    }
    replace_file(path, json.dumps(record) + "\n")
    return state


def switch_off(path: Path) -> bool:
    """End maintenance; False when there was none."""
    existed = read(path) is not None
    path.unlink(missing_ok=True)
    return existed


def read(path: Path) -> Maintenance | None:
    """What the file says now: None when absent, malformed, no plain file, from another boot, or over."""
    try:
        record = json.loads(wire.read_small(str(path), MAX_BYTES))
        until_boot_s = float(record["until_boot_s"])
        until_wall_s = float(record["until_wall_s"])
        if record["v"] != 1 or record["boot_id"] != boot_id():
            return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    left_s = until_boot_s - since_boot_s()
    if not 0 < left_s <= MAX_S:
        return None
    return Maintenance(until_boot_s=until_boot_s, until_wall_s=until_wall_s)
