"""Stand-in for DCGM's module of this name: as much of its surface as kvwatch touches, no more."""

import itertools
import types

import dcgm_scenario
import dcgm_structs

if dcgm_scenario.read().get("import") == "exit":
    print("[ERROR] these bindings dislike this interpreter")
    raise SystemExit(1)
if dcgm_scenario.read().get("import") == "error":
    import logger  # noqa: F401 - a module that the package forgot to ship

_numbers = itertools.count(1)
_groups = {}
_watched = set()
GPU, INSTANCE = 1, 4


def _enter(name):
    scenario = dcgm_scenario.read()
    dcgm_scenario.misbehave(scenario)
    code = dcgm_scenario.read().get("errors", {}).get(name, 0)
    if code == "type":
        raise TypeError('can only concatenate str (not "c_void_p") to str')
    if code:
        raise dcgm_structs.DCGMError(code)
    return dcgm_scenario.read()


def dcgmInit():
    _enter("dcgmInit")


def dcgmConnect_v2(address, params):
    dcgm_scenario.note(f"connect {address.decode()} unix={params.addressIsUnixSocket} {params.timeoutMs}")
    _enter("dcgmConnect_v2")
    return object()


def dcgmDisconnect(handle):
    dcgm_scenario.note("disconnect")


def dcgmGetAllDevices(handle):
    scenario = _enter("dcgmGetAllDevices")
    return [gpu["id"] for gpu in scenario["gpus"]]


def dcgmGetGpuStatus(handle, gpu_id):
    scenario = _enter("dcgmGetGpuStatus")
    return next((gpu.get("status", 1) for gpu in scenario["gpus"] if gpu["id"] == gpu_id), 0)


def dcgmGetGpuInstanceHierarchy(handle):
    scenario = _enter("dcgmGetGpuInstanceHierarchy")
    space = types.SimpleNamespace
    rows = [
        space(
            entity=space(entityGroupId=group, entityId=one["id"]),
            parent=space(entityGroupId=GPU, entityId=one["gpu"]),
            info=space(nvmlInstanceId=one["instance"]),
        )
        for one in scenario.get("instances", ())
        for group in (INSTANCE, 5)
    ]
    return space(count=len(rows), entityList=rows)


def dcgmGroupCreate(handle, kind, name):
    _enter("dcgmGroupCreate")
    number = next(_numbers)
    _groups[number] = []
    return number


def dcgmGroupAddEntity(handle, group, entity_group, entity):
    _enter("dcgmGroupAddEntity")
    _groups[group].append((entity_group, entity))


def dcgmFieldGroupCreate(handle, ids, name):
    _enter("dcgmFieldGroupCreate")
    number = next(_numbers)
    _groups[number] = list(ids)
    return number


def dcgmWatchFields(handle, group, field_group, frequency, keep_age, keep_samples):
    scenario = _enter("dcgmWatchFields")
    ids = _groups[field_group]
    dcgm_scenario.note(f"watch {ids} every {frequency} us")
    if any(field >= 1000 for field in ids) and scenario.get("profiling_code"):
        raise dcgm_structs.DCGMError(scenario["profiling_code"])
    _watched.update((key, field) for key in _groups[group] for field in ids)


def dcgmUnwatchFields(handle, group, field_group):
    _watched.difference_update((key, field) for key in _groups[group] for field in _groups[field_group])


def dcgmFieldGroupDestroy(handle, group):
    _groups.pop(group)


def dcgmGroupDestroy(handle, group):
    _groups.pop(group)


def dcgmUpdateAllFields(handle, wait):
    dcgm_scenario.note("update all")
    _enter("dcgmUpdateAllFields")


def dcgmEntitiesGetLatestValues(handle, pairs, ids, flags):
    scenario = _enter("dcgmEntitiesGetLatestValues")
    keys = [(pair.entityGroupId, pair.entityId) for pair in pairs]
    holders = {(GPU, gpu["id"]): gpu for gpu in scenario["gpus"]}
    holders |= {(INSTANCE, one["id"]): one for one in scenario.get("instances", ())}
    if any(key not in holders or holders[key].get("spoils") for key in keys):
        raise dcgm_structs.DCGMError(-1)
    return [_value(scenario, key, field, holders[key]) for key in keys for field in ids]


def _value(scenario, key, field, holder):
    import time

    row = dcgm_structs.FieldValue(entityGroupId=key[0], entityId=key[1], fieldId=field)
    raw = holder["values"].get(str(field))
    code = holder.get("code", 0)
    if (key, field) not in _watched:
        code = -16
    elif raw is None and not code:
        code = -14
    row.status = code
    if code:
        return row
    row.ts = int((time.time() - scenario.get("age_s", 0.0) - holder.get("age_s", 0.0)) * 1e6)
    if isinstance(raw, str):
        row.fieldType = ord("s")
        row.value.str = raw.encode()
    elif isinstance(raw, float):
        row.fieldType = ord("d")
        row.value.dbl = raw
    else:
        row.fieldType = ord("i")
        row.value.i64 = raw
    return row


if dcgm_scenario.read().get("bindings") == "3.3":
    del dcgmGetGpuStatus  # first in those of 4.0
