"""Runs one hook outside the daemon's sandbox: `python -m kvwatch.exec_helper`, one process per request.

systemd starts it with the connection as standard input. Whoever asks must be the service's user or root,
and can only choose among the programs that the configuration names: it is read here, anew, and must be out
of the asker's reach. What has once moved a lever may always give it back, also when the configuration no
longer names it.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import json
import os
import pwd
import select
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvwatch import wire_exec
from kvwatch.actions.exec_run import execute
from kvwatch.wire_exec import BadFrameError, HookAnswer, HookRequest

MAX_CONFIG = 1024 * 1024
_SO_PEERGROUPS = 59  # Linux 4.13; Python has no name for it
_MAX_GROUPS = 256  # Python hands over no more than 1024 bytes
_MAX_LINKS = 40  # as the kernel


class RefusedError(Exception):
    """The hook is not run; the text says why and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Who asks, as the kernel says. `groups` is None where they cannot be had."""

    pid: int
    uid: int
    groups: frozenset[int] | None

    def can_write(self, info: os.stat_result) -> bool:
        """Whether the asker could change this file, or what is in this folder. Root is not looked at."""
        if self.uid == 0:
            return False
        if info.st_uid == self.uid:
            return True
        # A link's own mode says nothing; in a sticky folder nobody replaces what is somebody else's.
        sticky = stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX
        if stat.S_ISLNK(info.st_mode) or sticky:
            return False
        if info.st_mode & stat.S_IWGRP and (self.groups is None or info.st_gid in self.groups):
            return True
        return bool(info.st_mode & stat.S_IWOTH)


def peer_of(channel: socket.socket) -> Peer:
    """The process that made this connection."""
    size = struct.calcsize("3i")
    pid, uid, gid = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    try:
        raw = channel.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    except OSError:
        return Peer(pid=pid, uid=uid, groups=None)
    return Peer(pid=pid, uid=uid, groups=frozenset({gid, *struct.unpack(f"{len(raw) // 4}I", raw)}))


class Levers:
    """Which programs have imposed a limit and not given it back: one file each, in a folder of our own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _file(self, request: HookRequest) -> Path:
        key = json.dumps([request.argv, request.variables.get("KVWATCH_SERVER", "")])
        return self._folder / hashlib.sha256(key.encode()).hexdigest()

    def note(self, request: HookRequest) -> None:
        """Before a limit. Raises RefusedError when it cannot be noted: it could not be given back then."""
        try:
            self._file(request).touch(mode=0o600)
        except OSError as error:
            raise RefusedError(f"{self._folder}: {error.strerror}; the limit could not be noted") from error

    def has(self, request: HookRequest) -> bool:
        """Whether this program may still hold a limit."""
        return self._file(request).exists()

    def forget(self, request: HookRequest) -> None:
        """After it was given back."""
        with contextlib.suppress(OSError):
            self._file(request).unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Who may ask (`user`, beside root), which file names the programs, and where levers are noted."""

    user: str
    config: Path
    levers: Levers

    def admit(self, peer: Peer) -> None:
        """Raises RefusedError for anybody but the service's user and root."""
        if peer.uid in (0, _uid_of(self.user)):
            return
        raise RefusedError(f"uid {peer.uid} may not ask for hooks; only root and {self.user} may")

    def allow(self, request: HookRequest, peer: Peer) -> None:
        """Raises RefusedError for a program that the configuration does not name, or that is not safe."""
        event = request.variables.get("KVWATCH_EVENT", "")
        _out_of_reach(Path(request.argv[0]), peer)
        if event == "restore" and self.levers.has(request):
            return
        self._check_config(peer)
        if request.argv not in named_programs(self.config):
            raise RefusedError(
                f"not named by any exec in {self.config}; reload kvwatch if that file has changed, and see "
                "docs/hooks.md if it runs with another file"
            )
        if event == "limit":
            self.levers.note(request)

    def _check_config(self, peer: Peer) -> None:
        info = _out_of_reach(self.config, peer)
        if info.st_uid not in (0, os.geteuid()):
            raise RefusedError(f"{self.config} belongs to uid {info.st_uid}; it must belong to root")


def _uid_of(user: str) -> int:
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise RefusedError(f"there is no user {user}") from None


def _out_of_reach(path: Path, peer: Peer) -> os.stat_result:
    """What `path` is. Raises RefusedError where the asker could change it or a folder above it."""
    if not path.is_absolute():
        raise RefusedError(f"{path} is not an absolute path")
    try:
        for part in _parts(path):
            if peer.can_write(part.lstat()):
                raise RefusedError(f"{part} can be changed by uid {peer.uid}, who asks; make it root's alone")
        return path.stat()
    except UnicodeError:  # half a character of JSON's (\\ud800)
        raise RefusedError("argv[0] is no file name") from None
    except OSError as error:
        raise RefusedError(
            f"{path}: {error.strerror}; it must exist and be readable for this user"
        ) from error


def _parts(path: Path) -> Iterator[Path]:
    """Every folder and link on the way to an absolute path, and what it leads to. Raises OSError."""
    here, ahead, links = Path("/"), list(path.parts[1:]), 0
    yield here
    while ahead:
        name = ahead.pop(0)
        here = here.parent if name == ".." else here / name
        yield here
        if here.is_symlink():
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            target = here.readlink()
            here = Path("/") if target.is_absolute() else here.parent
            ahead = [*(part for part in target.parts if part != "/"), *ahead]


