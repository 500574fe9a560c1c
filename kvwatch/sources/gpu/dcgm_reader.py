"""What does the host engine say of each GPU and MIG instance? Calls through DCGM's own Python bindings.

Only `dcgm_structs` and `dcgm_agent` are imported: the larger modules (`pydcgm`, `DcgmReader`, `DcgmDiag`)
have failed at import or in use in several releases (DCGM#165, #262). Used of them, the same from
2.4 to 4.6: connect by dcgmConnect_v2, watch groups of numeric field ids, read by
dcgmEntitiesGetLatestValues. Never an embedded engine: it would open every GPU and fight over the
profiling hardware with the one that runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

from kvwatch.sources.gpu import dcgm_fields as fields

SLOW_PERIODS = 10  # everything but memory is watched at a tenth of its rate
STALE_PERIODS = 3.0
CONNECT_TIMEOUT_MS = 2000
GPU, GPU_INSTANCE = 1, 4  # dcgm_field_entity_group_t
EMPTY_GROUP = 1
_PROFILE = re.compile(r"(?:\d+c\.)?\d+g\.\d+gb(?:\+[\w.]+)?")
Key = tuple[int, int]
Value = int | float | str | None


class EngineGoneError(Exception):
    """Only a new connection, made by a new process, can help; `code` is DCGM's."""

    def __init__(self, code: int, why: str = "") -> None:
        super().__init__(why or fields.explain(code))
        self.code = code


class DcgmCallError(Exception):
    """A call failed with a code that concerns only what it asked for."""

    def __init__(self, code: int) -> None:
        super().__init__(fields.explain(code))
        self.code = code


class Entity:
    """One GPU or MIG instance with its newest values. `code` is the status of its memory reading."""

    def __init__(self, key: Key, gpu_id: int, instance: int | None = None) -> None:
        self.key = key
        self.gpu_id = gpu_id
        self.instance = instance  # NVML's GPU instance id
        self.values: dict[int, Value] = {}
        self.code = 0
        self.status_code = 0
        self.missing: set[str] = {fields.XID_MISSING}
        self.is_mig_parent = False
        self.uuid = ""  # kept when a later reading lacks it
        self.name = ""
        self.stale_s: float | None = None  # how old its newest memory value is, where that is too old

    def number(self, field: int) -> int | float | None:
        """A current, known number of a field."""
        value = self.values.get(field)
        return None if isinstance(value, str) else value

    def text(self, field: int) -> str:
        """A current, known text of a field, or ""."""
        value = self.values.get(field)
        return value if isinstance(value, str) else ""


