"""Metrics of what kvwatch concludes and imposes: forecasts, rules, limits, actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvwatch.catalogue.metrics_server import engines_of
from kvwatch.catalogue.metrics_spec import (
    Facts,
    MetricSpec,
    PerReport,
    Reader,
    Row,
    counter,
    experimental,
    gauge,
    kept,
)
from kvwatch.model.action import Outcome
from kvwatch.model.level import Level, Verdict
from kvwatch.model.report import LimitReport, TickReport
from kvwatch.model.signal import Forecast

SCOPE = ("server", "engine", "uuid", "gpu")
ENGINE = ("server", "engine")
BOUNDS: tuple[tuple[str, Callable[[Forecast], float | None]], ...] = (
    ("floor", lambda f: f.floor_s),
    ("low", lambda f: f.low_s),
    ("central", lambda f: f.central_s),
    ("high", lambda f: f.high_s),
)
LEVEL_NAMES = tuple(level.name.lower() for level in sorted(Level))  # from -1 upwards
# How bad a level is when scopes fold into one series: unknown is never hidden behind green.
MAX_KEPT_LABELS = 4096
BADNESS = {Level.GREEN: 0, Level.UNKNOWN: 1, Level.YELLOW: 2, Level.RED: 3}


def _forecasts(report: TickReport) -> Iterator[tuple[tuple[str, str, str, str], str, Forecast]]:
    for server in report.servers:
        for engine in server.signals.engines:
            yield (server.server, engine.engine, "", ""), "kv", engine.kv_forecast
    for gpu in report.gpus:
        if gpu.signals is not None:
            ids = ("", "", gpu.state.uuid, str(gpu.state.index))
            yield ids, "device", gpu.signals.device_forecast


def _exhaustion(report: TickReport) -> Iterator[Row]:
    for ids, resource, forecast in _forecasts(report):
        for bound, pick in BOUNDS:
            seconds = pick(forecast)
            if seconds is not None:
                yield (*ids, resource, bound), seconds


def _coverage(report: TickReport) -> Iterator[Row]:
    for ids, resource, forecast in _forecasts(report):
        if forecast.coverage_ratio is not None:
            yield (*ids, resource), forecast.coverage_ratio


class Labels:
    """Label values of one scope's rule, made once: making them anew is most of the work of a page."""

    __slots__ = ("_before", "_place", "red", "scope", "seconds", "yellow")

    def __init__(self, scope: tuple[str, ...]) -> None:
        self.scope = scope
        self.yellow = (*scope, "yellow")
        self.red = (*scope, "red")
        self.seconds: list[Row] = [((*scope, name), -1.0) for name in LEVEL_NAMES]
        self._before: tuple[float, ...] | None = None  # what the rows were made of
        self._place = 0

    def spend(self, verdict: Verdict, now_s: float) -> None:
        """Bring the rows up to date: while the level stands, only its own seconds go on."""
        before, place = verdict.seconds_before, verdict.level + 1
        if before is self._before and place == self._place:
            spent = before[place] + max(0.0, now_s - verdict.since_s)
            self.seconds[place] = (self.seconds[place][0], spent)
            return
        self.put(verdict.seconds_at(now_s))
        self._before, self._place = before, place

    def put(self, times: Sequence[float]) -> None:
        """The seconds of every level; a row that does not change stays the same row."""
        self._before = None
        for place, spent in enumerate(times):
            row = self.seconds[place]
            if row[1] != spent:
                self.seconds[place] = (row[0], spent)


Folded = list[tuple[Labels, list[Verdict]]]
_LABELS: dict[tuple[str, ...], Labels] = {}


def _labels(verdict: Verdict) -> Labels:
    scope = verdict.scope
    key = (scope.server, scope.engine, scope.uuid, scope.gpu, verdict.rule.value)
    known = _LABELS.get(key)
    if known is None:
        if len(_LABELS) >= MAX_KEPT_LABELS:
            _LABELS.clear()
        known = _LABELS[key] = Labels(key)
    return known


class Shape:
    """Which verdicts fold into which labels; the same from report to report until scopes come or go."""

    __slots__ = ("groups", "rules", "scopes")

    def __init__(self, verdicts: Sequence[Verdict]) -> None:
        self.scopes = [verdict.scope for verdict in verdicts]
        self.rules = [verdict.rule for verdict in verdicts]
        places: dict[Labels, list[int]] = {}
        for place, verdict in enumerate(verdicts):
            places.setdefault(_labels(verdict), []).append(place)
        self.groups = list(places.items())

    def fits(self, verdicts: Sequence[Verdict]) -> bool:
        """Whether these verdicts are about the same, in the same order."""
        return [v.scope for v in verdicts] == self.scopes and [v.rule for v in verdicts] == self.rules


_shape = Shape(())


def _fold(report: TickReport) -> Folded:
    global _shape
    verdicts, shape = report.verdicts, _shape
    if not shape.fits(verdicts):
        _shape = shape = Shape(verdicts)
    return [
        (labels, [verdicts[places[0]]])
        if len(places) == 1
        else (labels, sorted([verdicts[place] for place in places], key=_badness, reverse=True))
        for labels, places in shape.groups
    ]


folded = PerReport(_fold)
"""Verdicts by their labels, worst first; scopes that differ by source alone share labels."""


