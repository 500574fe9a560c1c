"""What can go wrong, each as something that begins and ends: drawn from a shuffled deck, so that all come."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from checks.endurance import server
from checks.endurance.process import die_with_parent
from checks.endurance.program import ROOT
from checks.endurance.world import GPUS, SERVERS, World
from tests.fakes.nvml import Scenario

LOST, UNKNOWN, NOT_SUPPORTED, MISMATCH = 15, 999, 3, 18
SMALL_DISK = "1m"
BROKEN = (
    "servers: [\n",
    "servers: [{name: x, kind: vlm, url: 'http://h'}]\n",
    "\x00",
    "a: &a [*a]\n",
    "[]\n",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. Two with the same key do not overlap; `longest_s` bounds how long it lasts."""

    kind: str
    key: str
    begin: Callable[[], object]
    end: Callable[[], object]
    longest_s: float = 30.0

    def __str__(self) -> str:
        return f"{self.kind} ({self.key})"


def _nothing() -> None:
    return


class Deck:
    """Every kind of fault once in random order, then again in another order."""

    def __init__(self, world: World, chance: Random, disks: Disks) -> None:
        self._world = world
        self._chance = chance
        self._disks = disks
        self._left: list[Callable[[], Fault]] = []

    def draw(self) -> Fault:
        """The next one, made for the world as it is."""
        if not self._left:
            self._left = self._kinds()
            self._chance.shuffle(self._left)
        return self._left.pop()()

    def _kinds(self) -> list[Callable[[], Fault]]:
        of_servers = [self._server(fault) for fault in (*server.FAULTS, "stopped", "restart")]
        of_gpus = [self._gpus(kind) for kind in _GPU_FAULTS] + [self._xid]
        of_levers = [self._hook(mode) for mode in ("fail", "later", "hang")]
        own = [self._killed, self._killed, self._paused, self._other_config, self._bad_config, self._hangups]
        around = [self._silent, self._hostile, self._crowd, self._maintenance]
        disks = [self._disk(kind) for kind in self._disks.kinds()]
        return [*of_servers, *of_gpus, *of_levers, *own, *around, *disks]

    # -- servers

    def _server(self, fault: str) -> Callable[[], Fault]:
        def make() -> Fault:
            name = self._chance.choice(SERVERS)
            one = self._world.servers[name]
            if fault == "stopped":
                return Fault(
                    kind="server stopped", key=name,
                    begin=lambda: one.signal(signal.SIGSTOP), end=lambda: one.signal(signal.SIGCONT),
                )  # fmt: skip
            if fault == "restart":
                return Fault(
                    kind="server restarts", key=name, begin=lambda: one.tell(restart=True), end=_nothing
                )
            return Fault(
                kind=f"server: {fault}", key=name,
                begin=lambda: one.tell(fault=fault), end=lambda: one.tell(fault=""),
            )  # fmt: skip

        return make

    # -- GPUs

    def _gpus(self, kind: str) -> Callable[[], Fault]:
        def make() -> Fault:
            index = self._chance.randrange(GPUS)
            key, change = _GPU_FAULTS[kind](index, self._chance)
            hardware = self._world.hardware

            def begin() -> None:
                hardware.faults[f"{kind} {key}"] = change
                hardware.write()

            def end() -> None:
                hardware.faults.pop(f"{kind} {key}", None)
                hardware.write()

            return Fault(kind=f"NVML {kind}", key=key, begin=begin, end=end)

        return make

    def _xid(self) -> Fault:
        index, code = self._chance.randrange(GPUS), self._chance.choice((31, 43, 48, 63, 79, 94))
        hardware = self._world.hardware

        def begin() -> None:
            hardware.faults["xid"] = lambda made: made.xid(index, code)
            hardware.write()
            hardware.faults.pop("xid")

        return Fault(kind="Xid", key="xid", begin=begin, end=_nothing)

    # -- levers

    def _hook(self, mode: str) -> Callable[[], Fault]:
        path = self._world.hook_mode
        return lambda: Fault(
            kind=f"hook: {mode}", key="hook",
            begin=lambda: path.write_text(mode), end=lambda: path.unlink(missing_ok=True),
        )  # fmt: skip

    # -- kvwatch itself

    def _killed(self) -> Fault:
        daemon = self._world.daemon
        return Fault(
            kind="kvwatch killed", key="kvwatch", longest_s=12.0,
            begin=lambda: daemon.signal(signal.SIGKILL), end=_nothing,
        )  # fmt: skip

    def _paused(self) -> Fault:
        daemon = self._world.daemon
        return Fault(
            kind="kvwatch stopped", key="kvwatch", longest_s=10.0,
            begin=lambda: daemon.signal(signal.SIGSTOP), end=lambda: daemon.signal(signal.SIGCONT),
        )  # fmt: skip

    def _other_config(self) -> Fault:
        def change() -> None:
            self._world.variant = 1 - self._world.variant
            self._world.write_config()
            self._world.hangups += 1

        return Fault(kind="another configuration", key="configuration", begin=change, end=change)

    def _bad_config(self) -> Fault:
        broken = self._chance.choice(BROKEN)

        def begin() -> None:
            self._world.config.write_text(broken)
            self._world.hangups += 1

        def end() -> None:
            self._world.write_config()
            self._world.hangups += 1

        return Fault(kind="bad configuration", key="configuration", begin=begin, end=end)

    def _hangups(self) -> Fault:
        def begin() -> None:
            self._world.hangups += 20

        return Fault(kind="20 reloads at once", key="configuration", begin=begin, end=_nothing)

    # -- around it

    def _silent(self) -> Fault:
        agent = self._world.agent
        return Fault(
            kind="agent silent", key="agent",
            begin=lambda: setattr(agent, "silent", True), end=lambda: setattr(agent, "silent", False),
        )  # fmt: skip

    def _hostile(self) -> Fault:
        path, seed = self._world.daemon.run / "agent.sock", self._chance.randrange(1 << 30)
        return self._program("hostile agent", "hostile", "hostile", str(path), str(os.getpid()), str(seed))

    def _crowd(self) -> Fault:
        crowd = ("idle=200", "drip=60", "header=1")
        return self._program("a crowd", "clients", "attackers", str(self._world.daemon.port), *crowd)

    def _program(self, kind: str, key: str, module: str, *arguments: str) -> Fault:
        """A program that ends when its standard input does."""
        running: list[subprocess.Popen[bytes]] = []

        def begin() -> None:
            command = [sys.executable, "-m", f"checks.endurance.{module}", *arguments]
            running.append(
                subprocess.Popen(
                    command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                    preexec_fn=die_with_parent,
                )
            )  # fmt: skip

        def end() -> None:
            while running:
                with running.pop() as one:
                    one.kill()

        return Fault(kind=kind, key=key, begin=begin, end=end, longest_s=20.0)

    def _maintenance(self) -> Fault:
        from kvwatch.daemon import maintenance

        path = self._world.daemon.run / "maintenance.json"

        def begin() -> None:
            with contextlib.suppress(OSError):  # a full disk
                maintenance.switch_on(path, 120.0)

        return Fault(
            kind="maintenance", key="maintenance", begin=begin, end=lambda: path.unlink(missing_ok=True)
        )

    # -- disks

    def _disk(self, kind: str) -> Callable[[], Fault]:
        what, _, name = kind.partition(" ")
        return lambda: Fault(
            kind=f"{name} {what}", key=f"disk {name}",
            begin=lambda: self._disks.spoil(name, what), end=lambda: self._disks.mend(name),
        )  # fmt: skip


