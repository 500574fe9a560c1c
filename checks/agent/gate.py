"""Limits on vLLM's own scheduler, step by step; prints one JSON object for test_vllm_scheduler.py."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from checks.agent.harness import OldScheduler, Scheduler, World
from kvwatch import wire
from kvwatch.agent.limits import Limits
from kvwatch.agent.vllm_scheduler import Gate, SchedulerAgent

SEQS = 64


class Held:
    """A world whose scheduler has an agent, with a lease file and a clock of its own."""

    def __init__(self, *, old: bool, version: str = "0.32.0", blocks: int = 1000) -> None:
        self.world = World(OldScheduler if old else Scheduler, blocks=blocks, seqs=SEQS)
        self.folder = Path(tempfile.mkdtemp())
        self.now_s = 1000.0
        self.seq = 0
        limits = Limits(str(self.folder / "chat.json"), "chat", clock=lambda: self.now_s)
        self.agent = SchedulerAgent(
            self.world.scheduler, limits, server="chat", engine=0, pid=os.getpid(), version=version
        )
        if old and self.agent._gate is not None:
            self.agent._gate = old_gate(self.world.scheduler)

    def lease(self, **limit: object) -> None:
        self.seq += 1
        wire.write(
            self.folder,
            wire.Lease(server="chat", boot_id=wire.boot_id(), seq=self.seq, ttl_s=15, **limit),  # type: ignore[arg-type]
        )

    def step(self) -> None:
        self.now_s += 0.2
        self.world.fill()
        self.agent.before_step(self.world.scheduler, self.now_s)
        self.world.step()

    @property
    def running(self) -> int:
        return len(self.world.scheduler.running)

    def until_running(self, most: int, steps: int = 3000) -> bool:
        """Step (renewing nothing) until at most so many run."""
        return any(self.running <= most or self.step() for _ in range(steps)) or self.running <= most


def old_gate(scheduler: object) -> Gate:
    """The gate as it is where the class has no `max_num_active_reqs`."""
    gate = Gate(scheduler)
    gate._active = False
    return gate


def story(*, old: bool) -> dict[str, object]:
    """Overload, lower far below what runs, hold, stop admission, let the lease run out."""
    held = Held(old=old)
    for _ in range(150):
        held.step()
    found: dict[str, object] = {"before": held.running, "preempted_before": held.world.preemptions}
    rising = []
    held.lease(max_running=5)
    held.step()
    top = held.running
    for index in range(1500):
        if index % 50 == 0:
            held.lease(max_running=5)
        before = held.running
        held.step()
        rising.append(held.running > max(before, 5))
        if held.running <= 5:
            break
    found |= {"admitted_above": any(rising), "first": top, "drained": held.running}
    preempted, most = held.world.preemptions, 0
    for index in range(300):
        if index % 50 == 0:
            held.lease(max_running=5)
        held.step()
        most = max(most, held.running)
    found |= {"held": most, "preempted_held": held.world.preemptions - preempted}
    for index in range(600):
        if index % 50 == 0:
            held.lease(admit=False)
        held.step()
    found["without_admission"] = held.running
    found["waiting"] = len(held.world.scheduler.waiting)
    steps = 0
    while held.running <= 5 and steps < 200:
        held.step()
        steps += 1
    found |= {"seconds_to_release": steps * 0.2, "after": held.running}
    scheduler = held.world.scheduler
    found["own_again"] = [scheduler.max_num_running_reqs, scheduler.max_num_active_reqs]
    return found


def exact() -> list[list[dict[str, int | None]]]:
    """What the agent says of the blocks beside what vLLM's tables say, at random moments."""
    held = Held(old=False)
    pairs = []
    for _ in range(40):
        for _ in range(7):
            held.step()
        state = held.agent._note(held.world.scheduler)
        kv = state["kv"]
        told = {
            "num": kv["num_blocks"],
            "used": kv["num_blocks"] - kv["free_blocks"] - kv["evictable_blocks"],
            "free": kv["free_blocks"],
            "evictable": kv["evictable_blocks"],
            "held": kv["blocks_held"],
            "tokens": kv["tokens"],
        }
        pairs.append([told, held.world.brute()])
    return pairs


def unknown() -> dict[str, object]:
    """A release nobody has read: it publishes and is left alone."""
    held = Held(old=False, version="0.99.0")
    for _ in range(30):
        held.step()
    held.lease(max_running=2)
    for _ in range(30):
        held.step()
    state = held.agent._note(held.world.scheduler)
    return {
        "limits": state["limits"],
        "max": held.world.scheduler.max_num_active_reqs,
        "running": held.running,
        "told": state["scheduler"]["running"],
    }


def trap() -> bool:
    """Whether the bound really ends the engine when it is lowered without care (the reason for the gate)."""
    held = Held(old=True)
    for _ in range(100):
        held.step()
    held.world.scheduler.max_num_running_reqs = 2
    try:
        held.world.step()
    except AssertionError:
        return True
    return False


def day() -> dict[str, int]:
    """A day at 50 steps a second, as fast as it goes: the agent's part of each step, nothing else."""
    held = Held(old=False)
    for _ in range(60):
        held.step()
    agent, scheduler = held.agent, held.world.scheduler

    def hours(count: float) -> int:
        steps = int(count * 3600 * 50)
        for index in range(steps):
            held.now_s += 0.02
            if index % 250 == 0:
                held.lease(max_running=5 + index // 250 % 7)
            agent._asked = index % 50 == 0
            agent.before_step(scheduler, held.now_s)
        return steps

    hours(0.2)
    gc.collect()
    rss = resident()
    steps = hours(24)
    gc.collect()
    return {"steps": steps, "grown_bytes": max(0, resident() - rss)}


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    began_s = time.monotonic()
    found = {"new": story(old=False), "old": story(old=True), "exact": exact(), "unknown": unknown()}
    found |= {"day": day(), "trap": trap(), "seconds": time.monotonic() - began_s}
    print("RESULT " + json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
