"""How long from a page that shows a crossing to the hook's first instruction? `python -m checks.act.latency`.

A real daemon polls a real page five times a second; the page crosses 50 times. Time runs from the
moment the page's last byte has been handed to the kernel until the hook (a small C program, else a
script) reads the clock. Two paths: a limit (decided by policy `threshold`) and a notice (a rule that
changed its level). Prints p50 and the longest, with the targets: 100 ms and 300 ms.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from tests.daemon.acting import config  # noqa: E402
from tests.daemon.page_server import PageServer  # noqa: E402
from tests.harness import Daemon  # noqa: E402

TARGET_P50_S, TARGET_MAX_S = 0.1, 0.3
SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
int main(int argc, char **argv) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const char *event = getenv("KVWATCH_EVENT");
    FILE *out = fopen(argv[1], "a");
    fprintf(out, "%s %ld.%09ld\n", event ? event : "", (long)now.tv_sec, now.tv_nsec);
    return fclose(out);
}
"""
SCRIPT = """#!{python} -SE
import time
now = time.monotonic()
import os, sys
with open(sys.argv[1], "a") as out:
    out.write(f"{{os.environ.get('KVWATCH_EVENT', '')}} {{now}}\\n")
"""


def build_hook(folder: Path) -> Path:
    """A program that notes the time before anything else."""
    hook = folder / "hook"
    (folder / "hook.c").write_text(SOURCE)
    try:
        subprocess.run(["gcc", "-O1", "-o", str(hook), str(folder / "hook.c")], check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        hook.write_text(SCRIPT.format(python=sys.executable))
        hook.chmod(0o755)
    return hook


class Run:
    """One daemon, one page server, one hook."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.log = folder / "times"
        self.log.touch()
        self.kind = kind
        self.server = PageServer()
        self.crossed_s: float | None = None
        self.server.on_page = self._paged
        hook = f"{{argv: [{build_hook(folder)}, {self.log}], deadline: 2s}}"
        text = config(
            self.server.url,
            f"[{{exec: {hook}}}]",
            mode="act" if kind == "limit" else "observe",
            cooldown="0s",
            lease="60s",
            notify="[]" if kind == "limit" else f"[{{on: [yellow], rules: [kv_usage], exec: {hook}}}]",
        )
        text = text.replace("floor: 4", "floor: 1").replace("ceiling: 64", "ceiling: 100000")
        text = text.replace("cooldown:", "max_moves: 1000\n      params: {factor: 0.9}\n      cooldown:")
        text += "rules: {kv_usage: {hold: 0s, clear: 0.01}}\n"
        self.daemon = Daemon(folder / "daemon", text)

    def _paged(self, at_s: float, page: bytes) -> None:
        if self.crossed_s is None and b" 0.99\n" in page:
            self.crossed_s = at_s

    def times(self) -> list[float]:
        """When the hook was started for a crossing."""
        wanted = "limit" if self.kind == "limit" else "yellow"
        rows = [line.split() for line in self.log.read_text().splitlines()]
        return [float(row[1]) for row in rows if len(row) == 2 and row[0] == wanted]

    def cross(self, running: int) -> float:
        """One crossing and back; the seconds it took the hook to start."""
        before = len(self.times())
        self.crossed_s = None
        self.server.full(running=running)
        end_s = time.monotonic() + 5
        while len(self.times()) == before or self.crossed_s is None:
            if time.monotonic() > end_s:
                raise SystemExit(f"no hook within 5 s\n{self.daemon.log.read_text()[-2000:]}")
            time.sleep(0.002)
        self.server.usage, self.server.waiting = (0.9, 0) if self.kind == "limit" else (0.3, 0)
        pages = self.server.pages
        while self.server.pages < pages + 3:
            time.sleep(0.01)
        return self.times()[before] - self.crossed_s


def measure(kind: str, count: int) -> list[float]:
    """The delays of this many crossings, in seconds."""
    with tempfile.TemporaryDirectory(prefix="kvwatch-latency-") as folder:
        run = Run(Path(folder), kind)
        with run.server, run.daemon:
            while run.server.pages < 5:
                time.sleep(0.05)
            running, delays = 20000, []
            for _ in range(count):
                delays.append(run.cross(running))
                running = int(running * 0.9)
            return delays


def main() -> int:
    """0 when both paths are within their targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="crossings per path (default 50)")
    count = parser.parse_args().count
    good = True
    for kind in ("limit", "notice"):
        delays = measure(kind, count)
        p50_s, max_s = statistics.median(delays), max(delays)
        good = good and p50_s <= TARGET_P50_S and max_s <= TARGET_MAX_S
        print(
            f"{kind:6}  {count} crossings: p50 {p50_s * 1e3:.1f} ms (target {TARGET_P50_S * 1e3:.0f}),"
            f" max {max_s * 1e3:.1f} ms (target {TARGET_MAX_S * 1e3:.0f})"
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
