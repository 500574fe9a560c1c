"""What must be given back: written to disk before a lever without an end of its own is moved."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvwatch import wire
from kvwatch.daemon.paths import replace_file

log = logging.getLogger("kvwatch.outstanding")

MAX_BYTES = 256 * 1024
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One lever that may hold a limit of ours."""

    server: str
    action: str
    params: Mapping[str, object]
    since_wall_s: float

    @property
    def key(self) -> str:
        """The same lever of the same server is one entry, however often it is moved."""
        return f"{self.server} {self.action} {json.dumps(self.params, sort_keys=True, default=list)}"


class Outstanding:
    """The entries, in memory and on disk alike. Every change is on disk before it returns.

    The lock protects the entries and the file: lanes of several targets write here. `problem` is
    what was wrong with the file at start, or "".
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._unreadable: OSError | None = None
        self.problem = ""
        self._entries = {entry.key: entry for entry in self._read()}

    def entries(self) -> list[Entry]:
        """What is out now."""
        with self._lock:
            return list(self._entries.values())

    def add(self, entry: Entry) -> None:
        """Remember a lever before it is moved. Raises OSError: then it must not be moved."""
        with self._lock:
            if self._unreadable is not None:
                raise self._unreadable
            if entry.key not in self._entries:
                self._save({**self._entries, entry.key: entry})

    def remove(self, entry: Entry) -> None:
        """Forget a lever after it has given back. A failing disk leaves it: giving back twice is harmless."""
        with self._lock:
            if entry.key not in self._entries:
                return
            left = {key: value for key, value in self._entries.items() if key != entry.key}
            try:
                self._save(left)
            except OSError as error:
                log.warning("%s: %s; the limit will be given back once more", self._path, error.strerror)

    @contextlib.contextmanager
    def lever(self, entry: Entry, timeout_s: float) -> Iterator[tuple[int | None, bool]]:
        """The lever's lock: a descriptor for the program that moves it, and whether the lock was had.

        The program inherits the descriptor, so that a lever counts as busy while a program that a
        dead kvwatch started still runs: what it does must come before the giving back.
        """
        name = hashlib.sha256(entry.key.encode()).hexdigest()[:16]
        folder = self._path.parent / "levers"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            log.warning("%s: %s; levers are moved without their locks", folder, error.strerror)
            yield None, False
            return
        had = False
        try:
            had = _lock(descriptor, timeout_s)
            yield descriptor, had
        finally:
            if had:
                # A child in a session of its own may hold a copy still; unlocking counts for all copies.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _save(self, entries: dict[str, Entry]) -> None:
        records = [
            {
                "server": entry.server,
                "action": entry.action,
                "params": dict(entry.params),
                "since_wall_s": entry.since_wall_s,
            }
            for entry in entries.values()
        ]
        text = json.dumps({"v": 1, "entries": records}, indent=1, default=list) + "\n"
        if len(text) > MAX_BYTES:
            raise OSError(errno.EFBIG, "too many levers")
        replace_file(self._path, text, mode=0o600, sync=True)
        _sync_folder(self._path.parent)
        self._entries = entries

    def _read(self) -> list[Entry]:
        """The entries a dead run left; a damaged file is kept aside and said aloud."""
        try:
            content = wire.read_small(str(self._path), MAX_BYTES)
        except FileNotFoundError:
            return []
        except OSError as error:
            self._unreadable = error
            self.problem = f"{self._path}: {error.strerror}; limits of an earlier run cannot be given back"
            log.error("%s", self.problem)
            return []
        try:
            return [_entry(record) for record in json.loads(content)["entries"]]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            self._set_aside(error)
            return []

    def _set_aside(self, error: Exception) -> None:
        aside = self._path.with_suffix(".damaged")
        self.problem = f"{self._path} is damaged ({error}), kept as {aside}; check the levers by hand"
        log.error("%s", self.problem)
        try:
            self._path.replace(aside)
        except OSError:
            log.exception("cannot set the damaged file aside")


def _entry(record: Mapping[str, object]) -> Entry:
    server, action, params = record["server"], record["action"], record["params"]
    since_wall_s = record["since_wall_s"]
    if not isinstance(server, str) or not isinstance(action, str) or not isinstance(params, dict):
        raise TypeError("an entry needs server and action as text, and params as a table")
    if not isinstance(since_wall_s, int | float):
        raise TypeError("since_wall_s is no number")
    return Entry(server=server, action=action, params=params, since_wall_s=float(since_wall_s))


def _lock(descriptor: int, timeout_s: float) -> bool:
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end_s:
                return False
            time.sleep(_POLL_S)
        else:
            return True


def _sync_folder(folder: Path) -> None:
    """The new name itself survives a crash of the host only once its folder is on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
