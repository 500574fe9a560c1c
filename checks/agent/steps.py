"""Does the agent make its host grow? Two long runs on vLLM's own scheduler, through the plugin's own entry.

    PYTHONPATH=. engines-work/vllm/bin/python -m checks.agent.steps [STEPS] [SECONDS]

STEPS (default 4 320 000: a day of 20 ms steps) of a real scheduler object whose `schedule()` itself is empty:
the agent's part of each step, with the looks at the lease (10 a second), renewals (1 in 5 s) and datagrams
(1 a second) of a whole day. Then whole steps of the real scheduler for SECONDS (default 60), with every
byte that the agent's code allocates traced. 1 when something grows.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import tempfile
import time
import tracemalloc
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checks.agent.harness import Scheduler, World
from kvwatch import wire
from kvwatch.agent import vllm_plugin
from kvwatch.agent.environment import Place
from kvwatch.agent.publisher import Sender
from kvwatch.wire_record import encode

STEP_S = 0.02
LOOK, TELL, RENEW = (int(seconds / STEP_S) for seconds in (0.1, 1.0, 5.0))  # in steps
GROWN_BYTES = 1 << 20  # of the process: pages that come and go. One byte a step would be four of these
GROWN_BLOCKS = 100  # of Python's allocator, of some 10^6: what this check itself notes, and caches
GROWN_TRACED = 1 << 10  # allocated by the agent's code and still there; one object a datagram would be ten


class Empty(Scheduler):
    """The real scheduler, with nothing to do in a step."""

    def schedule(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        return None


class Desk:
    """kvwatch's side: the lease that is renewed, and ears."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.place = Place(
            server="steps", socket=str(self.folder / "agent.sock"), lease=str(self.folder / "steps.json")
        )
        self.ears = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.ears.bind(self.place.socket)
        self.boot = wire.boot_id()
        self.seq = self.heard = 0

    def renew(self) -> None:
        self.seq = wire.next_seq(self.seq)
        lease = wire.Lease(
            server="steps", boot_id=self.boot, seq=self.seq, ttl_s=15, max_running=5 + self.seq % 7
        )
        wire.write(self.folder, lease)

    def listen(self) -> None:
        """Take what was sent, unread: the daemon's reading side is not what is measured here."""
        with contextlib.suppress(BlockingIOError):
            while self.ears.recv(1):
                self.heard += 1


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def marks(steps: int) -> Iterator[tuple[int, int]]:
    """Ten stretches of equal length: (first, last)."""
    for part in range(10):
        yield steps * part // 10, steps * (part + 1) // 10


def alone(desk: Desk, steps: int) -> bool:
    """The agent's part of each step; False when the process grows between the second mark and the last."""
    vllm_plugin._wrap_scheduler(desk.place, types.SimpleNamespace(Scheduler=Empty))  # type: ignore[arg-type]
    scheduler = World(Empty, blocks=500, seqs=64).scheduler
    scheduler.schedule()
    agent = scheduler.__dict__[vllm_plugin._AGENT]
    sender = Sender(desk.place.socket)
    seen, began_s = [], time.monotonic()
    for first, last in marks(steps):
        for index in range(first, last):
            if index % LOOK == 0:
                agent._limits.due_s = 0.0
            if index % RENEW == 0:
                desk.renew()
            agent._asked = index % TELL == 0
            scheduler.schedule()
            if index % TELL == 0:
                sender.send(encode(agent._state, seq=index, mono_s=began_s))
                desk.listen()
        gc.collect()
        seen.append((resident(), sys.getallocatedblocks()))
        rate = last / (time.monotonic() - began_s)
        print(
            f"  {last:>9} steps, {rate:7.0f} a second: {seen[-1][0] >> 10} KiB, {seen[-1][1]} blocks",
            flush=True,
        )
    grown, blocks = (seen[-1][place] - seen[1][place] for place in (0, 1))
    print(f"agent alone: {steps} steps, grown by {grown} bytes and {blocks} blocks, {desk.heard} datagrams")
    return grown <= GROWN_BYTES and blocks <= GROWN_BLOCKS and vllm_plugin.GUARD.faults == 0


def traced() -> int:
    """Bytes that the agent's code has allocated and that are still there."""
    names = ("agent/*", "wire.py", "wire_record.py")
    ours = [tracemalloc.Filter(True, f"*/kvwatch/{name}") for name in names]
    return sum(one.size for one in tracemalloc.take_snapshot().filter_traces(ours).statistics("filename"))


def whole(desk: Desk, seconds: float) -> bool:
    """Whole steps of the real scheduler under load; False when what the agent allocated stays."""
    vllm_plugin._wrap_scheduler(desk.place, types.SimpleNamespace(Scheduler=Scheduler))  # type: ignore[arg-type]
    world = World(blocks=500, seqs=64)
    tracemalloc.start()
    steps, seen, began_s = 0, [], time.monotonic()
    for part in range(10):
        renewed_s = 0.0
        while (now_s := time.monotonic()) < began_s + seconds * (part + 1) / 10:
            if now_s - renewed_s > 1.0:
                desk.renew()
                desk.listen()
                renewed_s = now_s
            world.fill(10)
            world.step()
            steps += 1
        gc.collect()
        seen.append(traced())
        print(f"  {steps:>9} steps: {resident() >> 10} KiB, of the agent's {seen[-1]} bytes", flush=True)
    tracemalloc.stop()
    grown = seen[-1] - seen[1]
    print(
        f"whole steps: {steps}, {steps / seconds:.0f} a second (traced), the agent's grown by {grown} bytes"
    )
    return grown <= GROWN_TRACED and vllm_plugin.GUARD.faults == 0


def main(steps: int, seconds: float) -> int:
    """Run both and print; 1 when something grew, or the agent met a fault."""
    desk = Desk()
    good = [alone(desk, steps), whole(desk, seconds)]
    print("nothing grows" if all(good) else "GROWTH (or a fault inside the agent)")
    return int(not all(good))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(
        main(
            int(arguments[0]) if arguments else int(24 * 3600 / STEP_S),
            float(arguments[1]) if len(arguments) > 1 else 60.0,
        )
    )
