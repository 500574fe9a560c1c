"""The host of the chaos run: fake GPUs, servers that fail as told, levers, an agent, and kvwatch itself.

Every part keeps what was true when, so that whatever kvwatch shows can be judged.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from checks.endurance.process import die_with_parent, is_running
from checks.endurance.program import ROOT, Kvwatch
from tests.fakes.nvml import Scenario, build, environment, uuid_of

GIB = 1 << 30
TOTAL_BYTES = 150_754_820_096
GPUS = 3
PERIOD_S = 0.5
LEASE_S = 6.0
FLOOR, CEILING = 4, 64
HOOK_DEADLINE_S = 1.0
KEPT = 4000
SERVERS = ("by-lease", "by-hook", "simulated")
AGENT = {"server": "by-lease", "engine": 0, "rank": 0}
POISON = 666  # what a liar says in the name of others
Figures = dict[str, list[float]]

CONFIG = """
tick: 200ms
gpus: {{source: nvml, peak_window: {peak}, expect: {gpus}}}
servers:
{servers}
control:
  mode: act
  targets:
    - {{server: by-lease, policy: threshold, accept_goodput_loss: true, floor: {floor}, ceiling: {ceiling},
       lease: {lease}s, cooldown: 1s, via: [{{lease: {{}}}}]}}
    - {{server: by-hook, policy: threshold, accept_goodput_loss: true, floor: {floor}, ceiling: {ceiling},
       lease: {lease}s, cooldown: {cooldown}, via: [{{exec: {{argv: [{hook}], deadline: {deadline}s}}}}]}}
"""
HOOK = """#!/bin/sh
case "$(cat {folder}/hook-mode 2>/dev/null)" in
  fail) exit 1 ;;
  later) exit 75 ;;
  hang) sleep 20; exit 1 ;;
esac
read -r up _ < /proc/uptime
if [ "$KVWATCH_EVENT" = restore ]; then
  rm -f {folder}/lever; echo "$up restore 0" >> {folder}/hook-log; exit 0
