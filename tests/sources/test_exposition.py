"""The page reader: it agrees with prometheus_client, and refuses rather than guesses."""

from __future__ import annotations

import itertools
import math
import re
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvwatch.model.sample import FailureKind
from kvwatch.sources.base import SourceError
from kvwatch.sources.exposition import SUFFIXES, Families, pick, printable, ratio, whole
from tests.sources.servers import recorded

Sample = tuple[str, tuple[tuple[str, str], ...]]


def ours(families: Families) -> dict[Sample, float]:
    """Everything picked, with `le` as a label again, its bound as a number."""
    found = {}
    for name in families.names():
        for series, value in families.series(name):
            labels = dict(series.labels)
            if series.le is not None:
                labels["le"] = repr(series.le)
            found[name, tuple(sorted(labels.items()))] = value
    return found


def theirs(page: str, wanted: set[str]) -> dict[Sample, float]:
    """The same from prometheus_client, without what we leave out on purpose."""
    names = {base + suffix for base in wanted for suffix in ("", *SUFFIXES)}
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.endswith("_bucket") and "le" in labels:
                labels["le"] = repr(float(labels["le"]))
            blank = math.isnan(sample.value) or 2.0**63 <= sample.value < math.inf
            if sample.name in names and not blank:
                found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def plain(found: dict[Sample, float]) -> dict[Sample, float]:
    """Without `_total`, which prometheus_client adds where a counter is written without."""
    return {(name.removesuffix("_total"), labels): value for (name, labels), value in found.items()}


def exposition_cases() -> list[recorded.Case]:
    """Cases with a metrics page in the exposition format (TensorRT-LLM has one of that name in JSON)."""
    found = [case for case in recorded.cases() if "metrics" in case.pages()]
    return [case for case in found if not case.pages()["metrics"].lstrip().startswith(b"[")]


@pytest.mark.parametrize("case", exposition_cases(), ids=lambda case: case.id)
def test_agrees_on_recorded_pages(case: recorded.Case) -> None:
    """Every family of every recorded page is read as prometheus_client reads it."""
    page = case.pages()["metrics"]
    names = {line.split()[2].decode() for line in page.splitlines() if line.startswith(b"# TYPE")}
    wanted = {name.removesuffix("_total") for name in names if not name.endswith("_created")}

    assert plain(ours(pick(page, wanted))) == plain(theirs(page.decode(), wanted))


NAMES = st.sampled_from(["vllm:a", "vllm:ab", "vllm:a_b", "other_a", "x", "vllm:c_total"])
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12) | st.sampled_from(
    ['a"b', "a\\b", "a\nb", "a,b", "a}b", "{", "a=b", "# x", "\\n", '\\"', "le"]
)
NUMBERS = st.one_of(
    st.floats(),
    st.integers(-(2**70), 2**70).map(float),
    st.sampled_from([2.0**63, math.nextafter(2.0**63, 0), -0.0]),
)


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


@st.composite
def pages(draw: st.DrawFn) -> str:
    """Pages in the text format: any labels, any numbers, blanks, timestamps, comments."""
    blank = st.sampled_from([" ", "  ", "\t", " \t"])
    lines = {}
    for _ in range(draw(st.integers(0, 12))):
        name = draw(NAMES) + draw(st.sampled_from(["", "_total", "_sum", "_count", "_bucket", "_created"]))
        labels = draw(
            st.dictionaries(st.sampled_from(["engine", "model_name", "a", "_x1"]), TEXTS, max_size=3)
        )
        if name.endswith("_bucket"):
            labels["le"] = draw(st.sampled_from(["0.5", "1", "+Inf", "1e3"]))
        inner = ",".join(
            f'{key}="{escaped(value)}"' for key, value in draw(st.permutations(list(labels.items())))
        )
        inner = "{" + inner + draw(st.sampled_from(["", ","] if inner else [""])) + "}" if labels else ""
        number = draw(
            st.one_of(NUMBERS.map(repr), st.sampled_from(["+Inf", "-Inf", "NaN", "1e-05", "8.34E+5", "+3"]))
        )
        stamp = draw(st.sampled_from(["", " 1712345678000"]))
        lines[name, frozenset(labels.items())] = name + inner + draw(blank) + number + stamp
    comments = draw(
        st.lists(st.sampled_from(["# HELP vllm:a some text", "# TYPE vllm:a gauge", "", "# note"]))
    )
    body = draw(st.permutations([*lines.values(), *comments]))
    indent = draw(st.sampled_from(["", " ", "\t"]))
    return "".join(indent + line + "\n" for line in body)


