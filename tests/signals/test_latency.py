"""Quantiles from histogram increases."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvwatch.model.server import Histogram
from kvwatch.signals.latency import QUANTILES, between
from tests.signals.build import Run, engine, histogram


def test_what_counts_less_than_nothing_is_no_base() -> None:
    """A page with negative counts between two good ones: their history is not taken for one second's."""
    run = Run()
    run.page(1000.0, engine(ttft=histogram(0, 100, 100, count=100)))
    run.page(1001.0, engine(ttft=histogram(-5, -5, -5, count=-5)))

    assert run.page(1002.0, engine(ttft=histogram(0, 100, 100, count=100))).ttft is None


def test_quantiles_are_linear_within_a_bucket() -> None:
    """Ten observations in (0.1, 0.5] and ten in (0.5, 1.0]: p50 is 0.5, p95 0.95, p99 0.99."""
    base = histogram(5, 5, 5, count=5)
    newest = histogram(5, 15, 25, count=25)

    found = between(base, newest, 60.0)

    assert found is not None
    assert [round(value, 9) for _, value in found.values] == [0.5, 0.95, 0.99]
    assert (found.count, found.window_s, found.beyond) == (20, 60.0, False)


def test_first_bucket_starts_at_zero() -> None:
    """With all observations in the first bucket, p50 is half of its bound."""
    found = between(histogram(0, 0, 0, count=0), histogram(10, 10, 10, count=10), 60.0)

    assert found is not None
    assert found.values[0] == (0.5, 0.05)


def test_open_bucket_is_its_lower_bound_and_flagged() -> None:
    """What lies beyond the last bound is reported as that bound, flagged."""
    found = between(histogram(0, 0, 0, count=0), histogram(0, 0, 1, count=10), 60.0)

    assert found is not None
    assert found.values[1] == (0.95, 1.0)
    assert found.beyond


def test_an_empty_window_has_no_quantiles() -> None:
    """Without a new observation there is nothing to report."""
    same = histogram(1, 2, 3, count=4)

    assert between(same, same, 60.0) is None


def test_window_forgets_what_is_older_than_a_minute() -> None:
    """After a quiet minute an old burst is gone from the quantiles."""
    run = Run()
    run.page(1000.0, engine(ttft=histogram(0, 0, 0, count=0)))
    assert run.page(1001.0, engine(ttft=histogram(9, 9, 9, count=9))).ttft is not None
    for second in range(1002, 1070):
        last = run.page(float(second), engine(ttft=histogram(9, 9, 9, count=9)))

    assert last.ttft is None


def test_window_covers_a_full_minute() -> None:
    """One observation a second: a minute later 60 to 65 of them are in the window, which says so."""
    run = Run()
    for second in range(200):
        now = run.page(1000.0 + second, engine(ttft=histogram(second, second, second, count=second)))

    assert now.ttft is not None
    assert 60 <= now.ttft.count <= 66
    assert now.ttft.count == now.ttft.window_s


def test_reset_and_new_buckets_start_anew() -> None:
    """A histogram that went back, or has other buckets, is not compared with the old one."""
    run = Run()
    run.page(1000.0, engine(tpot=histogram(5, 5, 5, count=5)))
    assert run.page(1001.0, engine(tpot=histogram(1, 1, 1, count=1))).tpot is None
    assert run.page(1002.0, engine(tpot=histogram(2, 2, 2, count=2))).tpot is not None
    assert run.page(1003.0, engine(tpot=histogram(3, 3, bounds=(1.0, 2.0), count=3))).tpot is None


counts = st.lists(st.integers(0, 1000), min_size=4, max_size=4)


@given(start=counts, grown=counts)
def test_quantiles_are_monotone_and_within_the_bounds(start: list[int], grown: list[int]) -> None:
    """Whatever the counts: quantiles rise with q, and lie between 0 and the last bound."""
    bounds = (0.1, 0.5, 1.0, 2.5)
    later = [old + new for old, new in zip(start, grown, strict=True)]
    base = Histogram(bounds=bounds, counts=tuple(map(float, start)), count=float(max(start)))
    newest = Histogram(bounds=bounds, counts=tuple(map(float, later)), count=float(max(later)))

    found = between(base, newest, 60.0)

    if found is not None:
        values = [value for _, value in found.values]
        assert values == sorted(values)
        assert all(0.0 <= value <= 2.5 for value in values)
        assert [quantile for quantile, _ in found.values] == list(QUANTILES)


@given(st.lists(st.floats(0.001, 2.4), min_size=1, max_size=200))
def test_quantile_lies_in_the_bucket_of_the_true_one(observed: list[float]) -> None:
    """The estimate is in the same bucket as the observation of that rank."""
    bounds = (0.1, 0.5, 1.0, 2.5)
    cumulative = tuple(float(sum(value <= bound for value in observed)) for bound in bounds)
    newest = Histogram(bounds=bounds, counts=cumulative, count=float(len(observed)))

    found = between(Histogram(bounds=bounds, counts=(0.0,) * 4, count=0.0), newest, 60.0)

    assert found is not None
    for quantile, value in found.values:
        rank = max(1, -int(-quantile * len(observed) // 1))
        truth = sorted(observed)[min(rank, len(observed)) - 1]
        upper = next(bound for bound in bounds if truth <= bound)
        lower = max((bound for bound in bounds if bound < upper), default=0.0)
        assert lower <= value <= upper
