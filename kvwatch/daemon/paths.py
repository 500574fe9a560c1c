"""Where the daemon keeps its files: the directories systemd gives, else those of the system or the user."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path


class DirectoryError(Exception):
    """A directory cannot be made or written; the text names it and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Runtime files (sockets, leases, locks) and state that outlives a reboot."""

    runtime: Path
    state: Path

    @property
    def limits(self) -> Path:
        """Lease files, one per server."""
        return self.runtime / "limits"

    @property
    def maintenance(self) -> Path:
        """The maintenance switch."""
        return self.runtime / "maintenance.json"

    @property
    def outstanding(self) -> Path:
        """Levers that must be given back, over restarts and reboots."""
        return self.state / "outstanding.json"

    @property
    def evidence(self) -> Path:
        """What was kept of the moments when a paging rule turned red."""
        return self.state / "evidence"

    @property
    def lock(self) -> Path:
        """Held by the running daemon."""
        return self.runtime / "daemon.lock"


def _first(variable: str) -> str | None:
    """Systemd separates several directories by colons; ours is the first."""
    value = os.environ.get(variable, "")
    return value.split(":")[0] or None


def find() -> Paths:
    """systemd's directories if set, else /run and /var/lib as root, else the XDG directories."""
    root = os.geteuid() == 0
    state = _first("STATE_DIRECTORY") or ("/var/lib/kvwatch" if root else f"{_state_base()}/kvwatch")
    runtime = _first("RUNTIME_DIRECTORY") or ("/run/kvwatch" if root else f"{_runtime_base()}/kvwatch")
    return Paths(runtime=Path(runtime), state=Path(state))


def _runtime_base() -> str:
    given = os.environ.get("XDG_RUNTIME_DIR")
    return given or str(own_folder(Path(f"/tmp/kvwatch-{os.geteuid()}")))  # noqa: S108


def own_folder(path: Path) -> Path:
    """A folder in a place where everybody may make one. Raises DirectoryError unless it is ours alone: links
    laid out in somebody else's would lead our writing into our own files."""
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o755)
        found = path.lstat()
    except OSError as error:
        raise DirectoryError(f"{path}: {error.strerror}; set RUNTIME_DIRECTORY to your own") from error
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not ours or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DirectoryError(
            f"{path}: no folder that uid {os.geteuid()} alone may write; remove it, or set RUNTIME_DIRECTORY "
            "to your own"
        )
    return path


def _state_base() -> str:
    """Raises DirectoryError for a user that has no home (an arbitrary uid in a container)."""
    base = os.environ.get("XDG_STATE_HOME")
    if base:
        return base
    try:
        return str(Path.home() / ".local" / "state")
    except RuntimeError as error:
        raise DirectoryError(
            f"uid {os.geteuid()} has no home directory: set STATE_DIRECTORY to a folder it may write"
        ) from error


def prepare(paths: Paths) -> None:
    """Make the directories: the runtime one readable by engines, the state one private.

    Raises DirectoryError with the path and the fix.
    """
    for path, mode in ((paths.runtime, 0o755), (paths.limits, 0o755), (paths.state, 0o750)):
        try:
            path.mkdir(parents=True, exist_ok=True, mode=mode)
        except OSError as error:
            raise DirectoryError(
                f"{path}: cannot make this directory ({error.strerror}); create it for this user, "
                "or set RUNTIME_DIRECTORY and STATE_DIRECTORY"
            ) from error
        if not os.access(path, os.W_OK | os.X_OK):
            raise DirectoryError(f"{path}: not writable by uid {os.geteuid()}; give it to this user")


def replace_file(path: Path, text: str, mode: int = 0o644, *, sync: bool = False) -> None:
    """Write a whole file or nothing: a temporary file beside it, then a rename. Raises OSError.

    With `sync` the content is on disk before the rename, so that a crash of the host keeps it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # of a dead process with our number, or no file at all
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            os.fchmod(stream.fileno(), mode)  # the umask of the unit is stricter than this file may be
            stream.write(text)
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
