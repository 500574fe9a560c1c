"""Lower SGLang's running batch over HTTP, and read back whether it did. Does not end by itself.

`POST /set_internal_state` with `pp_max_micro_batch_size` bounds the running batch (also without pipeline
parallelism) and takes effect at once; what runs is never evicted. It answers 200 in every case, and up to
0.5.10 even claimed success when it had refused: only `/server_info` tells. Up to 0.5.2 the key had no
`pp_` in its name.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvwatch.actions import http as web
from kvwatch.actions.base import Action, ActionError, Attempt, Context
from kvwatch.model.action import ActionRequest, EventKind, Limit, Outcome

SELF_EXPIRING = False

KEYS = ("pp_max_micro_batch_size", "max_micro_batch_size")
MAX_ANSWER = 1 << 20
MAX_KEY = 4096


class SglangAction:
    """One server. `bearer_file` holds the admin key where one is set."""

    self_expiring = SELF_EXPIRING

    def __init__(self, url: str, bearer_file: str | None, ca_file: str | None) -> None:
        self._url = url.rstrip("/")
        self._parts = urlsplit(self._url)
        self._bearer_file = bearer_file
        self._ca_file = ca_file

    def perform(self, request: ActionRequest, held: int | None = None) -> Attempt:  # noqa: ARG002
        """Set the limit (or the server's own at RESTORE) and compare what the server then says."""
        limit = request.limit
        if limit is None:
            raise ActionError(Outcome.REFUSED, "a limit is needed; this request has none")
        end_s = time.monotonic() + request.deadline_s
        with web.explained(self._url, request.deadline_s):
            return self._set(limit, end_s, restore=request.event is EventKind.RESTORE)

    def _set(self, limit: Limit, end_s: float, *, restore: bool) -> Attempt:
        key, present, own = _state(self._ask("GET", "/server_info", None, end_s))
        wanted = own if restore else _wanted(limit, own)
        if present == [wanted] * len(present):
            return Attempt(outcome=Outcome.NOOP, read_back=_back(limit, present))
        self._ask("POST", "/set_internal_state", {"server_args": {key: wanted}}, end_s)
        _, present, _ = _state(self._ask("GET", "/server_info", None, end_s))
        if present != [wanted] * len(present):
            raise ActionError(
                Outcome.FAILED,
                f"{self._url}: asked for {key}={wanted} (1 to {own} are taken), it still says {present}",
            )
        detail = "" if restore or limit.admit else "SGLang cannot stop admission; one request at a time"
        return Attempt(outcome=Outcome.APPLIED, detail=detail, read_back=_back(limit, present))

    def _ask(self, method: str, path: str, content: object, end_s: float) -> object:
        """One exchange on a connection of its own; the answer's JSON."""
        body = b"" if content is None else json.dumps(content).encode()
        with web.connect(self._parts, end_s, self._ca_file) as connection:
            web.send(connection, self._head(method, path, len(body)) + body, end_s)
            raw = bytearray()
            while len(raw) <= MAX_ANSWER:
                connection.settimeout(web.left_s(end_s))
                piece = connection.recv(65536)
                if not piece:
                    break
                raw += piece
        return _parsed(bytes(raw), f"{self._url}{path}")

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [
            f"{method} {self._parts.path}{path} HTTP/1.1",
            f"Host: {self._parts.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {length}",
            "User-Agent: kvwatch",
            "Connection: close",
        ]
        if self._bearer_file is not None:
            lines.append(f"Authorization: Bearer {_bearer(self._bearer_file)}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _bearer(path: str) -> str:
    try:
        key = Path(path).read_text(encoding="ascii")[:MAX_KEY].strip()
    except (OSError, ValueError) as error:
        raise ActionError(Outcome.FAILED, f"{path}: cannot be read; it must hold the admin key") from error
    if not key.isprintable() or not key:
        raise ActionError(Outcome.FAILED, f"{path}: must hold the admin key, one line")
    return key


class _Answer:
    """A whole answer, for http.client to take apart."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._raw)


def _parsed(raw: bytes, url: str) -> object:
    import http.client

    response = http.client.HTTPResponse(_Answer(raw))  # type: ignore[arg-type]
    try:
        response.begin()
        content = response.read(MAX_ANSWER)
        if response.status != 200:
            hint = "; give the admin key in bearer_file" if response.status in (401, 403) else ""
            raise ActionError(Outcome.FAILED, f"{url}: HTTP {response.status}{hint}")
        answer: object = json.loads(content)
    except (http.client.HTTPException, ValueError, RecursionError) as error:
        raise ActionError(Outcome.FAILED, f"{url}: not an answer of SGLang") from error
    finally:
        response.close()
    return answer


def _state(info: object) -> tuple[str, list[int], int]:
    """(the key this release has, its value on each rank, the server's own limit) of /server_info."""
    states = info.get("internal_states") if isinstance(info, dict) else None
    if isinstance(info, dict) and isinstance(states, list) and states:
        for key in KEYS:
            values = [state.get(key) for state in states if isinstance(state, dict)]
            known = [value for value in values if isinstance(value, int)]
            if len(known) == len(states):
                return key, known, _own(info, states[0], key)
    raise ActionError(Outcome.REFUSED, f"/server_info has no {KEYS[0]}: this SGLang cannot be limited so")


def _own(info: Mapping[str, Any], state: Mapping[str, Any], key: str) -> int:
    """What the server was started with: the configured value, else its running limit over its stages."""
    configured = info.get(key)
    if isinstance(configured, int) and configured > 0:
        return configured
    running = state.get("effective_max_running_requests_per_dp") or state.get("max_running_requests")
    stages = state.get("pp_size") or 1
    if not isinstance(running, int) or not isinstance(stages, int) or running < stages:
        raise ActionError(Outcome.REFUSED, "/server_info does not tell max_running_requests")
    return running // stages


def _wanted(limit: Limit, own: int) -> int:
    if not limit.admit:
        return 1
    return own if limit.max_running is None else max(1, min(own, limit.max_running))


def _back(limit: Limit, present: list[int]) -> Limit:
    return Limit(server=limit.server, max_running=max(present))


def create(params: Mapping[str, object], _context: Context) -> Action:
    """`url` of the server, and optionally `bearer_file` and `ca_file`."""
    return SglangAction(*web.endpoint("sglang", params, "bearer_file"))
