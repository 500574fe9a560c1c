"""Runs a demo scenario offline: the real adapter and the real core, on a clock that jumps."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvwatch import core
from kvwatch.daemon.board import Board
from kvwatch.lab.demo import SERVER, settings_for
from kvwatch.lab.demo_gpus import DemoGpus
from kvwatch.lab.demo_script import SCENARIOS
from kvwatch.lab.demo_world import World
from kvwatch.model.level import Level, RuleId, Scope
from kvwatch.model.report import ShellStatus, TickClock, TickReport
from kvwatch.model.sample import Failure, FailureKind, Sample
from kvwatch.model.settings import Settings
from kvwatch.sources.servers import vllm

PORT = 40123
TICK_S = 0.2
SERVER_SOURCE = f"server/{SERVER}"


@dataclass
class Story:
    """What came of a scenario: every change of a level, with the time at which it came."""

    scenario: str
    changes: dict[tuple[RuleId, Scope], list[tuple[float, Level]]] = field(default_factory=dict)
    headline: list[tuple[float, Level]] = field(default_factory=list)
    reports: list[tuple[float, TickReport]] = field(default_factory=list)

    def levels(self, rule: RuleId, **scope: str) -> list[tuple[float, Level]]:
        """The changes of one rule in the only scope that matches."""
        (found,) = [
            changes
            for (each, where), changes in self.changes.items()
            if each is rule and all(getattr(where, name) == value for name, value in scope.items())
        ]
        return found

    def worst(self, rule: RuleId) -> Level:
        """The highest level this rule ever had anywhere."""
        return max(
            (level for (each, _), changes in self.changes.items() if each is rule for _, level in changes),
            default=Level.UNKNOWN,
        )


def play(scenario: str, seconds: float) -> Story:
    """Play a scenario from its start, as the daemon would see it."""
    now = [5000.0]
    world = World(SCENARIOS[scenario], lambda: now[0], lambda: 1.8e9 + now[0])
    gpus = DemoGpus(world, PORT, lambda: now[0])
    settings = settings_for(Settings(), PORT)
    board, story = Board(), Story(scenario)
    board.register("nvml", gpus.expected_period_s, gpus.deadline_s)
    board.register(SERVER_SOURCE, 1.0, 0.8)
    state = core.initial(settings, version="test", patterns={"vllm": vllm.ADAPTER.processes})
    world.page()
    hangs = False
    for tick in range(int(seconds / TICK_S)):
        now[0] = 5000.0 + tick * TICK_S
        clock = TickClock(mono_s=now[0], wall_s=1.8e9 + now[0])
        if tick % 5 == 0:
            _read_server(board, world, settings, clock)
        if not hangs:
            board.begin("nvml", now[0])
        hangs = world.phase().nvml_hung
        if not hangs:
            _put(board, "nvml", clock, value=gpus.poll())
        state, report = core.step(state, board.snapshot(now[0], ShellStatus()), (), clock)
        _note(story, tick * TICK_S, report)
    return story


def _read_server(board: Board, world: World, settings: Settings, clock: TickClock) -> None:
    board.begin(SERVER_SOURCE, clock.mono_s)
    if world.phase().server_down:
        refused = Failure(kind=FailureKind.REFUSED, message="nobody listens")
        _put(board, SERVER_SOURCE, clock, failure=refused)
    else:
        _put(
            board,
            SERVER_SOURCE,
            clock,
            value=vllm.parse({"metrics": world.page().encode()}, settings.servers[0]),
        )


def _put(
    board: Board, source: str, clock: TickClock, *, value: object = None, failure: Failure | None = None
) -> None:
    board.put(
        Sample(source=source, observed_s=clock.mono_s, wall_s=clock.wall_s, value=value, failure=failure)
    )


def _note(story: Story, elapsed_s: float, report: TickReport) -> None:
    for verdict in report.verdicts:
        changes = story.changes.setdefault((verdict.rule, verdict.scope), [])
        if not changes or changes[-1][1] is not verdict.level:
            changes.append((elapsed_s, verdict.level))
    if not story.headline or story.headline[-1][1] is not report.headline:
        story.headline.append((elapsed_s, report.headline))
    story.reports.append((elapsed_s, report))
