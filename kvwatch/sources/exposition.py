"""Which of the wanted series are on a Prometheus or OpenMetrics text page, and with what values?

Only lines of wanted families are parsed: a page of 50 KB costs 0.2 ms instead of the 2 ms and more
of a full parser. Decisions, each tested:

* a value that is not a number ("N/A", nothing at all) makes that series absent and leaves a finding;
* NaN and the "no value" sentinels of GPU libraries make a series absent;
* the same series twice with different values is refused, since nobody can tell which one holds;
* a page that ends inside a wanted line is refused: `12` may have been `1234`;
* `_created` series, timestamps and exemplars are ignored.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Collection, Sequence

from kvwatch.model.sample import FailureKind
from kvwatch.model.server import Histogram
from kvwatch.sources.base import SourceError

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
_INDENT = re.compile(rb"\n[ \t]+")
_ESCAPES = {b"n": b"\n", b'"': b'"', b"\\": b"\\"}

_MAX_KNOWN = 4096  # series of 8 engines of vLLM: 1000
_MAX_HEAD_BYTES = 2048
_MAX_LINES = 50_000  # wanted lines on one page
_MAX_FINDINGS = 8


class Labels(dict[str, str]):
    """The labels of a series without `le`; shared between series, so never changed after it is made.

    `key` is the same as a sorted tuple, to group and to compare by.
    """

    __slots__ = ("key",)

    def __init__(self, pairs: dict[str, str]) -> None:
        super().__init__(pairs)
        self.key = tuple(sorted(pairs.items()))


class Series:
    """What stands before a value: sample name, labels, and for a bucket its upper bound `le`.

    Compared by identity: one page has one object per series, however its labels are ordered.
    """

    __slots__ = ("labels", "le", "name")

    def __init__(self, name: str, labels: Labels, le: float | None = None) -> None:
        self.name = name
        self.labels = labels
        self.le = le

    def __repr__(self) -> str:
        return f"Series({self.name!r}, {dict(self.labels)!r}, le={self.le!r})"


class _Known:
    """Series seen before: heads repeat from poll to poll, so each is parsed once.

    A page is read with one of these from start to end; a full one is replaced between pages, so
    threads may share it (plain dict operations are atomic).
    """

    __slots__ = ("heads", "labels", "series")

    def __init__(self) -> None:
        self.heads: dict[bytes, Series] = {}
        self.labels: dict[tuple[tuple[str, str], ...], Labels] = {}
        self.series: dict[tuple[str, tuple[tuple[str, str], ...], float | None], Series] = {}

    def full(self) -> bool:
        return len(self.series) > _MAX_KNOWN or len(self.heads) > _MAX_KNOWN

    def intern(self, name: str, pairs: dict[str, str], le: float | None) -> Series:
        labels = Labels(pairs)
        labels = self.labels.setdefault(labels.key, labels)
        return self.series.setdefault((name, labels.key, le), Series(sys.intern(name), labels, le))


_known = _Known()


class Families:
    """The wanted part of one page.

    `findings` are sentences about series that were left out, for people.
    """

    __slots__ = ("_by_name", "_labels", "_page", "findings")

    def __init__(self, page: bytes, values: dict[Series, float], findings: tuple[str, ...]) -> None:
        self._page = page
        self.findings = findings
        self._by_name: dict[str, list[tuple[Series, float]]] = {}
        for pair in values.items():
            self._by_name.setdefault(pair[0].name, []).append(pair)
        self._labels = {id(series.labels): series.labels for series in values}

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def names(self) -> Collection[str]:
        """Names of the samples found."""
        return self._by_name.keys()

    def label_sets(self) -> Collection[Labels]:
        """The distinct label sets found (`le` left out)."""
        return self._labels.values()

    def series(self, name: str) -> Sequence[tuple[Series, float]]:
        """Every series whose sample name is exactly `name`, with its value."""
        return self._by_name.get(name, ())

    def counter(self, name: str) -> Sequence[tuple[Series, float]]:
        """Series of counter `name`, written with `_total` or without."""
        base = name.removesuffix("_total")
        return self.series(base + "_total") or self.series(base)

    def declares(self, name: str) -> bool:
        """Whether the page has HELP or TYPE lines of `name`, with or without samples."""
        text = name.encode()
        return b"# TYPE " + text + b" " in self._page or b"# HELP " + text + b" " in self._page

    def histograms(self, name: str) -> Sequence[tuple[Labels, Histogram]]:
        """Every histogram `name`, one per label set; those without any count are left out."""
        found = self._by_name.get(name + "_bucket", ())
        buckets: dict[int, dict[float, float]] = {id(series.labels): {} for series, _ in found}
        for series, value in found:
            if series.le is not None:
                buckets[id(series.labels)][series.le] = value
        counts = {id(series.labels): value for series, value in self.series(name + "_count")}
        sums = {id(series.labels): value for series, value in self.series(name + "_sum")}
        return [
            (self._labels[key], _histogram(cumulative, count, sums.get(key)))
            for key, cumulative in buckets.items()
            if (count := counts.get(key, cumulative.get(math.inf))) is not None
        ]


def pick(page: bytes, wanted: Collection[str], *, dcgm: bool = False) -> Families:
    """Read the wanted families of a page; family names are given without suffix.

    `dcgm` drops DCGM's 32-bit and float sentinels as well; elsewhere those are possible values.
    Raises SourceError(MALFORMED) for a wanted line that cannot be read, for one series with two
    values, and for a page that ends inside a wanted line.
    """
    if not wanted:
        return Families(page, {}, ())
    names = wanted if isinstance(wanted, frozenset) else frozenset(wanted)
    text = b"\n" + page
    if _INDENT.search(text):
        text = _INDENT.sub(b"\n", text)
    lines: list[bytes] = []
    for pattern in _patterns(names):
        lines += pattern.findall(text)
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
def _patterns(names: frozenset[str]) -> tuple[re.Pattern[bytes], ...]:
    """Patterns that find a line break and a whole wanted line, one per namespace.

    A pattern that begins with the break and a long literal lets `re` search, not try each place.
    """
    groups: dict[str, list[bytes]] = {}
    for name in sorted(names):
        groups.setdefault(re.split("[:_]", name, maxsplit=1)[0], []).append(name.encode())
    return tuple(_pattern(group) for group in groups.values())


def _pattern(names: list[bytes]) -> re.Pattern[bytes]:
    """The pattern of sorted names; the first and the last have the common prefix of all."""
    size = 0
    while names[0][size : size + 1] == names[-1][size : size + 1] != b"":
        size += 1
    tails = b"|".join(re.escape(name[size:]) for name in names)
    suffixes = "|".join(SUFFIXES).encode()
    ends = b"(?:" + tails + b")(?:" + suffixes + rb")?[ \t{][^\n]*)"
    return re.compile(b"\n(" + re.escape(names[0][:size]) + ends)


def _refuse_cut(text: bytes, names: frozenset[str]) -> None:
    """Refuse a page whose last line has no end and is, or may become, a wanted one."""
    tail = text[text.rfind(b"\n") :]
    line = tail[1:].rstrip()
    if not line or line.startswith(b"#"):
        return
    cut = any(pattern.match(tail) for pattern in _patterns(names))
    if not cut and _NAME.fullmatch(line):
        start = line.decode()
        cut = any((family + suffix).startswith(start) for family in names for suffix in ("", *SUFFIXES))
    if cut:
        raise _malformed(
            f"the page ends in the middle of the line {excerpt(line)!r}: the answer was cut short"
        )


def _read(page: bytes, lines: list[bytes], dcgm: bool) -> Families:
    """Read wanted lines. The loop's body is the fast path: a head seen before and a plain number."""
    global _known
    if _known.full():
        _known = _Known()
    known = _known
    heads = known.heads
    values: dict[Series, float] = {}
    findings: list[str] = []
    for line in lines:
        head, _, token = line.rpartition(b" ")
        series = heads.get(head)
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
    return Families(page, values, tuple(findings[:_MAX_FINDINGS]))


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


def _histogram(cumulative: dict[float, float], count: float, total: float | None) -> Histogram:
    bounds = sorted(bound for bound in cumulative if bound != math.inf)
    return Histogram(
        bounds=tuple(bounds), counts=tuple(cumulative[bound] for bound in bounds), count=count, sum=total
    )


def _malformed(message: str) -> SourceError:
    return SourceError(FailureKind.MALFORMED, message)
