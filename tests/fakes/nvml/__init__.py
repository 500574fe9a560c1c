"""A fake NVML library and the scenario file that steers it.

`build(directory)` compiles it, `environment(...)` gives what a process needs to load it, and a
`Scenario` writes the file that the running library reads again whenever it changes:

    scenario = Scenario(directory / "scenario", gpus=8)
    scenario.gpu(0, used=9 * GIB, free=131 * GIB)
    scenario.error(3, "nvmlDeviceGetMemoryInfo_v2", 15).write()
"""

from __future__ import annotations

import csv
import gzip
import os
import shutil
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_nvml.c")
LIBRARY = "libnvidia-ml.so.1"
SENTINEL = 2**64 - 1
ANY = "*"


def uuid_of(index: int) -> str:
    """The UUID that the fake gives GPU `index` unless the scenario says otherwise."""
    return f"GPU-{0xF0000000 + index:08x}-0000-4000-8000-{index:012x}"


def build(directory: Path, *, layout_535: bool = False) -> Path:
    """Compile the library into `directory` (once) and return that directory."""
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / LIBRARY
    if not target.exists():
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            raise RuntimeError("a C compiler is needed to build the fake NVML: install gcc")
        flags = ["-DLAYOUT_535"] if layout_535 else []
        scratch = target.with_name(f"{target.name}.{os.getpid()}")
        command = [compiler, "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wno-format-truncation", *flags]
        subprocess.run([*command, "-o", str(scratch), str(SOURCE)], check=True)
        scratch.rename(target)
    return directory


def environment(directory: Path, scenario: Path) -> dict[str, str]:
    """The variables under which a process loads the fake from `directory`."""
    return {"LD_LIBRARY_PATH": str(directory), "KVWATCH_FAKE_NVML": str(scenario)}


def write_tape(recording: Path, target: Path) -> list[tuple[float, int]]:
    """Turn a csv.gz recording (t_s,used,free,reserved) into the fake's binary; returns (t_s from 0, used)."""
    truth = []
    with gzip.open(recording, "rt") as lines, target.open("wb") as out:
        rows = csv.reader(lines)
        next(rows)
        first = None
        for row in rows:
            seconds, (used, free, reserved) = float(row[0]), map(int, row[1:4])
            first = seconds if first is None else first
            out.write(struct.pack("=dQQQ", seconds - first, used, free, reserved))
            truth.append((seconds - first, used))
    return truth


@dataclass
class Scenario:
    """The state of the fake hardware; every change takes effect with `write()`."""

    path: Path
    gpus: int = 1
    driver: str = "580.159.04"
    call_log: Path | None = None
    statements: list[str] = field(default_factory=list)
    xids: list[str] = field(default_factory=list)

    def gpu(self, index: int | str, **fields: int | str) -> Scenario:
        """Set fields of one GPU (or ANY), named as in `set_field` of fake_nvml.c"""
        self.statements += [f"gpu {index} {name} {value}" for name, value in fields.items()]
        return self

    def memory(
        self, index: int, used: int, *, total: int = 150754820096, reserved: int = 644939776
    ) -> Scenario:
        """Let a GPU hold `used` bytes, the three parts adding up to `total`."""
        return self.gpu(index, total=total, reserved=reserved, used=used, free=total - reserved - used)

    def process(self, index: int, pid: int, used: int, kind: str = "compute") -> Scenario:
        """Put a process on a GPU; kind is compute, graphics or mps."""
        self.statements.append(f"proc {index} {kind} {pid} {used}")
        return self

    def mig(
        self,
        index: int,
        slot: int,
        uuid: str,
        *,
        total: int,
        used: int,
        reserved: int = 0,
        gi: int = 1,
        ci: int = 0,
    ) -> Scenario:
        """Add a MIG instance to a GPU."""
        free = total - used - reserved
        self.statements.append(f"gpu {index} mig 1")
        self.statements.append(f"mig {index} {slot} {uuid} {total} {used} {free} {reserved} {gi} {ci}")
        return self

    def mig_process(self, index: int, slot: int, pid: int, used: int) -> Scenario:
        """Put a process on a MIG instance."""
        self.statements.append(f"migproc {index} {slot} {pid} {used}")
        return self

    def error(self, index: int | str, call: str, code: int) -> Scenario:
        """Let a call (or ANY) on a GPU (or ANY) return an error code."""
        self.statements.append(f"fault error {index} {call} {code}")
        return self

    def hang(self, index: int | str = ANY, call: str = ANY) -> Scenario:
        """Let calls not return until the scenario no longer says so."""
        self.statements.append(f"fault hang {index} {call} 0")
        return self

    def slow(self, microseconds: int, index: int | str = ANY, call: str = ANY) -> Scenario:
        """Let calls take this much longer."""
        self.statements.append(f"fault slow {index} {call} {microseconds}")
        return self

    def crash(self, index: int | str = ANY, call: str = ANY) -> Scenario:
        """Let a call end the process with SIGSEGV."""
        self.statements.append(f"fault crash {index} {call} 0")
        return self

    def xid(self, index: int, code: int) -> Scenario:
        """Raise one Xid event (those written before the library was loaded are lost, as in reality)."""
        self.xids.append(f"xid {len(self.xids) + 1} {index} {code}")
        return self

    def playback(self, index: int, tape: Path, phase_s: float = 0.0) -> Scenario:
        """Play a tape (`write_tape`) as a GPU's memory; its start is noted in `<tape>.started`."""
        self.statements.append(f"playback {index} {tape} {phase_s}")
        return self

    def healed(self) -> Scenario:
        """Take back every fault."""
        self.statements = [line for line in self.statements if not line.startswith("fault ")]
        return self

    def write(self) -> Scenario:
        """Replace the file in one step."""
        lines = [f"count {self.gpus}", f"driver {self.driver}", *self.statements, *self.xids]
        if self.call_log is not None:
            lines.append(f"calllog {self.call_log}")
        scratch = self.path.with_name(self.path.name + ".new")
        scratch.write_text("\n".join(lines) + "\n")
        scratch.replace(self.path)
        return self
