"""What was picked from one metrics page: series by name, and histograms by label set.

A server's pages have the same series poll after poll. What follows from those alone (where each name
stands, which buckets make up a histogram) is worked out once, in a `Layout`; a page is a layout and the
values at its places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from kvwatch.model.server import Histogram

T = TypeVar("T")


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


class Shape(NamedTuple):
    """Where the values of one histogram stand on a page."""

    labels: Labels
    bounds: tuple[float, ...]
    counts: Callable[[Sequence[float]], tuple[float, ...]]
    count_at: int
    sum_at: int | None

    def of(self, values: Sequence[float]) -> Histogram:
        """The histogram with the values of one page."""
        return Histogram(
            bounds=self.bounds,
            counts=self.counts(values),
            count=values[self.count_at],
            sum=None if self.sum_at is None else values[self.sum_at],
        )


class Layout:
    """The series of a page, in the order of their values."""

    __slots__ = ("_shapes", "by_name", "facts", "labels")

    def __init__(self, series: Iterable[Series]) -> None:
        self.by_name: dict[str, list[tuple[Series, int]]] = {}
        labels: dict[int, Labels] = {}
        for place, each in enumerate(series):
            self.by_name.setdefault(each.name, []).append((each, place))
            labels[id(each.labels)] = each.labels
        self.labels = tuple(labels.values())
        self.facts: dict[str, Any] = {}
        self._shapes: dict[str, tuple[Shape, ...]] = {}

    def shapes(self, name: str) -> tuple[Shape, ...]:
        """The histograms `name`, one per label set; those without any count are left out."""
        found = self._shapes.get(name)
        if found is None:
            found = self._shapes[name] = tuple(self._find_shapes(name))
        return found

    def _find_shapes(self, name: str) -> Iterable[Shape]:
        buckets: dict[int, dict[float, int]] = {}
        labels: dict[int, Labels] = {}
        for series, place in self.by_name.get(name + "_bucket", ()):
            labels[id(series.labels)] = series.labels
            places = buckets.setdefault(id(series.labels), {})
            if series.le is not None:
                places[series.le] = place
        counts = {id(series.labels): place for series, place in self.by_name.get(name + "_count", ())}
        sums = {id(series.labels): place for series, place in self.by_name.get(name + "_sum", ())}
        for key, places in buckets.items():
            count = counts.get(key, places.get(math.inf))
            if count is not None:
                bounds = tuple(sorted(bound for bound in places if bound != math.inf))
                take = _taker([places[bound] for bound in bounds])
                yield Shape(labels[key], bounds, take, count, sums.get(key))


def _taker(places: list[int]) -> Callable[[Sequence[float]], tuple[float, ...]]:
    """A function from all values to those at these places."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)


class Families:
    """The wanted part of one page.

    `findings` are sentences about series that were left out, for people.
    """

    __slots__ = ("_layout", "_page", "_values", "findings")

    def __init__(
        self, page: bytes, layout: Layout, values: Sequence[float], findings: tuple[str, ...]
    ) -> None:
        self._page = page
        self._layout = layout
        self._values = values
        self.findings = findings

    def __bool__(self) -> bool:
        return bool(self._values)

    def names(self) -> Collection[str]:
        """Names of the samples found."""
        return self._layout.by_name.keys()

    def label_sets(self) -> Collection[Labels]:
        """The distinct label sets found (`le` left out)."""
        return self._layout.labels

    def fact(self, name: str, find: Callable[[], T]) -> T:
        """What `find` gave for this layout: it may look at names and labels, never at values.

        `name` is the caller's own (its module's, to begin with).
        """
        facts = self._layout.facts
        if name not in facts:
            facts[name] = find()
        found: T = facts[name]
        return found

    @property
    def values(self) -> Sequence[float]:
        """All values, by the places that `places` tells."""
        return self._values

    def places(self, name: str) -> Sequence[tuple[Series, int]]:
        """Every series whose sample name is exactly `name`, with the place of its value."""
        return self._layout.by_name.get(name, ())

    def series(self, name: str) -> Sequence[tuple[Series, float]]:
        """Every series whose sample name is exactly `name`, with its value."""
        places = self._layout.by_name.get(name)
        if places is None:
            return ()
        values = self._values
        return [(series, values[place]) for series, place in places]

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
        return [(shape.labels, shape.of(self._values)) for shape in self._layout.shapes(name)]

    def shapes(self, name: str) -> Sequence[Shape]:
        """Where the values of every histogram `name` stand."""
        return self._layout.shapes(name)
