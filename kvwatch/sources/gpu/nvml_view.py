"""What do the worker's messages add up to? Per-GPU state that outlives a worker, made into HostGpus."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from kvwatch.model.gpu import Accounting, GpuHealth, GpuMemory, GpuProcess, GpuState, HostGpus, LedgerPass
from kvwatch.model.settings import GpuSettings
from kvwatch.sources.gpu.inventory import Inventory, KnownGpu
from kvwatch.sources.gpu.nvml_windows import MemoryWindows

log = logging.getLogger(__name__)
STALE_AFTER_S = 2.0  # or three sample intervals
LEDGER_STALE_AFTER_S = 15.0  # the process lane slows down to 10 s
SLOW_STALE_AFTER_S = 90.0
NO_INDEX = -1
UNIFIED = (
    "this device uses the host's memory: total is MemTotal, free is MemAvailable (page cache can be given "
    "up), and used is what all of the host uses"
)
COHERENT = (
    "the operating system may keep pages in this GPU's memory, which count as used (os_pages_bytes), and "
    "memory may stay used for a while after its process has ended"
)
NAMELESS = "GPU-unknown-"  # with the index: a GPU that never told its UUID
CLOCK_EVENT_REASONS = (
    (0x1, "gpu_idle"),
    (0x2, "applications_clocks"),
    (0x4, "sw_power_cap"),
    (0x8, "hw_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "sw_thermal"),
    (0x40, "hw_thermal"),
    (0x80, "hw_power_brake"),
    (0x100, "display_clocks"),
)


def clock_event_reasons(mask: int) -> tuple[str, ...]:
    """Names of the set bits of nvmlClocksEventReasons."""
    return tuple(name for bit, name in CLOCK_EVENT_REASONS if mask & bit)


class XidLog:
    """The Xid events of one GPU. It outlives the source: a reload must not take a lost GPU for a well one."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.last: int | None = None
        self.last_s: float | None = None

    def saw(self, now_s: float, xid: int) -> None:
        """Count an event."""
        self.counts[xid] = self.counts.get(xid, 0) + 1
        self.last, self.last_s = xid, now_s

    def fields(self) -> dict[str, Any]:
        """As a GpuState has them."""
        return {
            "xid_events_total": tuple(sorted(self.counts.items())),
            "last_xid": self.last,
            "last_xid_s": self.last_s,
        }


XidLogs = dict[str, XidLog]  # by UUID


