"""What an action is: one lever on the world, its promise about expiry, and the errors it may raise."""

from __future__ import annotations

import functools
import importlib
import json
import math
import pkgutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvwatch.model.action import ActionRequest, EventKind, Limit, Outcome
from kvwatch.model.level import Level

_NOT_ACTIONS = {"base", "exec_client", "exec_run"}  # the last two are parts of exec


class ActionError(Exception):
    """The action was not carried out; the text says what came and how to mend it."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What came of carrying out one request. `read_back` is what the target itself says afterwards."""

    outcome: Outcome
    detail: str = ""
    read_back: Limit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What every action may use: the lease directory and the host's boot identifier.

    `stopping` is set when kvwatch stops: a limit that is just being imposed is broken off.
    """

    limits_dir: Path
    boot_id: str
    stopping: threading.Event = field(default_factory=threading.Event)


class Action(Protocol):
    """One configured lever.

    `self_expiring` promises that what it imposes ends without anybody's help. A lever without
    that promise gets a RESTORE when the lease ends, at stop, and at the next start after a crash.
    """

    self_expiring: bool

    def perform(self, request: ActionRequest, held: int | None = None) -> Attempt:
        """Carry out one request within its deadline. Raises nothing but ActionError.

        `held` is the descriptor of the lever's lock. A program that is started inherits it, so that
        the lever counts as busy for as long as the program lives, even when kvwatch has died.
        """
        ...


@functools.cache
def kinds() -> tuple[str, ...]:
    """Names of the actions that can be configured: the modules beside this one."""
    package = importlib.import_module("kvwatch.actions")
    return tuple(
        sorted(
            module.name
            for module in pkgutil.iter_modules(package.__path__)
            if module.name not in _NOT_ACTIONS
        )
    )


def create(kind: str, params: Mapping[str, object], context: Context) -> Action:
    """Make the action of this kind. Raises ActionError for an unknown kind or bad parameters."""
    if kind not in kinds():
        raise ActionError(Outcome.REFUSED, f"no action {kind!r}; there are {', '.join(kinds())}")
    module: Any = importlib.import_module(f"kvwatch.actions.{kind}")
    action: Action = module.create(params, context)
    return action


def is_self_expiring(kind: str) -> bool:
    """Whether what this kind imposes ends by itself."""
    module: Any = importlib.import_module(f"kvwatch.actions.{kind}")
    return bool(module.SELF_EXPIRING)


def payload(request: ActionRequest) -> dict[str, Any]:
    """The request as hooks get it (docs/hooks.md): plain JSON types, only what applies."""
    scope = request.scope
    limit = request.limit
    imposing = request.event is EventKind.LIMIT
    record: dict[str, Any] = {
        "v": 1,
        "event": request.event.value,
        "request_id": request.request_id,
        "server": scope.server or (limit.server if limit else ""),
        "engine": scope.engine,
        "gpu": scope.gpu,
        "gpu_uuid": scope.uuid,
        "rule": request.rule.value if request.rule else None,
        "level": None if request.level is Level.UNKNOWN else request.level.name.lower(),
        "max_running": limit.max_running if limit and imposing else None,
        "admit": limit.admit if limit and imposing else None,
        "expires_in_s": request.expires_in_s,
        "reason": request.reason,
        "evidence": {key: value for key, value in request.evidence.items() if _is_plain(value)},
    }
    return {key: value for key, value in record.items() if value not in (None, "", {})}


def body(request: ActionRequest) -> bytes:
    """The payload as one line of JSON."""
    return json.dumps(payload(request), allow_nan=False).encode() + b"\n"


def _is_plain(value: object) -> bool:
    """JSON has no infinities; what is not known or not finite is left out."""
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
