"""What does an NVML return code mean for the call, the device and the library? Pure tables."""

from __future__ import annotations

import enum

LOST, RESET_REQUIRED, GPU_NOT_FOUND, UNKNOWN = 15, 16, 28, 999
NO_PERMISSION, INVALID_ARGUMENT, INSUFFICIENT_SIZE, VERSION_MISMATCH = 4, 2, 7, 25
NOT_SUPPORTED = 3
NOT_FOUND, TIMEOUT, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND = 6, 10, 12, 13
DRIVER_NOT_LOADED, LIB_RM_MISMATCH = 9, 18
SENTINEL_64 = 0x7FFFFFFFFFFFFFF0  # this and above is "blank": DCGM's, and NVML's 2^64-1
SENTINEL_32 = 0x7FFFFFF0
RETRY_CAPABILITY_S = 3600.0


class Meaning(enum.Enum):
    """What to do about a return code."""

    CAPABILITY = enum.auto()  # not on this device: ask again in an hour
    ABSENT = enum.auto()  # nothing to report just now
    DEVICE = enum.auto()  # this GPU is gone; its handle must never be used again
    LIBRARY = enum.auto()  # only a new process can help


_MEANINGS = {
    1: Meaning.LIBRARY,
    INVALID_ARGUMENT: Meaning.CAPABILITY,
    NOT_SUPPORTED: Meaning.CAPABILITY,
    NO_PERMISSION: Meaning.CAPABILITY,
    DRIVER_NOT_LOADED: Meaning.LIBRARY,
    LIBRARY_NOT_FOUND: Meaning.LIBRARY,
    FUNCTION_NOT_FOUND: Meaning.CAPABILITY,
    LOST: Meaning.DEVICE,
    RESET_REQUIRED: Meaning.DEVICE,
    LIB_RM_MISMATCH: Meaning.LIBRARY,
    VERSION_MISMATCH: Meaning.CAPABILITY,
    26: Meaning.CAPABILITY,
    27: Meaning.LIBRARY,
    GPU_NOT_FOUND: Meaning.DEVICE,
    29: Meaning.LIBRARY,
    UNKNOWN: Meaning.DEVICE,
}
_HEALTH = {LOST: "lost", GPU_NOT_FOUND: "lost", RESET_REQUIRED: "reset_required", NO_PERMISSION: "denied"}
CGROUP_HINT = (
    "in a container this often means that the device cgroup was rewritten (systemctl daemon-reload on the "
    "host): restart the container; elsewhere look for Xid lines in the kernel log"
)
_TEXTS = {
    1: "NVML is not initialised (error 1)",
    INVALID_ARGUMENT: "NVML no longer knows this handle (error 2)",
    NO_PERMISSION: "no permission (NVML error 4): the service user needs read and write on /dev/nvidia*",
    DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded (NVML error 9): `modprobe nvidia`, or install it",
    LIBRARY_NOT_FOUND: (
        "libnvidia-ml.so.1 was not found (NVML error 12): install the NVIDIA driver, "
        "or set LD_LIBRARY_PATH to its folder"
    ),
    LOST: "the GPU fell off the bus (NVML error 15): look for Xid 79 in the kernel log; it may need a reboot",
    RESET_REQUIRED: "the GPU must be reset before it can be used (NVML error 16): nvidia-smi --gpu-reset",
    LIB_RM_MISMATCH: (
        "driver and library versions differ (NVML error 18): the driver was upgraded while the old kernel "
        "module is still loaded; reboot, or stop all GPU users and reload the nvidia modules"
    ),
    27: "NVML is not ready yet (error 27)",
    GPU_NOT_FOUND: "the GPU was not found any more (NVML error 28)",
    29: "NVML lost its session (error 29)",
    UNKNOWN: f"NVML unknown error (999): {CGROUP_HINT}",
}


def meaning(code: int) -> Meaning:
    """Classify a return code; unnamed ones (hardware notices, timeouts) only mean "no value now"."""
    return _MEANINGS.get(code, Meaning.ABSENT)


def health(code: int) -> str:
    """The state of a GPU whose essential call returned `code`."""
    return _HEALTH.get(code, "unknown")


def explain(code: int) -> str:
    """A sentence with the fix."""
    return _TEXTS.get(code, f"NVML error {code}")


def known(value: int, limit: int = SENTINEL_64) -> int | None:
    """The value, or None for a sentinel ("blank", "not available")."""
    return value if value < limit else None
