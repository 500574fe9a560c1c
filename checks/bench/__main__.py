"""`make bench`: medians and ratios of both programs, measured side by side."""

from __future__ import annotations

import argparse
import gzip
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from checks.bench.subjects import PROMETHEUS_ASKS, Subject, free_port, kvwatch, median, nvitop
from tests.fakes.nvml import Scenario, build

PAGES = Path("tests/fixtures/servers/vllm")
GPU_SERIES = b"kvwatch_gpu_memory_used_bytes"


def main() -> int:
    """Run everything; 1 when a bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvitop", type=Path, required=True, help="virtual environment of nvitop-exporter")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30, help="length of each CPU window")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--scrapes", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvwatch-bench-") as name:
        folder = Path(name)
        fake, scenario = build(folder / "fake"), folder / "scenario"
        hardware = Scenario(scenario, gpus=args.gpus).write()
        with_page = _serve_page(folder)
        subjects = [
            kvwatch(folder, fake, scenario, with_page.url),
            nvitop(folder, fake, scenario, args.nvitop),
        ]
        try:
            for subject in subjects:
                subject.wait()
            time.sleep(15)  # past both programs' start and kvwatch's first full lanes
            good = _measure(subjects, args)
            good &= _hang(subjects, hardware)
        finally:
            for subject in subjects:
                subject.stop()
            with_page.process.terminate()
            with_page.process.wait(5)
    return 0 if good else 1


class _Page:
    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process, self.url = process, url


def _serve_page(folder: Path) -> _Page:
    recorded = max(PAGES.rglob("preempting*"), key=lambda path: path.stat().st_size)
    content = recorded.read_bytes()
    page = folder / "page.prom"
    page.write_bytes(gzip.decompress(content) if recorded.suffix == ".gz" else content)
    port = free_port()
    print(f"vLLM page: {recorded} ({page.stat().st_size} bytes)")
    process = subprocess.Popen([sys.executable, "-m", "checks.bench.page_server", str(page), str(port)])
    url = f"http://127.0.0.1:{port}"
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s:
        try:
            urllib.request.urlopen(url + "/metrics", timeout=1).close()
            break
        except OSError:
            time.sleep(0.1)
    return _Page(process, url)


def _measure(subjects: list[Subject], args: argparse.Namespace) -> bool:
    cpu: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    for _ in range(args.windows):
        before = {subject.name: subject.cpu_s() for subject in subjects}
        time.sleep(args.seconds)
        for subject in subjects:
            cpu[subject.name].append(100 * (subject.cpu_s() - before[subject.name]) / args.seconds)
    scrape, size = _scrapes(subjects, args.scrapes, b"")
    asked, _ = _scrapes(subjects, args.scrapes, PROMETHEUS_ASKS)
    memory = {subject.name: subject.pss_mib() for subject in subjects}
    own, other = (subject.name for subject in subjects)
    print(f"\n{args.gpus} idle GPUs, CPU windows of {args.seconds:g} s")
    print("scrapes 2 s apart, so all are cold; connections are kept where the server keeps them.")
    print("Prometheus asks for OpenMetrics and gzip; both programs give both.")
    print(f"{'':28}{own:>18}{other:>18}{'ratio':>8}   bound")
    rows = [
        ("CPU, % of a core (median)", median(cpu[own]), median(cpu[other]), 1.0, None),
        ("/metrics p50, ms", median(scrape[own]), median(scrape[other]), 1 / 3, None),
        ("the same as Prometheus asks", median(asked[own]), median(asked[other]), 1 / 3, None),
        ("PSS of all processes, MiB", memory[own], memory[other], None, 45.0),
        ("page, bytes", float(size[own]), float(size[other]), None, None),
    ]
    good = True
    for label, mine, theirs, ratio_bound, bound in rows:
        holds = (ratio_bound is None or mine <= theirs * ratio_bound) and (bound is None or mine <= bound)
        said = f"ratio ≤ {ratio_bound:.2f}" if ratio_bound else (f"≤ {bound:g}" if bound else "-")
        verdict = "" if said == "-" else (" holds" if holds else " DOES NOT HOLD")
        print(f"{label:28}{mine:18.2f}{theirs:18.2f}{mine / theirs:8.2f}   {said}{verdict}")
        good &= holds
    return good


def _scrapes(
    subjects: list[Subject], count: int, fields: bytes
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Milliseconds of each scrape and the size of the last page, by program; each waits 2 s for its next."""
    took_ms: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    size: dict[str, int] = {}
    for _ in range(count):
        for subject in subjects:
            took_s, body = subject.scrape(fields)
            took_ms[subject.name].append(1000 * took_s)
            size[subject.name] = len(body)
            time.sleep(2.0 / len(subjects))
    return took_ms, size


def _hang(subjects: list[Subject], hardware: Scenario) -> bool:
    """NVML stops answering: kvwatch's GPU series must go within 3 s, and its page stay as fast."""
    hardware.hang().write()
    hung_s = time.monotonic()
    gone_s: float | None = None
    took: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    while time.monotonic() - hung_s < 8:
        for subject in subjects:
            took_s, body = subject.scrape()
            took[subject.name].append(1000 * took_s)
            if subject is subjects[0] and GPU_SERIES + b"{" not in body and gone_s is None:
                gone_s = time.monotonic() - hung_s
        time.sleep(0.1)
    other = subjects[1].scrape()[1]
    still = sum(1 for line in other.splitlines() if b"memory_used" in line and not line.startswith(b"#"))
    hardware.healed().write()
    said = "never" if gone_s is None else f"{gone_s:.1f} s"
    holds = gone_s is not None and gone_s <= 3.0
    print(
        f"\nNVML hung: kvwatch's GPU series gone after {said} (bound 3 s){'' if holds else ' DOES NOT HOLD'}"
    )
    for subject in subjects:
        print(f"  {subject.name}: /metrics p50 {median(took[subject.name]):.2f} ms while hung")
    print(f"  {subjects[1].name} still serves {still} memory_used series")
    return holds


if __name__ == "__main__":
    sys.exit(main())
