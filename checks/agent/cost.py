"""What the agent costs a step of vLLM's own scheduler: idle, publishing, limiting; interleaved, no GPU.

    PYTHONPATH=. engines-work/vllm/bin/python -m checks.agent.cost [STEPS]

Prints the agent's own microseconds a step (timed around it), and the whole step with and without it.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from checks.agent.harness import World
from kvwatch import wire
from kvwatch.agent.environment import Place
from kvwatch.agent.guard import Guard
from kvwatch.agent.limits import Limits
from kvwatch.agent.publisher import Publisher
from kvwatch.agent.vllm_scheduler import SchedulerAgent

BLOCK = 200  # steps of one kind in a row
PHASES = ("without", "idle", "publishing", "limiting")


def main(steps: int) -> int:
    """Run and print; 1 when a step costs more than 20 µs on average."""
    world = World(blocks=4000)
    folder = Path(tempfile.mkdtemp())
    place = Place(server="cost", socket=str(folder / "agent.sock"), lease=str(folder / "cost.json"))
    agent = SchedulerAgent(
        world.scheduler,
        Limits(place.lease, "cost"),
        server="cost",
        engine=0,
        pid=os.getpid(),
        version="0.32.0",
    )
    guard = Guard()
    publisher = Publisher(place, engine=agent.read)
    publishing = {"on": False}
    publisher.engine = lambda: agent.read() if publishing["on"] else None
    publisher.start()
    own: dict[str, list[float]] = {phase: [] for phase in PHASES}
    whole: dict[str, list[float]] = {phase: [] for phase in PHASES}
    seq, done = 0, 0
    while done < steps:
        for phase in PHASES:
            publishing["on"] = phase == "publishing"
            renewed_s = 0.0
            for _ in range(BLOCK):
                world.fill()
                now_s = time.monotonic()
                if phase == "limiting" and now_s - renewed_s > 1.0:
                    seq, renewed_s = wire.next_seq(seq), now_s
                    wire.write(
                        folder,
                        wire.Lease(server="cost", boot_id=wire.boot_id(), seq=seq, ttl_s=15, max_running=200),
                    )
                began_s = time.perf_counter()
                if phase != "without":
                    undo = functools.partial(agent.give_up, world.scheduler)
                    guard.run(
                        "limit",
                        agent.before_step,
                        world.scheduler,
                        time.monotonic(),
                        otherwise=None,
                        mend=undo,
                    )
                spent_s = time.perf_counter() - began_s
                own[phase].append(spent_s)
                whole[phase].append(spent_s + world.step())
                done += 1
            if phase == "limiting":
                wire.clear(folder, "cost")
    publisher.stop()
    print(f"{done} steps, {len(world.scheduler.running)} running, {world.preemptions} preemptions")
    for phase in PHASES:
        mean = statistics.fmean(own[phase]) * 1e6
        tail = sorted(own[phase])[int(len(own[phase]) * 0.99)] * 1e6
        step = statistics.median(whole[phase]) * 1e6
        print(f"{phase:>10}: agent mean {mean:6.2f} µs p99 {tail:7.1f} µs, schedule() median {step:7.0f} µs")
    if guard.faults:
        print(f"{guard.faults} faults inside the agent")
        return 1
    return int(max(statistics.fmean(own[phase]) for phase in PHASES) > 20e-6)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 12_000))
