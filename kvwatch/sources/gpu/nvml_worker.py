"""The process that talks to NVML: `python -m kvwatch.sources.gpu.nvml_worker LOCK TICK_S PARENT_PID MODE`.

It exists because NVML calls can hang for ever, a stale handle can end the process, and only a new
process can load a new driver's library. It writes JSON lines to stdout and ends when stdin closes.
One thread makes all calls. LOCK "" means no lock; MODE is `all` or `memory`.

Lines: {"hello":…} before NVML is loaded, {"facts":…} when names, states or capabilities change,
{"s": monotonic seconds, "g": memory rows, "p": process passes, "x": slow values, "xid": events}
every tick, {"bye":…} when it ends for a reason that it knows. This is the only module that imports pynvml.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from json import JSONEncoder
from typing import Any

from kvwatch.sources.gpu import nvml_errors as errors
from kvwatch.sources.gpu.host_memory import HostMemory, is_coherent
from kvwatch.sources.gpu.nvml_lanes import FAST_S, FLAT_S, SLOWEST_MEMORY_S, Cost, Pace, stretched
from kvwatch.sources.gpu.nvml_reader import Device, LibraryGoneError, Reader
from kvwatch.sources.gpu.procfs import ProcessTable

EXIT_LIBRARY, EXIT_LOCKED = 3, 4
SLOW_EVERY_S = 10.0
ALL_UNKNOWN_FOR_S = 60.0
HEARTBEAT_S = 1.0  # while nothing moves; what moves is sent at the next tick
COALESCE_S = 0.002  # what is due this soon is done in the same wake-up
_encode = JSONEncoder(separators=(",", ":")).encode


def say(message: dict[str, Any]) -> None:
    """Write one line; a closed pipe ends the process through BrokenPipeError."""
    data = (_encode(message) + "\n").encode()
    while data:
        data = data[os.write(1, data) :]


class Worker:
    """The lanes: memory 10 or 100 Hz, utilisation 5 Hz, processes and power 1 Hz, the rest 0.1 Hz."""

    def __init__(self, reader: Reader, tick_s: float, *, memory_only: bool) -> None:
        self.reader = reader
        self.tick_s = tick_s
        self.memory_only = memory_only
        self.table = ProcessTable()
        self.cost = Cost()
        self.flat_due_s = 0.0
        self.flat_ended_s = 0.0
        self.fast_due_s = 0.0
        self.next_tick_s = 0.0
        self.sent_s = 0.0
        self.utilization = Pace(0.2, 10.0)
        self.processes = Pace(1.0, 10.0)
        self.power = Pace(1.0, 10.0)
        self.renewal = Pace(1.0, 10.0)
        self.mig_check = Pace(SLOW_EVERY_S, 60.0)
        self.slow_queue: list[tuple[Device, bool]] = []
        self.slow_started_s = -SLOW_EVERY_S
        self.extra: dict[str, Any] = {}
        self.told: dict[int, tuple[int | None, Any]] = {}
        self.all_unknown_since_s: float | None = None

    def run(self) -> None:
        """Work until stdin closes."""
        inbox = select.poll()
        inbox.register(0, select.POLLIN | select.POLLHUP | select.POLLERR)
        self.now()
        self.reader.enumerate()
        while True:
            now = self.now()
            self.read_memory(now)
            if now + COALESCE_S >= self.next_tick_s:
                self.tick(now)
            wait_s = max(0.0, min(self.next_tick_s, self.flat_due_s, self.fast_due_s) - time.monotonic())
            if inbox.poll(wait_s * 1000) and not os.read(0, 4096):
                return

    def now(self) -> float:
        """Read the clock, for the reader's retry times as well."""
        self.reader.now_s = time.monotonic()
        return self.reader.now_s

    # -- memory --------------------------------------------------------------------------------

    def read_memory(self, now: float) -> None:
        """Run the flat and the fast lane where they are due, each within its budget."""
        open_devices = [device for device in self.reader.devices if device.handle is not None]
        fast = [device for device in open_devices if now < device.motion.until_s]
        if now + COALESCE_S >= self.flat_due_s:
            self.memory_pass([device for device in open_devices if now >= device.motion.until_s])
            self.flat_ended_s = self.now()
            self.flat_due_s = following(
                self.flat_due_s, self.interval_s(FLAT_S, len(open_devices) - len(fast))
            )
        if not fast:
            self.fast_due_s = self.flat_due_s
        elif now + COALESCE_S >= self.fast_due_s:
            self.memory_pass(fast)
            self.fast_due_s = following(self.fast_due_s, self.interval_s(FAST_S, len(fast)))
        else:
            self.fast_due_s = min(self.fast_due_s, now + self.interval_s(FAST_S, len(fast)))

    def interval_s(self, wanted_s: float, num_devices: int) -> float:
        """Interval of a memory lane over so many devices."""
        return stretched(self.cost.median_s * num_devices, wanted_s, SLOWEST_MEMORY_S)

    def memory_pass(self, devices: list[Device]) -> None:
        """Read the memory of each device, sending in between where the calls are slow."""
        if not devices:
            return
        started = time.perf_counter()
        for device in devices:
            memory = self.reader.memory(device)
            if memory is not None:
                device.seen(self.now(), memory)
            self.send_if_late()
        ended = time.perf_counter()
        self.cost.took(ended, (ended - started) / len(devices))

    def sample_interval_s(self, device: Device, num_fast: int) -> float:
        """Present seconds between two memory readings of this device."""
        if self.reader.now_s < device.motion.until_s:
            return self.interval_s(FAST_S, num_fast)
        return self.interval_s(FLAT_S, max(1, len(self.reader.devices) - num_fast))

    # -- the tick ------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Run what is due besides memory, then send if there is news or a heartbeat is due."""
        if not self.memory_only:
            self.read_slow(now)
            if self.due(self.power, now):
                self.read_power()
                self.power.done(now, self.now())
            if self.due(self.processes, now):
                self.read_processes()
                self.processes.done(now, self.now())
        self.renew(now)
        news = self.has_news()
        if news or now + self.tick_s / 2 >= self.sent_s + HEARTBEAT_S:
            if not self.memory_only and self.due(self.utilization, now):
                self.read_utilization()
                self.utilization.done(now, self.now())
            if not news:
                self.extra["q"] = 1
            self.send()
        self.next_tick_s = following(self.next_tick_s, self.tick_s)

    def due(self, lane: Pace, now: float) -> bool:
        """Say whether a lane is due at this tick (half a tick early counts: ticks are its grid)."""
        return now + self.tick_s / 2 >= lane.due_s

    def renew(self, now: float) -> None:
        """Once a second: devices that came, went or returned; Xid events."""
        if not self.due(self.renewal, now):
            return
        before = self.reader.devices
        self.reader.renew()
        if not self.memory_only:
            events = self.reader.xids()
            if events:
                self.extra.setdefault("xid", []).extend(events)
            if self.due(self.mig_check, now):
                self.reader.check_mig_modes()
                self.mig_check.done(now, self.now())
        if self.reader.devices is not before:
            self.forget_rows()
        self.end_if_all_unknown()
        self.renewal.done(now, self.now())

    def end_if_all_unknown(self) -> None:
        """A lost device cgroup makes every GPU unknown for good; a new process reports it at init."""
        devices = self.reader.devices
        if not devices or any(device.health != "unknown" for device in devices):
            self.all_unknown_since_s = None
        elif self.all_unknown_since_s is None:
            self.all_unknown_since_s = self.reader.now_s
        elif self.reader.now_s - self.all_unknown_since_s > ALL_UNKNOWN_FOR_S:
            raise LibraryGoneError(errors.UNKNOWN)

    def forget_rows(self) -> None:
        """After a new enumeration the row numbers mean other devices."""
        self.extra = {key: value for key, value in self.extra.items() if key == "xid"}
        self.slow_queue = []

    def open_devices(self) -> Iterator[Device]:
        """Each device that has a handle; between two of them memory is read and sent if late."""
        for device in tuple(self.reader.devices):
            if device.handle is not None:
                yield device
                if self.now() - self.flat_ended_s > SLOWEST_MEMORY_S:
                    self.read_memory(self.reader.now_s)
                self.send_if_late()

    def read_utilization(self) -> None:
        """Busy and bandwidth percentages; they go out with the memory row."""
        for device in self.open_devices():
            device.utilization = None if device.parent else self.reader.utilization(device)

    def read_power(self) -> None:
        """Power and temperature."""
        for device in self.open_devices():
            if device.parent is None:
                self.slow_values(device).update(self.reader.power_and_temperature(device))

    def read_slow(self, now: float) -> None:
        """One device's slow values a tick (energy in a tick of its own), all of them in ten seconds."""
        if not self.slow_queue:
            if now - self.slow_started_s < SLOW_EVERY_S:
                return
            self.slow_started_s = now
            self.slow_queue = [(device, energy) for device in self.reader.devices for energy in (True, False)]
        share = 2 * len(self.reader.devices) * self.tick_s / SLOW_EVERY_S
        for _ in range(min(len(self.slow_queue), max(1, round(share + 0.49)))):
            device, energy = self.slow_queue.pop()
            if device.handle is None:
                continue
            if not energy:
                self.slow_values(device).update(self.reader.slow(device))
            elif device.parent is None:
                self.slow_values(device)["mj"] = self.reader.energy(device)
            self.send_if_late()

    def slow_values(self, device: Device) -> dict[str, Any]:
        """Where the next message collects a device's slow values."""
        row: dict[str, Any] = self.extra.setdefault("x", {}).setdefault(self.reader.devices.index(device), {})
        return row

    def read_processes(self) -> None:
        """Memory and processes of each device in one pass, so that they can be added up."""
        pids: set[int] = set()
        for device in self.open_devices():
            memory = None if device.is_mig_parent else self.reader.memory(device)
            if memory is None:
                continue
            device.seen(self.now(), memory)
            found = self.reader.processes(device, memory[0])
            listed = None
            if found is not None:
                pids.update(pid for pid, _, _ in found)
                listed = [self.process_row(*entry) for entry in found]
            row = [self.reader.devices.index(device), self.reader.now_s, *memory, listed]
            self.extra.setdefault("p", []).append(row)
        self.table.keep_only(pids)
        self.told = {pid: seen for pid, seen in self.told.items() if pid in pids}

    def process_row(self, pid: int, used: int | None, kind: str) -> list[Any]:
        """[pid, used, kind, alive, start ticks]; what /proc says of it goes out once per change."""
        alive, ticks, details = self.table.look(pid, self.reader.now_s)
        if self.told.get(pid) != (ticks, details):
            self.told[pid] = (ticks, details)
            self.extra.setdefault("d", []).append([pid, ticks, *details])
        return [pid, used, kind, alive, ticks]

    # -- sending -------------------------------------------------------------------------------

    def has_news(self) -> bool:
        """What is not to wait for the heartbeat: other facts, Xid events, memory that moved."""
        return self.reader.dirty or "xid" in self.extra or any(d.moved for d in self.reader.devices)

    def send_if_late(self) -> None:
        """Keep the lines coming while calls are slow: a slow driver is not a stuck one."""
        now = self.now()
        if self.sent_s and now - self.sent_s >= HEARTBEAT_S + self.tick_s:
            self.send()

    def send(self) -> None:
        """Send what changed of the facts, then the newest values with their extremes."""
        if self.reader.dirty:
            self.reader.dirty = False
            say({"facts": self.facts()})
        devices = self.reader.devices
        now = self.reader.now_s
        num_fast = sum(now < device.motion.until_s for device in devices)
        rows = []
        for number, device in enumerate(devices):
            if device.fresh and device.memory is not None:
                device.fresh = False
                device.sent = device.memory
                interval = round(self.sample_interval_s(device, num_fast), 4)
                busy = device.utilization or (None, None)
                # Another GPU's call may have hung since: what was read before it is that old.
                age_s = round(now - device.read_s, 3)
                rows.append([number, *device.memory, device.peak, device.low, interval, *busy, age_s])
        say({"s": round(now, 4), "g": rows, **self.extra})
        self.extra = {}
        self.sent_s = now

    def facts(self) -> dict[str, Any]:
        """What seldom changes, complete: names, states and missing capabilities of every device."""
        return {
            "driver": self.reader.driver_version,
            "host_pids": self.table.host_pids,
            "memory_only": self.memory_only,
            "gpus": [
                {
                    "uuid": device.uuid, "index": device.index, "name": device.name, "health": device.health,
                    "detail": device.detail, "mig_profile": device.mig_profile, "v1": device.used_v1,
                    "unified": device.unified,
                    "coherent": device.parent is None and is_coherent(device.name),
                    "parent_uuid": device.parent.uuid if device.parent else "",
                    "is_mig_parent": device.is_mig_parent, "missing": sorted(device.missing),
                }
                for device in self.reader.devices
            ],
        }  # fmt: skip


