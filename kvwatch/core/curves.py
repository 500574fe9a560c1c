"""What were the last ten minutes like? A ring of compact rows, at most one a second, in plain arrays.

A figure takes four bytes and a level one, and only what was ever reported takes any: an engine costs at
most 24 KiB, a GPU 16 KiB.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite, nan

from kvwatch.model.level import Level, RuleId, Scope
from kvwatch.model.report import GpuReport, TickReport
from kvwatch.model.signal import EngineSignals

SPAN_S = 600.0
PERIOD_S = 1.0
ROWS = 610  # ten minutes, and a few for moments that were kept out of turn
# 64 servers of four engines and 16 GPUs fit; whatever comes beyond is not kept.
MAX_TRACKS = 400
NO_LEVEL = -2  # nothing was judged then

Place = tuple[str, str, str]  # server, engine, uuid
Figures = Mapping[str, float | int | None]

# Rules whose value is on no other curve. Faults that are there or not have their level alone.
VALUED = frozenset(
    {RuleId.LATENCY_SLO, RuleId.DEVICE_EXHAUSTION, RuleId.ALLOC_RETRIES, RuleId.LARGEST_ALLOCATABLE}
)


def place_of(scope: Scope) -> Place:
    """Where a verdict belongs."""
    return scope.server, scope.engine, scope.uuid


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """What was cut out of the ring for one place, oldest row first; NaN and NO_LEVEL where unknown."""

    place: Place
    values: Mapping[str, array[float]]
    levels: Mapping[str, array[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Rows of some places. `t_s` are seconds from the moment of red, negative before it."""

    t_s: tuple[float, ...]
    tracks: tuple[Track, ...]

    def plain(self) -> dict[str, object]:
        """The same as JSON-ready values, None where unknown, six digits."""
        return {
            "t_s": [round(at_s, 1) for at_s in self.t_s],
            "tracks": [
                {
                    "server": track.place[0],
                    "engine": track.place[1],
                    "uuid": track.place[2],
                    "values": {name: [_short(v) for v in column] for name, column in track.values.items()},
                    "levels": {
                        rule: [None if level == NO_LEVEL else level for level in column]
                        for rule, column in track.levels.items()
                    },
                }
                for track in self.tracks
            ],
        }

    def growth(self, place: Place, name: str) -> tuple[float, float] | None:
        """By how much a figure grew from its lowest to its last known value, and over how many seconds."""
        column = next((t.values[name] for t in self.tracks if t.place == place and name in t.values), None)
        known = [(v, at_s) for v, at_s in zip(column or (), self.t_s, strict=False) if isfinite(v)]
        if len(known) < 2:
            return None
        low, since_s = min(known)
        last, now_s = known[-1]
        return last - low, now_s - since_s


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if isfinite(value) else None


class _Columns:
    """One place's arrays; a column begins when its figure is first known."""

    __slots__ = ("levels", "seen_s", "values")

    def __init__(self) -> None:
        self.values: dict[str, array[float]] = {}
        self.levels: dict[RuleId, array[int]] = {}
        self.seen_s = 0.0

    def blank(self, row: int) -> None:
        for column in self.values.values():
            column[row] = nan
        for levels in self.levels.values():
            levels[row] = NO_LEVEL

    def put(self, row: int, figures: Figures, rows: int) -> None:
        for name, value in figures.items():
            if value is None:
                continue
            column = self.values.get(name)
            if column is None:
                column = self.values[name] = array("f", [nan]) * rows
            try:
                column[row] = value
            except OverflowError:  # a server may report an integer beyond every float
                column[row] = nan

    def judge(self, row: int, rule: RuleId, level: Level, rows: int) -> None:
        column = self.levels.get(rule)
        if column is None:
            column = self.levels[rule] = array("b", [NO_LEVEL]) * rows
        column[row] = level


