"""The lease file: how a limit travels from the daemon into a server, and ends by itself.

A lease is one small JSON file per server (docs/leases.md). Whoever reads it honours a sequence
number for `ttl_s` seconds on its own clock, counted from when it first saw that number. Anything
else (no file, another version, another boot, malformed, run out) means: no limit.

`python -m kvwatch.wire read FILE` is the reference reader for scripts.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # loaded inside servers: neither is worth its milliseconds there
    from pathlib import Path

    from kvwatch.model.action import Limit

VERSION = 1
MAX_TTL_S = 120.0
MAX_BYTES = 4096
MAX_RUNNING = 1_000_000
MAX_REASON = 64
BOOT_ID_FILE = "/proc/sys/kernel/random/boot_id"


class Lease(NamedTuple):
    """One lease as it stands in the file. `ttl_s` seconds; `max_running` None: no cap."""

    server: str
    boot_id: str
    seq: int
    ttl_s: float
    max_running: int | None = None
    admit: bool = True
    compact: int = 0
    reason: str = ""

    @property
    def limit(self) -> Limit:
        """What the lease imposes."""
        from kvwatch.model.action import Limit

        return Limit(server=self.server, max_running=self.max_running, admit=self.admit, compact=self.compact)


def clock_s() -> float:
    """Seconds since boot, suspended time included (CLOCK_BOOTTIME); setting the clock moves nothing."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseError(ValueError):
    """The text is not a lease; whoever reads it must act as if there were none."""


def boot_id() -> str:
    """The kernel's identifier of this boot, or "" where it cannot be read."""
    try:
        with open(BOOT_ID_FILE, encoding="utf-8") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def encode(lease: Lease) -> bytes:
    """The file's content. The reason is cut, and freed of what no reader would take."""
    reason = "".join(char if char.isprintable() and char not in "{}[]" else " " for char in lease.reason)
    record = {
        "v": VERSION,
        "server": lease.server,
        "boot_id": lease.boot_id,
        "seq": lease.seq,
        "ttl_s": lease.ttl_s,
        "max_running": lease.max_running,
        "admit": lease.admit,
        "compact": lease.compact,
        "reason": reason[:MAX_REASON],
    }
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def decode(content: bytes) -> Lease:
    """Read a lease; raises LeaseError for anything that is not exactly one."""
    if len(content) > MAX_BYTES:
        raise LeaseError(f"{len(content)} bytes; a lease has at most {MAX_BYTES}")
    # Deep nesting would crash the parser of some Pythons; a lease has none at all.
    if content.count(b"{") != 1 or b"[" in content:
        raise LeaseError("not one flat JSON object")
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise LeaseError(f"not JSON: {error}") from error
    if not isinstance(record, dict) or _whole(record, "v", 0, VERSION) != VERSION:
        raise LeaseError("not version 1")
    max_running = record.get("max_running")
    return Lease(
        server=_text(record, "server", 63),
        boot_id=_text(record, "boot_id", 64),
        seq=_whole(record, "seq", 0, 2**63),
        ttl_s=_ttl(record),
        max_running=None if max_running is None else _whole(record, "max_running", 1, MAX_RUNNING),
        admit=_flag(record, "admit"),
        compact=_whole(record, "compact", 0, 2**63) if "compact" in record else 0,
        reason=_text(record, "reason", MAX_REASON) if "reason" in record else "",
    )


def _text(record: dict[str, object], key: str, longest: int) -> str:
    value = record.get(key)
    if not isinstance(value, str) or len(value) > longest:
        raise LeaseError(f"{key}: expected text of at most {longest} characters")
    return value


def _whole(record: dict[str, object], key: str, least: int, most: int) -> int:
    value = record.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise LeaseError(f"{key}: expected a whole number from {least} to {most}")
    return value


def _flag(record: dict[str, object], key: str) -> bool:
    value = record.get(key)
    if not isinstance(value, bool):
        raise LeaseError(f"{key}: expected true or false")
    return value


def _ttl(record: dict[str, object]) -> float:
    value = record.get("ttl_s")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_TTL_S:
        raise LeaseError(f"ttl_s: expected seconds, more than 0 and at most {MAX_TTL_S:g}")
    return float(value)


class NotPlainError(OSError, LeaseError):
    """What lies there is no regular file: neither a lease nor anything else to read."""