def named_programs(config: Path) -> set[tuple[str, ...]]:
    """Every `argv` of an `exec` in the configuration. Raises RefusedError when it cannot be read.

    Words are taken as written, as the daemon takes them.
    """
    import yaml  # only for a request that has come this far

    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    try:
        with config.open("rb") as stream:
            document = yaml.load(stream.read(MAX_CONFIG), Loader=loader)  # noqa: S506 (it makes nothing but texts)
    except OSError as error:
        raise RefusedError(f"{config}: {error.strerror}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise RefusedError(f"{config} is no YAML; `kvwatch check {config}` says where") from error
    return set(_argvs(document))


def _argvs(document: object) -> Iterator[tuple[str, ...]]:
    """Where the configuration names programs: `notify[].exec`, `control.targets[].via[].exec`."""
    for notice in _items(document, "notify"):
        yield from _argv(notice)
    for target in _items(_get(document, "control"), "targets"):
        for lever in _items(target, "via"):
            yield from _argv(lever)


def _get(node: object, key: str) -> object:
    return node.get(key) if isinstance(node, dict) else None


def _items(node: object, key: str) -> list[object]:
    found = _get(node, key)
    return found if isinstance(found, list) else []


def _argv(node: object) -> Iterator[tuple[str, ...]]:
    argv = _get(_get(node, "exec"), "argv")
    if isinstance(argv, list) and argv and all(isinstance(word, str) for word in argv):
        yield tuple(argv)


class Connection:
    """One request and its answer, within limits of size and time."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._end_s = time.monotonic() + wire_exec.SEND_WITHIN_S
        self.held: int | None = None

    def read(self) -> tuple[HookRequest, bytes]:
        """The request and what its hook reads. Raises BadFrameError or OSError."""
        received = bytearray()
        while b"\n" not in received:
            if len(received) > wire_exec.MAX_HEADER:
                raise BadFrameError(f"no line of at most {wire_exec.MAX_HEADER} bytes")
            received += self._receive()
        line, _, content = bytes(received).partition(b"\n")
        request = wire_exec.decode_request(line + b"\n")
        while len(content) < request.body_bytes:
            content += self._receive()
        if len(content) > request.body_bytes:
            raise BadFrameError("more than was announced")
        return request, content

    def _receive(self) -> bytes:
        self._channel.settimeout(max(0.001, self._end_s - time.monotonic()))
        piece, descriptors, _, _ = socket.recv_fds(self._channel, 64 * 1024, 4, socket.MSG_CMSG_CLOEXEC)
        for descriptor in descriptors:
            self._keep(descriptor)
        if not piece:
            raise BadFrameError("the request ended too early")
        return piece

    def _keep(self, descriptor: int) -> None:
        """One plain file may come along: the lever's lock."""
        if self.held is not None or not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise BadFrameError("a descriptor that is no lock")
        self.held = descriptor

    def release(self) -> None:
        """Let go of the lock, so that it is free when the asker hears the answer."""
        if self.held is not None:
            os.close(self.held)
            self.held = None

    def broken_off(self) -> bool:
        """Whether the asker has gone or wants no more: after its request it says nothing."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN | select.POLLRDHUP)
        return bool(poll.poll(0))

    def answer(self, answer: HookAnswer) -> None:
        """Send the answer; an asker that has gone does not get one."""
        with contextlib.suppress(OSError):
            self._channel.settimeout(wire_exec.SEND_WITHIN_S)
            self._channel.sendall(wire_exec.encode_answer(answer))


def serve(channel: socket.socket, rules: Rules) -> HookAnswer:
    """Read one request, run its hook if that is allowed, answer."""
    connection = Connection(channel)
    try:
        answer = _serve(connection, peer_of(channel), rules)
    except (RefusedError, BadFrameError) as error:
        answer = HookAnswer(problem=f"refused by the helper: {error}")
    except OSError as error:
        answer = HookAnswer(problem=f"the helper could not read the request: {error.strerror or 'too slow'}")
    connection.answer(answer)
    return answer


def _serve(connection: Connection, peer: Peer, rules: Rules) -> HookAnswer:
    rules.admit(peer)
    request, content = connection.read()
    rules.allow(request, peer)
    try:
        answer = execute(
            request.argv,
            request.variables,
            content,
            deadline_s=request.deadline_s,
            broken_off=connection.broken_off,
            held=connection.held,
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return HookAnswer(problem=f"{reason}; it must exist and be executable for {_name()}")
    finally:
        connection.release()
    if answer.code == 0 and answer.ended and request.variables.get("KVWATCH_EVENT") == "restore":
        rules.levers.forget(request)
    return answer


def _name() -> str:
    try:
        return f"the helper's user, {pwd.getpwuid(os.geteuid()).pw_name}"
    except KeyError:
        return f"the helper's uid {os.geteuid()}"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the connection on standard input; 0 when a hook was run, 1 when it was not (said on stderr)."""
    parser = argparse.ArgumentParser(prog="kvwatch.exec_helper", description="One hook of kvwatch.")
    parser.add_argument("--user", default="kvwatch", help="who may ask, beside root (default kvwatch)")
    parser.add_argument("--config", default="/etc/kvwatch/kvwatch.yml", help="the file that names the hooks")
    parser.add_argument("--state", help="a folder of our own; default $RUNTIME_DIRECTORY")
    args = parser.parse_args(argv)
    state = args.state or os.environ.get("RUNTIME_DIRECTORY") or "/run/kvwatch-exec"
    rules = Rules(user=args.user, config=Path(args.config), levers=Levers(Path(state)))
    try:
        channel = socket.socket(fileno=os.dup(0))
    except OSError:
        print(
            "kvwatch.exec_helper: standard input is no socket; systemd starts this program", file=sys.stderr
        )
        return 2
    with channel:
        answer = serve(channel, rules)
    if answer.problem:
        print(f"hook not run: {answer.problem}", file=sys.stderr)
    return 1 if answer.problem else 0


if __name__ == "__main__":
    sys.exit(main())
