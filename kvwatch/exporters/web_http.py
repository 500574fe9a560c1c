"""What did the client ask, and what does an answer look like on the wire? HTTP/1.x as bytes; no I/O."""

from __future__ import annotations

import re
import time
import zlib
from dataclasses import dataclass, field

HEAD_MAX_BYTES = 16 * 1024
BODY_MAX_BYTES = 64 * 1024
GZIP_MIN_BYTES = 1024

REASONS = {
    200: "OK",
    302: "Found",
    304: "Not Modified",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    411: "Length Required",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\xff]+) HTTP/(\d)\.(\d)\Z")
_HEAD_END = re.compile(rb"\r?\n\r?\n")
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class HttpError(Exception):
    """A request that cannot be answered as asked: a status and a sentence for people."""

    def __init__(self, status: int, message: str, *, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One parsed request. Header names are in lower case; `size` is its length in bytes, body included."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    keep_alive: bool
    size: int

    def header(self, name: str) -> str:
        """A header's value, "" where it is missing."""
        return self.headers.get(name, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One answer. `body` is already compressed when `gzip` is set."""

    status: int = 200
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = field(default=())
    gzip: bool = False


def head_length(data: bytes | bytearray, start: int = 0) -> int | None:
    """Length of the request's head with its blank line; None while it is incomplete.

    Empty lines in front of a request are allowed (RFC 9112, 2.2) and belong to its head.
    `start` says how much was searched before. Raises HttpError 431 when it grows too long.
    """
    lead = len(data) - len(data.lstrip(b"\r\n"))
    found = _HEAD_END.search(data, max(lead, start - 3))
    end = found.end() if found else len(data)
    if end > HEAD_MAX_BYTES:
        raise HttpError(431, f"the request's head is longer than {HEAD_MAX_BYTES} bytes")
    return end if found else None


def parse(data: bytes, length: int) -> Request:
    """The request whose head is the first `length` bytes; HttpError where it is none."""
    lines = data[:length].strip(b"\r\n").split(b"\n")
    line = _REQUEST_LINE.match(lines[0].rstrip(b"\r"))
    if line is None:
        raise HttpError(400, "that is no HTTP/1.1 request line")
    method, target, major, minor = line.groups()
    if major != b"1":
        raise HttpError(505, "this server speaks HTTP/1.1")
    headers = _headers(lines[1:])
    if minor != b"0" and "host" not in headers:
        raise HttpError(400, "HTTP/1.1 wants a Host header")
    path, _, query = _origin_form(target.decode("latin-1")).partition("?")
    options = headers.get("connection", "").lower()
    keep = "close" not in options and (minor != b"0" or "keep-alive" in options)
    return Request(
        method=method.decode("ascii"),
        path=path,
        query=query,
        headers=headers,
        keep_alive=keep,
        size=length + _body_length(headers),
    )


def _origin_form(target: str) -> str:
    if target.startswith("/"):
        return target
    scheme, found, rest = target.partition("://")
    if found and scheme.lower() in ("http", "https"):
        return "/" + rest.partition("/")[2]
    raise HttpError(400, "the request's target is no path")


def _headers(lines: list[bytes]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw in lines:
        line = raw.rstrip(b"\r")
        if not line:
            continue
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.match(name) or b"\0" in value or b"\r" in value:
            raise HttpError(400, "there is a malformed header line")
        key, text = name.decode("ascii").lower(), value.strip(b" \t").decode("latin-1")
        if key in headers and key in ("host", "content-length", "authorization"):
            raise HttpError(400, f"there is more than one {key} header")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return headers


def _body_length(headers: dict[str, str]) -> int:
    if "transfer-encoding" in headers:
        raise HttpError(411, "send a Content-Length: other transfer encodings are not accepted")
    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit()):
        raise HttpError(400, "Content-Length is no number")
    if len(text) > 9 or int(text) > BODY_MAX_BYTES:
        raise HttpError(413, f"the body is longer than {BODY_MAX_BYTES} bytes")
    return int(text)


def _weights(header: str) -> list[tuple[str, str, float]]:
    """(value, parameters, q) of a comma-separated Accept header."""
    found = []
    for part in header.lower().split(","):
        value, *parameters = [piece.strip() for piece in part.split(";")]
        weight = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    weight = float(parameter[2:])
                except ValueError:
                    weight = 0.0
        found.append((value, ";".join(parameters), weight))
    return found


def wants_openmetrics(accept: str) -> bool:
    """Whether OpenMetrics 1.0.0 is asked for, and not less than the text format."""
    best_text = best_openmetrics = 0.0
    for value, parameters, weight in _weights(accept):
        if value == "application/openmetrics-text":
            if "version=" not in parameters or "version=1.0.0" in parameters:
                best_openmetrics = max(best_openmetrics, weight)
        elif value == "text/plain":
            best_text = max(best_text, weight)
    return best_openmetrics > 0 and best_openmetrics >= best_text


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether the client takes gzip (RFC 9110, 12.5.3; `q=0` means that it does not)."""
    weights = {value: weight for value, _, weight in _weights(accept_encoding)}
    return weights.get("gzip", weights.get("*", 0.0)) > 0


def gzip_compress(data: bytes) -> bytes:
    """Gzip at the fastest level: a page shrinks to a tenth, the higher levels gain little more."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    return packer.compress(data) + packer.flush()


def http_date(wall_s: float) -> str:
    """A Unix time as HTTP writes it."""
    t = time.gmtime(wall_s)
    day, month = _DAYS[t.tm_wday], _MONTHS[t.tm_mon - 1]
    return f"{day}, {t.tm_mday:02d} {month} {t.tm_year} {t.tm_hour:02d}:{t.tm_min:02d}:{t.tm_sec:02d} GMT"


def wire(
    response: Response,
    *,
    wall_s: float,
    keep_alive: bool,
    head_only: bool,
    extra: tuple[tuple[str, str], ...] = (),
) -> bytes:
    """The answer as bytes. `extra` headers replace those of the same name."""
    headers = {
        "Date": http_date(wall_s),
        "Content-Type": response.content_type,
        "Content-Length": str(len(response.body)),
        "X-Content-Type-Options": "nosniff",
        "Cross-Origin-Resource-Policy": "same-origin",
        **dict(response.headers),
        **dict(extra),
        "Connection": "keep-alive" if keep_alive else "close",
    }
    if response.gzip:
        headers["Content-Encoding"] = "gzip"
    head = f"HTTP/1.1 {response.status} {REASONS.get(response.status, 'Status')}\r\n"
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return f"{head}{lines}\r\n".encode("latin-1", "replace") + (b"" if head_only else response.body)


def error_response(error: HttpError) -> Response:
    """An error as a short plain sentence."""
    body = f"{error.message}\n".encode()
    return Response(status=error.status, body=body, headers=(("Cache-Control", "no-store"), *error.headers))


def unauthorized() -> HttpError:
    """No password, or a wrong one."""
    headers = (("WWW-Authenticate", 'Basic realm="kvwatch"'),)
    return HttpError(401, "a user and a password are wanted", headers=headers)


def too_many_unchecked() -> HttpError:
    """More new passwords at once than can be checked."""
    return HttpError(503, "too many passwords wait to be checked", headers=(("Retry-After", "2"),))
