"""What must hold whatever is broken: every page against the truth, every lever against the clock.

"Waited" is how long kvwatch and this process were ready to run lately while the machine had no processor
for them: every bound on time is that much later.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from checks.endurance.page import Counters, Page, complaints
from checks.endurance.process import waited_for_cpu_s
from checks.endurance.world import (
    AGENT,
    CEILING,
    FLOOR,
    GPUS,
    HOOK_DEADLINE_S,
    LEASE_S,
    PERIOD_S,
    POISON,
    World,
)
from kvwatch.signals.freshness import GPU_MAX_AGE_S, LEAST_S
from kvwatch.sources.gpu.nvml_lanes import SLOWEST_MEMORY_S
from kvwatch.wire import Lease, LeaseReader, clock_s
from tests.fakes.nvml import uuid_of

# After what is stale has become so: the next tick (a second at most) and the way of a page.
LATE_S = 2.0
# A hook that failed is asked again after at most a minute.
HOOK_RETRY_S = 65.0
GIVE_BACK_S = 12.0
RELOAD_S = 8.0
# Starts of NVML workers in a sliding window, for each time that the backoff (1, 2, 4, 8, 16, 32 s) begins
# anew: with a new daemon, a new configuration of the GPUs, the end of maintenance.
STARTS = ((10.0, 4), (60.0, 6))
SHOWN: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("kvwatch_kv_usage_ratio", "usage", {}),
    ("kvwatch_requests", "running", {"state": "running"}),
    ("kvwatch_requests", "waiting", {"state": "waiting"}),
)


@dataclass
class Life:
    """The daemon's life as the harness knows it; times are monotonic seconds."""

    launched_s: float = 0.0
    launched_wall_s: float = 0.0
    answered_s: float | None = None
    died_s: float | None = None
    stopped: bool = False
    resumed_s: float = 0.0
    moved_s: float = 0.0  # a configuration was changed
    new_sources: deque[float] = field(default_factory=lambda: deque(maxlen=200))  # starts that we caused

    @property
    def running(self) -> bool:
        """Whether it is there and not stopped."""
        return self.died_s is None and not self.stopped

    def up_for_s(self, now_s: float) -> float:
        """How long it has run without an interruption; 0.0 while it does not answer."""
        if not self.running or self.answered_s is None:
            return 0.0
        return now_s - max(self.answered_s, self.resumed_s)


class Faults:
    """Which faults are in force, and when each last was."""

    def __init__(self) -> None:
        self.active: list[tuple[str, str]] = []  # (key, what)
        self._ended_s: dict[str, float] = {}

    def begin(self, key: str, what: str) -> None:
        """One more."""
        self.active.append((key, what))

    def end(self, key: str, what: str) -> None:
        """One less."""
        self.active.remove((key, what))
        self._ended_s[key] = time.monotonic()

    def lately(self, key: str, seconds: float) -> bool:
        """Whether a fault whose key starts so is in force, or was within these seconds."""
        if any(one.startswith(key) for one, _ in self.active):
            return True
        since_s = time.monotonic() - seconds
        return any(one.startswith(key) and at_s >= since_s for one, at_s in self._ended_s.items())

    def __str__(self) -> str:
        return ", ".join(f"{what} ({key})" for key, what in self.active) or "none"


