"""Requests and hooks for the tests of actions: every hook is a real program in a real file."""

from __future__ import annotations

import time
from pathlib import Path

from kvwatch.actions.base import Attempt, Context, create
from kvwatch.model.action import ActionRequest, EventKind, Limit
from kvwatch.model.level import RuleId, Scope
from tests.actions import inetd

BOOT = "11111111-2222-3333-4444-555555555555"


def limit_request(**changes: object) -> ActionRequest:
    values: dict[str, object] = {
        "request_id": "chat-1000-0",
        "target": "limit/chat",
        "action": "exec",
        "event": EventKind.LIMIT,
        "rule": RuleId.KV_USAGE,
        "scope": Scope(server="chat"),
        "limit": Limit(server="chat", max_running=24),
        "expires_in_s": 15.0,
        "deadline_s": 5.0,
        "reason": "kv_usage above shrink_above with requests waiting",
    } | changes
    return ActionRequest(**values)  # type: ignore[arg-type]


def restore_request(**changes: object) -> ActionRequest:
    return limit_request(
        event=EventKind.RESTORE,
        limit=Limit(server="chat"),
        expires_in_s=None,
        rule=None,
        reason="",
        **changes,
    )


def hook(folder: Path, body: str, *, name: str = "hook", mode: int = 0o755) -> Path:
    """A shell script."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(mode)
    return path


def context(folder: Path) -> Context:
    return Context(limits_dir=folder, boot_id=BOOT)


def perform(folder: Path, argv: list[str], request: ActionRequest | None = None) -> Attempt:
    """Run a program as the exec action does; where a helper is in use its configuration names the program."""
    inetd.allow(argv)
    return create("exec", {"argv": argv}, context(folder)).perform(request or limit_request())


def until(look: object, seconds: float = 5.0) -> bool:
    """Whether `look` came true in time."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        if look():  # type: ignore[operator]
            return True
        time.sleep(0.01)
    return False


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int) -> bool:
    """Whether a process that was killed has ended by now."""
    return until(lambda: not alive(pid))


def pid_in(path: Path) -> int:
    """The number a hook has written."""
    assert until(lambda: path.exists() and path.read_text().strip())
    return int(path.read_text())


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
