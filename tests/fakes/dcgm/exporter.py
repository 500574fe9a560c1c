"""Pages as dcgm-exporter writes them, generated in the form of each major version.

`python -m tests.fakes.dcgm.exporter 4.4` prints one. Only form and names follow the versions; the
figures are made up.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.fakes.dcgm import uuid_of

NEW_NAMES = {
    "DCGM_FI_DEV_GPU_UTIL": "DCGM_FI_DEV_GPU_UTIL_RATIO",
    "DCGM_FI_DEV_GPU_TEMP": "DCGM_FI_DEV_GPU_TEMP_CELSIUS",
    "DCGM_FI_DEV_POWER_USAGE": "DCGM_FI_DEV_BOARD_POWER_WATTS",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "DCGM_FI_DEV_ROW_REMAP_FAILED",
    "DCGM_FI_DEV_XID_ERRORS": "DCGM_FI_DEV_XID_ERROR",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO",
}
VERSIONS = ("2.4", "3.3", "4.2", "4.4", "4.6")


@dataclass
class Board:
    """One GPU of a page: MiB and DCGM's other units; `more` replaces or adds values by (old) name."""

    index: int
    used: int = 9000
    free: int = 134156
    reserved: int = 615
    more: dict[str, float | str | None] = field(default_factory=dict)
    instances: list[tuple[int, str, int, int]] = field(default_factory=list)  # id, profile, used, free

    def values(self) -> dict[str, float | str | None]:
        return {
            "DCGM_FI_DEV_GPU_TEMP": 41, "DCGM_FI_DEV_POWER_USAGE": 120.503,
            "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 9000000123, "DCGM_FI_DEV_GPU_UTIL": 37,
            "DCGM_FI_DEV_MEM_COPY_UTIL": 12, "DCGM_FI_DEV_XID_ERRORS": 31,
            "DCGM_FI_DEV_FB_FREE": self.free, "DCGM_FI_DEV_FB_USED": self.used,
            "DCGM_FI_DEV_FB_RESERVED": self.reserved,
            "DCGM_FI_DEV_ROW_REMAP_FAILURE": 0, "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.372914,
            **self.more,
        }  # fmt: skip


def page(version: str, boards: Iterable[Board], *, pods: dict[int, str] | None = None) -> bytes:
    """A whole page; `pods` maps GPU index to the pod that its series are labelled with."""
    boards = list(boards)
    major, minor = (int(part) for part in version.split("."))
    lines = []
    names = {name: None for board in boards for name in board.values()}
    for old in names:
        if old == "DCGM_FI_DEV_FB_RESERVED" and (major, minor) < (4, 3):
            continue
        name = NEW_NAMES.get(old, old) if (major, minor) >= (4, 6) else old
        lines += [f"# HELP {name} Made up.", f"# TYPE {name} gauge"]
        for board in boards:
            pod = (pods or {}).get(board.index)
            for labels, value in _series(board, old):
                lines.append(f"{name}{{{_labels((major, minor), board.index, labels, pod)}}} {value}")
    return ("\n".join(lines) + "\n").encode()


def _series(board: Board, name: str) -> list[tuple[dict[str, str], float | str]]:
    value = board.values().get(name)
    if not board.instances or name not in _PER_INSTANCE:
        return [] if value is None else [({}, value)]
    rows = []
    for number, profile, used, free in board.instances:
        own = {"DCGM_FI_DEV_FB_USED": used, "DCGM_FI_DEV_FB_FREE": free, "DCGM_FI_DEV_FB_RESERVED": 64}
        rows.append(({"GPU_I_PROFILE": profile, "GPU_I_ID": str(number)}, own.get(name, 0.5)))
    return rows


_PER_INSTANCE = (
    "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_FB_RESERVED", "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
)  # fmt: skip


def _labels(version: tuple[int, int], index: int, instance: dict[str, str], pod: str | None) -> str:
    labels = {"gpu": str(index), "UUID": uuid_of(index)}
    if version >= (3, 4):
        labels["pci_bus_id"] = f"00000000:{index:02X}:00.0"
    labels |= {"device": f"nvidia{index}", "modelName": "NVIDIA H200", **instance}
    labels["hostname" if version >= (4, 6) else "Hostname"] = "node-1"
    if version >= (4, 6):
        labels["DCGM_FI_SYSTEM_DRIVER_VERSION"] = "580.159.04"
    elif version >= (3, 0):
        labels["DCGM_FI_DRIVER_VERSION"] = "580.159.04"
    if pod is not None:
        labels |= {"container": "main", "namespace": "default", "pod": pod}
    elif version < (3, 0):
        labels |= {"container": "", "namespace": "", "pod": ""}
    return ",".join(f'{name}="{text}"' for name, text in labels.items())


if __name__ == "__main__":
    print(page(sys.argv[1] if len(sys.argv) > 1 else "4.4", [Board(0), Board(1)]).decode(), end="")
