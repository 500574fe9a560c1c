"""What do agents inside servers say? One datagram socket, and who may say what.

The kernel names the sender of every datagram (SCM_CREDENTIALS), translated into this process's pid
namespace; what the datagram itself claims is compared with that. Whatever does not fit is counted by
reason and changes nothing.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvwatch.model.sample import FailureKind
from kvwatch.model.server import AgentState
from kvwatch.sources.base import SourceError
from kvwatch.wire_datagram import Datagram, DatagramError, decode
from kvwatch.wire_record import MAX_BYTES, address

PERIOD_S = 1.0
"""How often an agent sends."""

RATE_PER_S = 5.0
BURST = 10.0
"""What one process may send; an agent sends one a second for each GPU."""

QUIET_S = 5.0
"""A sender silent for this long has lost its place: another process may take the rank over."""

MAX_AGE_S = 60.0
"""A datagram's own time is believed within this; beyond it (time namespaces) its arrival counts."""

FORGOTTEN_S = 600.0
"""A rank silent for this long is forgotten."""

MAX_KEYS = 1024
MAX_KEYS_UNKNOWN = 64  # ranks of servers that are not configured: shown, never judged
MAX_KEYS_EACH = 64  # ranks that one process may speak for
MAX_SENDERS = 4096
BATCH = 256
PAUSE_S = 0.005
SOCKET_MODE = 0o666
_CREDENTIALS = struct.Struct("iII")


class Refusal(enum.StrEnum):
    """Why a datagram changed nothing; a closed set, so that it can be counted."""

    ANONYMOUS = "anonymous"  # no credentials, or a sender whose pid means nothing here
    RATE = "rate"
    SIZE = "size"
    MALFORMED = "malformed"
    PID = "pid"  # claims to be another process
    UID = "uid"  # the server speaks as another user
    REPLAYED = "replayed"
    CONFLICT = "conflict"  # another living process speaks for this rank
    TOO_MANY = "too_many"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Who sent a datagram, as the kernel says."""

    pid: int
    uid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """One accepted datagram: the rank's newest state (parts of several processes joined), and its time."""

    key: str  # agent/<server>/<engine>/<rank>
    state: AgentState
    observed_s: float


@dataclass(slots=True)
class _Process:
    """One sending process: its identity over pid reuse, its highest seq per rank, and its budget."""

    started: int | None
    tokens: float = BURST
    refilled_s: float = 0.0
    seen_s: float = 0.0
    last_seq: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Part:
    """One half of a rank (its allocator, or its scheduler and KV blocks) and the process that tells it."""

    sender: Sender
    started: int | None
    state: AgentState
    seen_s: float