fi
echo "$KVWATCH_MAX_RUNNING" > {folder}/lever.new && mv {folder}/lever.new {folder}/lever
echo "$up limit $KVWATCH_MAX_RUNNING" >> {folder}/hook-log
"""


class FakeServer:
    """A server in a process of its own, and every page that it has handed out whole: (when, figures)."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.scripted = kind == "scripted"
        command = [sys.executable, "-m", "checks.endurance.server", kind]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=die_with_parent
        )
        assert self._process.stdout is not None
        self.port = int(json.loads(self._process.stdout.readline())["port"])
        self.pid = self._process.pid
        self.pages: deque[tuple[float, Figures]] = deque(maxlen=KEPT)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            self.pages.append((told.pop("t"), told))

    def tell(self, **command: object) -> None:
        """Send one command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def signal(self, number: int) -> None:
        """Stop it or let it go on."""
        self._process.send_signal(number)

    def last_page_s(self) -> float:
        """When the last whole page went out; 0.0 before the first."""
        return self.pages[-1][0] if self.pages else 0.0

    def served(self, field: str, since_s: float) -> set[float]:
        """Every value of a figure on the pages since then."""
        return {value for at_s, page in list(self.pages) if at_s >= since_s for value in page[field]}

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait(5)
        self._reader.join(5)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Hardware:
    """Three GPUs whose memory moves, with the faults in force; and every state they were in."""

    def __init__(self, folder: Path, pids: list[int]) -> None:
        self.nvml = build(folder / "nvml")
        self.path = folder / "scenario"
        self.starts_path = folder / "nvml-starts"
        self.faults: dict[str, Callable[[Scenario], object]] = {}
        self.history: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=KEPT)
        self._xids: list[str] = []
        self._pids = pids
        self.used = [40 * GIB, 60 * GIB, 8 * GIB]
        self.write()

    def environment(self) -> dict[str, str]:
        """Under which kvwatch finds these GPUs."""
        return environment(self.nvml, self.path) | {"KVWATCH_FAKE_NVML_STARTS": str(self.starts_path)}

    def write(self) -> None:
        """Put the present state into force."""
        made = Scenario(self.path, gpus=GPUS, xids=list(self._xids))
        for index, used in enumerate(self.used):
            made.memory(index, used)
        made.process(0, self._pids[0], 24 * GIB).process(0, 4_000_001, 2 * GIB)
        made.process(1, self._pids[1], 50 * GIB)
        for change in self.faults.values():
            change(made)
        made.write()
        self._xids = made.xids
        self.history.append((time.monotonic(), tuple(self.used)))

    def move(self, chance: Random) -> None:
        """Another amount of memory on one GPU."""
        index = chance.randrange(GPUS)
        self.used[index] = (30 + 30 * (index == 1)) * GIB + chance.randrange(1, 20_000) * (1 << 20)
        self.write()

    def true_used(self, index: int, since_s: float) -> set[int]:
        """What this GPU has held since then."""
        entries = list(self.history)
        ends = [at_s for at_s, _ in entries[1:]] + [time.monotonic()]
        return {used[index] for (_, used), end_s in zip(entries, ends, strict=True) if end_s >= since_s}

    def starts(self) -> list[tuple[float, int]]:
        """(when, pid) of every process that has loaded the library."""
        try:
            rows = [line.split() for line in self.starts_path.read_text().splitlines()]
        except FileNotFoundError:
            return []
        return [(float(row[0]), int(row[1])) for row in rows if len(row) == 2]

    def workers(self) -> list[int]:
        """NVML workers that are alive."""
        return [pid for pid in {pid for _, pid in self.starts()} if is_running(pid, "nvml_worker")]


class Agent:
    """An agent inside `by-lease`: one datagram a second from this process, with figures that move."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._seq = 0
        self.silent = False
        self.said: deque[tuple[float, int]] = deque(maxlen=KEPT)

    def speak(self, chance: Random) -> None:
        """Send the next one, if it is not silent."""
        if self.silent:
            return
        self._seq += 1
        allocated = chance.randrange(1, 20_000) * (1 << 20)
        self.said.append((time.monotonic(), allocated))
        content = datagram(os.getpid(), self._seq, allocated)
        with contextlib.suppress(OSError):  # nobody listens
            self._socket.sendto(content, str(self._path))

    def true_allocated(self, since_s: float) -> set[int]:
        """What it has said since then."""
        return {value for at_s, value in list(self.said) if at_s >= since_s}

    def close(self) -> None:
        """Stop speaking."""
        self._socket.close()


def datagram(pid: int, seq: int, allocated: int, **change: object) -> bytes:
    """One datagram of the contract."""
    sizes = {"allocated_bytes.all.current": allocated, "reserved_bytes.all.current": allocated + GIB}
    fields = {"v": 1, **AGENT, "pid": pid, "seq": seq, "mono_s": time.monotonic(), "gpu_uuid": uuid_of(0)}
    return json.dumps(fields | {"allocator": sizes} | change).encode()


