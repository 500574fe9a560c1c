"""What one derive() costs, by number of servers: run as `python -m tests.signals.cost`. Not a test."""

from __future__ import annotations

import sys
import time
from statistics import median

from kvwatch.model.report import Snapshot
from kvwatch.model.server import Histogram
from kvwatch.model.settings import GIB, ServerSettings
from kvwatch.signals.derive import SignalState, derive
from tests.signals.build import PATTERNS, clock, engine, gpu, host, page, process, settings

BOUNDS = tuple(0.001 * 1.5**step for step in range(24))


def _histogram(count: int) -> Histogram:
    counts = tuple(float(count * min(1.0, step / 15)) for step in range(24))
    return Histogram(bounds=BOUNDS, counts=counts, count=float(count))


def _snapshot(servers: int, now_s: float, tick: int) -> Snapshot:
    used = 40 * GIB + tick % 7
    gpus = [
        gpu(
            now_s,
            used,
            [process(10 * index + 1, 30 * GIB, f"vllm serve m --port {8000 + index}")],
            uuid=f"GPU-{index:04}",
            index=index,
        )
        for index in range(min(servers, 8))
    ]
    pages = {}
    for index in range(servers):
        one = engine(
            0.5 + (tick % 30) / 80,
            waiting=tick % 5,
            preemptions=tick // 3,
            prompt=tick * 900,
            generation=tick * 400,
            ttft=_histogram(tick * 3),
            tpot=_histogram(tick * 300),
            queue=_histogram(tick * 3),
        )
        pages[f"s{index}"] = page(now_s, one, server=f"s{index}")
    return Snapshot(servers=pages, gpus=host(now_s, *gpus))


def measure(servers: int) -> tuple[float, float, float]:
    """Median microseconds of a tick: all new with forecasts due, all new without, nothing new."""
    config = settings(
        *(
            ServerSettings(name=f"s{i}", kind="vllm", url=f"http://127.0.0.1:{8000 + i}")
            for i in range(servers)
        )
    )
    state = SignalState.initial()
    costs: tuple[list[float], list[float], list[float]] = ([], [], [])
    for tick in range(200):
        now_s = 1000.0 + tick
        first, second = _snapshot(servers, now_s, tick), _snapshot(servers, now_s + 0.2, tick)
        steps = ((first, now_s), (second, now_s + 0.2), (second, now_s + 0.3))
        for spent, (snapshot, at_s) in zip(costs, steps, strict=True):
            started = time.thread_time()
            state, _ = derive(state, snapshot, config, PATTERNS, clock(at_s))
            spent.append((time.thread_time() - started) * 1e6)
    forecasts, new, idle = (median(spent[80:]) for spent in costs)
    return forecasts, new, idle


def main() -> None:
    """Print a line per number of servers."""
    for servers in (1, 8, 64):
        forecasts, new, idle = measure(servers)
        sys.stdout.write(
            f"{servers:3} servers, {min(servers, 8)} GPUs, us a tick: all new {new:7.0f} "
            f"({new / servers:4.0f} a server), and forecasts due {forecasts:7.0f} "
            f"({forecasts / servers:4.0f}), nothing new {idle:5.0f}\n"
        )


if __name__ == "__main__":
    main()
