"""Does anything grow? `python -m checks.endurance.soak --minutes 30 --speed 10` (`make soak`).

The demo goes through all of its stories at ten times its speed, scraped every second as text, every tenth
time as Prometheus asks and as JSON. Each page must keep to what is true of every page (`page.py`). At the
end memory, threads and descriptors of the last quarter are compared with those of the first one after the
start (medians). Prints figures every five minutes; 1 on any violation.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from checks.endurance.page import Counters, Page, complaints, strict_json
from checks.endurance.process import MIB, Usage, cpu_s, middle, quantile, usage, waited_for_cpu_s
from checks.endurance.program import Kvwatch
from checks.endurance.scrape import OPENMETRICS, Answer, Scraper

EVERY_S = 1.0
TOLD_EVERY_S = 300.0
WARM_UP_SHARE = 0.1  # not counted: caches and the first round of every story
SLOW_S = 0.25  # beside what kvwatch waited for a processor
# Growth of the medians that is no leak: 2,000 audit events are kept in memory (about 1 KiB each) and fill
# up over hours, and the demo's own server makes a thread and a descriptor for each connection.
PRIVATE_BYTES = 4 * MIB
THREADS = 1
DESCRIPTORS = 2


class Soak:
    """One run: what was seen, and what was wrong."""

    def __init__(self, daemon: Kvwatch, speed: float) -> None:
        self._daemon = daemon
        self._speed = speed
        self._text = Scraper(daemon.port, keep=True)
        self._other = Scraper(daemon.port)
        self._counters = Counters()
        self._begun_s = time.monotonic()
        self._cpu_s = cpu_s(daemon.pid)
        self.seen: list[Usage] = []
        self.took_s: list[float] = []
        self.levels: Counter[str] = Counter()
        self.violations: Counter[str] = Counter()

    def run(self, seconds: float) -> None:
        """Scrape once a second until the time is over."""
        number, due_s, told_s = 0, self._begun_s, self._begun_s + TOLD_EVERY_S
        while (now_s := time.monotonic()) < self._begun_s + seconds:
            self._look(number)
            number += 1
            if now_s >= told_s:
                told_s += TOLD_EVERY_S
                self.tell()
            due_s = max(due_s + EVERY_S, time.monotonic())
            time.sleep(max(0.0, due_s - time.monotonic()))
        self._text.close()

    def _look(self, number: int) -> None:
        if not self._daemon.alive:
            raise RuntimeError(f"kvwatch has ended by itself:\n{self._daemon.tail()}")
        self._page(self._ask(self._text), openmetrics=False)
        if number % 10 == 3:
            self._page(self._ask(self._other, fields=OPENMETRICS), openmetrics=True)
        if number % 10 == 7:
            for path in ("/api/v1/state", "/api/v1/events?since=0", "/"):
                answer = self._ask(self._other, path=path)
                if answer is not None and path != "/":
                    self._json(path, answer.body)
        self.seen.append(usage(self._daemon.pid, time.monotonic()))

    def _ask(self, scraper: Scraper, path: str = "/metrics", fields: bytes = b"") -> Answer | None:
        waited_s = waited_for_cpu_s(self._daemon.pid)
        try:
            answer = scraper.get(path, fields)
        except OSError as error:
            self._wrong(f"{path}: {error}")
            return None
        if path == "/metrics":
            self.took_s.append(answer.took_s)
        # A thread that has ended meanwhile takes what it waited out of the sum.
        waited_s = max(0.0, waited_for_cpu_s(self._daemon.pid) - waited_s)
        if answer.took_s > SLOW_S + waited_s:
            self._wrong(f"{path} took more than {SLOW_S} s (and {waited_s:.2f} s without a processor)")
        if answer.status != 200:
            self._wrong(f"{path} answered {answer.status}")
        return answer

    def _page(self, answer: Answer | None, *, openmetrics: bool) -> None:
        if answer is None:
            return
        try:
            page = Page(answer.body, openmetrics=openmetrics)
        except ValueError as error:
            self._wrong(f"the page cannot be parsed: {error}")
            return
        found = list(complaints(page))
        for complaint in [*found, *([] if openmetrics else self._counters.complaints(page))]:
            self._wrong(complaint)
        for _, level in page.all("kvwatch_rule_level"):
            self.levels[("unknown", "green", "yellow", "red")[int(level) + 1]] += 1

    def _json(self, path: str, body: bytes) -> None:
        try:
            strict_json(body)
        except ValueError as error:
            self._wrong(f"{path} is no JSON: {error}")

    def _wrong(self, text: str) -> None:
        self.violations[text] += 1
        if self.violations[text] == 1:
            print(f"VIOLATION after {time.monotonic() - self._begun_s:.1f} s: {text}", flush=True)

    def tell(self) -> None:
        """One line of figures."""
        elapsed_s = time.monotonic() - self._begun_s
        share = 100 * (cpu_s(self._daemon.pid) - self._cpu_s) / elapsed_s
        p50_ms, p99_ms = (1e3 * quantile(self.took_s, rank) for rank in (0.5, 0.99))
        print(
            f"{elapsed_s / 60:5.1f} min: {len(self.took_s)} scrapes, p50 {p50_ms:.1f} ms,"
            f" p99 {p99_ms:.1f} ms; {middle(self.seen[-30:])}; {share:.1f} % of a core;"
            f" {sum(self.violations.values())} violations",
            flush=True,
        )

    def leaks(self) -> bool:
        """Whether anything has grown; says what."""
        warm = self.seen[int(len(self.seen) * WARM_UP_SHARE) :]
        quarter = max(1, len(warm) // 4)
        first, last = middle(warm[:quarter]), middle(warm[-quarter:])
        good = [
            _flat("private, MiB", first.private / MIB, last.private / MIB, PRIVATE_BYTES / MIB),
            _flat("threads", first.threads, last.threads, THREADS),
            _flat("descriptors", first.descriptors, last.descriptors, DESCRIPTORS),
        ]
        return not all(good)


def _flat(name: str, first: float, last: float, allowed: float) -> bool:
    holds = last - first <= allowed
    print(
        f"  {name:12} first quarter {first:.1f}, last quarter {last:.1f}: {last - first:+.1f}"
        f" (allowed {allowed:+.0f}){'' if holds else '  DOES NOT HOLD'}"
    )
    return holds


def soak(folder: Path, seconds: float, speed: float, *, grown: bool = True) -> bool:
    """Whether nothing was wrong and nothing grew (not asked where it is too short to tell)."""
    with Kvwatch(folder, "--demo", "all", environment={"KVWATCH_DEMO_SPEED": f"{speed:g}"}) as daemon:
        daemon.wait()
        run = Soak(daemon, speed)
        run.run(seconds)
        print(f"\nthe end, at {speed:g} times the demo's speed:")
        run.tell()
        print(f"  verdicts seen: {', '.join(f'{count} {level}' for level, count in run.levels.items())}")
        leaks = run.leaks() and grown
        status = daemon.stop()
    _tell_violations(run.violations)
    if status != 0:
        print(f"kvwatch ended with {status}:\n{daemon.tail()}")
    return not run.violations and not leaks and status == 0


def _tell_violations(violations: Counter[str]) -> None:
    for text, count in violations.most_common(20):
        print(f"  {count:5} times: {text}")
    print(f"{sum(violations.values())} violations")


def main(argv: Sequence[str] | None = None) -> int:
    """0 when nothing was wrong and nothing grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--speed", type=float, default=10, help="of the demo's story and load (default 10)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="kvwatch-soak-") as name:
        return 0 if soak(Path(name), 60 * args.minutes, args.speed) else 1


if __name__ == "__main__":
    sys.exit(main())
