"""GPU facts from the page of a dcgm-exporter that runs already.

Its values are DCGM's cache, without timestamps, up to its collection interval old (30 s unless changed).
Decisions, each tested:

* MiB everywhere; total = used + free + reserved, or unknown: FB_RESERVED is in the default counters only
  since 4.3.1, and from driver 510 on it is a part of its own (dcgm-exporter#136);
* names of DCGM up to 4.5 and of 4.6, labels in any case (`Hostname` became `hostname`);
* of several series of one GPU the one without workload labels holds; per-pod shares are never summed;
* a MIG instance has no UUID there: it is called as DCGM calls it, MIG-<uuid of the GPU>/<GPU_I_ID>;
* 200 without memory series is a failure (it is what the page looks like during a reload), and so is a
  page whose energy counters stand still (an exporter that lost its engine has served those for ever);
* the Xid gauge holds the last code for ever, so it is not read at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvwatch.model.gpu import HostGpus
from kvwatch.model.sample import FailureKind
from kvwatch.model.settings import GpuSettings
from kvwatch.sources.base import SourceError
from kvwatch.sources.exposition import Families, pick, printable
from kvwatch.sources.gpu import dcgm_fields as fields
from kvwatch.sources.gpu.inventory import Inventory
from kvwatch.sources.gpu.nvml_view import HostView
from kvwatch.sources.http import Deadline, HttpClient

log = logging.getLogger(__name__)
PERIOD_S = 2.0
DEADLINE_S = 1.5
COLLECT_S = 30.0  # dcgm-exporter's default `-c`: how old a value may be
FROZEN_AFTER_S = 4 * COLLECT_S
MAX_DEVICES = 1024
DRIVER_SPLIT = 510  # the first driver whose `used` excludes what it reserves
WANTED = frozenset(fields.EXPORTER_NAMES)
WORKLOAD_LABELS = frozenset(
    ("pod", "namespace", "container", "pod_name", "pod_namespace", "container_name", "pid", "process_name",
     "vgpu", "hpc_job")
)  # fmt: skip
SHARED_FIELDS = frozenset((fields.FB_USED, fields.GPU_UTIL, fields.ENGINE_ACTIVE))  # may be one pod's share
EXPECTED = (
    fields.FB_FREE, fields.FB_USED, fields.FB_RESERVED, fields.GPU_UTIL, fields.BANDWIDTH_UTIL,
    fields.GPU_TEMP, fields.POWER, fields.ENERGY,
)  # fmt: skip
RESERVED_MISSING = (
    "memory (the page lacks DCGM_FI_DEV_FB_RESERVED, without which total is unknown: add it to the "
    "exporter's counters file, or use dcgm-exporter 4.3.1 or later)"
)
SHARES = "memory (the page has only per-pod shares of it, which are never summed)"
_DERIVED_LIMIT = 0.25  # of total: a larger rest is no driver reserve


@dataclass(slots=True)
class Device:
    """One GPU (`instance` "") or MIG instance on one page: candidates by field, then values."""

    uuid: str
    instance: str
    index: int
    name: str = ""
    profile: str = ""
    driver: str = ""
    candidates: dict[int, list[tuple[frozenset[str], float]]] = field(default_factory=dict)
    missing: set[str] = field(default_factory=lambda: {fields.XID_MISSING})

    def value(self, wanted: int) -> float | None:
        """The device's own value: the series without workload labels, else the only one there is."""
        rows = self.candidates.get(wanted, ())
        own = {value for labels, value in rows if not labels}
        if own:
            return own.pop() if len(own) == 1 else None
        values = {value for _, value in rows}
        share = wanted in SHARED_FIELDS and (len(rows) > 1 or any("vgpu" in labels for labels, _ in rows))
        return values.pop() if len(values) == 1 and not share else None


def read_page(body: bytes) -> list[Device]:
    """The devices on a page, whole GPUs before their instances; raises SourceError."""
    families = pick(body, WANTED, dcgm=True)
    devices: dict[tuple[str, str], Device] = {}
    for name, wanted in fields.EXPORTER_NAMES.items():
        for series, value in families.series(name):
            device = _device(devices, {key.lower(): text for key, text in series.labels.items()})
            if device is not None:
                labels = frozenset(
                    key for key, text in series.labels.items() if key.lower() in WORKLOAD_LABELS and text
                )
                device.candidates.setdefault(wanted, []).append((labels, value))
    _refuse_useless(devices.values(), body, families)
    return sorted(devices.values(), key=lambda one: (one.index, one.uuid, one.instance != "", one.instance))


