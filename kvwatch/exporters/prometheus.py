"""How does the last report look as a Prometheus page?

The page is written here and not by prometheus_client, whose writer takes several times as
long and whose import costs about 5 MiB; its parsers judge every page in the tests.
Formats: text 0.0.4 and OpenMetrics 1.0.0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from math import nan

from kvwatch import __version__
from kvwatch.catalogue.metrics import METRICS, MetricKind, MetricSpec, Row
from kvwatch.exporters.process import PROCESS_SERIES, readings
from kvwatch.model.report import TickReport

TEXT_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

# Series whose texts are kept between reports, per metric and format; more on one host is churn.
MAX_CACHED_SERIES = 4096

# OpenMetrics wants a state set's label to be named like the metric; ours is named for people, so
# state sets are gauges there too.
_TEXT_TYPES = {MetricKind.INFO: "gauge", MetricKind.STATESET: "gauge"}
_OPENMETRICS_TYPES = {MetricKind.STATESET: "gauge"}


def go_float(value: float) -> str:
    """A number as Go's `strconv.FormatFloat(f, 'g', -1, 64)` prints it, as Prometheus' own writer does."""
    try:
        number = float(value)
    except OverflowError:  # an int beyond every float
        return "+Inf" if value > 0 else "-Inf"
    if -1e6 < number < 1e6:
        return f"{number:.0f}" if number.is_integer() else repr(number)
    text = repr(number)
    if "e" in text:
        return text
    if text[-1] in "fn":
        return {"inf": "+Inf", "-inf": "-Inf"}.get(text, "NaN")
    return _with_exponent(text)


def _with_exponent(text: str) -> str:
    """Rewrite a plain decimal of at least 1e6 as `d.ddde+dd`."""
    sign, digits = ("-", text[1:]) if text[0] == "-" else ("", text)
    whole, _, fraction = digits.partition(".")
    mantissa = (whole + fraction).rstrip("0")
    tail = f".{mantissa[1:]}" if len(mantissa) > 1 else ""
    return f"{sign}{mantissa[0]}{tail}e+{len(whole) - 1:02d}"


def openmetrics_float(value: float) -> str:
    """The same with a decimal point or an exponent, as Go's OpenMetrics writer prints it."""
    text = go_float(value)
    return text if "." in text or "e" in text or text[-1] in "fN" else f"{text}.0"


def seconds(value: float) -> str:
    """Counted seconds to the millisecond: a third of the time that every digit takes, and nobody's loss."""
    return f"{value:.3f}"


def readable(value: str) -> str:
    """The text itself; what is no Unicode (a name in bytes) becomes "?"."""
    return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")