class Registry:
    """Decides what a datagram changes. Pure but for /proc, which is given as functions.

    A rank may be told by two processes: vLLM's scheduler and its first worker are two.
    """

    def __init__(
        self,
        *,
        started: Callable[[int], int | None],
        namespace_pids: Callable[[int], tuple[int, ...]],
        own_uid: int,
    ) -> None:
        self.servers: frozenset[str] = frozenset()
        self.refused: dict[Refusal, int] = dict.fromkeys(Refusal, 0)
        self.accepted = 0
        self._started = started
        self._namespace_pids = namespace_pids
        self._own_uid = own_uid
        self._processes: dict[int, _Process] = {}
        self._parts: dict[str, dict[str, _Part]] = {}
        self._uids: dict[str, tuple[int, float]] = {}  # server: (uid that speaks for it, last heard)

    def take(self, content: bytes, sender: Sender | None, now_s: float) -> Heard | None:
        """Judge one datagram; None when it is refused (and counted)."""
        outcome = self._judge(content, sender, now_s)
        if isinstance(outcome, Refusal):
            self.refused[outcome] += 1
            return None
        self.accepted += 1
        return outcome

    def _judge(self, content: bytes, sender: Sender | None, now_s: float) -> Heard | Refusal:
        if sender is None or sender.pid <= 0:
            return Refusal.ANONYMOUS
        process = self._process(sender.pid, now_s)
        if process is None:
            return Refusal.TOO_MANY
        if not _spend(process, now_s):
            return Refusal.RATE
        if len(content) > MAX_BYTES:
            return Refusal.SIZE
        try:
            datagram = decode(content)
        except DatagramError:
            return Refusal.MALFORMED
        return self._admit(datagram, sender, process, now_s)

    def _admit(self, datagram: Datagram, sender: Sender, process: _Process, now_s: float) -> Heard | Refusal:
        state = datagram.state
        key = f"agent/{state.server}/{state.engine}/{state.rank}"
        if not self._is_pid(state.pid, sender.pid):
            return Refusal.PID
        if not self._may_speak(sender, state.server, now_s):
            return Refusal.UID
        started = self._started(sender.pid)
        if started != process.started:  # the pid belongs to a new process
            process.started, process.last_seq = started, {}
        if state.seq <= process.last_seq.get(key, -1):
            return Refusal.REPLAYED
        if not self._has_room(key, state.server, process):
            return Refusal.TOO_MANY
        refusal = self._place(key, replace(state, pid=sender.pid), sender, started, now_s)
        if refusal is not None:
            return refusal
        process.last_seq[key] = state.seq
        self._uids[state.server] = (sender.uid, now_s)
        return Heard(key=key, state=self._joined(key, now_s), observed_s=_observed_s(datagram, now_s))

    def _has_room(self, key: str, server: str, process: _Process) -> bool:
        if key in self._parts:
            return True
        unknown = sum(name.split("/")[1] not in self.servers for name in self._parts)
        return (
            len(self._parts) < MAX_KEYS
            and len(process.last_seq) < MAX_KEYS_EACH
            and (server in self.servers or unknown < MAX_KEYS_UNKNOWN)
        )

    def forget(self, now_s: float) -> list[str]:
        """Ranks that have been silent for ten minutes: dropped here, and named so that others drop them."""
        silent = [
            key
            for key, parts in self._parts.items()
            if all(now_s - part.seen_s > FORGOTTEN_S for part in parts.values())
        ]
        for key in silent:
            del self._parts[key]
        self._forget_quiet(now_s)
        return silent

    def _process(self, pid: int, now_s: float) -> _Process | None:
        process = self._processes.get(pid)
        if process is None:
            if len(self._processes) >= MAX_SENDERS:
                self._forget_quiet(now_s)
                if len(self._processes) >= MAX_SENDERS:
                    return None
            process = self._processes[pid] = _Process(started=self._started(pid), refilled_s=now_s)
        process.seen_s = now_s
        return process

    def _forget_quiet(self, now_s: float) -> None:
        quiet = [pid for pid, one in self._processes.items() if now_s - one.seen_s > MAX_AGE_S]
        for pid in quiet:
            del self._processes[pid]

    def _is_pid(self, claimed: int, real: int) -> bool:
        """Whether a process calls itself by one of its pids: here, or in a pid namespace of its own."""
        return claimed == real or claimed in self._namespace_pids(real)

    def _may_speak(self, sender: Sender, server: str, now_s: float) -> bool:
        """Root, this user, and whoever spoke for this server before (until it has been quiet)."""
        if sender.uid in (0, self._own_uid):
            return True
        uid, heard_s = self._uids.get(server, (sender.uid, 0.0))
        return uid == sender.uid or now_s - heard_s > MAX_AGE_S

    def _place(
        self, key: str, state: AgentState, sender: Sender, started: int | None, now_s: float
    ) -> Refusal | None:
        """Store the halves that this datagram tells, unless a living process holds one of them."""
        told = [
            name
            for name, there in (
                ("allocator", state.allocator is not None),
                ("engine", state.kv is not None or state.scheduler is not None),
            )
            if there
        ]
        parts = self._parts.get(key, {})
        if any(name in parts and self._is_held(parts[name], sender, now_s) for name in told):
            return Refusal.CONFLICT
        for name in told:
            parts[name] = _Part(sender, started, state, now_s)
        self._parts[key] = parts
        return None

    def _is_held(self, part: _Part, sender: Sender, now_s: float) -> bool:
        if part.sender.pid == sender.pid or now_s - part.seen_s > QUIET_S:
            return False
        return part.started is not None and self._started(part.sender.pid) == part.started

    def _joined(self, key: str, now_s: float) -> AgentState:
        """Both halves as one state; the allocator's process names it, so that it stays the same."""
        parts = {name: part for name, part in self._parts[key].items() if now_s - part.seen_s <= QUIET_S}
        allocator, engine = parts.get("allocator"), parts.get("engine")
        if allocator is None or engine is None:
            return next(part.state for part in parts.values())
        if allocator.sender.pid == engine.sender.pid:
            return engine.state
        told = engine.state
        return replace(
            allocator.state,
            kv=told.kv,
            scheduler=told.scheduler,
            effective_max_running=told.effective_max_running,
            blocks_held=told.blocks_held,
            host=told.host,
            limits=told.limits,
        )