def following(due_s: float, interval_s: float) -> float:
    """The next time on the lane's grid that is not past: missed ones are skipped, never made up."""
    now = time.monotonic()
    due_s += interval_s
    return due_s if due_s > now else now + interval_s


def take_lock(path: str) -> int | None:
    """Hold the lock for the life of this process; the descriptor, or None where another worker has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
        why = (
            f"process {holder} holds {path}: another kvwatch reads NVML, or its worker is stuck in the "
            "driver; no second one is started beside it"
        )
        say({"bye": "locked", "code": 0, "why": why})
        return None
    with contextlib.suppress(OSError):  # a full disk: the lock holds, it only cannot say who has it
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def follow_parent(parent: int) -> None:
    """End with the parent, as a second line behind the closed pipe; TERM only acts between calls."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's business
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    pr_set_pdeathsig, pr_set_name = 1, 15
    libc.prctl(pr_set_pdeathsig, signal.SIGTERM)
    libc.prctl(pr_set_name, b"kvwatch-nvml")
    if parent and os.getppid() != parent:
        sys.exit(0)


def pid_max() -> int:
    """The largest pid this kernel can give (4194304 where it does not say)."""
    try:
        with open("/proc/sys/kernel/pid_max", "rb") as limit:  # noqa: PTH123 - pathlib costs a megabyte here
            return int(limit.read())
    except (OSError, ValueError):
        return 4194304


