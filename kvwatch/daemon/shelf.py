"""Where does evidence lie? In files beside the state, a bounded number of them, touched by one thread alone.

Neither the loop nor a web worker opens a file here: the loop leaves a job and goes on, and a reader
waits for the thread a short time at most. What cannot be written is kept in memory and tried again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import stat
import threading
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kvwatch.catalogue.alert_evidence import parse
from kvwatch.daemon.paths import replace_file
from kvwatch.exporters.provider import EvidenceTally

log = logging.getLogger("kvwatch.evidence")

MAX_FILES = 50
MAX_TOTAL_BYTES = 20 * 1024 * 1024
MAX_PIECE_BYTES = 4 * 1024 * 1024  # of one that is read: ours have 1 MiB at most
MAX_JOBS = 128
MAX_HELD = 8  # pieces in memory while the directory takes none; packed, about 20 KiB each
RETRY_S = 60.0
READ_S = 3.0
CLOSE_S = 2.0
FILE_MODE = 0o640
_SUFFIX = ".json"

Job = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """Something to tell: a piece was written, or pieces cannot be (or can be again)."""

    message: str
    name: str


class _Answer:
    """What a reader waits for."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.data: bytes | None = None
        self.error: OSError | None = None


class Shelf:
    """Pieces of evidence by name. Every method but `close` returns at once, `read` within READ_S."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs: queue.Queue[Job | None] = queue.Queue(MAX_JOBS)
        self._lock = threading.Lock()  # guards everything below
        self._sizes: dict[str, int] = {}
        self._held: dict[str, bytes] = {}
        self._tally = EvidenceTally()
        self._thread: threading.Thread | None = None
        self._stuck = False  # a reader has waited in vain; no other one does until the thread moves
        self._news: deque[News] = deque(maxlen=MAX_JOBS)
        self._look()

    # for the loop

    def put(self, name: str, make: Callable[[], bytes]) -> None:
        """Have a piece made and written by the thread."""
        self._leave(lambda: self._store(name, make()))

    def change(self, name: str, edit: Callable[[bytes], bytes]) -> None:
        """Have a piece that is there replaced."""

        def job() -> None:
            data = self._load(name)
            if data is not None:
                self._store(name, edit(data))

        self._leave(job)

    def news(self) -> list[News]:
        """What there is to tell since the last call."""
        found = []
        while self._news:
            found.append(self._news.popleft())
        return found

    def close(self) -> None:
        """Finish what was left, for a moment at most."""
        thread = self._thread
        if thread is not None and self._offer(None):
            thread.join(CLOSE_S)

    # for the web server

    def names(self) -> list[str]:
        """All names, the newest first."""
        with self._lock:
            return sorted({*self._sizes, *self._held}, reverse=True)

    def tally(self) -> EvidenceTally:
        """How keeping them goes."""
        with self._lock:
            return replace(self._tally, unwritten=len(self._held), size_bytes=sum(self._sizes.values()))

    def read(self, name: str) -> bytes | None:
        """One piece; None where there is none. OSError where the disk fails or does not answer in time."""
        with self._lock:
            held, known, stuck = self._held.get(name), name in self._sizes, self._stuck
        if held is not None:
            return zlib.decompress(held)
        if not known:
            return None
        asked = _Answer()
        if stuck or not self._offer(lambda: self._reply(name, asked)):
            raise TimeoutError("the state directory does not answer")
        if not asked.done.wait(READ_S):
            self._stuck = True
            raise TimeoutError(f"the state directory has not answered for {READ_S:g} s")
        if asked.error is not None:
            raise asked.error
        return asked.data

    # jobs

    def _leave(self, job: Job) -> None:
        if not self._offer(job):
            with self._lock:
                self._tally = replace(self._tally, dropped_total=self._tally.dropped_total + 1)

    def _offer(self, job: Job | None) -> bool:
        """Queue a job and see to the thread; False when there are too many."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="evidence", daemon=True)
                self._thread.start()
        return True

    def _work(self) -> None:
        """One job after another; a fault of ours in one ends the thread, and the next job starts another."""
        while True:
            try:
                job = self._jobs.get(timeout=RETRY_S if self._held else None)
            except queue.Empty:
                self._retry()
                continue
            if job is None:
                return
            job()
            self._stuck = False

    # the thread

    def _reply(self, name: str, asked: _Answer) -> None:
        try:
            asked.data = self._load(name)
        except OSError as error:
            asked.error = error
        asked.done.set()

    def _load(self, name: str) -> bytes | None:
        held = self._held.get(name)
        if held is not None:
            return zlib.decompress(held)
        try:
            return _content(self._folder / f"{name}{_SUFFIX}")
        except FileNotFoundError:
            with self._lock:
                self._sizes.pop(name, None)
            return None

    def _store(self, name: str, data: bytes) -> None:
        """Write a piece, or keep it in memory and say so once."""
        try:
            new = self._write(name, data)
        except OSError as error:
            self._keep(name, data, error)
            return
        if new:
            self._news.append(News(message=f"evidence kept: /evidence/{name}", name=name))
        self._retry()

    def _write(self, name: str, data: bytes) -> bool:
        """Make room and write; whether the piece is new on disk. Raises OSError."""
        self._folder.mkdir(mode=0o750, exist_ok=True)
        self._make_room(name, len(data))
        path = self._folder / f"{name}{_SUFFIX}"
        replace_file(path, data.decode("utf-8"), mode=FILE_MODE, sync=True)
        with self._lock:
            new = name not in self._sizes
            self._sizes[name] = len(data)
            self._held.pop(name, None)
            self._tally = replace(self._tally, written_total=self._tally.written_total + new)
        return new

    def _make_room(self, name: str, size: int) -> None:
        """Remove the oldest until one more of this size fits. Raises OSError."""
        while True:
            others = {each: kept for each, kept in self._sizes.items() if each != name}
            if len(others) < MAX_FILES and sum(others.values()) + size <= MAX_TOTAL_BYTES:
                return
            oldest = min(others)
            with contextlib.suppress(IsADirectoryError):  # none of ours
                (self._folder / f"{oldest}{_SUFFIX}").unlink(missing_ok=True)
            with self._lock:
                del self._sizes[oldest]

    def _keep(self, name: str, data: bytes, error: OSError) -> None:
        why = f"{self._folder}: {error.strerror or error}; evidence stays in memory until that is mended"
        packed = zlib.compress(data, 1)
        with self._lock:
            first, again = not self._tally.problem, name in self._held
            failed = self._tally.failed_total + (not again)
            self._held[name] = packed
            lost = sorted(self._held)[:-MAX_HELD]
            for each in lost:
                del self._held[each]
            dropped = self._tally.dropped_total + len(lost)
            self._tally = replace(self._tally, problem=why, failed_total=failed, dropped_total=dropped)
        if first:
            log.warning("%s", why)
            self._news.append(News(message=why, name=name))

    def _retry(self) -> None:
        """Write what was held back, the oldest first, until that fails."""
        for name in sorted(self._held):
            try:
                new = self._write(name, zlib.decompress(self._held[name]))
            except OSError:
                return
            if new:
                self._news.append(News(message=f"evidence kept: /evidence/{name}", name=name))
        with self._lock:
            self._tally = replace(self._tally, problem="")

    def _look(self) -> None:
        """What earlier runs left; half-written files go. A folder that is not there is empty."""
        try:
            paths = list(self._folder.iterdir())
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s: %s; earlier evidence is not shown", self._folder, error.strerror)
            return
        for path in paths:
            try:
                self._look_at(path)
            except OSError as error:
                log.warning("%s: %s; it is passed over", path, error.strerror)

    def _look_at(self, path: Path) -> None:
        """Count one piece. What else lies there (a link, a pipe, a file too large) is none of ours."""
        if path.name.startswith(".") and f"{_SUFFIX}." in path.name:
            path.unlink(missing_ok=True)
        elif path.suffix == _SUFFIX and parse(path.stem) is not None:
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_size <= MAX_PIECE_BYTES:
                self._sizes[path.stem] = found.st_size


def _content(path: Path) -> bytes:
    """What is in a piece. OSError for what is none: a pipe would hold the thread for ever, a link may lead
    anywhere, a huge file would fill the memory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        if found.st_size > MAX_PIECE_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return stream.read(MAX_PIECE_BYTES)