@given(page=pages(), wanted=st.sets(NAMES, min_size=1))
@settings(max_examples=300, deadline=None)
def test_agrees_on_generated_pages(page: str, wanted: set[str]) -> None:
    """Whatever a page in the text format holds, wanted families are read as prometheus_client reads them."""
    assert ours(pick(page.encode(), wanted)) == theirs(page, wanted)


VALUE = re.compile(r"(?m)^(\s*[^#\s{]+(?:\{.*\})?\s+)(\S+)")


@given(page=pages(), wanted=st.sets(NAMES, min_size=1), numbers=st.lists(NUMBERS, min_size=1))
@settings(deadline=None)
def test_a_page_with_the_series_of_an_earlier_one_is_read_as_if_it_were_the_first(
    page: str, wanted: set[str], numbers: list[float]
) -> None:
    """What is remembered of a page's series changes nothing about the values of the next one."""
    pick(page.encode(), wanted)
    later = itertools.cycle(numbers)
    changed = VALUE.sub(lambda found: found[1] + repr(next(later)), page)

    assert ours(pick(page.encode(), wanted)) == theirs(page, wanted)
    assert ours(pick(changed.encode(), wanted)) == theirs(changed, wanted)


def test_histograms_of_later_pages_have_later_values() -> None:
    """Buckets, count and sum of a second page with the same series are its own; a blank one is left out."""
    text = 'h_bucket{a="1",le="+Inf"} %d\nh_bucket{a="1",le="1"} %d\nh_sum{a="1"} %s\nh_count{a="1"} %d\n'
    read = [
        pick((text % values).encode(), {"h"}).histograms("h")[0][1]
        for values in ((3, 2, "4.5", 3), (9, 7, "8.5", 9), (10, 7, "NaN", 10), (11, 8, "9.5", 11))
    ]

    assert [one.counts for one in read] == [(2.0,), (7.0,), (7.0,), (8.0,)]
    assert [one.count for one in read] == [3.0, 9.0, 10.0, 11.0]
    assert [one.sum for one in read] == [4.5, 8.5, None, 9.5]


def test_facts_belong_to_the_series_of_a_page() -> None:
    """A fact is found once for pages with the same series, and anew where a series came or went."""
    asked: list[int] = []
    for page in (b"fact_a 1\n", b"fact_a 2\n", b"fact_a 2\nfact_b 1\n", b"fact_a 3\n"):
        families = pick(page, {"fact_a", "fact_b"})
        count = families.fact("test.count", lambda found=families: asked.append(1) or len(found.names()))
        assert count == len(families.names())

    assert len(asked) == 2


@given(page=st.binary(max_size=300) | st.binary(max_size=60).map(lambda b: b"vllm:a{" + b + b"\nvllm:a " + b))
def test_any_bytes_are_read_or_refused(page: bytes) -> None:
    """Nothing but SourceError comes out of a page, whatever its bytes."""
    try:
        families = pick(page, {"vllm:a"})
    except SourceError:
        return
    assert all(value == value for value in ours(families).values())