def bindings_version(module: str) -> str:
    """Version of the distribution beside the module ("" where it is not one of nvidia-ml-py)."""
    with contextlib.suppress(OSError):
        for name in os.listdir(os.path.dirname(module)):  # noqa: PTH120, PTH208 - as in pid_max
            if name.startswith("nvidia_ml_py-") and name.endswith(".dist-info"):
                return name[len("nvidia_ml_py-") : -len(".dist-info")]
    return ""


def serve(tick_s: float, *, memory_only: bool) -> None:
    """Load NVML once, work, and shut it down only if it was started."""
    import pynvml

    say({
        "hello": {
            "pid": os.getpid(), "bindings_path": pynvml.__file__,
            "bindings": bindings_version(pynvml.__file__), "memory_v2": hasattr(pynvml, "nvmlMemory_v2"),
        }
    })  # fmt: skip
    time.sleep(os.getpid() % 64 / 640)  # monitors that start together have frozen GPUs: up to 0.1 s apart
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise LibraryGoneError(error.value) from error
    try:
        host = HostMemory(os.environ.get("KVWATCH_HOST_ROOT", ""))
        Worker(Reader(pynvml, pid_max=pid_max(), host=host), tick_s, memory_only=memory_only).run()
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def main(lock: str, tick: str, parent: str, mode: str) -> int:
    """Run the worker; the exit status says why it ended (0 asked to, 3 library, 4 locked)."""
    os.environ.pop("NVML_MPS_DEVICE_ENUMERATION", None)  # it changes what NVML enumerates
    follow_parent(int(parent))
    if lock and take_lock(lock) is None:
        return EXIT_LOCKED
    try:
        serve(float(tick), memory_only=mode == "memory")
    except LibraryGoneError as gone:
        say({"bye": "library", "code": gone.code, "why": str(gone)})
        return EXIT_LIBRARY
    except BrokenPipeError:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
