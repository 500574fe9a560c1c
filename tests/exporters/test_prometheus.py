"""The page against the official parsers, against promtool, and against a golden file."""

from __future__ import annotations

import dataclasses
import math
import re
import struct
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kvwatch.catalogue.metrics import METRICS, MetricKind
from kvwatch.exporters.process import PROCESS_SERIES, readings
from kvwatch.exporters.prometheus import Family, Page, go_float, openmetrics_float, render
from kvwatch.model.report import TickReport
from tests.exporters import sample

GOLDEN = Path(__file__).parent / "golden"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(page: bytes, *, openmetrics: bool) -> Samples:
    """Every sample that the official parser reads; fails when one comes twice."""
    parse = parse_openmetrics if openmetrics else parse_text
    found: Samples = {}
    for family in parse(page.decode("utf-8")):
        for one in family.samples:
            key = (one.name, frozenset(one.labels.items()))
            assert key not in found
            found[key] = one.value
    return found


def expected(report: TickReport) -> Samples:
    """What the catalogue says, with empty labels kept as they are."""
    return {
        (spec.name, frozenset(zip(spec.labels, values, strict=True))): float(value)
        for spec in METRICS
        for values, value in spec.read(report)
    }


def steady(page: bytes) -> bytes:
    """The page without the figures of the running process."""
    return re.sub(rb"(?m)^(process_\w+) .*$", rb"\1 0", page)


@pytest.mark.parametrize("openmetrics", [False, True], ids=["text", "openmetrics"])
@pytest.mark.parametrize("make", [sample.report, sample.empty_report, sample.bench_report])
def test_case_D3_the_official_parser_reads_every_value_of_every_page(make, openmetrics: bool) -> None:
    """Both official parsers accept the whole page and read exactly the catalogue's samples and values."""
    report = make()
    found = samples(render(report, openmetrics=openmetrics), openmetrics=openmetrics)

    ours = {key: value for key, value in found.items() if key[0].startswith("kvwatch_")}
    assert ours == expected(report)


@pytest.mark.parametrize("openmetrics", [False, True], ids=["text", "openmetrics"])
def test_page_equals_the_golden_file(openmetrics: bool, request: pytest.FixtureRequest) -> None:
    """The page of the sample report is byte for byte what was reviewed."""
    page = steady(Page().render(sample.report(), openmetrics=openmetrics))
    golden = GOLDEN / ("openmetrics.txt" if openmetrics else "metrics.txt")
    if request.config.getoption("--update"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_bytes(page)

    assert page.decode() == golden.read_text(encoding="utf-8")


@pytest.mark.needs("promtool")
@pytest.mark.parametrize("make", [sample.report, sample.empty_report])
def test_promtool_has_nothing_to_say(make) -> None:
    """`promtool check metrics` accepts the page and prints no complaint."""
    page = render(make(), openmetrics=False)
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, timeout=30, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_names_on_the_page_are_the_catalogue() -> None:
    """Every name on the page has a row in the catalogue, and every row is on the page of a full report."""
    found = samples(render(sample.report(), openmetrics=False), openmetrics=False)
    names = {name for name, _ in found}

    assert {n for n in names if n.startswith("kvwatch_")} == {spec.name for spec in METRICS}
    assert {n for n in names if not n.startswith("kvwatch_")} == {name for name, _, _ in PROCESS_SERIES}


@pytest.mark.parametrize("openmetrics", [False, True], ids=["text", "openmetrics"])
def test_before_the_first_report_there_are_self_metrics(openmetrics: bool) -> None:
    """Without a report the page is still good and says which version runs."""
    found = samples(render(None, openmetrics=openmetrics), openmetrics=openmetrics)

    assert [name for name, _ in found if name.startswith("kvwatch_")] == ["kvwatch_build_info"]
    assert "process_resident_memory_bytes" in {name for name, _ in found}


def test_case_K2_self_metrics_stand_first_on_the_page() -> None:
    """What kvwatch says of itself precedes everything that comes from a source."""
    page = render(sample.report(), openmetrics=False)

    assert (
        page.index(b"process_cpu_seconds_total")
        < page.index(b"kvwatch_source_up")
        < page.index(b"kvwatch_gpu_up")
    )


@given(
    values=st.lists(
        st.tuples(st.text(st.characters()), st.floats(allow_nan=True, width=64) | st.integers()),
        min_size=1,
        max_size=6,
    ),
    openmetrics=st.booleans(),
)
def test_case_D3_hostile_labels_and_values_leave_a_page_that_parses(
    values: list[tuple[str, float]], openmetrics: bool
) -> None:
    """Any label text and any number give a page that the official parser reads back; NaN is left out."""
    family = Family("kvwatch_probe", MetricKind.GAUGE, "A probe.", ("name",), "")
    page = family.write([((text,), value) for text, value in values], openmetrics=openmetrics)
    found = samples((page + ("# EOF\n" if openmetrics else "")).encode(), openmetrics=openmetrics)

    wanted: dict[str, float] = {}
    for text, value in values:
        key = text.encode("utf-8", "replace").decode()
        if value == value and key not in wanted:
            wanted[key] = value
    got = {dict(labels)["name"]: value for (_, labels), value in found.items()}
    assert got == {key: _as_float(value) for key, value in wanted.items()}


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def go_reference(value: float) -> str:
    """strconv's rule written down again: shortest digits; an exponent below 1e-4 and from 1e6 on."""
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    text = "".join(map(str, digits))
    point = len(text) + int(exponent)  # digits in front of the decimal point
    minus = "-" if sign else ""
    if value == 0:
        return f"{minus}0"
    if point - 1 < -4 or point - 1 >= 6:
        tail = f".{text[1:]}" if len(text) > 1 else ""
        mark = "-" if point - 1 < 0 else "+"
        return f"{minus}{text[0]}{tail}e{mark}{abs(point - 1):02d}"
    if point <= 0:
        return f"{minus}0.{'0' * -point}{text}"
    if len(text) <= point:
        return f"{minus}{text}{'0' * (point - len(text))}"
    return f"{minus}{text[:point]}.{text[point:]}"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (-1.0, "-1"),
        (0.25, "0.25"),
        (123456.0, "123456"),
        (999999.0, "999999"),
        (1e6, "1e+06"),
        (1048576.0, "1.048576e+06"),
        (150754820096.0, "1.50754820096e+11"),
        (1795996800.25, "1.79599680025e+09"),
        (1e21, "1e+21"),
        (0.0001, "0.0001"),
        (0.00001, "1e-05"),
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
        (math.nan, "NaN"),
        (10**400, "+Inf"),
        (-(10**400), "-Inf"),
        (True, "1"),
    ],
)
def test_numbers_look_as_go_writes_them(value: float, text: str) -> None:
    """Known outputs of Go's strconv.FormatFloat(f, 'g', -1, 64)."""
    assert go_float(value) == text


