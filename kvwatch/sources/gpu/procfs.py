"""Who is the process behind a pid? Unprivileged reading of /proc, cached per pid and start time.

Whether pids from the driver (always those of the host) resolve here is decided by the inode of our
pid namespace: the first one of a kernel has the fixed number 0xEFFFFFFC (PROC_PID_INIT_INO). A
container's /proc shows one NSpid as the host does, so NSpid alone cannot tell.
"""

from __future__ import annotations

import os

INITIAL_PID_NAMESPACE = f"pid:[{0xEFFFFFFC}]"
MAX_COMMAND = 512
MAX_ANCESTORS = 8
REFRESH_S = 10.0  # engines rename themselves after the start
Details = tuple[str, str, str, str, tuple[tuple[int, str], ...]]
NOTHING: Details = ("", "", "", "", ())


def in_host_pid_namespace(root: str = "/proc") -> bool:
    """Say whether host pids mean the same here, and `root` is the /proc of this namespace."""
    try:
        namespace = os.readlink(f"{root}/self/ns/pid")  # noqa: PTH115 - pathlib costs the worker a megabyte
        own = os.readlink(f"{root}/self")  # noqa: PTH115
        return namespace == INITIAL_PID_NAMESPACE and own == str(os.getpid())
    except OSError:
        return False


def _text(path: str, limit: int = 4096) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(descriptor, limit).decode("utf-8", "replace")
    except OSError:  # the process went away between open and read
        return ""
    finally:
        os.close(descriptor)


def command_of(pid: int, root: str = "/proc") -> str:
    """The command line with spaces between the words, cut to 512 characters."""
    return _text(f"{root}/{pid}/cmdline").rstrip("\0").replace("\0", " ")[:MAX_COMMAND]


def cgroup_of(pid: int, root: str = "/proc") -> str:
    """The cgroup path: version 2's, else systemd's own hierarchy, else the first."""
    paths = {}
    for line in _text(f"{root}/{pid}/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        paths[controllers] = path
    return paths.get("") or paths.get("name=systemd") or next(iter(paths.values()), "")


def unit_of(cgroup: str) -> str:
    """The innermost systemd service or scope of a cgroup path, "" if none."""
    units = [part for part in cgroup.split("/") if part.endswith((".service", ".scope"))]
    return units[-1] if units else ""


def stat_of(pid: int, root: str = "/proc") -> tuple[str, int, int, int] | None:
    """(state, parent pid, threads, start ticks) from /proc/<pid>/stat; None where it cannot be read."""
    line = _text(f"{root}/{pid}/stat")
    fields = line[line.rfind(")") + 2 :].split()
    if len(fields) < 20:
        return None
    return fields[0], int(fields[1]), int(fields[17]), int(fields[19])


def _exists(pid: int) -> bool:
    """Ask the kernel, since a hardened service may not see other users' entries in /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


class ProcessTable:
    """Reads processes by pid and remembers what does not change."""

    def __init__(self, root: str = "/proc", host_pids: bool | None = None) -> None:
        self.root = root
        self.host_pids = in_host_pid_namespace(root) if host_pids is None else host_pids
        self._cache: dict[tuple[int, int], tuple[float, Details]] = {}

    def look(self, pid: int, now_s: float) -> tuple[bool | None, int | None, Details]:
        """(alive, start ticks, (comm, command, cgroup, unit, ancestors)); alive None: cannot be told here.

        A zombie without other threads is dead; a leader that ended before its threads is not.
        """
        if not self.host_pids:
            return None, None, NOTHING
        stat = stat_of(pid, self.root)
        if stat is None:
            return _exists(pid), None, NOTHING
        state, parent, threads, ticks = stat
        alive = state not in "ZX" or threads > 1
        return alive, ticks, self._details(pid, parent, ticks, now_s)

    def keep_only(self, pids: set[int]) -> None:
        """Forget processes that no GPU reports any more."""
        for key in [key for key in self._cache if key[0] not in pids]:
            del self._cache[key]

    def _details(self, pid: int, parent: int, ticks: int, now_s: float) -> Details:
        cached = self._cache.get((pid, ticks))
        if cached is not None and now_s - cached[0] < REFRESH_S:
            return cached[1]
        cgroup = cgroup_of(pid, self.root)
        details: Details = (
            _text(f"{self.root}/{pid}/comm").rstrip("\n"),
            command_of(pid, self.root),
            cgroup,
            unit_of(cgroup),
            self._ancestors(parent),
        )
        self._cache[(pid, ticks)] = (now_s, details)
        return details

    def _ancestors(self, pid: int) -> tuple[tuple[int, str], ...]:
        found: list[tuple[int, str]] = []
        while pid > 1 and len(found) < MAX_ANCESTORS:
            found.append((pid, command_of(pid, self.root)))
            stat = stat_of(pid, self.root)
            if stat is None:
                break
            pid = stat[1]
        return tuple(found)
