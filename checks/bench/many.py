"""Many servers, each polled every second: processor time, age of what is known, and memory.

    python -m checks.bench.many [--servers 64] [--gpus 0]

One of the servers drips its answer, one never answers and one answers 500; the others serve a recorded page
of 50 KB whose counters move with every answer. The processor time is taken over a window in which nobody but
a scraper every 15 s asks; the ages over a second window, several times a second, from the daemon's own page.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from checks.bench.subjects import ROOT, Subject, free_port
from tests.fakes.nvml import Scenario, build, environment

PAGE = Path("tests/fixtures/servers/vllm/0.32.0/preempting.metrics.prom.gz")
ODD = ("dripping", "hung", "failing")
MAX_CPU_PERCENT = 8.0
MAX_AGE_S = 1.5
MAX_PSS_MIB = 90.0
SCRAPE_S = 15.0
LOOK_S = 0.25
_SUCCESS = re.compile(
    rb'(?m)^kvwatch_source_last_success_timestamp_seconds\{[^}]*source="server/([^"]+)"[^}]*\} (\S+)$'
)


class Farm:
    """The pages' process."""

    def __init__(self, folder: Path, healthy: int) -> None:
        page = folder / "page.prom"
        page.write_bytes(gzip.decompress(PAGE.read_bytes()))
        self.page_bytes = page.stat().st_size
        self.process = subprocess.Popen(
            [sys.executable, "-m", "checks.bench.page_farm", str(page), str(healthy)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        ports = self._read()
        self.urls = {f"vllm{place:02}": _url(port) for place, port in enumerate(ports["healthy"])}
        self.urls |= {name: _url(ports[name]) for name in ODD}

    def longest_gap_s(self) -> float:
        """The longest time between two answers of any healthy server since the last call."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        return float(max(self._read().values()))

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.communicate()


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def kvwatch(folder: Path, urls: dict[str, str], gpus: int) -> Subject:
    """The daemon on these servers, and on so many fake GPUs."""
    port, config = free_port(), folder / "kvwatch.yml"
    servers = [
        {"name": name, "kind": "vllm", "url": url, "period": "1s", "timeout": "800ms"}
        for name, url in urls.items()
    ]
    config.write_text(
        json.dumps({"gpus": {"source": "nvml" if gpus else "none"}, "servers": servers})  # JSON is YAML
    )
    env = {
        "RUNTIME_DIRECTORY": str(folder / "run"),
        "STATE_DIRECTORY": str(folder / "state"),
        "MALLOC_ARENA_MAX": "2",  # as in the unit
    }
    if gpus:
        scenario = folder / "scenario"
        Scenario(scenario, gpus=gpus).write()
        env |= environment(build(folder / "fake"), scenario)
    command = [sys.executable, "-m", "kvwatch", "run", "--config", str(config)]
    command += ["--web.listen-address", f"127.0.0.1:{port}"]
    return Subject("kvwatch", command, port, env, folder / "kvwatch.log")


def main() -> int:
    """Run; 1 when a bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--servers", type=int, default=64, help="of which three misbehave")
    parser.add_argument("--gpus", type=int, default=0, help="idle GPUs of a fake NVML")
    parser.add_argument("--seconds", type=float, default=60, help="length of each of the two windows")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvwatch-bench-") as name:
        folder = Path(name)
        farm = Farm(folder, args.servers - len(ODD))
        subject = kvwatch(folder, farm.urls, args.gpus)
        try:
            subject.wait()
            time.sleep(10)  # past the start: every server read several times
            return 0 if _measure(subject, farm, args) else 1
        finally:
            subject.stop()
            farm.stop()


def _measure(subject: Subject, farm: Farm, args: argparse.Namespace) -> bool:
    farm.longest_gap_s()
    cpu = _processor(subject, args.seconds)
    gap_s = farm.longest_gap_s()
    oldest, looks = _ages(subject, args.seconds)
    pss = subject.pss_mib()
    healthy = [name for name in farm.urls if name not in ODD]
    worst = max(healthy, key=lambda name: oldest.get(name, float("inf")))
    wrong = [name for name in ODD if name in oldest]
    print(f"{len(farm.urls)} servers, pages of {farm.page_bytes} bytes, {args.gpus} idle GPUs")
    print(f"two windows of {args.seconds:g} s: a scrape every {SCRAPE_S:g} s, then {looks} looks")
    good = _verdict("CPU, % of a core", cpu, MAX_CPU_PERCENT)
    good &= _verdict(f"oldest healthy server ({worst}), s", oldest.get(worst, float("inf")), MAX_AGE_S)
    good &= _verdict("longest time between two answers, s", gap_s, MAX_AGE_S)
    good &= _verdict("PSS of all processes, MiB", pss, MAX_PSS_MIB)
    print("bad servers are shown as never read:", f"DOES NOT HOLD: {', '.join(wrong)}" if wrong else "holds")
    return good and not wrong


def _verdict(label: str, value: float, bound: float) -> bool:
    holds = value <= bound
    print(f"{label:40}{value:10.2f}   ≤ {bound:g}  {'holds' if holds else 'DOES NOT HOLD'}")
    return holds


def _processor(subject: Subject, seconds: float) -> float:
    """Percent of a core, scrapes as a Prometheus makes them included."""
    begun, before = time.monotonic(), subject.cpu_s()
    while (left_s := begun + seconds - time.monotonic()) > 0:
        subject.scrape()
        time.sleep(min(SCRAPE_S, left_s))
    return 100 * (subject.cpu_s() - before) / (time.monotonic() - begun)


def _ages(subject: Subject, seconds: float) -> tuple[dict[str, float], int]:
    """The greatest age of each server that was ever read, and how often was looked."""
    oldest: dict[str, float] = {}
    looks, end_s = 0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        _, body = subject.scrape()
        now_s = time.time()
        for name, success in _SUCCESS.findall(body):
            if float(success) > 0:
                server = name.decode()
                oldest[server] = max(oldest.get(server, 0.0), now_s - float(success))
        looks += 1
        time.sleep(LOOK_S)
    return oldest, looks


if __name__ == "__main__":
    sys.exit(main())