class Ring:
    """The last ten minutes. Not for several threads: the loop offers and cuts, cuts may travel."""

    def __init__(self, rows: int = ROWS, max_tracks: int = MAX_TRACKS) -> None:
        self._rows = rows
        self._max_tracks = max_tracks
        self._times = array("d", [nan]) * rows
        self._columns: dict[Place, _Columns] = {}
        self._next = 0
        self._last_s = -PERIOD_S

    def offer(self, report: TickReport) -> None:
        """Keep a row of this report, if the last row is a second old."""
        if report.clock.mono_s - self._last_s >= PERIOD_S:
            self.keep(report)

    def keep(self, report: TickReport) -> None:
        """Keep a row of this report now."""
        row, now_s = self._next, report.clock.mono_s
        if now_s == self._last_s:
            return
        self._next, self._last_s = (row + 1) % self._rows, now_s
        self._times[row] = now_s
        for columns in self._columns.values():
            columns.blank(row)
        for place, figures in _figures(report):
            found = self._at(place, now_s)
            if found is not None:
                found.put(row, figures, self._rows)
        self._judge(report, row, now_s)
        for place in [at for at, kept in self._columns.items() if now_s - kept.seen_s > SPAN_S]:
            del self._columns[place]

    def cut(self, places: Iterable[Place], since_s: float, *, zero_s: float) -> Cut:
        """Copy the rows of these places from `since_s` on (a few memcpy); times count from `zero_s`."""
        times = self._times[self._next :] + self._times[: self._next]
        first = next((row for row, at_s in enumerate(times) if at_s >= since_s), self._rows)
        tracks = []
        for place in places:
            found = self._columns.get(place)
            if found is not None:
                tracks.append(self._track(place, found, first))
        return Cut(t_s=tuple([at_s - zero_s for at_s in times[first:]]), tracks=tuple(tracks))

    def places(self) -> tuple[Place, ...]:
        """Every place with a track."""
        return tuple(self._columns)

    @property
    def size_bytes(self) -> int:
        """What the arrays take."""
        arrays: list[array[float] | array[int]] = [self._times]
        for columns in self._columns.values():
            arrays += [*columns.values.values(), *columns.levels.values()]
        return sum(each.itemsize * len(each) for each in arrays)

    def _track(self, place: Place, found: _Columns, first: int) -> Track:
        at = self._next
        return Track(
            place=place,
            values={name: (column[at:] + column[:at])[first:] for name, column in found.values.items()},
            levels={rule.value: (column[at:] + column[:at])[first:] for rule, column in found.levels.items()},
        )

    def _at(self, place: Place, now_s: float) -> _Columns | None:
        """The arrays of a place; None for a new one where there are too many."""
        found = self._columns.get(place)
        if found is None:
            if len(self._columns) >= self._max_tracks:
                return None
            found = self._columns[place] = _Columns()
        found.seen_s = now_s
        return found

    def _judge(self, report: TickReport, row: int, now_s: float) -> None:
        for verdict in report.verdicts:
            if not verdict.pages:
                continue
            found = self._at(place_of(verdict.scope), now_s)
            if found is None:
                continue
            found.judge(row, verdict.rule, verdict.level, self._rows)
            if verdict.rule in VALUED:
                found.put(row, {verdict.rule.value: verdict.value}, self._rows)


def _figures(report: TickReport) -> Iterator[tuple[Place, Figures]]:
    """What a page needs of each GPU and engine; what is stale is not known."""
    for gpu in report.gpus:
        if not gpu.stale:
            yield ("", "", gpu.state.uuid), _of_gpu(gpu)
    for server in report.servers:
        if server.up:
            for engine in server.signals.engines:
                yield (server.server, engine.engine, ""), _of_engine(engine)


def _of_gpu(gpu: GpuReport) -> Figures:
    memory, signals = gpu.state.memory, gpu.signals
    return {
        "used_bytes": memory.used_bytes if memory else None,
        "free_bytes": memory.free_bytes if memory else None,
        "used_peak_bytes": gpu.state.used_peak_bytes,
        "headroom_bytes": signals.headroom_bytes if signals else None,
    }


def _of_engine(engine: EngineSignals) -> Figures:
    return {
        "kv_usage_ratio": engine.kv_usage_ratio,
        "running": engine.running,
        "waiting": engine.waiting,
        "preemptions_per_s": engine.preemptions_per_s,
        "recompute_tax_ratio": engine.recompute_tax_ratio,
    }
