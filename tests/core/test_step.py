"""The tick as a function: deterministic, bounded, and telling each change once."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from kvwatch import core
from kvwatch.core import headline, reports
from kvwatch.model.action import ActionResult, EventKind, Limit, Outcome
from kvwatch.model.level import Level, Reason, RuleId, Scope, Verdict
from kvwatch.model.report import Snapshot, TickClock, TickReport
from kvwatch.model.settings import (
    ActionSettings,
    ControlSettings,
    NotifySettings,
    RuleSettings,
    ServerSettings,
    Settings,
    TargetSettings,
)
from tests.core.host import CHAT, PATTERNS, Host


def story(host: Host) -> list[TickReport]:
    """A short life with a bit of everything."""
    reports = host.run(40)
    host.usage, host.waiting, host.preemptions_per_s, host.ttft_s = 1.0, 20, 3.0, 5.0
    reports += host.run(40)
    host.serving = False
    reports += host.run(10)
    host.serving, host.paused = True, True
    reports += host.run(10)
    return reports


def test_same_inputs_give_equal_reports() -> None:
    """Two runs over the same samples agree in every field of every report."""
    assert story(Host()) == story(Host())


def test_an_empty_host_has_a_report() -> None:
    """Nothing configured and nothing seen is unknown, not an error and not green."""
    state = core.initial(Settings(), version="1.0", patterns={})
    _, report = core.step(state, Snapshot(), (), TickClock(mono_s=1.0, wall_s=2.0))

    assert (report.tick, report.headline, report.verdicts, report.events) == (1, Level.UNKNOWN, (), ())
    assert report.headline_detail


def test_events_are_told_once_and_numbered() -> None:
    """A change makes one event; a host at rest makes none; numbers run on without gaps."""
    host = Host()
    reports = story(host)
    seqs = [event.seq for report in reports for event in report.events]
    assert seqs == list(range(1, len(seqs) + 1))

    calm = Host()
    calm.run(90)
    assert [event for report in calm.run(200) for event in report.events] == []


def test_a_level_event_carries_its_evidence() -> None:
    """Who reads the audit log sees what the level stood on."""
    host = Host()
    host.run(60)
    host.usage, host.waiting, host.preemptions_per_s = 1.0, 20, 3.0
    events = [event for report in host.run(60) for event in report.events]
    event = next(e for e in events if e.rule == "recompute_tax" and e.level_to is Level.RED)

    assert event.kind == "level"
    assert event.fields["red"] == 0.05
    assert float(str(event.fields["value"])) >= 0.05
    assert event.fields["waiting"] == 20
    assert event.message.startswith("recompute_tax of chat/0 is red (was ")


def test_server_and_source_events() -> None:
    """Up, down and restart are told by name."""
    host = Host()
    host.run(5)
    host.serving = False
    host.run(5)
    host.serving, host.counters = True, {}
    events = [e.message for report in host.run(5) for e in report.events if e.kind in ("server", "source")]

    assert "source server/chat is up" in events
    assert "server chat is up" in events
    assert "engine 0 of chat has restarted" in events


def test_source_stuck_is_told() -> None:
    """A poll that does not return is told as stuck, not as down."""
    host = Host()
    host.run(5)
    host.gpu_answers = False

    assert "source nvml is stuck: stuck" in [event.message for event in host.tick().events]


ACTING = Settings(
    servers=(CHAT,),
    notify=(NotifySettings(on=("red",), action=ActionSettings(kind="exec")),),
    control=ControlSettings(
        targets=(TargetSettings(server="chat", policy="fixed", params={"max_running": 64}, ceiling=64),)
    ),
)


def result(outcome: Outcome = Outcome.APPLIED, event: EventKind = EventKind.LIMIT) -> ActionResult:
    return ActionResult(
        request_id="r",
        target="chat",
        action="lease",
        event=event,
        outcome=outcome,
        started_s=1.0,
        took_s=0.1,
        finished_wall_s=2.0,
        limit=Limit(server="chat", max_running=4),
    )


def test_action_counters_start_at_zero_and_count() -> None:
    """Every outcome of every configured action is there before the first one happens."""
    host = Host(settings=ACTING)
    before = {(a, o): n for a, o, n in host.tick().actions_total}
    assert before == {(action, o.value): 0 for action in ("lease", "exec") for o in Outcome}
    after = {(a, o): n for a, o, n in host.tick(results=(result(), result(Outcome.FAILED))).actions_total}
    assert (after[("lease", "applied")], after[("lease", "failed")]) == (1, 1)
    assert sum(after.values()) == 2


def test_a_renewed_limit_is_told_once_a_notification_each_time() -> None:
    """Leases are renewed every few seconds; the log has the first outcome and every change of it."""
    host = Host(settings=ACTING)
    host.tick()
    told = [
        len([event for event in host.tick(results=(each,)).events if event.kind == "action"])
        for each in (
            result(),
            result(),
            result(Outcome.FAILED),
            result(Outcome.FAILED),
            result(event=EventKind.RED),
            result(event=EventKind.RED),
        )
    ]

    assert told == [1, 0, 1, 0, 1, 1]


def test_reload_keeps_what_still_exists_and_drops_what_does_not() -> None:
    """A reload keeps levels, seconds and counters; a removed server's verdicts and report vanish."""
    host = Host(settings=ACTING)
    host.usage = 0.8
    host.run(30)
    host.tick(results=(result(),))
    before = host.verdict(RuleId.KV_USAGE)
    rules = {RuleId.KV_USAGE: RuleSettings(yellow=0.75, red=0.95)}
    host.configure(replace(ACTING, rules=rules))
    report = host.tick()
    after = host.verdict(RuleId.KV_USAGE)
    assert (after.level, after.since_s, after.yellow) == (Level.YELLOW, before.since_s, 0.75)
    assert sum(after.seconds_at(host.now_s)) == pytest.approx(31.0)
    assert ("lease", "applied", 1) in report.actions_total

    host.configure(Settings(servers=(ServerSettings(name="other", kind="vllm"),)))
    report = host.tick()
    assert {verdict.scope.server for verdict in report.verdicts} <= {"", "other"}
    assert [server.server for server in report.servers] == ["other"]
    assert "server chat is no longer watched" in [event.message for event in report.events]