def _device(devices: dict[tuple[str, str], Device], labels: Mapping[str, str]) -> Device | None:
    """The device of a series, made when it is new; None for what is no GPU (switches, links, CPUs)."""
    uuid = printable(labels.get("uuid", ""), 96)
    if not uuid:
        return None
    instance = printable(labels.get("gpu_i_id", ""), 16)
    if instance and (uuid, "") not in devices:
        _device(devices, {**labels, "gpu_i_id": "", "gpu_i_profile": ""})
    device = devices.get((uuid, instance))
    if device is None:
        if len(devices) >= MAX_DEVICES:
            raise SourceError(FailureKind.TOO_LARGE, f"the page has over {MAX_DEVICES} GPUs and instances")
        number = labels.get("gpu", "")
        index = int(number) if number.isascii() and number.isdecimal() and len(number) < 6 else len(devices)
        device = devices[(uuid, instance)] = Device(uuid=uuid, instance=instance, index=index)
    device.name = printable(labels.get("modelname", ""), 96) or device.name
    device.profile = printable(labels.get("gpu_i_profile", ""), 32) or device.profile
    driver = labels.get("dcgm_fi_driver_version") or labels.get("dcgm_fi_system_driver_version", "")
    device.driver = printable(driver, 32) or device.driver
    return device


def _refuse_useless(devices: Iterable[Device], body: bytes, families: Families) -> None:
    if any(fields.FB_USED in one.candidates or fields.FB_FREE in one.candidates for one in devices):
        return
    what = "an empty page" if not body.strip() else "no DCGM_FI_DEV_FB_USED or FB_FREE series with a value"
    also = f" ({families.findings[0]})" if families.findings else ""
    raise SourceError(
        FailureKind.NOT_EXPECTED,
        f"{what}{also}: dcgm-exporter is reloading or has lost its GPUs, or its counters file lacks them; "
        "see its log",
    )


def memory_row(device: Device) -> list[int | None] | None:
    """[total, used, free, reserved] in bytes, None where total cannot be known.

    Reserved None means that used includes the driver's part: drivers before 510, or a total that used
    and free make up alone (DCGM before 2.4).
    """
    used, free = device.value(fields.FB_USED), device.value(fields.FB_FREE)
    total, reserved = device.value(fields.FB_TOTAL), device.value(fields.FB_RESERVED)
    if used is None or free is None:
        return None
    if total is not None and reserved is None:
        rest = total - used - free
        reserved = rest if 8 < rest <= _DERIVED_LIMIT * total else None
    elif total is None:
        major = fields.driver_major(device.driver)
        if reserved is None and (major is None or major >= DRIVER_SPLIT):
            return None
        total = used + free + (reserved or 0)
    return fields.memory_row(total, used, free, reserved)


def message_of(devices: list[Device]) -> dict[str, Any]:
    """A page in the dialect of the workers, for HostView."""
    facts, rows = [], []
    slow: dict[int, dict[str, Any]] = {}
    whole = {one.uuid: one for one in devices if not one.instance}
    parents = {one.uuid for one in devices if one.instance}
    for number, device in enumerate(devices):
        row = memory_row(device)
        _note_missing(device, row, is_parent=not device.instance and device.uuid in parents)
        facts.append(_facts(device, whole[device.uuid], row, is_parent=device.uuid in parents))
        busy = _busy(device, device.uuid in parents)
        if row is not None:
            rows.append([number, *row, row[1], row[2], COLLECT_S, *busy, 0.0])
        slow[number] = {"busy": busy}
        if not device.instance:
            slow[number] |= _slow([device, *(one for one in devices if one.uuid == device.uuid)])
    driver = next((one.driver for one in devices if one.driver), "")
    return {
        "facts": {"driver": driver, "host_pids": False, "memory_only": False, "gpus": facts},
        "g": rows,
        "x": slow,
    }


def _facts(device: Device, gpu: Device, row: list[int | None] | None, *, is_parent: bool) -> dict[str, Any]:
    instance = bool(device.instance)
    return {
        "uuid": f"MIG-{device.uuid}/{device.instance}" if instance else device.uuid,
        "index": gpu.index,
        "name": device.name or gpu.name,
        "health": "ok",
        "detail": "",
        "mig_profile": device.profile if instance else "",
        "v1": row is not None and row[3] is None,
        "parent_uuid": device.uuid if instance else "",
        "is_mig_parent": is_parent and not instance,
        "missing": sorted(device.missing),
    }