def _spend(process: _Process, now_s: float) -> bool:
    """One token of the process's budget; False when it is used up."""
    process.tokens = min(BURST, process.tokens + (now_s - process.refilled_s) * RATE_PER_S)
    process.refilled_s = now_s
    if process.tokens < 1.0:
        return False
    process.tokens -= 1.0
    return True


def _observed_s(datagram: Datagram, now_s: float) -> float:
    age_s = now_s - datagram.mono_s
    return datagram.mono_s if 0.0 <= age_s <= MAX_AGE_S else now_s


class AgentSocket:
    """The socket that agents send to. Owned by one thread; `registry` tells what was refused.

    Raises SourceError when the socket cannot be made: the path, and the fix.
    """

    def __init__(self, path: Path, registry: Registry) -> None:
        self.path = path
        self.registry = registry
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            try:
                self._bind()
            except OSError:
                self._socket.close()
                raise
        except OSError as error:
            raise SourceError(
                FailureKind.DENIED,
                f"{path}: cannot listen for agents ({error.strerror or error}); {_fix(path, error)}",
            ) from error

    def _bind(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self.path.lstat().st_mode):
                raise FileExistsError(errno.EEXIST, "something else is there")
            self.path.unlink()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with address(str(self.path)) as name:
            self._socket.bind(name)
        self.path.chmod(SOCKET_MODE)
        self._inode = self.path.lstat().st_ino

    def receive(self, wait_s: float) -> list[Heard]:
        """What was accepted; returns after the first batch, at the latest after `wait_s`. Raises OSError.

        Under a flood it takes one batch and pauses, so that nobody can buy a whole core.
        """
        self._socket.settimeout(wait_s)
        heard: list[Heard] = []
        for count in range(BATCH):
            try:
                content, sender = self._one()
            except (TimeoutError, BlockingIOError):
                break
            if count == 0:
                self._socket.settimeout(0.0)
            found = self.registry.take(content, sender, time.monotonic())
            if found is not None:
                heard.append(found)
        else:
            time.sleep(PAUSE_S)
        return heard

    def _one(self) -> tuple[bytes, Sender | None]:
        content, ancillary, _, _ = self._socket.recvmsg(MAX_BYTES + 1, 256)
        sender = None
        for level, kind, data in ancillary:
            if level != socket.SOL_SOCKET:
                continue
            if kind == socket.SCM_RIGHTS:
                _close_all(data)
            elif kind == socket.SCM_CREDENTIALS:
                pid, uid, _ = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])
                sender = Sender(pid=pid, uid=uid)
        return content, sender

    def close(self) -> None:
        """Stop listening; removes the socket's file unless it is another one by now."""
        self._socket.close()
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()


def _fix(path: Path, error: OSError) -> str:
    """What somebody can do about it."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise LimitNOFILE= of the unit (or ulimit -n)"
    if error.errno == errno.EEXIST:
        return "move it away, or set agents.socket to another path"
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return f"make the directory {path.parent} for uid {os.geteuid()}, or set agents.socket"
    return f"give the directory to uid {os.geteuid()}, or set agents.socket"


def _close_all(data: bytes) -> None:
    """Descriptors that somebody sent along are never kept."""
    size = struct.calcsize("i")
    for start in range(0, len(data) - size + 1, size):
        with contextlib.suppress(OSError):
            os.close(struct.unpack_from("i", data, start)[0])


def started(pid: int) -> int | None:
    """When a process began, in clock ticks since boot: the same pid with another start is another process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def namespace_pids(pid: int) -> tuple[int, ...]:
    """A process's pids in every pid namespace it lives in, this one first; empty where /proc hides it."""
    try:
        with Path(f"/proc/{pid}/status").open(encoding="utf-8", errors="replace") as lines:
            found = next((line for line in lines if line.startswith("NSpid:")), "")
        return tuple(int(word) for word in found.split()[1:])
    except (OSError, ValueError):
        return ()


def create(path: Path) -> AgentSocket:
    """The socket with the real /proc behind it; raises SourceError."""
    registry = Registry(started=started, namespace_pids=namespace_pids, own_uid=os.geteuid())
    return AgentSocket(path, registry)


def counts(registry: Registry) -> Mapping[str, int]:
    """Datagrams by outcome, zeros included."""
    return {"accepted": registry.accepted, **{kind.value: count for kind, count in registry.refused.items()}}