class LeaseReader:
    """Follows one lease file. Cheap to ask often: the file is read only after it was replaced.

    `clock` is seconds that never go back and that count suspended time too: a lease from before a
    suspend is over after it. Never raises from `current`: every fault means "no limit".
    """

    def __init__(
        self,
        path: str | Path,
        *,
        server: str | None = None,
        clock: Callable[[], float] = clock_s,
        boot: str | None = None,
    ) -> None:
        self._path = os.fspath(path)
        self._server = server
        self._clock = clock
        self._boot = boot_id() if boot is None else boot
        self._seen: tuple[int, int, int] | None = None
        self._lease: Lease | None = None
        self._highest_seq = -1
        self._first_seen_s = 0.0

    def current(self) -> Lease | None:
        """The lease in force now, or None: no limit."""
        self._refresh()
        lease = self._lease
        if lease is None or self._clock() - self._first_seen_s >= lease.ttl_s:
            return None
        return lease

    def _refresh(self) -> None:
        try:
            found = os.stat(self._path)
        except (OSError, ValueError):
            self._seen, self._lease = None, None
            return
        key = (found.st_ino, found.st_mtime_ns, found.st_size)
        if key != self._seen:
            self._seen = key
            self._take(self._read())

    def _read(self) -> Lease | None:
        try:
            lease = decode(read_small(self._path))
        except (LeaseError, OSError, ValueError):
            return None
        wrong_server = self._server is not None and lease.server != self._server
        return None if wrong_server or lease.boot_id != self._boot else lease

    def _take(self, lease: Lease | None) -> None:
        """Accept a newer number; the same one gains no time, and an older one is no lease."""
        if lease is not None and lease.seq > self._highest_seq:
            self._highest_seq = lease.seq
            self._first_seen_s = self._clock()
        self._lease = lease if lease is not None and lease.seq == self._highest_seq else None


def read_small(path: str, longest: int = MAX_BYTES) -> bytes:
    """The content of a small regular file, `longest` bytes and one more at most: no symlink followed at its
    end, no waiting on a pipe.

    Raises OSError, NotPlainError when it is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotPlainError(22, "not a regular file")
        return os.read(descriptor, longest + 1)
    finally:
        os.close(descriptor)


def next_seq(last: int) -> int:
    """A number above `last` and above every number an earlier daemon of this boot has used."""
    return max(last + 1, int(clock_s() * 1e6))


def write(directory: Path, lease: Lease) -> None:
    """Replace a server's lease file atomically (0644), in a directory that is no symlink.

    Raises OSError. The file is complete or absent at every moment.
    """
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    # One name for ever, so that a writer killed at this point leaves nothing that piles up. Containers may
    # have this directory too: what lies there is never opened, be it a link to elsewhere or a pipe.
    temporary = f".{lease.server}.tmp"
    try:
        _unlink(temporary, folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o644, dir_fd=folder)
        try:
            os.fchmod(descriptor, 0o644)
            content = encode(lease)
            if os.write(descriptor, content) != len(content):
                raise OSError(28, "No space left on device")
        finally:
            os.close(descriptor)
        os.rename(temporary, f"{lease.server}.json", src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        _unlink(temporary, folder)
        raise
    finally:
        os.close(folder)


def clear(directory: Path, server: str) -> bool:
    """Remove a server's lease, and what a killed writer left of one; False when there was none.

    Raises OSError.
    """
    try:
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        found = _unlink(f"{server}.json", folder)
        _unlink(f".{server}.tmp", folder)
        return found
    finally:
        os.close(folder)


def _unlink(name: str, folder: int) -> bool:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _show_once(path: str) -> int:
    """One look from a script: the file's own age decides, since a script has no clock that runs on."""
    try:
        age_s = time.time() - os.stat(path).st_mtime
        lease = decode(read_small(path))
    except (OSError, ValueError):
        lease, age_s = None, 0.0
    if lease is None or lease.boot_id != boot_id() or not 0 <= age_s < lease.ttl_s:
        print("no limit")
        return 3
    print(encode(lease).decode().strip())
    return 0


def _follow(path: str, seconds: float) -> int:
    """Print a line whenever the limit changes, for at most `seconds`."""
    reader = LeaseReader(path)
    shown: Limit | str | None = "nothing yet"
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        lease = reader.current()
        limit = None if lease is None else lease.limit
        if limit != shown:
            shown = limit
            text = "no limit" if lease is None else encode(lease).decode().strip()
            print(text, flush=True)
        time.sleep(0.1)
    return 0


def main(argv: list[str]) -> int:
    """`read FILE`: 0 and the lease in force, or 3 and "no limit". `follow FILE [SECONDS]`: every change."""
    if len(argv) == 2 and argv[0] == "read":
        return _show_once(argv[1])
    if len(argv) in (2, 3) and argv[0] == "follow":
        return _follow(argv[1], float(argv[2]) if len(argv) == 3 else float("inf"))
    print("usage: python -m kvwatch.wire read FILE | follow FILE [SECONDS]")
    return 2


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