class Track:
    """One GPU or MIG instance: counts and windows for ever, readings until the worker ends."""

    def __init__(self, uuid: str, peak_window_s: float, xids: XidLog) -> None:
        self.uuid = uuid
        self.windows = MemoryWindows(peak_window_s)
        self.xids = xids
        self.facts: dict[str, Any] = {}
        self.clear()

    def clear(self) -> None:
        """Drop every reading: they belong to a worker or a handle that is gone."""
        self.memory: GpuMemory | None = None
        self.memory_s = 0.0
        self.interval_s: float | None = None
        self.busy: tuple[float | None, float | None] = (None, None)
        self.ledger: LedgerPass | None = None
        self.ledger_s = 0.0
        self.slow: dict[str, Any] = {}
        self.slow_s: dict[str, float] = {}

    def saw_memory(self, now_s: float, row: list[Any]) -> None:
        """Take a memory row: total, used, free, reserved, peak, low, interval, busy, bandwidth, age."""
        self.memory = self.memory_of(row[:4])
        self.memory_s = max(self.memory_s, now_s - row[9])
        self.windows.add(self.memory_s, row[4], row[5])
        self.interval_s = row[6]
        self.busy = (_ratio(row[7]), _ratio(row[8]))

    def memory_of(self, parts: list[Any]) -> GpuMemory:
        """Four numbers as GpuMemory, labelled with how they were counted."""
        total, used, free, reserved = parts
        accounting = Accounting.V1 if self.facts.get("v1") else Accounting.V2
        if self.facts.get("unified"):
            accounting = Accounting.UNIFIED
        return GpuMemory(
            total_bytes=total,
            used_bytes=used,
            free_bytes=free,
            reserved_bytes=reserved,
            accounting=accounting,
        )

    def saw_slow(self, now_s: float, values: dict[str, Any]) -> None:
        """Take slow values, each with its time."""
        self.slow.update(values)
        self.slow_s.update(dict.fromkeys(values, now_s))

    def expire(self, now_s: float) -> None:
        """Drop readings that were not renewed: absent, never frozen."""
        if self.memory is not None and now_s - self.memory_s > max(STALE_AFTER_S, 3 * (self.interval_s or 0)):
            self.memory, self.busy, self.interval_s = None, (None, None), None
        if now_s - self.ledger_s > LEDGER_STALE_AFTER_S:
            self.ledger = None
        for key in [key for key, seen_s in self.slow_s.items() if now_s - seen_s > SLOW_STALE_AFTER_S]:
            del self.slow[key], self.slow_s[key]

    def state(self, now_s: float, index: int) -> GpuState:
        """Everything known of it now."""
        self.expire(now_s)
        facts = self.facts
        parent = facts["parent_uuid"]
        busy = self.busy
        if self.memory is None and "busy" in self.slow:  # a source whose memory cannot be told
            busy = (_ratio(self.slow["busy"][0]), _ratio(self.slow["busy"][1]))
        return GpuState(
            uuid=self.uuid,
            index=index,
            health=GpuHealth(facts["health"]),
            health_detail=facts["detail"],
            name=facts["name"],
            driver_version=facts["driver"],
            mig_profile=facts["mig_profile"],
            parent_uuid=parent,
            is_mig_parent=facts["is_mig_parent"],
            capabilities_missing=facts["missing"],
            memory_note=UNIFIED if facts.get("unified") else COHERENT if facts.get("coherent") else "",
            reclaimable_bytes=self.slow.get("reclaimable"),
            os_pages_bytes=self.slow.get("os"),
            utilization_ratio=busy[0],
            memory_bandwidth_utilization_ratio=busy[1],
            ledger_pass=self.ledger,
            **self.xids.fields(),
            **self._memory_fields(now_s),
            **self._slow_fields(),
        )

    def _memory_fields(self, now_s: float) -> dict[str, Any]:
        if self.memory is None:
            return {}
        return {
            "memory": self.memory,
            "used_peak_bytes": self.windows.used_peak_bytes(now_s),
            "free_low_bytes": self.windows.free_low_bytes(now_s),
            "hidden_from_15s_bytes": self.windows.hidden_bytes(now_s, self.memory.used_bytes),
            "sample_interval_s": self.interval_s,
        }

    def _slow_fields(self) -> dict[str, Any]:
        slow = self.slow
        if not slow:
            return {}
        bar1 = slow.get("bar1") or (None, None)
        remap = slow.get("remap") or (None, None)
        ecc = slow.get("ecc") or (None, None)
        why = slow.get("why")
        return {
            "power_watts": _scaled(slow.get("mw")),
            "temperature_celsius": slow.get("c"),
            "energy_joules": _scaled(slow.get("mj")),
            "clock_event_reasons": None if why is None else clock_event_reasons(why),
            "ecc_corrected_total": ecc[0],
            "ecc_uncorrected_total": ecc[1],
            "remapped_rows_pending": remap[0],
            "remapped_rows_failed": remap[1],
            "bar1_total_bytes": bar1[0],
            "bar1_used_bytes": bar1[1],
        }