class Engine:
    """One connection. Every method may block for as long as the host engine does."""

    def __init__(
        self, structs: Any, agent: Any, address: str, *, every_s: float = 1.0, profiling: bool = False
    ) -> None:
        self.every_s = every_s
        self.slow_every_s = SLOW_PERIODS * every_s
        self._structs = structs
        self._agent = agent
        self._address = address
        self.profiling = profiling
        self._handle: Any = None
        self._groups: list[tuple[Any, Any]] = []
        self._num_groups = 0
        self._refused: dict[int, set[str]] = {}
        self.entities: list[Entity] = []

    # -- guarded calls -------------------------------------------------------------------------

    def call(self, name: str, *args: Any) -> Any:
        """Call the bindings; raises EngineGoneError or DcgmCallError."""
        try:
            return getattr(self._agent, name)(*args)
        except self._structs.DCGMError as error:
            code = int(error.value)
            if code in fields.GONE:
                raise EngineGoneError(code) from error
            raise DcgmCallError(code) from error
        except (AttributeError, TypeError, ValueError) as error:
            why = f"the DCGM bindings failed in {name}: {error!r}; use those of the engine's own version"
            raise EngineGoneError(fields.VERSION_MISMATCH, why) from error

    def connect(self) -> None:
        """Load the library and connect to the standalone host engine, within two seconds."""
        self._load_library()
        params = self._structs.c_dcgmConnectV2Params_v2()
        self._guarded("dcgmInit")
        params.persistAfterDisconnect = 0
        params.timeoutMs = CONNECT_TIMEOUT_MS
        params.addressIsUnixSocket = int(self._address.startswith("/"))
        self._handle = self._guarded("dcgmConnect_v2", self._address.encode(), params)

    def _load_library(self) -> None:
        """Where the bindings look, then the folders of LD_LIBRARY_PATH (DCGM 2 and 3.0 ignore it)."""
        folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
        failure: Exception | None = None
        for arguments in ((), *((folder,) for folder in folders)):
            try:
                self._structs._dcgmInit(*arguments)
                return
            except self._structs.DCGMError as error:
                failure = failure or EngineGoneError(int(error.value))
            except OSError as error:
                failure = failure or EngineGoneError(
                    fields.LIBRARY_NOT_FOUND, f"libdcgm cannot be loaded: {error}"
                )
        raise failure or EngineGoneError(fields.LIBRARY_NOT_FOUND)

    def disconnect(self) -> None:
        """Let go of the engine; what was watched for us ends with the connection."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._guarded("dcgmDisconnect", handle)

    def _guarded(self, name: str, *args: Any) -> Any:
        """A call without which there is no connection: every failure ends it."""
        try:
            return self.call(name, *args)
        except DcgmCallError as error:
            raise EngineGoneError(error.code) from error

    # -- entities ------------------------------------------------------------------------------

    def enumerate(self) -> bool:
        """List GPUs and MIG instances anew; on a change watch the new set. Says whether it changed."""
        found = [
            Entity((GPU, int(gpu)), int(gpu)) for gpu in self._guarded("dcgmGetAllDevices", self._handle)
        ]
        gpus = {entity.gpu_id: entity for entity in found}
        for entity in self._instances(gpus):
            found.append(entity)
            gpus[entity.gpu_id].is_mig_parent = True
        if [(one.key, one.instance) for one in found] == [(one.key, one.instance) for one in self.entities]:
            return False
        self.entities = found
        self._watch_all()
        return True

    def _instances(self, gpus: dict[int, Entity]) -> Iterable[Entity]:
        try:
            tree = self.call("dcgmGetGpuInstanceHierarchy", self._handle)
        except DcgmCallError:  # no MIG here
            return
        for i in range(int(tree.count)):
            row = tree.entityList[i]
            gpu_id = int(row.parent.entityId)
            if int(row.entity.entityGroupId) == GPU_INSTANCE and gpu_id in gpus:
                key = (GPU_INSTANCE, int(row.entity.entityId))
                yield Entity(key, gpu_id, int(row.info.nvmlInstanceId))

    def _watch_all(self) -> None:
        self._unwatch_all()
        gpus = [one.key for one in self.entities if one.key[0] == GPU]
        instances = [one.key for one in self.entities if one.key[0] == GPU_INSTANCE]
        self._watch(gpus + instances, fields.MEMORY_FIELDS, self.every_s)
        self._watch(gpus, fields.SLOW_FIELDS, self.slow_every_s)
        self._watch(instances, (fields.NAME,), self.slow_every_s)
        if self.profiling:
            self._watch(gpus + instances, (fields.ENGINE_ACTIVE,), self.slow_every_s)
        with contextlib.suppress(DcgmCallError):  # once, so that the first reading is there; never in a loop
            self.call("dcgmUpdateAllFields", self._handle, 1)

    def _watch(self, keys: Sequence[Key], ids: Sequence[int], every_s: float) -> None:
        """Watch fields; a refusal (profiling, above all) makes them a missing capability."""
        if not keys:
            return
        self._num_groups += 1
        name = f"kvwatch-{os.getpid()}-{self._num_groups}".encode()
        try:
            group = self.call("dcgmGroupCreate", self._handle, EMPTY_GROUP, name)
            for key in keys:
                self.call("dcgmGroupAddEntity", self._handle, group, *key)
            field_group = self.call("dcgmFieldGroupCreate", self._handle, list(ids), name)
            self._groups.append((group, field_group))
            keep_s = STALE_PERIODS * every_s
            self.call("dcgmWatchFields", self._handle, group, field_group, round(every_s * 1e6), keep_s, 2)
        except DcgmCallError as error:
            for field in ids:
                title = fields.TITLES.get(field)
                if title is not None:
                    self._refused.setdefault(field, set()).add(f"{title} ({error})")

    def _unwatch_all(self) -> None:
        groups, self._groups, self._refused = self._groups, [], {}
        for group, field_group in groups:
            for name, *args in (
                ("dcgmUnwatchFields", group, field_group),
                ("dcgmFieldGroupDestroy", field_group),
                ("dcgmGroupDestroy", group),
            ):
                try:
                    self.call(name, self._handle, *args)
                except DcgmCallError:  # gone already
                    continue

    # -- reading -------------------------------------------------------------------------------

    def read_memory(self) -> None:
        """The newest memory values of everything, in one call."""
        stale = STALE_PERIODS * self.every_s
        unwatched = 0
        for entity, rows in self._latest(self.entities, fields.MEMORY_FIELDS):
            self._take(entity, rows, stale)
            entity.code = _worst(rows)
            entity.stale_s = self._staleness(rows, stale)
            unwatched += entity.code == fields.NOT_WATCHED
            if entity.key[0] == GPU and (entity.stale_s is not None or fields.FB_TOTAL not in entity.values):
                self._ask_status(entity)
        if unwatched and unwatched == len(self.entities):
            self._watch_all()

    def read_slow(self) -> None:
        """Everything else, and the state of each GPU as the engine sees it."""
        stale = STALE_PERIODS * self.slow_every_s
        gpus = [one for one in self.entities if one.key[0] == GPU]
        instances = [one for one in self.entities if one.key[0] == GPU_INSTANCE]
        extra = (fields.ENGINE_ACTIVE,) if self.profiling else ()
        for entity, rows in self._latest(gpus, (*fields.SLOW_FIELDS, *extra)):
            self._take(entity, rows, stale)
        for entity, rows in self._latest(instances, (fields.NAME, *extra)):
            self._take(entity, rows, stale)
        for entity in gpus:
            self._ask_status(entity)

    def _ask_status(self, entity: Entity) -> None:
        """The engine's own view of a GPU: well, lost, inaccessible, detached (bindings of 4.0 and later)."""
        if not hasattr(self._agent, "dcgmGetGpuStatus"):
            return
        try:
            entity.status_code = int(self.call("dcgmGetGpuStatus", self._handle, entity.gpu_id))
        except DcgmCallError:
            entity.status_code = 0

    def _latest(self, entities: Sequence[Entity], ids: Sequence[int]) -> list[tuple[Entity, list[Any]]]:
        """Cached values of fields by entity: one call, or one per entity where one spoils it."""
        if not entities:
            return []
        try:
            return list(zip(entities, self._ask(entities, ids), strict=True))
        except DcgmCallError as error:
            if len(entities) == 1:
                entities[0].values = {}
                entities[0].code = error.code
                return []
        found = []
        for entity in entities:
            found += self._latest([entity], ids)
        return found

    def _ask(self, entities: Sequence[Entity], ids: Sequence[int]) -> list[list[Any]]:
        pairs = []
        for entity in entities:
            pair = self._structs.c_dcgmGroupEntityPair_t()
            pair.entityGroupId, pair.entityId = entity.key
            pairs.append(pair)
        rows: dict[Key, list[Any]] = {entity.key: [] for entity in entities}
        for value in self.call("dcgmEntitiesGetLatestValues", self._handle, pairs, list(ids), 0):
            key = (int(value.entityGroupId), int(value.entityId))
            if key in rows:
                rows[key].append(value)
        return [rows[entity.key] for entity in entities]

    def _take(self, entity: Entity, rows: Iterable[Any], stale_s: float) -> None:
        """Keep what is good, fresh and no blank; everything else makes the field absent."""
        now_s = time.time()
        for row in rows:
            field = int(row.fieldId)
            entity.values.pop(field, None)
            title = fields.TITLES.get(field)
            raw = None if row.status else _decode(row)
            if title is not None:
                self._note_capability(entity, title, row.status, raw)
            if raw is None or abs(now_s - row.ts / 1e6) > stale_s:
                continue
            value = fields.known_text(raw) or None if isinstance(raw, str) else fields.known(raw)
            if value is not None:
                entity.values[field] = value
        for field, texts in self._refused.items():
            entity.missing |= texts
            entity.values.pop(field, None)

    @staticmethod
    def _note_capability(entity: Entity, title: str, status: int, raw: Value) -> None:
        number = None if isinstance(raw, str) else raw
        if status in fields.PROFILING_CODES or fields.incapable(number):
            entity.missing.add(title)
        elif number is not None and fields.known(number) is not None:
            entity.missing.discard(title)

    @staticmethod
    def _staleness(rows: Iterable[Any], stale_s: float) -> float | None:
        """Age of the newest good memory value where it is too old."""
        times = [row.ts / 1e6 for row in rows if not row.status and row.ts]
        if not times:
            return None
        age_s = time.time() - max(times)
        return age_s if abs(age_s) > stale_s else None


def _worst(rows: Iterable[Any]) -> int:
    """The status that tells most about the entity: one of the GPU before one of the reading."""
    codes = [int(row.status) for row in rows]
    for code in codes:
        if fields.health(code) != "ok":
            return code
    return next((code for code in codes if code), 0)


def _decode(row: Any) -> Value:
    """The value by its declared type; None for types that are never asked for."""
    kind = row.fieldType
    if kind in (ord("i"), ord("t")):
        return int(row.value.i64)
    if kind == ord("d"):
        return float(row.value.dbl)
    if kind == ord("s"):
        return _text(row)
    return None


def _text(row: Any) -> str | None:
    """A text value: the bindings decode it themselves, and raise where it is no UTF-8."""
    try:
        raw = row.value.str
    except ValueError:
        return None
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


def profile_of(name: str) -> str:
    """The MIG profile in a device name such as "NVIDIA H100 MIG 1g.10gb", or ""."""
    found = _PROFILE.search(name)
    return found[0] if found else ""
