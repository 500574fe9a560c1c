"""What do running processes use? Read from /proc, for the checks that run for long."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
_PR_SET_PDEATHSIG = 1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def die_with_parent() -> None:
    """In a child: be killed when the parent ends, however it ends; works on a stopped process too."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def pss_bytes(pid: int) -> int:
    """Proportional set size."""
    return _rollup(pid, "Pss:")


def rss_bytes(pid: int) -> int:
    """Resident set size."""
    return _rollup(pid, "Rss:")


def private_bytes(pid: int) -> int:
    """What it shares with nobody: unlike the others it does not move when another program starts or ends."""
    return _rollup(pid, "Private_Clean:") + _rollup(pid, "Private_Dirty:")


def _rollup(pid: int, name: str) -> int:
    with Path(f"/proc/{pid}/smaps_rollup").open() as lines:
        found = next(line for line in lines if line.startswith(name))
    return int(found.split()[1]) * 1024


def threads(pid: int) -> int:
    """How many threads it has."""
    return len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208 many times a minute


def descriptors(pid: int) -> int:
    """How many descriptors it holds."""
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208


def cpu_s(pid: int) -> float:
    """User and system seconds so far, those of children that have ended included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / _TICKS_PER_S


def waited_for_cpu_s(pid: int) -> float:
    """Seconds that its threads were ready to run and the machine had no processor for them, added up.

    Tells a slow answer of the program from a slow moment of a shared machine.
    """
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError, IndexError):
            total += int((task / "schedstat").read_text().split()[1])
    return total / 1e9


def children(pid: int) -> list[int]:
    """Its children that are alive."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(word) for word in (task / "children").read_text().split()]
    return found


def is_running(pid: int, word: str) -> bool:
    """Whether this process is alive (no zombie) and its command line has this word in it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX" and word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a program and its children hold at one moment."""

    at_s: float
    private: int
    pss: int
    rss: int
    threads: int
    descriptors: int

    def __str__(self) -> str:
        return (
            f"private {self.private / MIB:.1f} MiB, PSS {self.pss / MIB:.1f} MiB,"
            f" RSS {self.rss / MIB:.1f} MiB, {self.threads} threads, {self.descriptors} descriptors"
        )


def usage(pid: int, at_s: float) -> Usage:
    """Of this process and its children together. Raises OSError when it has ended."""
    own = [pid, *children(pid)]
    private = pss = rss = count = held = 0
    for one in own:
        try:
            private, pss, rss = private + private_bytes(one), pss + pss_bytes(one), rss + rss_bytes(one)
            count, held = count + threads(one), held + descriptors(one)
        except (OSError, StopIteration):
            if one == pid:
                raise OSError(f"process {pid} has ended") from None
    return Usage(at_s=at_s, private=private, pss=pss, rss=rss, threads=count, descriptors=held)


def middle(found: Sequence[Usage]) -> Usage:
    """The median of each figure."""
    return Usage(
        at_s=found[-1].at_s,
        private=int(statistics.median(one.private for one in found)),
        pss=int(statistics.median(one.pss for one in found)),
        rss=int(statistics.median(one.rss for one in found)),
        threads=int(statistics.median(one.threads for one in found)),
        descriptors=int(statistics.median(one.descriptors for one in found)),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not pass; 0.0 of none."""
    ordered = sorted(values)
    place = min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))
    return ordered[place] if ordered else 0.0
