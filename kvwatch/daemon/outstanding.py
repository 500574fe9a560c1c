"""What must be given back: written to disk before a lever without an end of its own is moved."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvwatch.daemon.paths import replace_file

log = logging.getLogger("kvwatch.outstanding")

MAX_BYTES = 256 * 1024


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

    The lock protects the entries and the file: lanes of several targets write here.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._entries = {entry.key: entry for entry in _read(path)}

    def entries(self) -> list[Entry]:
        """What is out now."""
        with self._lock:
            return list(self._entries.values())

    def add(self, entry: Entry) -> None:
        """Remember a lever before it is moved. Raises OSError: then it must not be moved."""
        with self._lock:
            if entry.key in self._entries:
                return
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
        replace_file(self._path, text, mode=0o600, sync=True)
        self._entries = entries


def _read(path: Path) -> list[Entry]:
    """The entries a dead run left; a damaged file is kept aside and said aloud."""
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        log.error("%s: %s; limits of an earlier run cannot be given back", path, error.strerror)
        return []
    try:
        records = json.loads(content)["entries"]
        return [
            Entry(
                server=str(record["server"]),
                action=str(record["action"]),
                params=dict(record["params"]),
                since_wall_s=float(record["since_wall_s"]),
            )
            for record in records
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        aside = path.with_suffix(".damaged")
        log.error("%s is damaged (%s), kept as %s; check the levers by hand", path, error, aside)
        try:
            path.replace(aside)
        except OSError:
            log.exception("cannot set the damaged file aside")
        return []