class Lag:
    """How long kvwatch and we have waited for a processor lately."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, float]] = deque(maxlen=400)

    def look(self, pid: int) -> None:
        """Take a reading."""
        with contextlib.suppress(OSError):
            total = waited_for_cpu_s(pid) + waited_for_cpu_s(os.getpid())
            self._seen.append((time.monotonic(), pid, total))

    def over(self, seconds: float) -> float:
        """Seconds waited within the last so many seconds."""
        since_s = time.monotonic() - seconds
        recent = [(pid, total) for at_s, pid, total in self._seen if at_s >= since_s]
        steps = itertools.pairwise(recent)
        return sum(max(0.0, after[1] - before[1]) for before, after in steps if before[0] == after[0])


class Judge:
    """Looks at pages and at levers; each complaint is a sentence."""

    def __init__(self, world: World, life: Life, faults: Faults, lag: Lag) -> None:
        self._world = world
        self._life = life
        self._faults = faults
        self._lag = lag
        self._counters = Counters()
        self._readers = {name: LeaseReader(self._lease_path(name), server=name) for name in world.servers}
        self._hook_events = 0
        self._looks: deque[float] = deque(maxlen=200)
        self._poisonable_s = 0.0

    def _lease_path(self, name: str) -> str:
        return str(self._world.daemon.run / "limits" / f"{name}.json")

    def new_process(self) -> None:
        """Another process of kvwatch counts from zero."""
        self._counters = Counters()

    # -- pages

    def page(self, page: Page, asked_s: float, *, openmetrics: bool) -> Iterator[str]:
        """Everything wrong with one page that was asked for at this time."""
        yield from complaints(page)
        if asked_s - self._life.moved_s < RELOAD_S:
            self._counters.forget_sources()
        if not openmetrics:
            yield from self._counters.complaints(page)
        if self._life.up_for_s(asked_s) < LATE_S:
            return  # the page may be the last one before it was stopped
        for complaint in [*self._untrue(page, asked_s)]:
            # what a server or the hardware has just said may reach us a moment after it reached kvwatch
            time.sleep(0.2)
            if complaint in set(self._untrue(page, asked_s)):
                yield complaint
        yield from self._configured(page, asked_s)

    def _untrue(self, page: Page, asked_s: float) -> Iterator[str]:
        yield from self._servers(page, asked_s)
        yield from self._gpus(page, asked_s)
        yield from self._agent(page, asked_s)

    def _servers(self, page: Page, asked_s: float) -> Iterator[str]:
        since_s = asked_s - LEAST_S - LATE_S - self._lag.over(8.0)
        for name, server in self._world.watched().items():
            for metric, figure, labels in SHOWN:
                for _, value in page.all(metric, server=name, **labels):
                    served = server.served(figure, since_s)
                    if not any(abs(value - true) < 1e-9 for true in served):
                        yield f"{metric} of {name} is {value:g}, which it has not said lately"
            if page.get("kvwatch_server_up", server=name) == 1 and server.last_page_s() < since_s:
                yield f"{name} is up, and has given no page for {asked_s - server.last_page_s():.1f} s"

    def _gpus(self, page: Page, asked_s: float) -> Iterator[str]:
        # While its calls are slow a GPU is read once a second: its last reading is so old.
        since_s = asked_s - GPU_MAX_AGE_S - SLOWEST_MEMORY_S - LATE_S - self._lag.over(8.0)
        for index in range(GPUS):
            for _, value in page.all("kvwatch_gpu_memory_used_bytes", uuid=uuid_of(index)):
                if int(value) not in self._world.hardware.true_used(index, since_s):
                    yield f"used memory of GPU {index} is {value:.0f}, which it has not been lately"

    def _agent(self, page: Page, asked_s: float) -> Iterator[str]:
        since_s = asked_s - LEAST_S - LATE_S - self._lag.over(8.0)
        labels = {key: str(value) for key, value in AGENT.items()}
        if self._faults.lately("hostile", 10.0) and (
            self._faults.lately("agent", 10.0)
            or self._faults.lately("kvwatch", 30.0)
            or self._restarted(30.0)
        ):
            self._poisonable_s = asked_s  # a rank that nobody speaks for belongs to the first who does
        for _, value in page.all("kvwatch_allocator_bytes", state="allocated", **labels):
            if value == POISON and asked_s - self._poisonable_s < 10.0:
                continue
            if int(value) not in self._world.agent.true_allocated(since_s):
                yield f"allocated memory of the agent is {value:.0f}, which it has not said lately"

    def _restarted(self, seconds: float) -> bool:
        return time.monotonic() - self._life.launched_s < seconds

    def _configured(self, page: Page, asked_s: float) -> Iterator[str]:
        """The servers shown are those of the last good configuration, and a bad one is said to be bad."""
        settled_s = RELOAD_S + self._lag.over(8.0)
        if asked_s - self._life.moved_s < settled_s or self._life.up_for_s(asked_s) < settled_s:
            return
        sources = [labels["source"] for labels, _ in page.all("kvwatch_source_up")]
        shown = {name.removeprefix("server/") for name in sources if name.startswith("server/")}
        if shown != set(self._world.watched()):
            yield f"the servers shown are {sorted(shown)}"
        good = page.get("kvwatch_config_last_reload_successful")
        bad = any(what == "bad configuration" for _, what in self._faults.active)
        if good != (0 if bad else 1):
            yield f"config_last_reload_successful is {good} with a {'bad' if bad else 'good'} configuration"

    def missing(self, page: Page) -> list[str]:
        """What a host without faults would show and this page does not."""
        found = []
        for index in range(GPUS):
            if page.get("kvwatch_gpu_memory_used_bytes", uuid=uuid_of(index)) is None:
                found.append(f"memory of GPU {index}")
            if page.get("kvwatch_gpu_up", uuid=uuid_of(index)) != 1:
                found.append(f"GPU {index} up")
        for name in self._world.watched():
            if page.get("kvwatch_server_up", server=name) != 1:
                found.append(f"{name} up")
            if page.get("kvwatch_kv_usage_ratio", server=name) is None:
                found.append(f"usage of {name}")
        found += [
            f"source {labels['source']}"
            for labels, value in page.all("kvwatch_source_up")
            if value != 1 and not labels["source"].startswith("agent/")
        ]
        labels = {key: str(value) for key, value in AGENT.items()}
        if not page.all("kvwatch_allocator_bytes", **labels):
            found.append("the agent")
        if page.get("kvwatch_config_last_reload_successful") != 1:
            found.append("a good configuration")
        if page.get("kvwatch_maintenance_active") != 0:
            found.append("the end of maintenance")
        return found

    # -- levers and processes

    def levers(self, now_s: float) -> Iterator[str]:
        """Leases, the hook's lever, and what moved it."""
        late_s = self._lag.over(10.0) + self._longest_gap(now_s)
        for name, reader in self._readers.items():
            lease = reader.current()
            if lease is not None:
                yield from self._lease(name, lease, now_s, late_s)
            yield from self._left_lease(name, now_s, late_s)
        yield from self._lever(now_s, late_s)
        yield from self._hook(late_s)

    def _longest_gap(self, now_s: float) -> float:
        """How long nobody looked at the levers within the last ten seconds: a reader counts from its look."""
        self._looks.append(now_s)
        recent = [at_s for at_s in self._looks if at_s >= now_s - 10.0]
        return max((after - before for before, after in itertools.pairwise(recent)), default=0.0)

    def _lease(self, name: str, lease: Lease, now_s: float, late_s: float) -> Iterator[str]:
        if lease.ttl_s > LEASE_S:
            yield f"the lease of {name} is {lease.ttl_s:g} s long"
        if lease.max_running is not None and not FLOOR <= lease.max_running <= CEILING:
            yield f"the lease of {name} limits to {lease.max_running}"
        unheard_s = now_s - self._world.servers[name].last_page_s()
        if unheard_s > LEASE_S + 1.0 + late_s:
            written_s = clock_s() - lease.seq / 1e6
            yield (
                f"a lease of {name} is in force {unheard_s:.1f} s after its last page (written"
                f" {written_s:.1f} s ago for {lease.ttl_s:g} s; bounds {late_s:.1f} s later)"
            )
        died_s = self._life.died_s
        if died_s is not None and now_s > died_s + LEASE_S + 1.0 + late_s:
            yield f"a lease of {name} is in force {now_s - died_s:.1f} s after kvwatch died"

    def _left_lease(self, name: str, now_s: float, late_s: float) -> Iterator[str]:
        """Leases of an earlier run are cleared at start."""
        if self._life.up_for_s(now_s) < 3.0 + late_s or self._faults.lately("disk", 60.0):
            return
        with contextlib.suppress(OSError):
            if Path(self._lease_path(name)).stat().st_mtime < self._life.launched_wall_s - 0.1:
                yield f"the lease of {name} is from an earlier run"

    def _lever(self, now_s: float, late_s: float) -> Iterator[str]:
        world = self._world
        try:
            moved_wall_s = world.lever.stat().st_mtime
        except OSError:
            return
        if world.noted() is False:
            time.sleep(0.1)
            if world.lever.exists() and world.noted() is False:
                yield "the hook's limit is in force and not noted for giving back"
        if self._life.up_for_s(now_s) < GIVE_BACK_S + late_s or self._faults.lately("hook", HOOK_RETRY_S):
            return
        if moved_wall_s < self._life.launched_wall_s - 0.1:
            yield "the hook's limit is from an earlier run"
        unheard_s = now_s - world.servers["by-hook"].last_page_s()
        if unheard_s > LEASE_S + HOOK_DEADLINE_S + 2.0 + late_s:
            yield f"the hook's limit is in force {unheard_s:.1f} s after the last page of its server"

    def _hook(self, late_s: float) -> Iterator[str]:
        """A limit is only ever imposed on a page that is current."""
        events = self._world.hook_events()
        pages = [at_s for at_s, _ in list(self._world.servers["by-hook"].pages)]
        for at_s, event in events[self._hook_events :]:
            before = max((page_s for page_s in pages if page_s <= at_s), default=0.0)
            late = at_s - before > 3 * PERIOD_S + 1.0 + late_s
            if event == "limit" and late and at_s - self._life.resumed_s > LATE_S:
                yield f"the hook was told a limit {at_s - before:.1f} s after the last page"
        self._hook_events = len(events)

    def workers(self, now_s: float) -> Iterator[str]:
        """One NVML worker at a time, started no more often than its backoff says."""
        alive = self._world.hardware.workers()
        if len(alive) > 1:
            time.sleep(0.2)
            alive = [pid for pid in self._world.hardware.workers() if pid in alive]
        if len(alive) > 1:
            yield f"{len(alive)} NVML workers are beside each other"
        starts = [at_s for at_s, _ in self._world.hardware.starts()]
        for window_s, bound in STARTS:
            since_s = now_s - window_s
            anew = 1 + sum(at_s >= since_s - 10.0 for at_s in self._life.new_sources)
            count = sum(at_s >= since_s for at_s in starts)
            if count > bound * anew:
                yield f"{count} NVML workers were started within {window_s:g} s (backoff begun {anew} times)"


def same(complaint: str) -> str:
    """The complaint without its figures: what is counted together."""
    return "".join("#" if char.isdigit() else char for char in complaint)