@given(
    st.integers(min_value=0, max_value=2**64 - 1).map(
        lambda bits: struct.unpack("d", struct.pack("Q", bits))[0]
    )
)
def test_any_finite_number_is_formatted_as_go_would(value: float) -> None:
    """Over all bit patterns the text equals the rule, and reads back as the same number."""
    if not math.isfinite(value):
        return

    assert go_float(value) == go_reference(value)
    assert float(go_float(value)) == value
    assert float(openmetrics_float(value)) == value


def test_openmetrics_numbers_are_floats() -> None:
    """OpenMetrics numbers have a point or an exponent, infinities aside."""
    assert [openmetrics_float(v) for v in (0, 1, 5, 0.5, 1e9, math.inf)] == [
        "0.0",
        "1.0",
        "5.0",
        "0.5",
        "1e+09",
        "+Inf",
    ]


def test_a_series_that_is_gone_leaves_the_page() -> None:
    """Remembered label texts are no remembered series: what the report lacks is not on the page."""
    page = Page()
    full = page.render(sample.report(), openmetrics=False)
    less = page.render(dataclasses.replace(sample.report(), gpus=()), openmetrics=False)

    assert b"kvwatch_gpu_up{" in full
    assert b"kvwatch_gpu_up{" not in less


def test_repeated_series_are_written_once() -> None:
    """Two rows with the same labels give one sample: a repeated one would spoil the page."""
    family = Family("kvwatch_probe", MetricKind.GAUGE, "A probe.", ("name",), "")

    assert family.write([(("a",), 1.0), (("a",), 2.0)], openmetrics=False).count("kvwatch_probe{") == 1


def test_names_that_are_no_unicode_stay_one_series() -> None:
    """Two names in undecodable bytes that look the same on the page are written once."""
    family = Family("kvwatch_probe", MetricKind.GAUGE, "A probe.", ("name",), "")
    page = family.write([(("\udc80",), 1.0), (("\udc81",), 2.0), (("?",), 3.0)], openmetrics=False)

    assert page.endswith('kvwatch_probe{name="?"} 1\n')
    assert page.count("kvwatch_probe{") == 1


def test_label_texts_are_not_kept_for_ever() -> None:
    """Series that change their labels all the time do not grow the writer without bound."""
    family = Family("kvwatch_probe", MetricKind.GAUGE, "A probe.", ("name",), "")
    for i in range(10_000):
        family.write([((str(i),), 1.0)], openmetrics=False)

    assert family.remembered <= 4096


def test_process_figures_are_those_of_this_process() -> None:
    """Memory, descriptors and start time are read from /proc and plausible."""
    found = dict(readings())

    assert found["process_resident_memory_bytes"] > 5e6
    assert found["process_virtual_memory_bytes"] > found["process_resident_memory_bytes"]
    assert 0 < found["process_open_fds"] < found["process_max_fds"]
    assert found["process_start_time_seconds"] > 1.5e9
    assert found["process_cpu_seconds_total"] > 0


def test_prometheus_client_is_not_loaded_by_the_exporter() -> None:
    """The daemon's exporter does without prometheus_client, ssl and bcrypt until something needs them."""
    code = (
        "import sys, kvwatch.exporters.web, kvwatch.exporters.prometheus;"
        "print([m for m in ('prometheus_client', 'ssl', 'bcrypt', 'http', 'email') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        cwd=Path(__file__).parents[2],
    )

    assert done.stdout.strip() == "[]"
