"""Text to numbers with units and back: durations, sizes, ratios, counts, listen addresses.

Every parser raises Reject with the fix in it. Results are seconds, bytes, 0..1, and integers.
"""

from __future__ import annotations

import re

from kvwatch.config.findings import Reject, quoted

_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_INTEGER = re.compile(r"[+-]?(?:0|[1-9]\d*)", re.ASCII)
_DURATION = re.compile(
    r"(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m(?!s))?"
    r"(?:(?P<s>\d+(?:\.\d+)?)s)?(?:(?P<ms>\d+(?:\.\d+)?)ms)?",
    re.ASCII,
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]+)", re.ASCII)
_RATIO = re.compile(r"(\d+(?:\.\d+)?)%", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|", re.ASCII)

SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
MAX_TEXT = 32  # no number worth writing is longer; also keeps int() and float() away from huge texts
MAX_SECONDS = 366 * 24 * 3600.0
MAX_BYTES = 2**60


def is_number(text: str) -> bool:
    """Whether the text is one plain decimal number."""
    return len(text) <= MAX_TEXT and _NUMBER.fullmatch(text) is not None


def _check_common(text: str, what: str, example: str) -> None:
    if len(text) > MAX_TEXT:
        raise Reject(f"{quoted(text, 16)} is too long for {what}; write {example}")
    if text.startswith("-") and text != "-":
        raise Reject(f"{quoted(text)} is negative; write {example}")


def duration_s(text: str) -> float:
    """Seconds of `200ms`, `1s`, `5m`, `1h`, `1m30s`."""
    example = "a duration like 200ms, 1s, 5m or 1h"
    _check_common(text, "a duration", example)
    if is_number(text):
        raise Reject(f"{text} has no unit; write a duration like {text}s or {text}ms")
    match = _DURATION.fullmatch(text)
    if match is None or not text:
        raise Reject(f"{quoted(text)} is not a duration; write {example}")
    seconds = sum(float(number) * SECONDS[unit] for unit, number in match.groupdict().items() if number)
    if seconds > MAX_SECONDS:
        raise Reject(f"{quoted(text)} is longer than a year; write {example}")
    return round(seconds, 6)


def size_bytes(text: str) -> int:
    """Bytes of `512MiB`, `2GiB`, `80GB`."""
    example = "a size like 512MiB or 2GiB"
    _check_common(text, "a size", example)
    if is_number(text):
        raise Reject(f"{text} has no unit; write {text}B, or a size like 512MiB or 2GiB")
    match = _SIZE.fullmatch(text)
    if match is None or match.group(2) not in BYTES:
        raise Reject(f"{quoted(text)} is not a size; write {example} (units: {', '.join(BYTES)})")
    size = float(match.group(1)) * BYTES[match.group(2)]
    if size > MAX_BYTES:
        raise Reject(f"{quoted(text)} is larger than an exbibyte; write {example}")
    return round(size)


def number(text: str) -> float:
    """A finite number without a unit."""
    if text.lower().lstrip("+-.") in ("inf", "nan", "infinity"):
        raise Reject(f"{quoted(text)} is not a finite number")
    if not is_number(text):
        raise Reject(f"{quoted(text)} is not a number; write a plain decimal number like 1.5")
    value = float(text)
    if abs(value) > 1e18:
        raise Reject(f"{quoted(text)} is too large")
    return value


def share(text: str) -> float:
    """A share that may pass 1, as `1.5` or `150%`."""
    _check_common(text, "a ratio", "a ratio like 0.7 or 70%")
    match = _RATIO.fullmatch(text)
    return round(number(match.group(1)) / 100, 9) if match else number(text)


def ratio(text: str) -> float:
    """A ratio from 0 to 1, as `0.7` or `70%`."""
    try:
        value = share(text)
    except Reject:
        if text.startswith("-") or text.lower().lstrip("+-.") in ("inf", "nan", "infinity"):
            raise
        raise Reject(f"{quoted(text)} is not a ratio; write one like 0.7 or 70%") from None
    if not 0.0 <= value <= 1.0:
        fix = f"; write {text}%" if 1 < value <= 100 and not text.endswith("%") else ""
        raise Reject(f"{quoted(text)} is not between 0 and 1 (0% and 100%){fix}")
    return value


def integer(text: str) -> int:
    """A whole decimal number; octal, hexadecimal, `1_000` and `1:30` are refused, not guessed."""
    if len(text) > MAX_TEXT or _INTEGER.fullmatch(text) is None:
        raise Reject(f"{quoted(text)} is not a whole number; write one like 4")
    return int(text)


def listen_address(text: str) -> tuple[str, int]:
    """Host and port of `127.0.0.1:9843`, `[::1]:9843`, `localhost:9843` or `:9843` (all addresses).

    Port 0 lets the kernel choose one.
    """
    host, colon, port = text.rpartition(":")
    if not colon:
        raise Reject(f"{quoted(text)} has no port; write host:port like 127.0.0.1:9843")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if not re.fullmatch(r"[0-9A-Fa-f:.]{2,45}(%[\w.-]+)?", host, re.ASCII) or ":" not in host:
            raise Reject(f"{quoted(text)} has no IPv6 address in the brackets; write [::1]:9843")
    elif ":" in host:
        raise Reject(f"{quoted(text)} is not host:port; write an IPv6 address in brackets like [::1]:9843")
    elif _HOST.fullmatch(host) is None:
        raise Reject(f"{quoted(text)} is not host:port; write one like 127.0.0.1:9843")
    if not re.fullmatch(r"\d{1,5}", port, re.ASCII) or int(port) > 65535:
        raise Reject(f"{quoted(text)} has no valid port; ports are 0 to 65535")
    return host or "0.0.0.0", int(port)  # noqa: S104 - asked for by the empty host


def show_duration(seconds: float) -> str:
    """The shortest exact duration text: 90 -> `1m30s`, 0.2 -> `200ms`."""
    left = round(seconds * 1000)
    parts = []
    for unit, length in (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, left = divmod(left, length)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def show_size(size: float) -> str:
    """The largest binary unit that divides the size: 268435456 -> `256MiB`."""
    whole = round(size)
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if whole and whole % BYTES[unit] == 0:
            return f"{whole // BYTES[unit]}{unit}"
    return f"{whole}B"


def show_number(value: float) -> str:
    """A number without a trailing `.0`."""
    return f"{value:.9g}"
