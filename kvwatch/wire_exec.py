"""What the daemon and the helper that runs hooks outside its sandbox say to each other.

One connection is one hook. The daemon sends one line of JSON, then the bytes for the hook's standard
input; the descriptor of the lever's lock may come with the first of them. It gets one line of JSON back.
When the daemon shuts its side down earlier, the hook is ended. The reader trusts nothing: sizes, depth,
types and ranges are checked here; who asks and what may be run is for the helper to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

VERSION = 1
SOCKET_VARIABLE = "KVWATCH_EXEC_SOCKET"
MAX_HEADER = 64 * 1024
MAX_BODY = 1024 * 1024
MAX_ANSWER = 64 * 1024
MAX_DEPTH = 4
MAX_ARGUMENTS = 256
MAX_VARIABLE = 500  # characters of one environment variable
MAX_DEADLINE_S = 60.0  # as in the configuration
SEND_WITHIN_S = 2.0  # the whole request must have arrived by then
TERM_GRACE_S = 1.0  # between TERM and KILL at the deadline
# After KILL a program is gone at once, unless it hangs inside the kernel; then it is left behind.
KILL_GRACE_S = 2.0
PREFIX = "KVWATCH_"
# What a hook is told beside its standard input: key of the payload, variable without the prefix.
VARIABLES: Mapping[str, str] = {
    "event": "EVENT", "server": "SERVER", "engine": "ENGINE", "rule": "RULE", "level": "LEVEL",
    "max_running": "MAX_RUNNING", "admit": "ADMIT", "expires_in_s": "EXPIRES_IN_S", "reason": "REASON",
    "request_id": "REQUEST_ID",
}  # fmt: skip

_NAMES = frozenset(PREFIX + name for name in VARIABLES.values())
_BRACKETS = re.compile(rb"[\[\]{}]")
_TEXTS = re.compile(rb'"(?:[^"\\]|\\.)*"')


class BadFrameError(ValueError):
    """Not a well-formed request or answer; the text says what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookRequest:
    """A program to run. `variables` are KVWATCH_ ones only; `body_bytes` follow the line."""

    argv: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    deadline_s: float
    body_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HookAnswer:
    """What became of a program: `ended` is False when it had to be ended, `code` None if that failed.

    `problem` is set when it was not run at all.
    """

    code: int | None = None
    ended: bool = True
    output: str = ""
    problem: str = ""


def encode_request(request: HookRequest) -> bytes:
    """The line of a request. Raises BadFrameError for one that no helper would take."""
    record = {
        "v": VERSION,
        "argv": list(request.argv),
        "env": dict(request.variables),
        "deadline_s": request.deadline_s,
        "body_bytes": request.body_bytes,
    }
    line = json.dumps(record).encode() + b"\n"
    decode_request(line)
    return line


def decode_request(line: bytes) -> HookRequest:
    """The request of a line. Raises BadFrameError."""
    record = _object(line, MAX_HEADER)
    deadline_s, body_bytes = _seconds(record.get("deadline_s")), record.get("body_bytes")
    if type(body_bytes) is not int or not 0 <= body_bytes <= MAX_BODY:
        raise BadFrameError(f"body_bytes is not within 0 and {MAX_BODY}")
    return HookRequest(
        argv=_argv(record.get("argv")),
        variables=_variables(record.get("env")),
        deadline_s=deadline_s,
        body_bytes=body_bytes,
    )


def encode_answer(answer: HookAnswer) -> bytes:
    """The line of an answer."""
    record = {
        "v": VERSION,
        "code": answer.code,
        "ended": answer.ended,
        "output": answer.output,
        "problem": answer.problem,
    }
    return json.dumps(record).encode() + b"\n"


def decode_answer(line: bytes) -> HookAnswer:
    """The answer of a line. Raises BadFrameError."""
    record = _object(line, MAX_ANSWER)
    code, ended = record.get("code"), record.get("ended")
    output, problem = record.get("output"), record.get("problem")
    if code is not None and type(code) is not int:
        raise BadFrameError("code is not a whole number")
    if not isinstance(ended, bool) or not isinstance(output, str) or not isinstance(problem, str):
        raise BadFrameError("ended, output or problem is missing")
    return HookAnswer(code=code, ended=ended, output=output, problem=problem)


def _object(line: bytes, longest: int) -> dict[str, object]:
    if not line.endswith(b"\n") or len(line) > longest:
        raise BadFrameError(f"no line of at most {longest} bytes")
    if _depth(line) > MAX_DEPTH:
        raise BadFrameError(f"nested deeper than {MAX_DEPTH}")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadFrameError("no JSON") from error
    if not isinstance(record, dict) or record.get("v") != VERSION:
        raise BadFrameError(f"no object of version {VERSION}")
    return record


def _depth(line: bytes) -> int:
    """How deep brackets nest outside texts, found before anything is built from them."""
    depth = deepest = 0
    for bracket in _BRACKETS.findall(_TEXTS.sub(b"", line)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _seconds(value: object) -> float:
    # A number that is none (NaN) is not within anything.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= MAX_DEADLINE_S:
        raise BadFrameError(f"deadline_s is not within 0 and {MAX_DEADLINE_S:g}")
    return float(value)


def _argv(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_ARGUMENTS:
        raise BadFrameError(f"argv is not a list of 1 to {MAX_ARGUMENTS} texts")
    if not all(isinstance(part, str) and "\0" not in part for part in value):
        raise BadFrameError("argv holds something that is no argument")
    return tuple(value)


def _variables(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise BadFrameError("env is not an object")
    for name, text in value.items():
        if name not in _NAMES:
            raise BadFrameError("env holds a variable that is not in the hook contract")
        if not isinstance(text, str) or len(text) > MAX_VARIABLE or not text.isprintable():
            raise BadFrameError(f"{name} is not at most {MAX_VARIABLE} printable characters")
    return value


def printable(text: str) -> str:
    """The same text with spaces for what could harm a terminal or a log."""
    return "".join(char if char.isprintable() else " " for char in text)
