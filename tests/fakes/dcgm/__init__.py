"""A stand-in for DCGM's Python bindings and the scenario that steers it.

`bindings/` is what a worker imports instead of the vendor's modules, which are not on PyPI and were
not run here. A `Scenario` writes the file that the stand-in reads before every call:

    scenario = Scenario(path, gpus=2)
    scenario.gpu(0).memory(total=143771, used=9000, reserved=615)
    scenario.write()
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BINDINGS = Path(__file__).with_name("bindings")
BLANK = 0x7FFFFFFFFFFFFFF0
NOT_SUPPORTED = BLANK + 2
NOT_PERMITTED = BLANK + 3
FP_NOT_SUPPORTED = float(2**47 + 2)


def uuid_of(index: int) -> str:
    """The UUID of GPU `index`, the one that the fake NVML gives as well."""
    return f"GPU-{0xF0000000 + index:08x}-0000-4000-8000-{index:012x}"


@dataclass
class Holder:
    """A GPU or a MIG instance: values by field id, in DCGM's units."""

    id: int
    values: dict[int, int | float | str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def memory(self, *, total: int = 143771, used: int = 0, reserved: int | None = 615) -> Holder:
        """MiB; free is the rest. Without `reserved` the field is "not supported"."""
        free = total - used - (reserved or 0)
        self.values |= {250: total, 251: free, 252: used}
        self.values[253] = NOT_SUPPORTED if reserved is None else reserved
        return self

    def set(self, **extra: Any) -> Holder:
        """Set `status`, `code`, `age_s` or `spoils`."""
        self.extra |= extra
        return self

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "values": self.values, **self.extra}


def whole_gpu(index: int) -> Holder:
    """An H200 with everything a well GPU reports."""
    values: dict[int, int | float | str] = {
        1: "580.159.04", 50: "NVIDIA H200", 52: index, 54: uuid_of(index), 67: 0,
        90: 262144, 92: 3, 112: 1, 150: 41, 155: 120.5, 156: 9_000_000_000 + index,
        203: 37, 204: 12, 230: 31, 310: 4, 311: 0, 395: 0, 396: 0,
    }  # fmt: skip
    return Holder(index, values).memory(used=1000 * (index + 1))


@dataclass
class Scenario:
    """The state of the host engine; every change takes effect with `write()`."""

    path: Path
    gpus: list[Holder] = field(default_factory=lambda: [whole_gpu(0)])
    instances: list[Holder] = field(default_factory=list)
    engine: dict[str, Any] = field(default_factory=dict)

    def instance(self, id: int, gpu: int, number: int, profile: str = "1g.18gb") -> Holder:
        """Add a MIG instance."""
        one = Holder(id, {50: f"NVIDIA H200 MIG {profile}"}, {"gpu": gpu, "instance": number})
        self.instances.append(one.memory(total=16384, used=1024, reserved=64))
        return one

    def write(self, **engine: Any) -> Scenario:
        """Replace the file in one step; keywords change the engine (age_s, hang, leak_mib, errors, ...)."""
        self.engine |= engine
        page = {
            "gpus": [gpu.as_json() for gpu in self.gpus],
            "instances": [one.as_json() for one in self.instances],
            **self.engine,
        }
        scratch = self.path.with_name(self.path.name + ".new")
        scratch.write_text(json.dumps(page))
        scratch.replace(self.path)
        return self

    def calls(self) -> list[str]:
        """The log of calls, each with the worker's pid in front."""
        log = self.path.with_name(self.path.name + ".calls")
        return log.read_text().splitlines() if log.exists() else []


@contextmanager
def listening(path: Path | None = None) -> Iterator[str]:
    """Something that accepts connections, as a host engine would; gives its address."""
    if path is None:
        listener = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    else:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen(64)
        address = str(path)
    with listener:
        yield address
