"""Play the recorded growth of an H200's memory at several phases and print the worst missed peak.

    python -m tests.fakes.nvml.playback_check [--phases 5] [--window 15]

The true peak of a window is compared with `used_peak_bytes` each time the source reports; 0.2 s at
each edge of the window are not counted, since a burst there belongs to either window.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from bisect import bisect_left, bisect_right
from pathlib import Path

from kvwatch.model.settings import GpuSettings
from kvwatch.sources.gpu.nvml import NvmlSource
from tests.fakes.nvml import Scenario, build, environment, write_tape

RECORDING = Path(__file__).parents[2] / "fixtures" / "h200" / "unpaged_growth_nvml.csv.gz"
EDGE_S = 0.2
MIB = 1024**2


def worst_miss(directory: Path, *, phase_s: float, for_s: float, window_s: float = 15.0) -> tuple[float, int]:
    """(worst missed MiB, windows compared) over a playback from `phase_s` for `for_s` seconds.

    Windows that reach back before the start of the playback are compared over what was played.
    The fake library must be loadable: see `environment`.
    """
    tape = directory / "tape"
    truth = write_tape(RECORDING, tape)
    Scenario(directory / "scenario").playback(0, tape, phase_s).write()
    settings = GpuSettings(peak_window_s=window_s)
    source = NvmlSource(settings, runtime_dir=directory, state_dir=directory)
    seen = []
    try:
        stop_s = None
        while stop_s is None or time.monotonic() < stop_s:
            gpu = source.poll().gpus[0]
            if gpu.used_peak_bytes is None:
                continue
            seen.append((time.monotonic(), gpu.used_peak_bytes))
            stop_s = stop_s or time.monotonic() + for_s
    finally:
        source.close()
    began_s = float(tape.with_name("tape.started").read_text())
    return _compare(truth, seen, phase_s - began_s, phase_s, window_s)


def _compare(
    truth: list[tuple[float, int]],
    seen: list[tuple[float, int]],
    shift_s: float,
    phase_s: float,
    window_s: float,
) -> tuple[float, int]:
    times = [at for at, _ in truth]
    worst, compared = 0, 0
    for at, peak in seen:
        end = at + shift_s
        low = bisect_left(times, max(phase_s, end - window_s) + EDGE_S)
        high = bisect_right(times, end - EDGE_S)
        if low < high:
            compared += 1
            worst = max(worst, max(used for _, used in truth[low:high]) - peak)
    return worst / MIB, compared


def main() -> None:
    """Play the whole recording once per phase and print each worst miss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--phases", type=int, default=3)
    parser.add_argument("--window", type=float, default=15.0)
    parser.add_argument("--seconds", type=float, default=76.0)
    args = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        directory = build(Path(name))
        os.environ.update(environment(directory, directory / "scenario"))
        for number in range(args.phases):
            phase_s = 0.037 * number
            miss, compared = worst_miss(
                directory, phase_s=phase_s, for_s=args.seconds - phase_s, window_s=args.window
            )
            worst = max(worst, miss)
            print(f"phase {phase_s:.3f} s: worst miss {miss:.0f} MiB over {compared} windows", flush=True)
    print(f"worst miss {worst:.0f} MiB")


if __name__ == "__main__":
    main()
