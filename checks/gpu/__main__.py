"""`make gpu-check`: kvwatch on a real GPU. Prints what it saw and writes it under --out for the fixtures.

It changes no setting of the GPU. With torch installed it also lets memory grow in bursts and compares
kvwatch's peaks with the truth.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.harness import Daemon, Page

BURST = """
import sys, time, torch
total = torch.cuda.get_device_properties(0).total_memory
held = [torch.empty(int(total * 0.2), dtype=torch.uint8, device="cuda")]
print("base", torch.cuda.memory_reserved(), flush=True)
for size in (0.1, 0.2, 0.3):
    time.sleep(4)
    burst = torch.empty(int(total * size), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    print("burst", torch.cuda.memory_reserved(), flush=True)
    time.sleep(0.2)
    del burst
    torch.cuda.empty_cache()
time.sleep(4)
"""


def main() -> int:
    """Run every check; 1 when one does not hold, 2 where there is no GPU to check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="where the recordings go")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvwatch-gpu-") as folder:
        daemon = Daemon(Path(folder), "gpus: {peak_window: 15s}\n")
        with daemon:
            found = _wait_for_gpus(daemon)
            if found is None:
                print("no GPU can be read here; nothing was checked")
                print(daemon.log.read_text()[-1500:])
                return 2
            results: dict[str, Any] = {"ledger": _ledger(daemon.metrics()), "idle": _costs(daemon, 20)}
            results["burst"] = _bursts(daemon)
            (args.out / "metrics.prom").write_text(daemon.metrics().text)
            (args.out / "state.json").write_text(daemon.get("/api/v1/state"))
    (args.out / "results.json").write_text(json.dumps(results, indent=1))
    print(json.dumps(results, indent=1))
    held = results["ledger"]["adds_up"] and results["burst"].get("holds", True)
    return 0 if held else 1


def _wait_for_gpus(daemon: Daemon) -> Page | None:
    end_s = time.monotonic() + 25
    while time.monotonic() < end_s:
        page = daemon.metrics()
        if page.all("kvwatch_gpu_memory_ledger_bytes"):
            return page
        time.sleep(0.5)
    return None


def _ledger(page: Page) -> dict[str, Any]:
    totals = {labels["uuid"]: value for labels, value in page.all("kvwatch_gpu_memory_total_bytes")}
    sums = dict.fromkeys(totals, 0.0)
    for labels, value in page.all("kvwatch_gpu_memory_ledger_bytes"):
        sums[labels["uuid"]] += value
    return {"gpus": len(totals), "adds_up": sums == totals}


def _costs(daemon: Daemon, seconds: float) -> dict[str, Any]:
    """CPU and memory of every kvwatch process while the GPUs are as they are."""
    from checks.bench.subjects import TICKS
    from checks.engines.vllm import descendants

    assert daemon.process is not None
    pids = [daemon.process.pid, *descendants(daemon.process.pid)]

    def cpu_s() -> float:
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
        return sum((int(one[11]) + int(one[12])) / TICKS for one in fields)

    before = cpu_s()
    time.sleep(seconds)
    spent = cpu_s() - before
    pss_kib = sum(
        int(line.split()[1])
        for pid in pids
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        if line.startswith("Pss:")
    )
    return {"cpu_percent": round(100 * spent / seconds, 2), "pss_mib": round(pss_kib / 1024, 1)}


def _bursts(daemon: Daemon) -> dict[str, Any]:
    """Short bursts of allocation: the exported peak must have seen each of them."""
    if importlib.util.find_spec("torch") is None:
        return {"skipped": "torch is not installed here"}
    with subprocess.Popen([sys.executable, "-c", BURST], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        misses = []
        for line in child.stdout:
            what, reserved = line.split()
            if what != "burst":
                continue
            time.sleep(0.5)
            peak = max(value for _, value in daemon.metrics().all("kvwatch_gpu_memory_used_peak_bytes"))
            misses.append(max(0.0, int(reserved) - peak) / 2**20)
    return {"missed_mib": misses, "holds": bool(misses) and max(misses) <= 128}


if __name__ == "__main__":
    sys.exit(main())
