"""What does NVML say about each device? Guarded calls; one bad device never spoils the others.

Takes the bindings as a parameter: only the worker module imports them. Not for the daemon process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from kvwatch.sources.gpu import nvml_errors as errors
from kvwatch.sources.gpu.host_memory import HostMemory, Memory, is_coherent, is_unified
from kvwatch.sources.gpu.nvml_lanes import Motion
from kvwatch.sources.gpu.nvml_processes import ProcessLists, merged

V2, V1 = "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"
REOPEN_FIRST_S, REOPEN_MAX_S = 5.0, 60.0
DENIED_RETRY_S = 60.0
XID_EVENT = 0x8
MAX_EVENTS = 64


class LibraryGoneError(Exception):
    """NVML as a whole no longer works in this process; `code` is its return code."""

    def __init__(self, code: int) -> None:
        super().__init__(errors.explain(code))
        self.code = code


class Device:
    """One GPU or MIG instance of the present enumeration."""

    __slots__ = (
        "detail", "fresh", "handle", "health", "index", "is_mig_parent", "low", "memory", "mig_profile",
        "missing", "motion", "name", "parent", "peak", "read_s", "reopen_in_s", "reopen_s", "sent", "unified",
        "used_v1", "utilization", "uuid",
    )  # fmt: skip

    def __init__(self, index: int, parent: Device | None = None) -> None:
        self.index = index
        self.parent = parent
        self.handle: Any = None
        self.uuid = ""
        self.name = ""
        self.mig_profile = ""
        self.is_mig_parent = False
        self.health = "ok"
        self.detail = ""
        self.missing: dict[str, tuple[float, int]] = {}  # call -> (retry at, return code)
        self.used_v1 = False
        self.unified = False  # whether its memory is the host's, read there
        self.reopen_s = 0.0
        self.reopen_in_s = REOPEN_FIRST_S
        self.motion = Motion()
        self.memory: Memory | None = None
        self.read_s = 0.0  # when
        self.peak = 0
        self.low = 0
        self.fresh = False
        self.sent: Memory | None = None  # the values of the last message
        self.utilization: tuple[int, int] | None = None

    @property
    def moved(self) -> bool:
        """Whether its memory has been anywhere else since the last message."""
        return self.fresh and (
            self.memory != self.sent or self.memory is None or self.memory[1:3] != (self.peak, self.low)
        )

    def seen(self, now_s: float, memory: Memory) -> None:
        """Note a memory reading: the newest value and the extremes since the previous message."""
        used, free = memory[1], memory[2]
        if self.fresh:
            self.peak = max(self.peak, used)
            self.low = min(self.low, free)
        else:
            self.peak, self.low = used, free
        self.fresh = True
        self.memory, self.read_s = memory, now_s
        self.motion.seen(now_s, used)


class Reader:
    """All devices of a loaded NVML library. `dirty` says that names, states or capabilities changed."""

    def __init__(self, nvml: Any, *, pid_max: int, host: HostMemory) -> None:
        self.nvml = nvml
        self.host = host
        self.now_s = 0.0
        self.devices: list[Device] = []
        self.dirty = True
        self.driver_version = ""
        self.has_v2 = hasattr(nvml, "nvmlMemory_v2")
        self.lists = ProcessLists(nvml.nvmlLib, pid_max)
        self._count = 0
        self._blamed: dict[tuple[str, str], tuple[float, int]] = {}
        self._event_set: Any = None
        self._subscribed: dict[int | None, str] = {}  # handle -> UUID: events may outlive the handle
        self._kept_xids: list[tuple[str, int]] = []

    # -- guarded calls -------------------------------------------------------------------------

    def host_call(self, name: str, *args: Any) -> Any:
        """A call that is about no single device; None where there is nothing or no such call."""
        try:
            return getattr(self.nvml, name)(*args)
        except self.nvml.NVMLError as error:
            if errors.meaning(error.value) is errors.Meaning.LIBRARY:
                raise LibraryGoneError(error.value) from error
            return None
        except (self.nvml.NVMLLibraryMismatchError, AttributeError):
            return None

    def call(self, device: Device, name: str, *args: Any, function: Callable[..., Any] | None = None) -> Any:
        """Call NVML for one device; None where there is no value. Never with the handle of a lost device."""
        if device.handle is None:
            return None
        known = device.missing.get(name)
        if known is not None and self.now_s < known[0]:
            return None
        try:
            value = (function or getattr(self.nvml, name))(device.handle, *args)
        except self.nvml.NVMLError as error:
            return self.failed(device, name, error.value)
        except self.nvml.NVMLLibraryMismatchError:
            return self.failed(device, name, errors.VERSION_MISMATCH)
        except AttributeError:
            return self.failed(device, name, errors.FUNCTION_NOT_FOUND)
        if known is not None:
            del device.missing[name]
            self.dirty = True
        return value

    def failed(self, device: Device, name: str, code: int) -> None:
        """React to a return code as nvml_errors classifies it."""
        what = errors.meaning(code)
        if code == errors.INVALID_ARGUMENT and name in (V1, V2):
            what = errors.Meaning.DEVICE  # the handle is no longer valid: reconfigured or replaced
        if what is errors.Meaning.LIBRARY:
            raise LibraryGoneError(code)
        if what is errors.Meaning.DEVICE:
            self._give_up(device, name, code)
        elif what is errors.Meaning.CAPABILITY:
            self._lacks(device, name, code)

    def _give_up(self, device: Device, name: str, code: int) -> None:
        """Drop the handle for good; the device is opened anew after a pause."""
        device.handle = None
        device.memory = None
        device.fresh = False
        device.health = errors.health(code)
        device.detail = f"{errors.explain(code)} (from {name})"
        device.reopen_s = self.now_s + device.reopen_in_s
        device.reopen_in_s = min(REOPEN_MAX_S, 2 * device.reopen_in_s)
        if code == errors.UNKNOWN and name not in (V1, V2):
            self._blamed[(device.uuid, name)] = (self.now_s + errors.RETRY_CAPABILITY_S, code)
        self.dirty = True

    def _lacks(self, device: Device, name: str, code: int) -> None:
        denied_memory = code == errors.NO_PERMISSION and name in (V1, V2) and not device.is_mig_parent
        pause = DENIED_RETRY_S if denied_memory else errors.RETRY_CAPABILITY_S
        self.dirty |= name not in device.missing
        device.missing[name] = (self.now_s + pause, code)
        if denied_memory:
            device.health, device.detail = "denied", errors.explain(code)

    # -- enumeration ---------------------------------------------------------------------------

    def enumerate(self) -> None:
        """Build the list of devices anew; those that cannot be opened stay in it with their state."""
        self.driver_version = self.host_call("nvmlSystemGetDriverVersion") or ""
        self._count = self.host_call("nvmlDeviceGetCount") or 0
        self.devices = []
        for index in range(self._count):
            device = Device(index)
            self._open(device)
            self.devices.append(device)
            self.devices.extend(self._instances(device))
        self.dirty = True
        self._listen()

    def renew(self) -> None:
        """Once a second: notice added, removed and returned devices, and MIG changes."""
        count = self.host_call("nvmlDeviceGetCount")
        if count is not None and count != self._count:
            self.enumerate()
            return
        for device in self.devices:
            if device.handle is None and device.parent is None and self.now_s >= device.reopen_s:
                self._reopen(device)
        if any(self._instances_changed(device) for device in self.devices if device.parent is None):
            self.enumerate()

    def _open(self, device: Device) -> None:
        try:
            device.handle = self.nvml.nvmlDeviceGetHandleByIndex(device.index)
        except self.nvml.NVMLError as error:
            if errors.meaning(error.value) is errors.Meaning.LIBRARY:
                raise LibraryGoneError(error.value) from error
            self._give_up(device, "nvmlDeviceGetHandleByIndex", error.value)
            return
        device.health, device.detail = "ok", ""
        self._identify(device)

    def _identify(self, device: Device) -> None:
        uuid = self.call(device, "nvmlDeviceGetUUID")
        device.uuid = uuid or device.uuid
        device.name = self.call(device, "nvmlDeviceGetName") or device.name
        mode = self.call(device, "nvmlDeviceGetMigMode")
        device.is_mig_parent = bool(mode and mode[0])
        for (blamed_uuid, name), until in self._blamed.items():
            if blamed_uuid == device.uuid:
                device.missing[name] = until

    def _reopen(self, device: Device) -> None:
        before = device.uuid
        self._open(device)
        if device.handle is None:
            return
        self.dirty = True
        if device.is_mig_parent or device.uuid != before:
            self.enumerate()
        elif self.memory(device) is not None:
            self._listen()

    def _instances(self, device: Device) -> list[Device]:
        if not device.is_mig_parent:
            return []
        found = []
        for handle, uuid in self._instance_handles(device):
            instance = Device(device.index, device)
            instance.handle, instance.uuid, instance.name = handle, uuid, device.name
            instance.mig_profile = self._profile(instance, device)
            found.append(instance)
        return found

    def _instance_handles(self, device: Device) -> list[tuple[Any, str]]:
        """(handle, UUID) of each MIG instance; holes in the numbering are normal."""
        found = []
        for slot in range(self.call(device, "nvmlDeviceGetMaxMigDeviceCount") or 0):
            if device.handle is None:
                break
            try:
                handle = self.nvml.nvmlDeviceGetMigDeviceHandleByIndex(device.handle, slot)
                found.append((handle, self.nvml.nvmlDeviceGetUUID(handle)))
            except self.nvml.NVMLError as error:
                if error.value not in (errors.NOT_FOUND, errors.INVALID_ARGUMENT, errors.NO_PERMISSION):
                    self.failed(device, "nvmlDeviceGetMigDeviceHandleByIndex", error.value)
        return found

    def _instances_changed(self, device: Device) -> bool:
        """Compare with the driver; handles are renewed always: an old one may mean another instance."""
        if not device.is_mig_parent or device.handle is None:
            return False
        present = self._instance_handles(device)
        instances = [other for other in self.devices if other.parent is device]
        if [uuid for _, uuid in present] != [instance.uuid for instance in instances]:
            return True
        for instance, (handle, _) in zip(instances, present, strict=True):
            instance.handle = handle
            self._follow_profile(instance, device)
            if instance.health != "ok":
                instance.health, instance.detail = "ok", ""
                self.dirty = True
        return False

    def _follow_profile(self, instance: Device, parent: Device) -> None:
        """Older drivers name an instance by its place, so a rebuilt one may have the UUID of another."""
        profile = self._profile(instance, parent)
        if profile and profile != instance.mig_profile:
            instance.mig_profile = profile
            self.dirty = True

    def _profile(self, instance: Device, parent: Device) -> str:
        """The profile's name, such as 1g.18gb, computed from the attributes (labels elsewhere were wrong)."""
        attributes = self.call(instance, "nvmlDeviceGetAttributes_v2")
        if attributes is None:
            return ""
        whole = self.memory(parent)
        gib = attributes.memorySizeMB / 1024
        if whole is not None:  # slices are eighths of the device
            eighths = -(-attributes.memorySizeMB * 8 * 1024 * 1024 // whole[0])
            gib = eighths * -(-whole[0] // 1024**3) / 8
        slices = f"{attributes.gpuInstanceSliceCount}g.{round(gib)}gb"
        if attributes.computeInstanceSliceCount < attributes.gpuInstanceSliceCount:
            return f"{attributes.computeInstanceSliceCount}c.{slices}"
        return slices

    def check_mig_modes(self) -> None:
        """Every ten seconds (the call takes 0.3 ms): notice that MIG was switched on or off."""
        for device in self.devices:
            mode = None if device.parent else self.call(device, "nvmlDeviceGetMigMode")
            if mode is not None and bool(mode[0]) != device.is_mig_parent:
                self.enumerate()
                return

    # -- readings ------------------------------------------------------------------------------

    def memory(self, device: Device) -> Memory | None:
        """Memory in bytes: NVML's, or the host's where a known device has no other.

        NVML is asked in any case, since a device that is lost or denied has no memory at all.
        """
        reading = self._own_memory(device)
        in_mig = device.is_mig_parent or device.parent is not None
        if device.handle is None or in_mig or not is_unified(device.name):
            return reading
        if reading is None and self._lacking(device) != errors.NOT_SUPPORTED:
            return None
        shared = self.host.unified()
        if shared is not None:
            self._note_version(device, v1=False, unified=True)
        return shared

    def _lacking(self, device: Device) -> int:
        """The return code with which memory was refused by the newest version there is, 0 if it was not."""
        why = self._why_no_v2(device)
        old = why in (errors.FUNCTION_NOT_FOUND, errors.VERSION_MISMATCH)
        return device.missing.get(V1, (0.0, 0))[1] if old else why

    def _why_no_v2(self, device: Device) -> int:
        """The return code with which memory by version 2 was refused, 0 if it was not."""
        return device.missing.get(V2, (0.0, 0 if self.has_v2 else errors.FUNCTION_NOT_FOUND))[1]

    def _own_memory(self, device: Device) -> Memory | None:
        """Memory by version 2; by version 1 (reserved counted as used) where that is missing."""
        info = None
        if self.has_v2:
            function = self.nvml.nvmlDeviceGetMemoryInfo
            info = self.call(device, V2, self.nvml.nvmlMemory_v2, function=function)
        if info is not None:
            self._note_version(device, v1=False)
            return _plausible(info.total, info.used, info.free, errors.known(info.reserved))
        if self._why_no_v2(device) not in (errors.FUNCTION_NOT_FOUND, errors.VERSION_MISMATCH):
            return None
        info = self.call(device, V1)
        if info is None:
            return None
        self._note_version(device, v1=True)
        return _plausible(info.total, info.used, info.free, None)

    def _note_version(self, device: Device, *, v1: bool, unified: bool = False) -> None:
        unified = unified or device.unified  # once read from the host, always: both are asked each time
        self.dirty |= (device.used_v1, device.unified) != (v1, unified) or device.health != "ok"
        device.used_v1, device.unified = v1, unified
        device.health, device.detail = "ok", ""
        device.reopen_in_s = REOPEN_FIRST_S

    def utilization(self, device: Device) -> tuple[int, int] | None:
        """(busy, memory bandwidth activity) in percent; not reported under MIG."""
        rates = self.call(device, "nvmlDeviceGetUtilizationRates")
        if rates is None or rates.gpu > 100 or rates.memory > 100:
            return None
        return rates.gpu, rates.memory

    def processes(self, device: Device, total_bytes: int) -> list[tuple[int, int | None, str]] | None:
        """[(pid, used bytes, kind)], None where the compute list cannot be read or is implausible."""
        found = []
        complete = False
        for number, name in enumerate(self.lists.names()):
            result = self.call(device, name, function=lambda handle, at=number: self._list(at, handle))
            if device.handle is None:
                return None
            if result is not None:
                found += result
                complete |= "Compute" in name
        if not complete or not self.lists.plausible(found, total_bytes):
            return None
        return merged(found)

    def _list(self, number: int, handle: Any) -> list[tuple[int, int | None, str]]:
        code, found = self.lists.read(number, handle)
        if code != 0:
            raise self.nvml.NVMLError(code)
        return found

    def power_and_temperature(self, device: Device) -> dict[str, int | None]:
        """Board power in milliwatts and GPU temperature in degrees Celsius."""
        power = self.call(device, "nvmlDeviceGetPowerUsage")
        temperature = self.call(device, "nvmlDeviceGetTemperature", 0)
        return {
            "mw": None if power is None else errors.known(power, errors.SENTINEL_32),
            "c": None if temperature is None else errors.known(temperature, 1000),
        }

    def slow(self, device: Device) -> dict[str, Any]:
        """BAR1 bytes, pending and failed row remaps, volatile ECC counts, clock event reasons."""
        bar1 = self.call(device, "nvmlDeviceGetBAR1MemoryInfo")
        rows = self.call(device, "nvmlDeviceGetRemappedRows")
        corrected = self.call(device, "nvmlDeviceGetTotalEccErrors", 0, 0)
        uncorrected = self.call(device, "nvmlDeviceGetTotalEccErrors", 1, 0)
        return {
            "bar1": None if bar1 is None else [errors.known(bar1.bar1Total), errors.known(bar1.bar1Used)],
            "remap": None if rows is None else [bool(rows[2]), bool(rows[3])],
            "ecc": [None if count is None else errors.known(count) for count in (corrected, uncorrected)],
            "why": self.call(device, "nvmlDeviceGetCurrentClocksEventReasons"),
            "reclaimable": self.host.reclaimable() if device.unified else None,
            "os": self._os_pages(device),
        }

    def _os_pages(self, device: Device) -> int | None:
        """Bytes that the operating system keeps in this GPU's memory, on devices known to lend it."""
        if device.parent is not None or not is_coherent(device.name):
            return None
        node = self.call(device, "nvmlDeviceGetNumaNodeId")
        return None if node is None else self.host.os_pages(node)

    def energy(self, device: Device) -> int | None:
        """Energy in millijoules since the driver was loaded; 3 to 17 ms a call."""
        energy = self.call(device, "nvmlDeviceGetTotalEnergyConsumption")
        return None if energy is None else errors.known(energy)

    # -- events --------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Subscribe to Xid events of every device that offers them; those from before that are lost."""
        if self._event_set is not None:
            self._kept_xids += self._waiting_xids()  # they would go with the set
            self.host_call("nvmlEventSetFree", self._event_set)
        self._subscribed = {}
        self._event_set = self.host_call("nvmlEventSetCreate")
        if self._event_set is None:
            return
        for device in self.devices:
            if device.parent is None:
                self._subscribe(device)

    def _subscribe(self, device: Device) -> None:
        handle = device.handle
        types = self.call(device, "nvmlDeviceGetSupportedEventTypes")
        if types and types & XID_EVENT:
            self.call(device, "nvmlDeviceRegisterEvents", XID_EVENT, self._event_set)
            self._subscribed[_address(handle)] = device.uuid

    def xids(self) -> list[tuple[str, int]]:
        """[(UUID, Xid)] since the last call, without waiting; also of devices that were lost since."""
        found, self._kept_xids = self._kept_xids, []
        return found + self._waiting_xids()

    def _waiting_xids(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        if self._event_set is None:
            return found
        for _ in range(MAX_EVENTS):
            event = self.host_call("nvmlEventSetWait_v2", self._event_set, 0)
            if event is None:
                break
            uuid = self._subscribed.get(_address(event.device))
            if uuid and event.eventType == XID_EVENT:
                found.append((uuid, event.eventData))
        return found


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _plausible(total: int, used: int, free: int, reserved: int | None) -> Memory | None:
    """The reading, or None where a part is a sentinel or exceeds the total."""
    if total >= errors.SENTINEL_64 or used > total or free > total:
        return None
    return total, used, free, reserved