_worst_of = PerReport(lambda report: [(labels, verdicts[0]) for labels, verdicts in folded(report)])


def _badness(verdict: Verdict) -> tuple[int, float]:
    return BADNESS[verdict.level], verdict.value if verdict.value is not None else float("-inf")


def _worst(pick: Callable[[Verdict], float | None]) -> Reader:
    def read(report: TickReport) -> list[Row]:
        rows = _worst_of(report)
        return [(labels.scope, value) for labels, worst in rows if (value := pick(worst)) is not None]

    return read


def _thresholds(report: TickReport) -> Iterator[Row]:
    for labels, worst in _worst_of(report):
        if worst.yellow is not None:
            yield labels.yellow, worst.yellow
        if worst.red is not None:
            yield labels.red, worst.red


def _level_seconds(report: TickReport) -> list[Row]:
    """Seconds per level; of folded scopes the longest bad and the shortest green time: none ever shrinks."""
    now_s = report.clock.mono_s
    rows: list[Row] = []
    for labels, verdicts in folded(report):
        if len(verdicts) == 1:
            labels.spend(verdicts[0], now_s)
        else:
            labels.put(_folded_seconds(verdicts, now_s))
        rows += labels.seconds
    return rows


def _folded_seconds(verdicts: list[Verdict], now_s: float) -> list[float]:
    by_level = zip(*[verdict.seconds_at(now_s) for verdict in verdicts], strict=True)
    return [
        min(times) if name == "green" else max(times)
        for name, times in zip(LEVEL_NAMES, by_level, strict=True)
    ]


_levels = Facts(lambda report: [(labels, worst.level) for labels, worst in _worst_of(report)])
_bounds = Facts(lambda report: [(labels, worst.yellow, worst.red) for labels, worst in _worst_of(report)])
_values = Facts(lambda report: [(labels, worst.value) for labels, worst in _worst_of(report)])


def _limits(pick: Callable[[LimitReport], float | None]) -> Reader:
    def read(report: TickReport) -> Iterator[Row]:
        servers = {server.server: server for server in report.servers}
        for limit in report.limits:
            value = pick(limit)
            if value is None:
                continue
            server = servers.get(limit.server)
            for engine in engines_of(server) if server is not None else ("0",):
                yield (limit.server, engine), value

    return read


def _running(limit: LimitReport) -> float | None:
    return None if limit.active is None else limit.active.max_running


def _active(limit: LimitReport) -> float:
    return float(limit.active is not None and limit.active.restricts)


def _expiry(limit: LimitReport) -> float | None:
    return None if limit.active is None else limit.expires_wall_s


def _actions(report: TickReport) -> Iterator[Row]:
    counts = {
        (action, outcome.value): 0
        for action in dict.fromkeys(row[0] for row in report.actions_total)
        for outcome in Outcome
    }
    counts |= {(action, outcome): count for action, outcome, count in report.actions_total}
    yield from counts.items()


_action_facts = Facts(lambda report: [report.actions_total])

FORECAST = (
    gauge(
        "time_to_exhaustion_seconds",
        "Time until the resource is full at its present trend; +Inf when it is not filling.",
        _exhaustion,
        *SCOPE,
        "resource",
        "bound",
        unit="seconds",
    ),
    gauge(
        "forecast_coverage_ratio",
        "How often the stated interval held, measured on forecasts that came due.",
        _coverage,
        *SCOPE,
        "resource",
        unit="ratio",
    ),
)

RULES = (
    gauge(
        "rule_level",
        "Level of a rule: -1 unknown, 0 green, 1 yellow, 2 red.",
        kept(_levels, _worst(lambda v: v.level.value)),
        *SCOPE,
        "rule",
    ),
    gauge(
        "rule_value",
        "The value that a rule judges, in its own unit.",
        kept(_values, _worst(lambda v: v.value)),
        *SCOPE,
        "rule",
    ),
    gauge(
        "rule_threshold",
        "The thresholds of a rule, in its own unit.",
        kept(_bounds, _thresholds),
        *SCOPE,
        "rule",
        "level",
    ),
    counter(
        "rule_level_seconds_total",
        "How long a rule has been at each level; loses nothing between scrapes.",
        _level_seconds,
        *SCOPE,
        "rule",
        "level",
        unit="seconds",
    ),
    experimental(
        gauge(
            "headline_level",
            "The worst level of the rules that page: -1 unknown, 0 green, 1 yellow, 2 red.",
            lambda r: [((), float(r.headline))],
        )
    ),
)

CONTROL = (
    gauge(
        "limit_running", "Running requests that kvwatch allows each engine now.", _limits(_running), *ENGINE
    ),
    gauge(
        "limit_configured",
        "The server's own limit of running requests, where it tells.",
        _limits(lambda x: x.configured),
        *ENGINE,
    ),
    gauge("limit_active", "Whether kvwatch limits this server now.", _limits(_active), *ENGINE),
    gauge(
        "lease_expiry_timestamp_seconds",
        "When the present limit ends unless it is renewed, as Unix time.",
        _limits(_expiry),
        *ENGINE,
        unit="seconds",
    ),
    counter(
        "actions_total", "Actions by what came of them.", kept(_action_facts, _actions), "action", "outcome"
    ),
)

VERDICT_METRICS: tuple[MetricSpec, ...] = (*FORECAST, *RULES, *CONTROL)