class World:
    """Everything together. `chance` moves the weather; faults are somebody else's business."""

    def __init__(self, folder: Path, chance: Random) -> None:
        self.folder = folder
        self.chance = chance
        kinds = ("scripted", "scripted", "simulated")
        self.servers = {name: FakeServer(name, kind) for name, kind in zip(SERVERS, kinds, strict=True)}
        self.extra = FakeServer("extra", "scripted")
        self.hardware = Hardware(folder, [self.servers["by-lease"].pid, self.servers["by-hook"].pid])
        self.hook = folder / "set-limit"
        self.hook.write_text(HOOK.format(folder=folder))
        self.hook.chmod(0o755)
        self.lever, self.hook_mode, self.hook_log = (
            folder / name for name in ("lever", "hook-mode", "hook-log")
        )
        self.config = folder / "kvwatch.yml"
        self.variant = 0
        self.hangups = 0  # SIGHUPs that the daemon is to get once it answers
        self.write_config()
        self.daemon = Kvwatch(
            folder / "d", "--config", str(self.config), environment=self.hardware.environment()
        )
        self.agent = Agent(self.daemon.run / "agent.sock")
        self._boot_offset_s = time.monotonic() - float(Path("/proc/uptime").read_text().split()[0])
        self._full: dict[str, float] = {}
        self._due = {"gpus": 0.0, "servers": 0.0, "agent": 0.0}

    def watched(self) -> dict[str, FakeServer]:
        """The servers of the configuration in force."""
        return self.servers | ({"extra": self.extra} if self.variant else {})

    def write_config(self) -> None:
        """The configuration of the present variant; the other one has one more server and other times."""
        rows = [
            f'  - {{name: {name}, kind: vllm, url: "http://127.0.0.1:{server.port}", period: 500ms,'
            f" timeout: 400ms}}"
            for name, server in self.watched().items()
        ]
        peak, cooldown = (("30s", "1s"), ("45s", "2s"))[self.variant]
        self.config.write_text(
            CONFIG.format(
                servers="\n".join(rows), peak=peak, cooldown=cooldown, gpus=GPUS, floor=FLOOR,
                ceiling=CEILING, lease=int(LEASE_S), hook=self.hook, deadline=int(HOOK_DEADLINE_S),
            )
        )  # fmt: skip

    def weather(self, now_s: float) -> None:
        """Move memory, load and the agent's figures, each at its own pace."""
        if now_s >= self._due["gpus"]:
            self._due["gpus"] = now_s + self.chance.uniform(0.5, 3.0)
            self.hardware.move(self.chance)
        if now_s >= self._due["servers"]:
            self._due["servers"] = now_s + self.chance.uniform(0.4, 1.5)
            for server in (*self.servers.values(), self.extra):
                if server.scripted:
                    server.tell(set=self._load(server.name, now_s))
        if now_s >= self._due["agent"]:
            self._due["agent"] = now_s + 1.0
            self.agent.speak(self.chance)

    def _load(self, name: str, now_s: float) -> dict[str, float]:
        """A pool that is full with a queue for a while, and calm for a while."""
        chance = self.chance
        if now_s >= self._full.get(name, 0.0) + 25.0:
            self._full[name] = now_s + chance.uniform(2.0, 12.0)
        if now_s < self._full.get(name, 0.0):
            usage, waiting = chance.uniform(0.955, 0.999), chance.randrange(1, 30)
        else:
            usage, waiting = chance.uniform(0.2, 0.7), 0
        return {"usage": round(usage, 5), "running": chance.randrange(10, 60), "waiting": waiting}

    def hook_events(self) -> list[tuple[float, str]]:
        """(monotonic seconds, event) of everything the hook has done."""
        try:
            rows = [line.split() for line in self.hook_log.read_text().splitlines()]
        except FileNotFoundError:
            return []
        return [(float(row[0]) + self._boot_offset_s, row[1]) for row in rows if len(row) == 3]

    def noted(self) -> bool | None:
        """Whether kvwatch has noted that something is to be given back; None when that cannot be read."""
        try:
            return bool(json.loads((self.daemon.state / "outstanding.json").read_text())["entries"])
        except FileNotFoundError:
            return False
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """End everything, the workers that a fault still holds included."""
        for server in (*self.servers.values(), self.extra):
            server.close()
        self.agent.close()
        self.hardware.faults.clear()
        self.hardware.write()
        self.daemon.signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.daemon.stop()
        end_s = time.monotonic() + 10
        while self.hardware.workers() and time.monotonic() < end_s:
            time.sleep(0.1)


@contextlib.contextmanager
def world(folder: Path, chance: Random) -> Iterator[World]:
    """A world that is ended whatever happens."""
    made = World(folder, chance)
    try:
        yield made
    finally:
        made.close()
