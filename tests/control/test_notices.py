"""Notify hooks: who is told what, once, in every mode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvwatch.control import notices
from kvwatch.model.action import ActionRequest, EventKind
from kvwatch.model.level import Level, RuleId, Scope, Verdict
from kvwatch.model.settings import ActionSettings, ControlSettings, Mode, NotifySettings, Settings
from tests.control.world import stop_verdict, world

HOOK = ActionSettings(kind="exec", params={"argv": ("/bin/page",), "deadline_s": 2.0})


def asked(*on: str, rules: tuple[str, ...] = ("*",), mode: Mode = Mode.OBSERVE) -> Settings:
    notify = (NotifySettings(on=on, rules=rules, action=HOOK),)
    return Settings(notify=notify, control=ControlSettings(mode=mode))


def verdict(level: Level, at_s: float, rule: RuleId = RuleId.GPU_LOST) -> Verdict:
    return Verdict(rule=rule, scope=Scope(uuid="GPU-1", gpu="0"), level=level, since_s=at_s, since_wall_s=0.0)


def told(settings: Settings, *levels: Level, rule: RuleId = RuleId.GPU_LOST) -> list[str]:
    """The events that a sequence of levels brings."""
    state: notices.Worst = {}
    events: list[str] = []
    for number, level in enumerate(levels):
        state, requests = notices.due(state, (verdict(level, float(number), rule),), settings, float(number))
        events += [request.event.value for request in requests]
    return events


U, G, Y, R = Level.UNKNOWN, Level.GREEN, Level.YELLOW, Level.RED


@pytest.mark.parametrize(
    ("on", "levels", "events"),
    [
        (("red", "restore"), (G, R, G), ["red", "restore"]),
        (("red", "restore"), (G, Y, G), []),
        (("red", "restore"), (G, R, Y, G), ["red", "restore"]),
        (("red", "yellow", "restore"), (Y, R, G), ["yellow", "red", "restore"]),
        (("green",), (U, G), []),
        (("red", "green"), (R, G), ["red", "green"]),
        (("restore",), (Y, G), ["restore"]),
        (("red", "restore"), (R, R, R), ["red"]),
        (("red", "restore"), (R, U, R), ["red"]),
        (("red", "restore"), (R, U, G), ["red", "restore"]),
        (("red", "restore"), (R, G, U, G), ["red", "restore"]),
        (("red",), (U, R), ["red"]),
    ],
    ids=str,
)
def test_each_change_is_told_once_to_those_who_asked(
    on: tuple[str, ...], levels: tuple[Level, ...], events: list[str]
) -> None:
    """A restore ends what the same hook was told of; unknown is no news and ends nothing."""
    assert told(asked(*on), *levels) == events


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("rule", list(RuleId))
def test_every_rule_is_told_in_every_mode(rule: RuleId, mode: Mode) -> None:
    """GPU rules and server rules alike, whatever kvwatch may do to servers."""
    assert told(asked("red", mode=mode), R, rule=rule) == ["red"]


def test_a_rule_that_was_not_asked_for_is_not_told() -> None:
    """`rules` chooses."""
    assert told(asked("red", rules=("kv_usage",)), R) == []
    assert told(asked("red", rules=("kv_usage", "gpu_lost")), R) == ["red"]


def test_a_notice_says_where_and_why() -> None:
    """The request carries rule, level, place, figures and the hook's own deadline."""
    found = replace(verdict(R, 5.0), value=3.0, red=2.0, detail="no answer for 3 s")
    _, requests = notices.due({}, (found,), asked("red"), 5.0)

    request = requests[0]
    assert (request.rule, request.level, request.scope.uuid) == (RuleId.GPU_LOST, R, "GPU-1")
    assert (request.deadline_s, request.reason) == (2.0, "no answer for 3 s")
    assert dict(request.evidence) == {"value": 3.0, "red": 2.0}
    assert (request.limit, request.dry_run) == (None, False)


def test_what_is_remembered_is_only_what_is_not_green() -> None:
    """A thousand rules that are green, or gone, cost no memory."""
    state: notices.Worst = {}
    for number in range(1000):
        scope = Scope(server=f"s{number}")
        red = Verdict(rule=RuleId.SERVER_DOWN, scope=scope, level=R, since_s=1.0, since_wall_s=0.0)
        state, _ = notices.due(state, (red,), asked("red"), 1.0)

    assert len(state) == 1


def test_notices_go_out_from_a_whole_tick_of_control() -> None:
    """The plan hands them out beside the limits."""
    w = world(mode=Mode.OBSERVE)
    w.settings = replace(w.settings, notify=asked("red", "restore").notify)
    w.verdicts = (stop_verdict(R),)
    w.run(2)
    w.verdicts = (stop_verdict(G),)
    w.run(2)

    events: list[ActionRequest] = w.requests
    assert [request.event for request in events] == [EventKind.RED, EventKind.RESTORE]