def escape_label(value: str) -> str:
    """A label value with backslash, quote and newline escaped."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Series:
    """One series of one page format: its label text, and the last line written for it."""

    __slots__ = ("line", "prefix", "round", "value")

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.value: float = nan
        self.line = ""
        self.round = 0


class LastPage:
    """What a metric's part of the last page was made of, in its order; `lines` begins with the head.

    Lists side by side, so that comparing a new page touches little memory.
    """

    __slots__ = ("labels", "lines", "numbers", "rows", "series")

    def __init__(self, head: str) -> None:
        self.labels: list[tuple[str, ...]] = []
        self.numbers: list[float] = []
        self.lines = [head]
        self.series: list[Series] = []
        self.rows: list[Row] = []

    def add(self, row: Row, series: Series) -> None:
        """One more line."""
        self.rows.append(row)
        self.labels.append(row[0])
        self.numbers.append(series.value)
        self.lines.append(series.line)
        self.series.append(series)


class Family:
    """Writes one metric; lines whose value has not changed are those of the last report.

    Not for two threads at once (`Page` sees to that).
    """

    __slots__ = ("_heads", "_last", "_numbers", "_pages", "_round", "_series", "labels", "name")

    def __init__(self, name: str, kind: MetricKind, text: str, labels: tuple[str, ...], unit: str) -> None:
        self.name = name
        self.labels = labels
        self._round = 0
        self._last: dict[bool, tuple[list[Row] | None, str]] = {}
        self._series: dict[bool, dict[tuple[str, ...], Series]] = {False: {}, True: {}}
        text_head = f"# HELP {name} {text}\n# TYPE {name} {_TEXT_TYPES.get(kind, kind.value)}\n"
        suffix = {MetricKind.COUNTER: "_total", MetricKind.INFO: "_info"}.get(kind, "")
        family = name.removesuffix(suffix)
        unit_line = f"# UNIT {family} {unit}\n" if unit and family.endswith(f"_{unit}") else ""
        kind_text = _OPENMETRICS_TYPES.get(kind, kind.value)
        openmetrics_head = f"# HELP {family} {text}\n# TYPE {family} {kind_text}\n{unit_line}"
        self._numbers: dict[bool, Callable[[float], str]] = {False: go_float, True: openmetrics_float}
        if kind is MetricKind.COUNTER and unit == "seconds":
            self._numbers = {False: seconds, True: seconds}
        self._heads = {False: text_head, True: openmetrics_head}
        self._pages = {openmetrics: LastPage(head) for openmetrics, head in self._heads.items()}

    @classmethod
    def of(cls, spec: MetricSpec) -> Family:
        """The writer of one catalogue row."""
        return cls(spec.name, spec.kind, spec.help, spec.labels, spec.unit)

    @property
    def remembered(self) -> int:
        """How many series' texts are kept."""
        return sum(len(known) for known in self._series.values())

    def write_one(self, value: float, *, openmetrics: bool) -> str:
        """The one sample of a metric without labels, with its head."""
        number = self._numbers[openmetrics]
        return f"{self._heads[openmetrics]}{self.name} {number(value)}\n"

    def write(self, rows: Iterable[Row], *, openmetrics: bool) -> str:
        """All samples of this metric with their head; "" when there is none.

        A repeated series is dropped (one would spoil the whole page), and so is NaN.
        """
        kept, text = self._last.get(openmetrics, (None, ""))
        if rows is kept:  # a reader that keeps its list says so that nothing changed (`kept`)
            return text
        listed = list(rows)
        if not listed:  # as most metrics on most hosts
            return ""
        found = self._same_series(listed, openmetrics=openmetrics)
        text = self._text(listed, openmetrics=openmetrics) if found is None else found
        self._last[openmetrics] = (rows if isinstance(rows, list) else None, text)
        return text

    def _same_series(self, rows: list[Row], *, openmetrics: bool) -> str | None:
        """The text where the series are those of the last page in their order (the rule); else None."""
        page = self._pages[openmetrics]
        labels, numbers, lines = page.labels, page.numbers, page.lines
        if len(rows) != len(labels):
            return None
        number = self._numbers[openmetrics]
        known = page.rows
        for place, row in enumerate(rows):
            if row is known[place]:  # a reader that keeps single rows says so of each
                continue
            values, value = row
            if values != labels[place]:
                return None
            known[place] = row
            if value != numbers[place]:
                if value != value:
                    return None
                series = page.series[place]
                numbers[place] = series.value = value
                lines[place + 1] = series.line = f"{series.prefix}{number(value)}\n"
        return "".join(lines) if rows else ""

    def _text(self, rows: list[Row], *, openmetrics: bool) -> str:
        number = self._numbers[openmetrics]
        known = self._series[openmetrics]
        self._round = now = self._round + 1
        page = LastPage(self._heads[openmetrics])
        for row in rows:
            values, value = row
            series = known.get(values) or self._remember(known, values)
            if series.round == now or value != value:
                continue
            if series.value != value:
                series.value = value
                series.line = f"{series.prefix}{number(value)}\n"
            series.round = now
            page.add(row, series)
        self._pages[openmetrics] = page
        return "".join(page.lines) if page.labels else ""

    def _remember(self, known: dict[tuple[str, ...], Series], values: tuple[str, ...]) -> Series:
        if len(known) >= MAX_CACHED_SERIES:
            known.clear()
        texts = tuple([readable(value) for value in values])
        series = known.get(texts)
        if series is None:
            pairs = zip(self.labels, texts, strict=True)
            labels = ",".join([f'{label}="{escape_label(text)}"' for label, text in pairs])
            series = Series(f"{self.name}{{{labels}}} " if labels else f"{self.name} ")
        known[texts] = known[values] = series
        return series


class Page:
    """Renders reports; one per process, so that texts are made once per series and change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a family writes one page at a time
        self._metrics = [(Family.of(spec), spec.read) for spec in METRICS]
        self._process = {
            name: Family(name, MetricKind(kind), text, (), "") for name, kind, text in PROCESS_SERIES
        }
        self._build = Family.of(METRICS[0])

    def render(self, report: TickReport | None, *, openmetrics: bool) -> bytes:
        """The page for one report; before the first one, what kvwatch knows of itself."""
        with self._lock:
            parts = [self._process[n].write_one(v, openmetrics=openmetrics) for n, v in readings()]
            if report is None:
                parts.append(self._build.write([((__version__,), 1.0)], openmetrics=openmetrics))
            else:
                parts += [f.write(read(report), openmetrics=openmetrics) for f, read in self._metrics]
        if openmetrics:
            parts.append("# EOF\n")
        return "".join(parts).encode("utf-8")


_PAGE = Page()


def render(report: TickReport | None, *, openmetrics: bool) -> bytes:
    """The page for one report, label texts shared with all earlier calls."""
    return _PAGE.render(report, openmetrics=openmetrics)
