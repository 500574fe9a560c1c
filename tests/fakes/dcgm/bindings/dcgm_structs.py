"""Stand-in for DCGM's module of this name: as much of its surface as kvwatch touches, no more."""

import ctypes

import dcgm_scenario


class DCGMError(Exception):
    def __init__(self, value):
        super().__init__(f"DCGM error {value}")
        self.value = value


class c_dcgmConnectV2Params_v2(ctypes.Structure):  # noqa: N801
    _fields_ = [
        ("version", ctypes.c_uint),
        ("persistAfterDisconnect", ctypes.c_uint),
        ("timeoutMs", ctypes.c_uint),
        ("addressIsUnixSocket", ctypes.c_uint),
    ]


class c_dcgmGroupEntityPair_t(ctypes.Structure):  # noqa: N801
    _fields_ = [("entityGroupId", ctypes.c_uint32), ("entityId", ctypes.c_uint32)]


class FieldValueUnion(ctypes.Union):
    _fields_ = [("i64", ctypes.c_int64), ("dbl", ctypes.c_double), ("str", ctypes.c_char * 256)]

    def __getattribute__(self, key):
        """As the vendor's union does: bytes come out as text."""
        value = super().__getattribute__(key)
        return value.decode() if isinstance(value, bytes) else value


class FieldValue(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        ("entityGroupId", ctypes.c_uint),
        ("entityId", ctypes.c_uint),
        ("fieldId", ctypes.c_ushort),
        ("fieldType", ctypes.c_short),
        ("status", ctypes.c_int),
        ("unused", ctypes.c_uint),
        ("ts", ctypes.c_int64),
        ("value", FieldValueUnion),
    ]


def _dcgmInit(libDcgmPath=None):  # noqa: N803
    code = dcgm_scenario.read().get("library", 0)
    if code:
        raise DCGMError(code)
