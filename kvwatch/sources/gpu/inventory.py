"""Which GPUs has this host had? Kept over restarts, so that a vanished GPU is reported, not forgotten."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvwatch import wire

log = logging.getLogger(__name__)
VERSION = 1
MAX_BYTES = 1 << 20
MAX_GPUS = 256
_DAMAGED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownGpu:
    """A GPU seen at least once."""

    uuid: str
    index: int
    name: str = ""


class Inventory:
    """GPUs by UUID, with the index each had. Losing the file costs the memory of absent GPUs, nothing else.

    To forget a GPU that was taken out on purpose, stop the daemon and delete the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, KnownGpu] = {}
        self._pinned: dict[str, int] = {}
        self._complained: set[str] = set()
        self._unsaved = False
        self._unread = False
        self._load()

    def known(self) -> tuple[KnownGpu, ...]:
        """Every GPU seen once, in order of index."""
        return tuple(sorted(self._known.values(), key=lambda gpu: (gpu.index, gpu.uuid)))

    def pinned_index(self, uuid: str, index: int) -> int:
        """The index shown for a GPU: the first one it had in this process, were it renumbered since."""
        pinned = self._pinned.get(uuid)
        if pinned is None:
            taken = set(self._pinned.values())
            pinned = index if index not in taken else next(n for n in range(len(taken) + 1) if n not in taken)
            self._pinned[uuid] = pinned
        return pinned

    def uuid_at(self, index: int, live: Iterable[str]) -> str:
        """The UUID of a GPU that no longer tells it, by the index it had; "" where nobody knows."""
        present = set(live)
        for gpu in self._known.values():
            if gpu.index == index and gpu.uuid not in present:
                return gpu.uuid
        return ""

    def note(self, gpus: Iterable[KnownGpu]) -> None:
        """Remember these; the file is written only when something is new.

        Nor while it cannot be read (no descriptor left, say): that would forget the GPUs in it.
        """
        if self._unread:
            self._load()
        changed = self._unsaved
        for gpu in gpus:
            if self._known.get(gpu.uuid) != gpu and (gpu.uuid in self._known or len(self._known) < MAX_GPUS):
                self._known[gpu.uuid] = gpu
                changed = True
        if changed and self._unread:
            self._unsaved = True
        elif changed:
            self._save()

    def _load(self) -> None:
        """Add the GPUs of the file to those known here; a damaged file counts as empty."""
        self._unread = False
        try:
            page = json.loads(wire.read_small(str(self._path), MAX_BYTES))
            listed = [
                KnownGpu(uuid=str(uuid), index=int(gpu["index"]), name=str(gpu["name"]))
                for uuid, gpu in list(page["gpus"].items())[:MAX_GPUS]
            ]
        except FileNotFoundError:
            return
        except OSError as error:
            self._unread = True
            self._complain("GPU inventory cannot be read: absent GPUs are not shown", error)
        except _DAMAGED as error:
            self._complain("GPU inventory is damaged, starting a new one", error)
        else:
            self._known = {gpu.uuid: gpu for gpu in listed} | self._known

    def _save(self) -> None:
        gpus = {gpu.uuid: {"index": gpu.index, "name": gpu.name} for gpu in self.known()}
        scratch = self._path.with_name(self._path.name + ".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            scratch.write_text(json.dumps({"v": VERSION, "gpus": gpus}, indent=1) + "\n")
            scratch.replace(self._path)
            self._unsaved = False
        except OSError as error:
            self._unsaved = True
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)
            self._complain("GPU inventory not written: absent GPUs will be forgotten at a restart", error)

    def _complain(self, message: str, error: Exception) -> None:
        if message not in self._complained:
            self._complained.add(message)
            log.warning(message, extra={"path": str(self._path), "error": str(error)})
