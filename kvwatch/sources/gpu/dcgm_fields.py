"""What do DCGM's field ids, blank values and status codes mean? Pure tables, for the worker and the scraper.

Ids are stable from DCGM 2.4 to 4.6; names are not (dozens were renamed in 4.6), so everything here
goes by id and the names are only for pages of dcgm-exporter. Sources: dcgm_fields.h, dcgm_structs.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvwatch.model.sample import FailureKind

MIB = 1024 * 1024
DRIVER_VERSION, NAME, NVML_INDEX, UUID, MIG_MODE = 1, 50, 52, 54, 67
BAR1_TOTAL, BAR1_USED = 90, 92
CLOCK_EVENT_REASONS, GPU_TEMP, POWER, ENERGY = 112, 150, 155, 156
GPU_UTIL, BANDWIDTH_UTIL = 203, 204
FB_TOTAL, FB_FREE, FB_USED, FB_RESERVED = 250, 251, 252, 253
ECC_CORRECTED, ECC_UNCORRECTED = 310, 311  # volatile: since the driver was loaded, as NVML's
ROW_REMAP_FAILED, ROW_REMAP_PENDING = 395, 396
ENGINE_ACTIVE = 1001  # profiling: share of time that the graphics or compute engine is busy, 0..1

MEMORY_FIELDS = (FB_TOTAL, FB_FREE, FB_USED, FB_RESERVED)
IDENTITY_FIELDS = (DRIVER_VERSION, NAME, NVML_INDEX, UUID, MIG_MODE)
SLOW_FIELDS = (
    *IDENTITY_FIELDS, BAR1_TOTAL, BAR1_USED, CLOCK_EVENT_REASONS, GPU_TEMP, POWER, ENERGY,
    GPU_UTIL, BANDWIDTH_UTIL, ECC_CORRECTED, ECC_UNCORRECTED, ROW_REMAP_FAILED, ROW_REMAP_PENDING,
)  # fmt: skip

# What a page of dcgm-exporter may call a field: DCGM up to 4.5, then 4.6.
EXPORTER_NAMES: dict[str, int] = {
    "DCGM_FI_DEV_FB_TOTAL": FB_TOTAL,
    "DCGM_FI_DEV_FB_FREE": FB_FREE,
    "DCGM_FI_DEV_FB_USED": FB_USED,
    "DCGM_FI_DEV_FB_RESERVED": FB_RESERVED,
    "DCGM_FI_DEV_GPU_UTIL": GPU_UTIL,
    "DCGM_FI_DEV_GPU_UTIL_RATIO": GPU_UTIL,  # still 0..100: only the name changed
    "DCGM_FI_DEV_MEM_COPY_UTIL": BANDWIDTH_UTIL,
    "DCGM_FI_DEV_GPU_TEMP": GPU_TEMP,
    "DCGM_FI_DEV_GPU_TEMP_CELSIUS": GPU_TEMP,
    "DCGM_FI_DEV_POWER_USAGE": POWER,
    "DCGM_FI_DEV_BOARD_POWER_WATTS": POWER,
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": ENERGY,
    "DCGM_FI_DEV_BAR1_TOTAL": BAR1_TOTAL,
    "DCGM_FI_DEV_BAR1_USED": BAR1_USED,
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": CLOCK_EVENT_REASONS,
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": CLOCK_EVENT_REASONS,
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": ECC_CORRECTED,
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": ECC_UNCORRECTED,
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": ROW_REMAP_FAILED,
    "DCGM_FI_DEV_ROW_REMAP_FAILED": ROW_REMAP_FAILED,
    "DCGM_FI_DEV_ROW_REMAP_PENDING": ROW_REMAP_PENDING,
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ENGINE_ACTIVE,
    "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO": ENGINE_ACTIVE,
}
TITLES = {
    FB_TOTAL: "memory total", FB_FREE: "memory free", FB_USED: "memory used", FB_RESERVED: "memory reserved",
    BAR1_TOTAL: "BAR1", CLOCK_EVENT_REASONS: "clock event reasons", GPU_TEMP: "temperature",
    POWER: "power", ENERGY: "energy", GPU_UTIL: "utilization", BANDWIDTH_UTIL: "bandwidth utilization",
    ECC_CORRECTED: "ECC errors", ROW_REMAP_PENDING: "row remap", ENGINE_ACTIVE: "profiling",
}  # fmt: skip
XID_MISSING = "xid events (DCGM shows only the last code, which hides repeated ones)"
PROFILING_BLANK = "profiling (values have stayed blank for 10 min: paused, or the session broke)"

INT64_BLANK = 0x7FFFFFFFFFFFFFF0
INT32_BLANK = 0x7FFFFFF0
FP64_BLANK = 140737488355328.0  # 2^47
_NOT_SUPPORTED, _NOT_PERMITTED = 2, 3  # added to a blank

OK = 0
BAD_PARAMETER, INIT_ERROR, UNINITIALIZED, TIMEOUT, VERSION_MISMATCH = -1, -7, -10, -11, -12
NO_DATA, STALE, NOT_WATCHED, NO_PERMISSION = -14, -15, -16, -17
LOST, RESET_REQUIRED, FUNCTION_NOT_FOUND, CONNECTION_NOT_VALID = -18, -19, -20, -21
LIBRARY_NOT_FOUND, MODULE_NOT_LOADED = -25, -33
PROFILING_CODES = frozenset((-33, -36, -37, -38))  # not loaded, unsupported, library error, multi-pass
PAUSED, NVML_NOT_LOADED, DRIVER_TIMEOUT, DETACHED = -54, -56, -57, -67

# Codes after which only a new connection (and, here, a new process) can help, and how to count them.
GONE: dict[int, FailureKind] = {
    INIT_ERROR: FailureKind.BROKEN,
    UNINITIALIZED: FailureKind.BROKEN,
    TIMEOUT: FailureKind.TIMED_OUT,
    VERSION_MISMATCH: FailureKind.VERSION_MISMATCH,
    FUNCTION_NOT_FOUND: FailureKind.VERSION_MISMATCH,
    CONNECTION_NOT_VALID: FailureKind.BROKEN,
    LIBRARY_NOT_FOUND: FailureKind.NO_DRIVER,
    NVML_NOT_LOADED: FailureKind.NO_DRIVER,
    DRIVER_TIMEOUT: FailureKind.TIMED_OUT,
    DETACHED: FailureKind.NO_DRIVER,
}
_HEALTH = {
    NO_PERMISSION: "denied",
    LOST: "lost",
    RESET_REQUIRED: "reset_required",
    DETACHED: "unknown",
}
ENTITY_HEALTH = {3: "denied", 4: "lost", 6: "unknown", 7: "unknown"}  # DcgmEntityStatus_t
ENTITY_WORDS = {3: "inaccessible", 4: "lost", 6: "disabled", 7: "detached"}
_TEXTS = {
    BAD_PARAMETER: "the host engine does not know this entity (DCGM -1)",
    INIT_ERROR: "DCGM could not be initialised (-7)",
    UNINITIALIZED: "DCGM is not initialised (-10)",
    TIMEOUT: (
        "the host engine did not answer in time (DCGM -11): is nv-hostengine well? A GPU with a storm of "
        "ECC errors can block it"
    ),
    VERSION_MISMATCH: (
        "bindings and host engine are of different DCGM versions (-12): install the bindings of the "
        "version that runs (4.x: package datacenter-gpu-manager-4-core)"
    ),
    NO_DATA: "no data yet (DCGM -14)",
    STALE: "the host engine's data is stale (DCGM -15)",
    NOT_WATCHED: "the field is not watched (DCGM -16)",
    NO_PERMISSION: "the host engine may not read this (DCGM -17)",
    LOST: "the GPU fell off the bus (DCGM -18): look for Xid 79 in the kernel log; it may need a reboot",
    RESET_REQUIRED: "the GPU must be reset before it can be used (DCGM -19): nvidia-smi --gpu-reset",
    FUNCTION_NOT_FOUND: "libdcgm lacks a function (DCGM -20): bindings and library are of different versions",
    CONNECTION_NOT_VALID: (
        "the connection to the host engine was lost or refused (DCGM -21): systemctl status nvidia-dcgm"
    ),
    LIBRARY_NOT_FOUND: (
        "libdcgm was not found (DCGM -25): install the DCGM package of the bindings' major version, or set "
        "LD_LIBRARY_PATH to its folder"
    ),
    MODULE_NOT_LOADED: (
        "DCGM's profiling module is not there (-33): since 4.0 it is in the package "
        "datacenter-gpu-manager-4-proprietary"
    ),
    -36: "profiling is not supported on this GPU (DCGM -36)",
    -37: (
        "DCGM's profiling library failed (-37): another engine, Nsight or missing rights hold the hardware"
    ),
    -38: "these profiling fields cannot be read together (DCGM -38)",
    PAUSED: "the host engine is paused (DCGM -54): `dcgmi profile --resume`",
    NVML_NOT_LOADED: "the host engine has no NVML (DCGM -56): install the NVIDIA driver, then restart it",
    DRIVER_TIMEOUT: "the driver does not answer the host engine (DCGM -57): look for NVRM lines in the log",
    DETACHED: "the host engine has let go of the GPUs (DCGM -67): attach the driver again with dcgmi",
}


def explain(code: int) -> str:
    """A sentence with the fix."""
    return _TEXTS.get(code, f"DCGM error {code}")


def health(code: int) -> str:
    """State of a GPU whose readings have this status ("ok" where only the reading is missing)."""
    return _HEALTH.get(code, "ok")


def known(value: float | None) -> float | None:
    """The number, or None for a blank: 64-bit, exact 32-bit blanks, and those of doubles from 2^47."""
    if value is None or value != value:
        return None
    if isinstance(value, int):
        return None if value >= INT64_BLANK or INT32_BLANK <= value < INT32_BLANK + 16 else value
    return None if value >= FP64_BLANK else value


def incapable(value: float | None) -> bool:
    """Whether a blank says "not supported" or "not permitted", rather than "nothing yet"."""
    if value is None or known(value) is not None or value != value:
        return False
    bases = (INT64_BLANK, INT32_BLANK) if isinstance(value, int) else (FP64_BLANK,)
    return any(value - base in (_NOT_SUPPORTED, _NOT_PERMITTED) for base in bases)


def known_text(value: str | None) -> str:
    """The text, or "" for a blank such as `<<<NOT_SUPPORTED>>>`."""
    text = (value or "").strip()
    return "" if text.startswith("<<<") and ">>>" in text else text


# Each part is rounded down to a MiB, and each is read by a driver call of its own while memory moves
# (9 GiB within 100 ms were measured): a sum that is off by more than this is no picture of one GPU.
INVARIANT_SLACK_MIB = 256


def memory_row(
    total: float | None, used: float | None, free: float | None, reserved: float | None
) -> list[int | None] | None:
    """MiB fields as [total, used, free, reserved] in bytes; None where they do not make a whole.

    Without `reserved` total is what DCGM says, and used counts the driver's part (DCGM before 2.4, or
    a driver before 510). Parts that do not add up to total are refused: each alone may be right, but
    they are not of one memory.
    """
    if total is None or used is None or free is None or total <= 0 or used < 0 or free < 0:
        return None
    if abs(total - used - free - (reserved or 0)) > INVARIANT_SLACK_MIB:
        return None
    parts = (total, used, free, reserved)
    return [None if part is None else round(part * MIB) for part in parts]


def slow_values(get: Callable[[int], float | None]) -> dict[str, Any]:
    """Slow values under the NVML worker's keys and in its units; what is not reported is left out."""
    watts, why = get(POWER), get(CLOCK_EVENT_REASONS)
    bar1 = [get(BAR1_TOTAL), get(BAR1_USED)]
    remap = [get(ROW_REMAP_PENDING), get(ROW_REMAP_FAILED)]
    ecc = [get(ECC_CORRECTED), get(ECC_UNCORRECTED)]
    values = {
        "mw": None if watts is None else 1000 * watts,
        "c": get(GPU_TEMP),
        "mj": get(ENERGY),
        "why": None if why is None else int(why),
        "bar1": [None if part is None else int(part * MIB) for part in bar1],
        "remap": [None if part is None else part > 0 for part in remap],
        "ecc": [None if part is None else int(part) for part in ecc],
    }
    return {key: value for key, value in values.items() if value is not None and value != [None, None]}


def driver_major(version: str) -> int | None:
    """580 of "580.159.04"; None where nobody says."""
    head = version.split(".", 1)[0]
    return int(head) if head.isascii() and head.isdecimal() else None