def _note_missing(device: Device, row: list[int | None] | None, *, is_parent: bool) -> None:
    """Say which of the default series are not there, and why there is no memory."""
    if row is None and not is_parent:
        has_both = {fields.FB_USED, fields.FB_FREE} <= device.candidates.keys()
        if has_both and device.value(fields.FB_USED) is None:
            device.missing.add(SHARES)
        elif has_both and device.value(fields.FB_RESERVED) is None:
            device.missing.add(RESERVED_MISSING)
        else:
            device.missing.add("memory")
    if not device.instance and not is_parent:
        absent = [one for one in EXPECTED if one not in device.candidates]
        device.missing.update(fields.TITLES[one] for one in absent if one not in fields.MEMORY_FIELDS)


def _busy(device: Device, is_mig: bool) -> tuple[float | None, float | None]:
    """(busy, memory bandwidth) in percent. On MIG only the profiling ratio speaks of an instance."""
    active = device.value(fields.ENGINE_ACTIVE)
    percent = None if active is None or not 0 <= active <= 1 else 100 * active
    if is_mig:
        return (percent if device.instance else None), None
    busy, bandwidth = (_percent(device.value(one)) for one in (fields.GPU_UTIL, fields.BANDWIDTH_UTIL))
    return (percent if busy is None else busy), bandwidth


def _percent(value: float | None) -> float | None:
    return value if value is not None and 0 <= value <= 100 else None


def _slow(devices: list[Device]) -> dict[str, Any]:
    """Values of the board: from the GPU's own series, else from those of its instances where they agree."""

    def of(wanted: int) -> float | None:
        found = {value for one in devices if (value := one.value(wanted)) is not None}
        own = devices[0].value(wanted)
        return own if own is not None else found.pop() if len(found) == 1 else None

    return fields.slow_values(of)


class DcgmExporterSource:
    """Source[HostGpus] from dcgm-exporter's page, every two seconds.

    Raises SourceError: NOT_EXPECTED (no memory series), TIMED_OUT (also: the page stands still), and
    what the connection may meet. `poll` belongs to one thread.
    """

    def __init__(
        self,
        settings: GpuSettings,
        *,
        state_dir: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = "dcgm_exporter"
        self.period_s = PERIOD_S
        self.expected_period_s = PERIOD_S
        self.deadline_s = DEADLINE_S
        self._clock = clock
        self._client = HttpClient(settings.dcgm_exporter_url)
        self._path = "" if self._client.url.path else "/metrics"
        inventory = Inventory(state_dir / "inventory.json")
        self._view = HostView(settings, inventory, lister="dcgm-exporter", reported_by="dcgm_exporter")
        self._energy: tuple[float | None, ...] = ()
        self._energy_s = 0.0
        self._fields: frozenset[int] = frozenset()

    def poll(self) -> HostGpus:
        """One scrape within 1.5 s in all."""
        try:
            body = self._client.get(self._path, deadline=Deadline(self.deadline_s)).body
            devices = read_page(body)
        except SourceError:
            self._view.reset()
            raise
        now_s = self._clock()
        self._refuse_frozen(devices, now_s)
        self._note_set(devices)
        self._view.reset()
        self._view.apply(now_s, message_of(devices))
        return self._view.build(now_s)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def known(self) -> HostGpus:
        """The GPUs known of while the page cannot be read."""
        return self._view.known("dcgm-exporter is not being read")

    def _refuse_frozen(self, devices: list[Device], now_s: float) -> None:
        """Energy counters of live GPUs never stand still; without them nothing can be told."""
        energy = tuple(one.value(fields.ENERGY) for one in devices if not one.instance)
        if energy != self._energy or all(value is None for value in energy):
            self._energy, self._energy_s = energy, now_s
        elif now_s - self._energy_s > FROZEN_AFTER_S:
            self._view.reset()
            raise SourceError(
                FailureKind.TIMED_OUT,
                f"no energy counter on dcgm-exporter's page has moved for {now_s - self._energy_s:.0f} s: it "
                "serves old values; restart it, and look whether its host engine runs",
            )

    def _note_set(self, devices: list[Device]) -> None:
        """Say once that series are gone: an upgrade or another counters file (this has emptied panels)."""
        found = frozenset(key for one in devices for key in one.candidates)
        gone = self._fields - found
        if gone:
            names = sorted(fields.TITLES.get(one, str(one)) for one in gone)
            log.warning("dcgm-exporter no longer reports some values", extra={"gone": ", ".join(names)})
        self._fields = found