@given(cut=st.integers(0, 10_000), page=pages())
@settings(deadline=None)
def test_a_cut_page_never_changes_a_value(cut: int, page: str) -> None:
    """A page cut anywhere is refused, or what is read of it is a part of the truth."""
    wanted = {"vllm:a", "vllm:a_b", "x"}
    whole_page = ours(pick(page.encode(), wanted))
    try:
        part = ours(pick(page.encode()[:cut], wanted))
    except SourceError as error:
        assert error.failure.kind is FailureKind.MALFORMED  # noqa: PT017 - a cut may also leave a good page
        return
    assert part.items() <= whole_page.items()


def test_cut_inside_an_unwanted_line_is_harmless() -> None:
    """Only a wanted line that is cut makes a page unusable."""
    page = b"vllm:a 1\nprocess_resident_memory_bytes 12"

    assert ours(pick(page, {"vllm:a"})) == {("vllm:a", ()): 1.0}
    for end in (b"vllm:a", b"vllm:", b"vllm:a_tot", b'vllm:a{x="', b"vllm:a 12", b"v"):
        with pytest.raises(SourceError, match="cut short"):
            pick(b"x 1\n" + end, {"vllm:a"})


def test_openmetrics_page() -> None:
    """OpenMetrics: `_total`, `_created`, exemplars, float timestamps and `# EOF` without a line break."""
    page = (
        b'# TYPE vllm:a counter\nvllm:a_total{engine="0"} 17.0 1712345678.25 # {trace_id="x y"} 0.67 1.5\n'
        b'vllm:a_created{engine="0"} 1.7e9\nvllm:g 2 # {t="1"} 3\n# EOF'
    )
    families = pick(page, {"vllm:a", "vllm:g"})

    assert [value for _, value in families.counter("vllm:a")] == [17.0]
    assert [value for _, value in families.series("vllm:g")] == [2.0]
    assert families.names() == {"vllm:a_total", "vllm:g"}


def test_counter_with_and_without_total() -> None:
    """A counter is found under both spellings; where both stand, `_total` is meant."""
    for page in (b"a 3\n", b"a_total 3\n", b"a 9\na_total 3\n"):
        assert [value for _, value in pick(page, {"a"}).counter("a")] == [3.0]


def test_the_same_series_twice() -> None:
    """A repeated series with one value is one series; with two values the page is refused."""
    twice = b'a{x="1",y="2"} 5\na{y="2",x="1"} 5\n'
    assert len(ours(pick(twice, {"a"}))) == 1

    with pytest.raises(SourceError, match="twice with different values") as caught:
        pick(twice.replace(b"} 5\na", b"} 4\na"), {"a"})
    assert caught.value.failure.kind is FailureKind.MALFORMED


@pytest.mark.parametrize(
    "line",
    [b'a{x="1" 5', b"a{x=1} 5", b'a{x="1"x="2"} 5', b'a{x="1",x="2"} 5', b"a{,} 5", b'a_bucket{le="x"} 1'],
)
def test_a_wanted_line_that_cannot_be_read_is_refused(line: bytes) -> None:
    """Broken syntax in a wanted line is MALFORMED, and the text shows the line."""
    with pytest.raises(SourceError) as caught:
        pick(b"b 1\n" + line + b"\n", {"a"})
    assert caught.value.failure.kind is FailureKind.MALFORMED
    assert "a" in caught.value.failure.message


def test_case_D1_not_supported_sentinels_are_absent() -> None:
    """9.2e18 and its like mean "no value": they make a series absent, never a flat line in a graph."""
    page = b"a 9223372036854775807\nb 9.223372036854775794e+18\nc 9223372036854775792\nd 1\ne +Inf\n"

    assert {name for name, _ in ours(pick(page, set("abcde")))} == {"d", "e"}


def test_case_D1_dcgm_has_smaller_sentinels_as_well() -> None:
    """DCGM's 32-bit and float blanks are absent on DCGM's pages; on others those are possible counts."""
    page = b"a 2147483632\nb 140737488355328\nc 2147483631\nd 140737488355344\n"

    assert {name for name, _ in ours(pick(page, set("abcd"), dcgm=True))} == {"c", "d"}
    assert {name for name, _ in ours(pick(page, set("abcd")))} == set("abcd")


