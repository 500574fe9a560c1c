"""Which of the wanted series are on a Prometheus or OpenMetrics text page, and with what values?

Only lines of wanted families are parsed, and of a page with the same series as one before only the values:
a page of 50 KB costs 0.2 ms instead of the 2 ms and more of a full parser. Decisions, each tested:

* a value that is not a number ("N/A", nothing at all) makes that series absent and leaves a finding;
* NaN and the "no value" sentinels of GPU libraries make a series absent;
* the same series twice with different values is refused, since nobody can tell which one holds;
* a page that ends inside a wanted line is refused: `12` may have been `1234`;
* `_created` series, timestamps and exemplars are ignored.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import sys
from collections.abc import Collection

from kvwatch.model.sample import FailureKind
from kvwatch.sources.base import SourceError
from kvwatch.sources.families import Families, Labels, Layout, Series

__all__ = ["SUFFIXES", "Families", "Labels", "Series", "excerpt", "pick", "printable", "ratio", "whole"]

SUFFIXES = ("_total", "_bucket", "_sum", "_count")
# NVML's and DCGM's 64-bit "not supported" values start at 0x7ffffffffffffff0; as a float that is 2^63.
_PLAIN_BELOW = float(0x7FFFFFF0)  # no sentinel is smaller
INT64_BLANK = float(0x7FFFFFFFFFFFFFF0)
DCGM_INT32_BLANK = range(0x7FFFFFF0, 0x80000000)
DCGM_FP64_BLANK = (140737488355328.0, 140737488355343.0)  # 2^47 .. 2^47 + 15 (dcgm_structs.h)

_NAME = re.compile(rb"[a-zA-Z_:][a-zA-Z0-9_:]*+")
_TEXT = rb'"([^"\\\n]*+(?:\\.[^"\\\n]*+)*+)"'
_LABEL = re.compile(
    rb"[ \t]*+(?:([a-zA-Z_][a-zA-Z0-9_]*+)|" + _TEXT + rb")[ \t]*+=[ \t]*+" + _TEXT + rb"[ \t]*+(,?)"
)
_CLOSE = re.compile(rb"[ \t]*+\}")
_ESCAPE = re.compile(rb'\\(["n\\])')
_ESCAPES = {b"n": b"\n", b'"': b'"', b"\\": b"\\"}

_MAX_KNOWN_BYTES = 24 * 1024 * 1024  # a server needs 0.1 MiB
_ENTRY_BYTES = 256
_MAX_HEAD_BYTES = 2048
_MAX_LINES = 50_000  # wanted lines on one page
_MAX_FINDINGS = 8


class _Known:
    """What was seen before: heads repeat from poll to poll, so each is parsed once, and so do whole pages.

    A page is read with one of these from start to end; a full one is replaced between pages, so
    threads may share it (plain dict operations are atomic). `size` counts bytes, roughly.
    """

    __slots__ = ("heads", "labels", "layouts", "pages", "series", "size")

    def __init__(self) -> None:
        self.heads: dict[bytes, Series] = {}
        self.labels: dict[tuple[tuple[str, str], ...], Labels] = {}
        self.series: dict[tuple[str, tuple[tuple[str, str], ...], float | None], Series] = {}
        self.layouts: dict[tuple[Series, ...], Layout] = {}
        self.pages: dict[tuple[bytes, ...], Layout] = {}
        self.size = 0

    def intern(self, name: str, pairs: dict[str, str], le: float | None) -> Series:
        labels = Labels(pairs)
        labels = self.labels.setdefault(labels.key, labels)
        self.size += _ENTRY_BYTES
        return self.series.setdefault((name, labels.key, le), Series(sys.intern(name), labels, le))

    def layout(self, series: tuple[Series, ...]) -> Layout:
        found = self.layouts.get(series)
        if found is None:
            found = self.layouts.setdefault(series, Layout(series))
            self.size += _ENTRY_BYTES * len(series)
        return found


_known = _Known()


def pick(page: bytes, wanted: Collection[str], *, dcgm: bool = False) -> Families:
    """Read the wanted families of a page; family names are given without suffix.

    `dcgm` drops DCGM's 32-bit and float sentinels as well; elsewhere those are possible values.
    Raises SourceError(MALFORMED) for a wanted line that cannot be read, for one series with two
    values, and for a page that ends inside a wanted line.
    """
    if not wanted:
        return Families(page, Layout(()), (), ())
    names = wanted if isinstance(wanted, frozenset) else frozenset(wanted)
    text = b"\n" + page
    lines: list[bytes] = _pattern(names).findall(text)
    if len(lines) > _MAX_LINES:
        raise SourceError(
            FailureKind.TOO_LARGE, f"the page has {len(lines)} wanted lines; {_MAX_LINES} at most are read"
        )
    _refuse_cut(text, names)
    return _read(page, lines, dcgm)


def whole(value: float | None) -> int | None:
    """A count as an integer; None for what cannot be a count (absent, infinite, negative)."""
    if value is None or not 0 <= value < INT64_BLANK:
        return None
    return round(value)


def ratio(value: float | None) -> float | None:
    """A ratio clipped to 0..1; None where it is absent or far outside (another unit)."""
    if value is None or not -1e-3 <= value <= 1.001:
        return None
    return min(1.0, max(0.0, value))


def excerpt(data: bytes, limit: int = 80) -> str:
    """Foreign bytes, shortened and made printable, for an error text."""
    return printable(data[: limit * 4].decode("utf-8", "replace"), limit)


def printable(text: str, limit: int) -> str:
    """Foreign text on one line without control characters, `limit` characters and an ellipsis at most."""
    shown = " ".join("".join(c if c.isprintable() else " " for c in text[: limit * 4]).split())
    return shown if len(shown) <= limit else shown[:limit] + "…"


@functools.lru_cache(maxsize=64)
def _pattern(names: frozenset[str]) -> re.Pattern[bytes]:
    """The pattern that finds a line break and a whole wanted line, its indentation left out.

    What names have in common is written once: a line that is not wanted is passed over after its first
    few letters.
    """
    tree = _tree(sorted(name.encode() for name in names))
    suffixes = "|".join(SUFFIXES).encode()
    return re.compile(rb"\n[ \t]*+(" + tree + b"(?:" + suffixes + rb")?[ \t{][^\n]*)")


def _tree(names: list[bytes]) -> bytes:
    """A pattern for exactly these sorted, distinct names."""
    size = 0
    while names[0][size : size + 1] == names[-1][size : size + 1] != b"":
        size += 1
    start, rests = re.escape(names[0][:size]), [name[size:] for name in names]
    branches = [
        _tree(list(same)) for _, same in itertools.groupby(filter(None, rests), key=lambda rest: rest[:1])
    ]
    if not branches:
        return start
    return start + b"(?:" + b"|".join(branches) + b")" + (b"" if all(rests) else b"?")


def _refuse_cut(text: bytes, names: frozenset[str]) -> None:
    """Refuse a page whose last line has no end and is, or may become, a wanted one."""
    tail = text[text.rfind(b"\n") :]
    line = tail.strip()
    if not line or line.startswith(b"#"):
        return
    cut = _pattern(names).match(tail) is not None
    if not cut and _NAME.fullmatch(line):
        start = line.decode()
        cut = any((family + suffix).startswith(start) for family in names for suffix in ("", *SUFFIXES))
    if cut:
        raise _malformed(
            f"the page ends in the middle of the line {excerpt(line)!r}: the answer was cut short"
        )


def _read(page: bytes, lines: list[bytes], dcgm: bool) -> Families:
    """Read wanted lines. Where the same heads stood on an earlier page only the values are new."""
    global _known
    if _known.size > _MAX_KNOWN_BYTES:
        _known = _Known()
    known = _known
    cut = [line.rpartition(b" ") for line in lines]
    heads = tuple([head for head, _, _ in cut])
    layout = known.pages.get(heads)
    if layout is not None:
        plain = _plain([token for _, _, token in cut])
        if plain is not None:
            return Families(page, layout, plain, ())
    values, findings = _read_each(lines, dcgm, known)
    found = known.layout(tuple(values))
    if layout is None and len(values) == len(heads) and all(head in known.heads for head in heads):
        known.pages[heads] = found
        known.size += sum(map(len, heads))
    return Families(page, found, list(values.values()), tuple(findings[:_MAX_FINDINGS]))


def _plain(tokens: list[bytes]) -> list[float] | None:
    """The values, if all are ordinary numbers: none that may mean "no value"."""
    try:
        values = list(map(float, tokens))
    except ValueError:
        return None
    # A sum is NaN where any value is; `max` alone may step over one.
    ordinary = not values or (max(values) < _PLAIN_BELOW and not math.isnan(sum(values)))
    return values if ordinary and b"_" not in b"".join(tokens) else None


def _read_each(lines: list[bytes], dcgm: bool, known: _Known) -> tuple[dict[Series, float], list[str]]:
    """Values by series, and what was left out."""
    values: dict[Series, float] = {}
    findings: list[str] = []
    for line in lines:
        head, _, token = line.rpartition(b" ")
        series = known.heads.get(head)
        if series is None:
            series, token = _split(line, known)
        try:
            value = float(token)
        except ValueError:
            value = math.nan
        odd = not value < _PLAIN_BELOW or b"_" in token
        if odd and _absent(series, token, value, findings, dcgm):
            continue
        if values.setdefault(series, value) != value:
            raise _malformed(f"{excerpt(head)} is on the page twice with different values")
    return values, findings


def _absent(series: Series, token: bytes, value: float, findings: list[str], dcgm: bool) -> bool:
    """Whether an unusual value means "no value"; what is no number at all becomes a finding."""
    if b"_" in token or (value != value and token.lower().lstrip(b"+-") != b"nan"):
        findings.append(f"{series.name} has the value {excerpt(token, 20)!r}, which is no number: left out")
        return True
    return value != value or _is_blank(value, dcgm)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return None if value != value or "_" in text else value


def _is_blank(value: float, dcgm: bool) -> bool:
    """Whether a value is a library's way of saying "no value" (nvml.h, dcgm_structs.h)."""
    if INT64_BLANK <= value < math.inf:
        return True
    return dcgm and (value in DCGM_INT32_BLANK or DCGM_FP64_BLANK[0] <= value <= DCGM_FP64_BLANK[1])


