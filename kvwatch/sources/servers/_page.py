"""What do the picked series of one metrics page say about each engine? Shared by the plainer adapters.

Not an adapter itself: the underscore keeps it out of the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvwatch.model.sample import FailureKind
from kvwatch.model.server import Histogram
from kvwatch.sources.base import SourceError
from kvwatch.sources.exposition import Families, Labels, pick, whole
from kvwatch.sources.servers.base import clean, engine_names, label_values


def one_engine(_labels: Labels) -> str:
    """The engine of every series where a page has one engine only."""
    return "0"


def engine_label(labels: Labels) -> str:
    """The engine a series names in its label `engine`; "0" where it names none."""
    return clean(labels.get("engine", "0")) or "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Series by engine. `engine` gives the engine of a series from its labels.

    Where several series of one engine disagree on a gauge, it is left out and its name is kept in
    `disputed`: which of them holds cannot be told.
    """

    families: Families
    prefix: str = ""
    engine: Callable[[Labels], str] = one_engine
    disputed: set[str] = field(default_factory=set)

    def gauge(self, name: str, **labels: str) -> dict[str, float]:
        """The gauge of each engine, of series that have all these labels."""
        values: dict[str, float] = {}
        unclear: set[str] = set()
        for series, value in self.families.series(self.prefix + name):
            if _has(series.labels, labels) and values.setdefault(self.engine(series.labels), value) != value:
                unclear.add(self.engine(series.labels))
        if unclear:
            self.disputed.add(self.prefix + name)
        return {engine: value for engine, value in values.items() if engine not in unclear}

    def counter(self, name: str, **labels: str) -> dict[str, float]:
        """The counter of each engine, added up over all other labels."""
        sums: dict[str, float] = {}
        for series, value in self.families.counter(self.prefix + name):
            if _has(series.labels, labels):
                engine = self.engine(series.labels)
                sums[engine] = sums.get(engine, 0.0) + value
        return sums

    def sums(self, name: str) -> dict[str, float]:
        """The sum of all observations of a histogram, by engine."""
        return self.gauge(name + "_sum")

    def histogram(self, name: str, **labels: str) -> dict[str, Histogram]:
        """The histogram of each engine, added up over other labels where the bounds agree."""
        found: dict[str, list[Histogram]] = {}
        for each, histogram in self.families.histograms(self.prefix + name):
            if _has(each, labels):
                found.setdefault(self.engine(each), []).append(histogram)
        return {
            engine: added
            for engine, histograms in found.items()
            if (added := add_histograms(histograms)) is not None
        }

    def engines(self) -> tuple[str, ...]:
        """Every engine that a labelled series names; "0" where there are only unlabelled ones."""
        named = {self.engine(labels) for labels in self.families.label_sets() if labels}
        return engine_names(named or {"0"})

    def label_values(self, name: str) -> str:
        """The values of one label over the page, joined."""
        return label_values(self.families, name)

    def refuse_disputed(self) -> None:
        """Refuse a page on which one engine's gauge has several values."""
        if self.disputed:
            raise SourceError(
                FailureKind.NOT_EXPECTED,
                f"{min(self.disputed)} has several values for one engine: the page mixes several servers; "
                "point `url` at one server's own port",
            )


def read_page(
    body: bytes,
    prefix: str,
    names: Iterable[str],
    engine: Callable[[Labels], str] = one_engine,
) -> Page:
    """Pick `prefix + name` for each of the names."""
    return Page(families=pick(body, frozenset(prefix + name for name in names)), prefix=prefix, engine=engine)


def add_histograms(histograms: Iterable[Histogram]) -> Histogram | None:
    """The sum of histograms with equal bounds; None where bounds differ or there is none."""
    found = list(histograms)
    if len(found) <= 1:
        return found[0] if found else None
    if any(each.bounds != found[0].bounds for each in found):
        return None
    sums = [each.sum for each in found if each.sum is not None]
    return Histogram(
        bounds=found[0].bounds,
        counts=tuple(map(sum, zip(*(each.counts for each in found), strict=True))),
        count=sum(each.count for each in found),
        sum=sum(sums) if len(sums) == len(found) else None,
    )


def split_blocks(total: float | None, used: float | None) -> tuple[int | None, int | None, int | None]:
    """Blocks in all, used and free, adding up; used ones beyond the total are not believed."""
    blocks, busy = whole(total), whole(used)
    if not blocks:
        return None, None, None
    if busy is None or busy > blocks:
        return blocks, None, None
    return blocks, busy, blocks - busy


def _has(labels: Labels, wanted: Mapping[str, str]) -> bool:
    return all(labels.get(name) == value for name, value in wanted.items())