def test_a_replaced_gpu_source_leaves_no_figures_of_the_one_before() -> None:
    """A reload that makes a new GPU source, which only remembers who was there: no total and no ledger."""
    host = Host()
    host.run(5)
    (before,) = host.tick().gpus
    assert before.signals is not None
    assert before.signals.ledger is not None
    assert host.gpu_sample is not None
    assert host.gpu_sample.value is not None
    known = replace(host.gpu_sample.value, gpus=(reports.identity(before.state),))
    host.gpu_sample = replace(host.gpu_sample, observed_s=-1e9, value=known)
    (after,) = host.tick(0.2, poll=False).gpus

    assert (after.stale, after.state.memory) == (True, None)
    assert after.signals is not None
    assert (after.signals.ledger, after.signals.headroom_bytes) == (None, None)


def test_seconds_lose_nothing_between_ticks() -> None:
    """Whatever the levels did, each scope's seconds add up to the time since it appeared."""
    host = Host()
    reports = story(host)
    seen = host.now_s - len(reports) + 1
    for verdict in reports[-1].verdicts:
        if verdict.scope.engine:
            assert sum(verdict.seconds_at(host.now_s)) == pytest.approx(host.now_s - seen)


def test_the_wall_clock_decides_nothing() -> None:
    """A wall clock that jumps by a day changes no level and no value."""

    def told(host: Host, jump_s: float) -> list[tuple[RuleId, Level, float | None]]:
        found = []
        for second in range(90):
            if second == 45:
                host.wall_s += jump_s
                host.usage, host.waiting, host.preemptions_per_s = 1.0, 9, 3.0
            found += [(v.rule, v.level, v.value) for v in host.tick().verdicts]
        return found

    assert told(Host(), 0.0) == told(Host(), 86_400.0) == told(Host(), -86_400.0)


def test_report_of_a_server_before_its_first_page() -> None:
    """A server that was never seen is there, down, without age."""
    host = Host(serving=False)
    server = host.tick().servers[0]

    assert (server.server, server.kind, server.up, server.age_s, server.state) == (
        "chat",
        "vllm",
        False,
        None,
        None,
    )
    assert not server.stale


def test_size_of_the_state_does_not_grow_with_time() -> None:
    """A day of ticks needs no more memory than an hour of them."""
    host = Host(usage=0.9)
    host.tick(10.0)
    for _ in range(800):
        host.tick(10.0)
    early = weight(host.state, set())
    for _ in range(800):
        host.tick(10.0)

    assert weight(host.state, set()) < 1.1 * early


def weight(thing: object, seen: set[int]) -> int:
    """Bytes of everything reachable from dataclasses, tuples and mappings."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    size = sys.getsizeof(thing)
    if isinstance(thing, dict):
        return size + sum(weight(k, seen) + weight(v, seen) for k, v in thing.items())
    if isinstance(thing, (tuple, list, frozenset)):
        return size + sum(weight(each, seen) for each in thing)
    return size + sum(weight(getattr(thing, name), seen) for name in getattr(thing, "__slots__", ()))


def verdict(
    level: Level, reason: Reason = Reason.CROSSED, *, pages: bool = True, server: str = "chat"
) -> Verdict:
    return Verdict(
        rule=RuleId.RECOMPUTE_TAX,
        scope=Scope(server=server, engine="0"),
        level=level,
        since_s=0.0,
        since_wall_s=0.0,
        reason=reason,
        pages=pages,
    )


G, Y, R, U = Level.GREEN, Level.YELLOW, Level.RED, Level.UNKNOWN


@pytest.mark.parametrize(
    ("verdicts", "level"),
    [
        ((verdict(R), verdict(U, Reason.STALE)), R),
        ((verdict(Y), verdict(U, Reason.STALE)), Y),
        ((verdict(G), verdict(R, pages=False)), G),
        ((verdict(G), verdict(U, Reason.TOO_FEW)), G),
        ((verdict(G), verdict(U, Reason.STARTING)), G),
        ((verdict(G), verdict(U, Reason.STALE)), U),  # sight was lost: not green
        ((verdict(G), verdict(U, Reason.STALE, server="guest")), G),  # nobody asked for that one
        ((verdict(U, Reason.TOO_FEW),), U),
        ((verdict(G), verdict(U, Reason.DISABLED)), G),
        ((), U),
    ],
)
def test_headline(verdicts: tuple[Verdict, ...], level: Level) -> None:
    """The worst paging rule gives the colour; unknown hides nothing, and is not hidden itself."""
    guest = ServerSettings(name="guest", configured=False)
    judged = headline.judge(verdicts, Settings(servers=(CHAT, guest)))

    assert judged.level is level
    assert judged.detail.startswith(level.name.lower())


def test_patterns_may_be_kept_or_replaced_by_a_reload() -> None:
    """A reload that brings patterns replaces them, one that does not keeps them."""
    state = core.initial(Settings(), version="1.0", patterns=PATTERNS)

    assert core.reconfigure(state, Settings()).patterns is PATTERNS
    assert core.reconfigure(state, Settings(), patterns={}).patterns == {}