_Change = Callable[[Scenario], object]
_GPU_FAULTS: dict[str, Callable[[int, Random], tuple[str, _Change]]] = {
    "hangs": lambda _index, _chance: ("nvml", lambda made: made.hang()),
    "hangs for one GPU": lambda index, _chance: ("nvml", lambda made: made.hang(index)),
    "crashes": lambda _index, _chance: ("nvml", lambda made: made.crash()),
    "crashes for one GPU": lambda index, _chance: ("nvml", lambda made: made.crash(index)),
    "is slow": lambda _index, chance: _slow(chance.randrange(1000, 15_000)),
    "loses a GPU": lambda index, _chance: (f"gpu {index}", lambda made: made.error(index, "*", LOST)),
    "does not know the power": lambda index, _chance: (
        f"gpu {index}",
        lambda made: made.error(index, "nvmlDeviceGetPowerUsage", NOT_SUPPORTED),
    ),
    "does not list processes": lambda index, _chance: (
        f"gpu {index}",
        lambda made: made.error(index, "nvmlDeviceGetComputeRunningProcesses_v3", UNKNOWN),
    ),
    "fails for one GPU": lambda index, _chance: (
        f"gpu {index}",
        lambda made: made.error(index, "*", UNKNOWN),
    ),
    "misses a GPU": lambda _index, _chance: ("count", lambda made: setattr(made, "gpus", GPUS - 1)),
    "will not start": lambda _index, _chance: (
        "nvml",
        lambda made: made.error("*", "nvmlInitWithFlags", MISMATCH).crash("*", "nvmlDeviceGetMemoryInfo_v2"),
    ),
}


def _slow(microseconds: int) -> tuple[str, _Change]:
    return "slow", lambda made: made.slow(microseconds)


class Disks:
    """Small file systems under kvwatch's two directories, where we may mount (root, own namespace)."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders
        self._spoilt: dict[str, str] = {}
        self.mounted = os.environ.get(OWN_NAMESPACE) == "1" and all(
            _mount(folder, "-t", "tmpfs", "-o", f"size={SMALL_DISK},mode=755", "none")
            for folder in folders.values()
        )

    def kinds(self) -> list[str]:
        """What can be done to them here."""
        return [f"{what} {name}" for name in self._folders for what in ("full", "read-only")] * self.mounted

    def spoil(self, name: str, what: str) -> None:
        """Fill it, or make it read-only (filled instead where a file is open for writing)."""
        folder = self._folders[name]
        if what == "read-only" and _mount(folder, "-o", "remount,ro"):
            self._spoilt[name] = "read-only"
            return
        self._spoilt[name] = "full"
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))

    def mend(self, name: str) -> None:
        """As it was."""
        if self._spoilt.pop(name, "") == "read-only":
            _mount(self._folders[name], "-o", "remount,rw")
        (self._folders[name] / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount; what is still open is unmounted when it is closed."""
        if self.mounted:
            for folder in self._folders.values():
                subprocess.run(["umount", "-l", str(folder)], check=False)


OWN_NAMESPACE = "KVWATCH_CHAOS_NAMESPACE"


def _mount(folder: Path, *options: str) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", *options, str(folder)]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0
