"""Everything breaks at random: `python -m checks.endurance.chaos --minutes 15 --seed 1` (`make chaos`).

A real daemon over fake GPUs, servers that fail in every way, limits by lease and by hook, an agent and a
liar beside it, reloads, small disks, SIGKILL and SIGSTOP. Storms of overlapping faults, each followed by
a recovery that must be whole. Twice a second a page is read by the official parser and compared with the
truth; ten times a second the levers are looked at (`judge.py`). Prints each violation with its time, the
seed and the faults in force; at the end figures. 1 on any violation. As root it runs in a mount
namespace of its own, so that disks can be filled and made read-only; otherwise those faults are left out.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from checks.endurance.faults import OWN_NAMESPACE, Deck, Disks, Fault
from checks.endurance.judge import Faults, Judge, Lag, Life, same
from checks.endurance.page import Page, strict_json
from checks.endurance.process import MIB, Usage, cpu_s, quantile, usage, waited_for_cpu_s
from checks.endurance.scrape import OPENMETRICS, Answer, Scraper
from checks.endurance.world import World, world

TICK_S = 0.1
SCRAPE_S = 0.5
WORKERS_S = 0.5
SLOW_S = 0.25  # beside what kvwatch and we waited for a processor meanwhile
START_S = 10.0
RECOVERY_S = 75.0  # the NVML backoff is a minute at the longest
SETTLED_S = 5.0  # after a reload: the sources of before may be shown for a moment
CALM_S = 8.0
# The daemon of the first calm against that of the last: other threads may be about (lanes of actions live a
# minute), and the page has grown by what was seen meanwhile (Xids, outcomes, ranks that a liar has named).
GROWN = {"private": 12 * MIB, "threads": 6, "descriptors": 12}


class Chaos:
    """One run."""

    def __init__(self, made: World, seed: int, disks: Disks) -> None:
        self._world = made
        self._seed = seed
        self._chance = random.Random(seed)
        self._deck = Deck(made, self._chance, disks)
        self._faults = Faults()
        self._life = Life()
        self._lag = Lag()
        self._judge = Judge(made, self._life, self._faults, self._lag)
        self._scraper = Scraper(made.daemon.port, keep=True, timeout_s=5.0)
        self._begun_s = time.monotonic()
        self._due = {"scrape": 0.0, "workers": 0.0}
        self._restart_s = 0.0
        self._page: Page | None = None
        self._scrapes = 0
        self._left_cpu_s = 0.0
        self.took_s: list[float] = []
        self.injected: Counter[str] = Counter()
        self.violations: Counter[str] = Counter()
        self.calms: list[Usage] = []
        self.slowest_recovery_s = 0.0
        self.lives = 0

    # -- the story

    def run(self, seconds: float) -> None:
        """Storms and recoveries until the time is over; ends in a calm."""
        self._launch()
        self._recover()
        storm_s = (20.0, 40.0) if seconds > 60 else (8.0, 10.0)
        while time.monotonic() < self._begun_s + seconds - storm_s[0]:
            self._storm(self._chance.uniform(*storm_s))
            self._recover()
            if self._calm_after(seconds):
                self._calm()
        self._calm()

    def _calm_after(self, seconds: float) -> bool:
        return time.monotonic() < self._begun_s + seconds - 2 * CALM_S

    def _storm(self, length_s: float) -> None:
        """Several faults, each for a random part of the storm."""
        begun_s = time.monotonic()
        planned = self._plan(length_s)
        running: list[tuple[float, Fault]] = []
        while (now_s := time.monotonic() - begun_s) < length_s:
            for entry in [entry for entry in planned if entry[0] <= now_s]:
                planned.remove(entry)
                _, end_s, fault = entry
                self._begin(fault)
                running.append((end_s, fault))
            for ending in [ending for ending in running if ending[0] <= now_s]:
                running.remove(ending)
                self._end(ending[1])
            self._tick()
        for _, fault in running:
            self._end(fault)

    def _plan(self, length_s: float) -> list[tuple[float, float, Fault]]:
        """(begin, end, fault); two with the same key do not overlap."""
        planned: list[tuple[float, float, Fault]] = []
        for _ in range(self._chance.randrange(4, 9)):
            fault = self._deck.draw()
            begin_s = self._chance.uniform(0.0, 0.6 * length_s)
            end_s = min(length_s, begin_s + min(fault.longest_s, self._chance.uniform(2.0, length_s)))
            if all(
                one.key != fault.key or end_s < other_begin or begin_s > other_end
                for other_begin, other_end, one in planned
            ):
                planned.append((begin_s, end_s, fault))
        return planned

    def _begin(self, fault: Fault) -> None:
        self.injected[fault.kind] += 1
        self._faults.begin(fault.key, fault.kind)
        self._count_cpu(fault)
        fault.begin()
        if fault.kind == "kvwatch killed" and self._world.daemon.process is not None:
            self._world.daemon.process.wait(5)
        self._moved(fault)
        if fault.kind == "kvwatch stopped":
            self._life.stopped = self._world.daemon.alive

    def _end(self, fault: Fault) -> None:
        fault.end()
        self._moved(fault)
        if fault.kind == "kvwatch stopped":
            self._life.stopped, self._life.resumed_s = False, time.monotonic()
        self._faults.end(fault.key, fault.kind)

    def _moved(self, fault: Fault) -> None:
        """What a fault changes about what is expected."""
        now_s = time.monotonic()
        if fault.key == "configuration":
            self._life.moved_s = now_s
        if fault.key in ("configuration", "maintenance"):
            self._life.new_sources.append(now_s)

    def _count_cpu(self, fault: Fault) -> None:
        if fault.kind == "kvwatch killed" and self._world.daemon.alive:
            self._left_cpu_s += cpu_s(self._world.daemon.pid)

    def _recover(self) -> None:
        """Until everything is shown again."""
        begun_s = time.monotonic()
        missing: list[str] = ["a page"]
        while missing and time.monotonic() < begun_s + RECOVERY_S:
            self._tick()
            now_s = time.monotonic()
            settled = self._life.up_for_s(now_s) > 1.0 and now_s > self._life.moved_s + SETTLED_S
            fresh = self._page if settled else None
            missing = ["a page"] if fresh is None else self._judge.missing(fresh)
        took_s = time.monotonic() - begun_s
        self.slowest_recovery_s = max(self.slowest_recovery_s, took_s)
        if missing:
            self._wrong(f"not back after {took_s:.0f} s without faults: {', '.join(missing)}")

    def _calm(self) -> None:
        """Nothing is broken: nothing may be missing for a moment."""
        begun_s = time.monotonic()
        while time.monotonic() < begun_s + CALM_S:
            before = self._page
            self._tick()
            if self._page is None or self._page is before:
                continue
            missing = self._judge.missing(self._page)
            if missing and self._lag.over(6.0) < 1.0:
                self._wrong(f"missing in a calm: {', '.join(missing)}")
        if self._world.daemon.alive:
            self.calms.append(usage(self._world.daemon.pid, time.monotonic()))

    # -- one turn

    def _tick(self) -> None:
        begun_s = time.monotonic()
        self._world.weather(begun_s)
        self._supervise(begun_s)
        if self._life.running:
            self._lag.look(self._world.daemon.pid)
        while self._world.hangups and self._life.answered_s is not None and self._world.daemon.alive:
            self._world.hangups -= 1
            self._life.moved_s = begun_s
            self._world.daemon.signal(signal.SIGHUP)
            time.sleep(0.002)
        for complaint in self._judge.levers(time.monotonic()):
            self._wrong(complaint)
        if begun_s >= self._due["workers"]:
            self._due["workers"] = begun_s + WORKERS_S
            for complaint in self._judge.workers(time.monotonic()):
                self._wrong(complaint)
        if begun_s >= self._due["scrape"] and self._life.running:
            self._due["scrape"] = begun_s + SCRAPE_S
            self._scrape()
        time.sleep(max(0.01, begun_s + TICK_S - time.monotonic()))

    def _supervise(self, now_s: float) -> None:
        """What systemd does: notice that it has ended, and start it again."""
        daemon, life = self._world.daemon, self._life
        if life.died_s is None and not daemon.alive:
            life.died_s, self._page = now_s, None
            self._restart_s = now_s + self._chance.uniform(0.1, 3.0)
            self._ended(daemon.process.returncode if daemon.process is not None else 0)
        if life.died_s is not None and now_s >= self._restart_s:
            self._launch()
        started_s = max(life.launched_s, life.resumed_s)
        if life.running and life.answered_s is None and now_s - started_s > START_S + self._lag.over(START_S):
            self._wrong(f"no answer {now_s - started_s:.0f} s after its start:\n{daemon.tail(1500)}")
            life.answered_s = now_s

    def _ended(self, status: int) -> None:
        excused = (
            (status == -9 and self._faults.lately("kvwatch", 1.0))
            or (status == 2 and self._faults.lately("configuration", 2.0))
            or (status == 3 and self._faults.lately("disk", 2.0))
        )
        if not excused:
            self._wrong(f"kvwatch has ended with {status} by itself:\n{self._world.daemon.tail(1500)}")

    def _launch(self) -> None:
        life = self._life
        self._world.daemon.launch()
        life.launched_s, life.launched_wall_s = time.monotonic(), time.time()
        life.answered_s, life.died_s, life.stopped = None, None, False
        life.new_sources.append(life.launched_s)
        self._judge.new_process()
        self._scraper.close()
        self.lives += 1

    def _scrape(self) -> None:
        """One page, now and then in another form, and everything that is to be said of it."""
        self._scrapes += 1
        openmetrics = self._scrapes % 5 == 0
        asked_s = time.monotonic()
        answer = self._ask("/metrics", OPENMETRICS if openmetrics else b"")
        if answer is None:
            return
        self._life.answered_s = self._life.answered_s or asked_s
        self.took_s.append(answer.took_s)
        try:
            self._page = Page(answer.body, openmetrics=openmetrics)
        except ValueError as error:
            self._wrong(f"the page cannot be parsed: {error}")
            return
        for complaint in self._judge.page(self._page, asked_s, openmetrics=openmetrics):
            self._wrong(complaint)
        if self._scrapes % 10 == 7:
            self._others(asked_s)

    def _others(self, asked_s: float) -> None:
        """The other pages: JSON that everybody can read, and a loop that is well."""
        for path in ("/api/v1/state", "/api/v1/events?since=0"):
            answer = self._ask(path)
            try:
                if answer is not None and answer.status == 200:
                    strict_json(answer.body)
            except ValueError as error:
                self._wrong(f"{path} is no JSON: {error}")
        health = self._ask("/-/healthy")
        if health is not None and health.status != 200 and self._life.up_for_s(asked_s) > 3.0:
            self._wrong(f"/-/healthy says {health.status}: {health.body[:200]!r}")

    def _ask(self, path: str, fields: bytes = b"") -> Answer | None:
        pid = self._world.daemon.pid
        waited_s = self._waited(pid)
        try:
            answer = self._scraper.get(path, fields)
        except OSError as error:
            if self._life.answered_s is not None and self._world.daemon.alive:
                self._wrong(f"{path}: {error}")
            return None
        waited_s = self._waited(pid) - waited_s
        if answer.took_s > SLOW_S + waited_s and self._life.up_for_s(time.monotonic()) > 2.0:
            self._wrong(f"{path} took {answer.took_s:.2f} s ({waited_s:.2f} s of it without a processor)")
        if path == "/metrics" and answer.status != 200:
            self._wrong(f"/metrics answered {answer.status}")
        return answer

    def _waited(self, pid: int) -> float:
        try:
            return waited_for_cpu_s(pid) + waited_for_cpu_s(os.getpid())
        except OSError:
            return 0.0

    def _wrong(self, text: str) -> None:
        kind = same(text.partition("\n")[0])
        self.violations[kind] += 1
        if self.violations[kind] <= 3:
            at_s = time.monotonic() - self._begun_s
            print(
                f"VIOLATION at {at_s:.1f} s, seed {self._seed}: {text}\n  in force: {self._faults}",
                flush=True,
            )

    # -- the end

    def close(self) -> None:
        """Close the connection."""
        self._scraper.close()

    def tell(self) -> bool:
        """Print the figures; whether all was well."""
        elapsed_s = time.monotonic() - self._begun_s
        ms = [1e3 * quantile(self.took_s, rank) for rank in (0.5, 0.99, 1.0)]
        used_s = self._left_cpu_s + (cpu_s(self._world.daemon.pid) if self._world.daemon.alive else 0.0)
        print(f"\nseed {self._seed}, {elapsed_s / 60:.1f} min, {self.lives} lives of kvwatch")
        print(f"  {sum(self.injected.values())} faults of {len(self.injected)} kinds:")
        for kind, count in sorted(self.injected.items()):
            print(f"    {count:3} {kind}")
        limits = Counter(event for _, event in self._world.hook_events())
        print(
            f"  the hook moved its lever {limits['limit']} times and gave it back {limits['restore']} times"
        )
        print(
            f"  {len(self.took_s)} scrapes: p50 {ms[0]:.1f} ms, p99 {ms[1]:.1f} ms, longest {ms[2]:.0f} ms"
            f" (bound {1e3 * SLOW_S:.0f} and the time without a processor)"
        )
        print(f"  kvwatch used {100 * used_s / elapsed_s:.1f} % of a core")
        print(f"  slowest recovery {self.slowest_recovery_s:.0f} s (bound {RECOVERY_S:.0f})")
        flat = self._flat()
        for kind, count in self.violations.most_common():
            print(f"  {count:5} times: {kind}")
        print(f"  {sum(self.violations.values())} violations")
        return flat and not self.violations

    def _flat(self) -> bool:
        if not self.calms:
            print("  no calm to compare")
            return False
        first, last = self.calms[0], self.calms[-1]
        grown = {
            "private": last.private - first.private,
            "threads": last.threads - first.threads,
            "descriptors": last.descriptors - first.descriptors,
        }
        over = [name for name, allowed in GROWN.items() if grown[name] > allowed]
        print(f"  first calm: {first}\n  last calm:  {last}{f'  GROWN: {over}' if over else ''}")
        return not over


def chaos(folder: Path, seconds: float, seed: int) -> bool:
    """Whether all was well."""
    chance = random.Random(seed + 1_000_000)
    with world(folder, chance) as made:
        disks = Disks({"state": made.daemon.state, "run": made.daemon.run})
        print(f"seed {seed}; disks {'can' if disks.mounted else 'can not'} be spoilt here", flush=True)
        run = Chaos(made, seed, disks)
        try:
            run.run(seconds)
            good = run.tell()
            status = made.daemon.stop()
            print(f"  stopped at the end with status {status}")
            return good and status == 0
        finally:
            run.close()
            disks.close()


def in_own_namespace(arguments: Sequence[str]) -> int | None:
    """Run this again in a mount namespace of its own; None where that cannot be (or is so already)."""
    if os.environ.get(OWN_NAMESPACE) or os.geteuid() != 0 or shutil.which("unshare") is None:
        return None
    unshare = ["unshare", "--mount", "--propagation", "private"]
    if subprocess.run([*unshare, "true"], stderr=subprocess.DEVNULL, check=False).returncode != 0:
        return None
    command = [*unshare, sys.executable, "-m", "checks.endurance.chaos", *arguments]
    os.execvpe(command[0], command, os.environ | {OWN_NAMESPACE: "1"})


def main(arguments: Sequence[str]) -> int:
    """0 when nothing was violated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    in_own_namespace(arguments)
    with tempfile.TemporaryDirectory(prefix="kvwatch-chaos-") as name:
        return 0 if chaos(Path(name), 60 * args.minutes, args.seed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