@pytest.mark.parametrize("text", [b"N/A", b"", b"455.32.00", b"1_000", b"[Not Supported]", b"0x10"])
def test_case_D3_one_bad_value_costs_one_series(text: bytes) -> None:
    """A value that is no number makes its own series absent, says so, and the rest of the page is read."""
    families = pick(b"a " + text + b"\nb 2\n", {"a", "b"})

    assert ours(families) == {("b", ()): 2.0}
    assert len(families.findings) == 1
    assert "a has the value" in families.findings[0]


def test_nan_is_absent_without_a_finding() -> None:
    """NaN is a library's honest "not known"."""
    families = pick(b"a NaN\n", {"a"})

    assert not families
    assert families.findings == ()


def test_help_without_samples_is_declared() -> None:
    """A family that has no sample yet is told from one that the page does not know."""
    families = pick(b"# HELP vllm:a x\n# TYPE vllm:a gauge\n", {"vllm:a", "vllm:b"})

    assert families.declares("vllm:a")
    assert not families.declares("vllm:b")


def test_histograms_are_grouped_by_labels() -> None:
    """Buckets come back as one histogram per label set, in order, +Inf as the count."""
    page = b"""h_bucket{e="1",le="+Inf"} 9
h_bucket{e="1",le="2.0"} 5
h_bucket{le="0.5",e="1"} 3
h_sum{e="1"} 7.5
h_bucket{e="2",le="1"} 4
h_count{e="2"} 6
h_bucket{e="3",le="1"} 4
"""
    found = {labels["e"]: histogram for labels, histogram in pick(page, {"h"}).histograms("h")}

    assert found["1"].bounds == (0.5, 2.0)
    assert found["1"].counts == (3.0, 5.0)
    assert (found["1"].count, found["1"].sum) == (9.0, 7.5)
    assert (found["2"].count, found["2"].sum) == (6.0, None)
    assert "3" not in found


def test_a_name_that_begins_another_is_not_mixed_up() -> None:
    """Families whose names begin alike stay apart."""
    page = b'vllm:num_requests_waiting 1\nvllm:num_requests_waiting_by_reason{r="x"} 2\nvllm:num 3\n'

    assert ours(pick(page, {"vllm:num_requests_waiting"})) == {("vllm:num_requests_waiting", ()): 1.0}


def test_many_pages_in_many_threads_agree() -> None:
    """The memory of heads seen before is shared by threads and never changes what is read."""
    bodies = ["".join(f'a{{i="{i}",t="{t}"}} {i + t}\n' for i in range(1500)).encode() for t in range(6)]
    results: dict[int, bool] = {}

    def work(t: int) -> None:
        want = {("a", (("i", str(i)), ("t", str(t)))): float(i + t) for i in range(1500)}
        results[t] = all(ours(pick(bodies[t], {"a"})) == want for _ in range(3))

    threads = [threading.Thread(target=work, args=(t,)) for t in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(6), True)


def test_flood_of_wanted_series_is_refused() -> None:
    """A page with more wanted lines than any server has is TOO_LARGE."""
    with pytest.raises(SourceError) as caught:
        pick(b"a 1\n" * 60_000, {"a"})
    assert caught.value.failure.kind is FailureKind.TOO_LARGE


def test_conversions() -> None:
    """Counts and ratios out of range are "not reported", not clipped into looking right."""
    assert [whole(v) for v in (None, -1.0, math.inf, math.nan, 0.0, 2.6)] == [None, None, None, None, 0, 3]
    assert [ratio(v) for v in (None, -0.5, 42.0, math.nan, 1.0001, 0.5)] == [None, None, None, None, 1.0, 0.5]
    assert printable("a\x1b[31m\r\n b" + "c" * 50, 8) == "a [31m b…"