class HostView:
    """All GPUs of the host, built from messages; `reset` when the worker that sent them is gone."""

    def __init__(
        self,
        settings: GpuSettings,
        inventory: Inventory,
        *,
        lister: str = "NVML",
        reported_by: str = "nvml",
        xids: XidLogs | None = None,
    ) -> None:
        self._lister = lister
        self._reported_by = reported_by
        self._settings = settings
        self._inventory = inventory
        self._xids: XidLogs = {} if xids is None else xids
        self._tracks: dict[str, Track] = {}
        self._rows: list[Track] = []
        self._details: dict[int, list[Any]] = {}
        self._driver = ""
        self._host_pids = False
        self._last: HostGpus | None = None

    def reset(self) -> None:
        """Forget readings, keep counts, windows and the inventory."""
        for track in self._tracks.values():
            track.clear()
        self._rows = []
        self._details = {}

    def apply(self, now_s: float, message: dict[str, Any]) -> None:
        """Take in one message of the worker, received at `now_s`."""
        if "facts" in message:
            self._take_facts(message["facts"])
        for pid, *details in message.get("d", ()):
            self._details[pid] = details
        for row in message.get("g", ()):
            self._rows[row[0]].saw_memory(now_s, row[1:])
        for number, values in message.get("x", {}).items():
            self._rows[int(number)].saw_slow(now_s, values)
        for number, read_s, *rest in message.get("p", ()):
            self._take_pass(self._rows[number], now_s - (message["s"] - read_s), rest)
        for uuid, xid in message.get("xid", ()):
            self._track(uuid).xids.saw(now_s, xid)

    def _track(self, uuid: str) -> Track:
        if uuid not in self._tracks:
            log = self._xids.setdefault(uuid, XidLog())
            self._tracks[uuid] = Track(uuid, self._settings.peak_window_s, log)
        return self._tracks[uuid]

    def _take_facts(self, facts: dict[str, Any]) -> None:
        self._driver = facts["driver"]
        self._host_pids = facts["host_pids"]
        live = [gpu["uuid"] for gpu in facts["gpus"]]
        self._rows = []
        for gpu in facts["gpus"]:
            index = gpu["index"]
            uuid = gpu["uuid"] or self._inventory.uuid_at(index, live) or f"{NAMELESS}{index}"
            track = self._track(uuid)
            if gpu["health"] != "ok":
                track.clear()
            if track.facts and track.facts["health"] != gpu["health"]:
                change = {"uuid": uuid, "state": gpu["health"], "detail": gpu["detail"]}
                log.warning("GPU state changed", extra=change)
            track.facts = {**gpu, "driver": self._driver, "missing": tuple(gpu["missing"])}
            self._rows.append(track)
        self._inventory.note(
            KnownGpu(
                uuid=gpu["uuid"],
                index=self._inventory.pinned_index(gpu["uuid"], gpu["index"]),
                name=gpu["name"],
            )
            for gpu in facts["gpus"]
            if gpu["uuid"] and not gpu["parent_uuid"]
        )

    def _take_pass(self, track: Track, observed_s: float, rest: list[Any]) -> None:
        memory, listed = track.memory_of(rest[:4]), rest[4]
        processes = None if listed is None else tuple(self._process(row) for row in listed)
        track.ledger = LedgerPass(observed_s=observed_s, memory=memory, processes=processes)
        track.ledger_s = observed_s
        if len(self._details) > 4096:
            self._details = {}

    def _process(self, row: list[Any]) -> GpuProcess:
        pid, used, kind, alive, ticks = row
        known = self._details.get(pid)
        if known is None or known[0] != ticks:
            return GpuProcess(pid=pid, used_bytes=used, kind=kind, alive=alive, started_ticks=ticks)
        _, name, command, cgroup, unit, ancestors = known
        return GpuProcess(
            pid=pid,
            used_bytes=used,
            kind=kind,
            alive=alive,
            name=name,
            command=command,
            cgroup=cgroup,
            unit=unit,
            ancestors=tuple((other, line) for other, line in ancestors),
            started_ticks=ticks,
        )

    def build(self, now_s: float) -> HostGpus:
        """The host as of now: what is there, and what was or ought to be there and is not."""
        gpus = [track.state(now_s, self._index_of(track)) for track in self._rows]
        gpus += self._absent(
            {gpu.uuid for gpu in gpus}, GpuHealth.MISSING, f"seen before, no longer listed by {self._lister}"
        )
        return self._host(gpus)

    def known(self, detail: str) -> HostGpus:
        """What is known of the GPUs while NVML cannot be asked: who they are, in state unknown."""
        return self._host(self._absent(set(), GpuHealth.UNKNOWN, detail))

    def _host(self, gpus: list[GpuState]) -> HostGpus:
        if self._reported_by != "nvml":
            gpus = [replace(gpu, reported_by=self._reported_by) for gpu in gpus]
        return HostGpus(
            gpus=tuple(gpus),
            driver_version=self._driver,
            expected_count=self._settings.expect_count,
            host_pid_namespace=self._host_pids,
        )

    def _index_of(self, track: Track) -> int:
        uuid = track.facts["parent_uuid"] or track.uuid
        index: int = track.facts["index"]
        return index if uuid.startswith(NAMELESS) else self._inventory.pinned_index(uuid, index)

    def _absent(self, present: set[str], health: GpuHealth, detail: str) -> list[GpuState]:
        states = [
            self._absent_state(gpu.uuid, gpu.index, gpu.name, health, detail)
            for gpu in self._inventory.known()
            if gpu.uuid not in present
        ]
        every = present | {state.uuid for state in states}
        for wanted in self._settings.expect_uuids:
            if not any(uuid.startswith(wanted) for uuid in every):
                why = f"named in gpus.expect, not listed by {self._lister}"
                states.append(self._absent_state(wanted, NO_INDEX, "", GpuHealth.MISSING, why))
        return states

    def _absent_state(self, uuid: str, index: int, name: str, health: GpuHealth, detail: str) -> GpuState:
        log = self._xids.get(uuid)
        counts = {} if log is None else log.fields()
        return GpuState(uuid=uuid, index=index, name=name, health=health, health_detail=detail, **counts)


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def _scaled(thousandths: int | None) -> float | None:
    return None if thousandths is None else thousandths / 1000