def _split(line: bytes, known: _Known) -> tuple[Series, bytes]:
    """Parse a line's head; give the series and the token that stands where the value belongs."""
    named = _NAME.match(line)
    assert named is not None  # noqa: S101 - the pattern that found the line begins with a name
    at = named.end()
    pairs: dict[str, str] = {}
    rest = line[at:].lstrip(b" \t")
    if rest.startswith(b"{"):
        pairs, at = _labels(line, len(line) - len(rest) + 1)
    head, tokens = line[:at], line[at:].split()
    series = _series(named.group().decode(), pairs, line, known)
    if len(tokens) == 1 and len(head) <= _MAX_HEAD_BYTES and line == head + b" " + tokens[0]:
        known.heads[head] = series
        known.size += len(head) + _ENTRY_BYTES
    return series, tokens[0] if tokens and not tokens[0].startswith(b"#") else b""


def _labels(line: bytes, at: int) -> tuple[dict[str, str], int]:
    """Parse labels from behind the brace; give them and the place behind the closing brace."""
    pairs: dict[str, str] = {}
    more = True
    while (closed := _CLOSE.match(line, at)) is None:
        label = _LABEL.match(line, at) if more else None
        if label is None:
            raise _malformed(f"the labels of {excerpt(line)!r} cannot be read")
        name = _unescape(label[1] or label[2])
        if name in pairs:
            raise _malformed(f"{excerpt(line)!r} has the label {name[:40]!r} twice")
        pairs[name] = _unescape(label[3])
        at, more = label.end(), bool(label[4])
    return pairs, closed.end()


def _unescape(raw: bytes) -> str:
    if b"\\" in raw:
        raw = _ESCAPE.sub(lambda found: _ESCAPES[found[1]], raw)
    return raw.decode("utf-8", "replace")


def _series(name: str, pairs: dict[str, str], line: bytes, known: _Known) -> Series:
    le = None
    if name.endswith("_bucket") and "le" in pairs:
        le = _number(pairs.pop("le"))
        if le is None:
            raise _malformed(f"the bucket {excerpt(line)!r} has no number as its bound")
    return known.intern(name, pairs, le)


def _malformed(message: str) -> SourceError:
    return SourceError(FailureKind.MALFORMED, message)
