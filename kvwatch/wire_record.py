"""The datagram's writing side: how an agent's record becomes at most 16 KiB of JSON.

Names are those of docs/agent.md. This is loaded inside servers, so it needs next to nothing; the reading
side, which trusts nothing, is `wire_datagram`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

VERSION = 1
MAX_BYTES = 16 * 1024
MAX_ARENAS = 8
MAX_TEXT = 120
_LONGEST_ADDRESS = 107
_TEXTS = ("gpu_uuid", "host", "limits")
_PARTS = ("allocator", "kv", "scheduler")

Record = dict[str, Any]


@contextlib.contextmanager
def address(path: str) -> Iterator[str]:
    """The socket's path as the kernel takes it (at most 107 bytes), good inside the block. Raises OSError."""
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
        yield path
        return
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # noqa: PTH120
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"  # noqa: PTH119
    finally:
        os.close(folder)


def encode(record: Record, *, seq: int, mono_s: float) -> bytes:
    """The bytes to send. What is None is left out; arenas are dropped, the smallest first, until it fits.

    `record` has `server`, `engine`, `rank` and `pid`, and the parts and texts of docs/agent.md.
    """
    whole: Record = {
        "v": VERSION,
        **{key: record[key] for key in ("server", "engine", "rank", "pid")},
        "seq": seq,
        "mono_s": round(mono_s, 3),
    }
    whole |= {key: _plain(text) for key in _TEXTS if (text := record.get(key))}
    whole |= {key: _present(part) for key in _PARTS if (part := record.get(key)) is not None}
    arenas = whole.get("allocator", {}).get("arenas")
    if arenas:
        arenas = [{**arena, "name": _plain(arena["name"])} for arena in arenas[:MAX_ARENAS]]
        whole["allocator"]["arenas"] = arenas
    while True:
        content = json.dumps(whole, separators=(",", ":"), allow_nan=False).encode()
        if len(content) <= MAX_BYTES or not arenas:
            return content
        arenas.pop()


def _plain(text: str) -> str:
    """Text that every reader takes: printable ASCII, no brackets, cut."""
    kept = (char if " " <= char <= "~" and char not in "[]{}" else " " for char in text[:MAX_TEXT])
    return "".join(kept)


def _present(part: Record) -> Record:
    return {
        key: round(value, 6) if isinstance(value, float) else value
        for key, value in part.items()
        if value is not None
    }
