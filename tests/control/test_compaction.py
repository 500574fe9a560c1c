"""Compacting: only in need, on fresh figures, rarely, and ever more rarely while it does not help."""

from __future__ import annotations

import itertools

import pytest

from kvwatch.control.compaction import LEAST_BYTES, LONGEST_WAIT_S, SPACING_S
from kvwatch.model.action import ActionRequest, EventKind, Limit, Outcome
from kvwatch.model.level import Level, Reason, RuleId, Verdict
from kvwatch.model.settings import Mode
from tests.control.world import (
    EXEC,
    GIB,
    LEASE,
    Agent,
    Page,
    World,
    agent_verdict,
    full,
    stop_verdict,
    target,
    world,
)

SHORT = (stop_verdict(Level.YELLOW), agent_verdict())
UNBOUND = {"policy": "threshold", "compact": True}  # a page in the middle: no limit of its own


def short(agent: Agent | None = None, *verdicts: Verdict, **changes: object) -> World:
    """A device that is short while the allocator can return 4 GiB."""
    w = world(target(**UNBOUND | changes), verdicts=verdicts or SHORT)
    w.agent = agent or Agent()
    return w


def counters(w: World) -> list[int]:
    """Every number that was asked for, without renewals."""
    asked = [r.limit.compact for r in w.requests if r.event is EventKind.LIMIT and r.limit is not None]
    return [number for number, _ in itertools.groupby(asked) if number]


def asked_at(w: World) -> list[float]:
    """When each new number was first asked for."""
    times: dict[int, float] = {}
    for request in w.requests:
        if request.event is EventKind.LIMIT and request.limit is not None and request.limit.compact:
            times.setdefault(request.limit.compact, request.decided_s)
    return list(times.values())


def test_need_is_met_and_the_lease_goes() -> None:
    """A lease that carries nothing but the counter, the memory back, and nothing left in force."""
    w = short()
    w.tick()
    asked = w.requests[0].limit
    w.run(5)

    assert asked == Limit(server="chat", compact=asked.compact if asked else 0)
    assert asked is not None
    assert asked.compact > 0
    assert w.agent is not None
    assert w.agent.compactions == 1
    assert w.agent.reserved == 16 * GIB
    assert w.in_force() == []
    assert w.requests[-1].event is EventKind.RESTORE
    assert any("device_headroom is yellow" in message for message in w.events)
    assert any("brought enough" in message for message in w.events)


@pytest.mark.parametrize(
    "verdicts",
    [
        (stop_verdict(Level.RED), agent_verdict()),
        (agent_verdict(Level.YELLOW, Reason.CROSSED),),
        (agent_verdict(Level.RED, Reason.CROSSED),),
        (stop_verdict(Level.YELLOW, Reason.CAPPED), agent_verdict()),
    ],
    ids=["headroom_red", "largest_yellow", "largest_red", "headroom_capped"],
)
def test_each_sign_of_need(verdicts: tuple[Verdict, ...]) -> None:
    """Either rule, yellow or red, is need."""
    w = short(None, *verdicts)
    w.run(3)

    assert len(counters(w)) == 1


FRAGMENTED = agent_verdict(Level.YELLOW, Reason.CROSSED, RuleId.ALLOCATOR_FRAGMENTATION)
NOTHING: dict[str, tuple[Agent | None, tuple[Verdict, ...], dict[str, object]]] = {
    "not_configured": (Agent(), SHORT, {"compact": False}),
    "no_agent": (None, SHORT, {}),
    "refuses": (Agent(limits="refused: vLLM 0.99 is not known"), SHORT, {}),
    "program": (Agent(limits=""), SHORT, {}),
    "too_little": (Agent(releasable=LEAST_BYTES - 1), SHORT, {}),
    "not_told": (Agent(releasable=None), SHORT, {}),
    "old_figures": (Agent(figures_age_s=31.0), SHORT, {}),
    "no_figures": (Agent(figures_age_s=None), SHORT, {}),
    "green": (Agent(), (stop_verdict(Level.GREEN, Reason.BELOW), agent_verdict()), {}),
    "held": (Agent(), (stop_verdict(Level.YELLOW, Reason.HOLDING), agent_verdict()), {}),
    "stale": (Agent(), (stop_verdict(Level.RED, Reason.STALE_HELD), agent_verdict()), {}),
    "one_sample": (Agent(), (stop_verdict(Level.YELLOW), agent_verdict(Level.UNKNOWN, Reason.TOO_FEW)), {}),
    "other_gpu": (Agent(), (stop_verdict(Level.YELLOW), agent_verdict(uuid="GPU-2")), {}),
    "no_lease": (Agent(), SHORT, {"via": (EXEC,)}),
    "fragmented": (Agent(), (agent_verdict(), FRAGMENTED), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", NOTHING)
def test_otherwise_nothing_is_asked(case: str) -> None:
    """Without consent, need, fresh and judged figures, enough to return and an agent that obeys: nothing."""
    agent, verdicts, changes = NOTHING[case]
    w = world(target(**UNBOUND | changes), verdicts=verdicts)
    w.agent = agent
    w.run(130)

    assert w.requests == []


def test_silent_agent_is_asked_nothing() -> None:
    """Figures older than three datagrams are no ground."""
    w = short()
    w.verdicts = ()
    w.run(2)
    assert w.agent is not None
    w.agent.talking = False
    w.run(4)
    w.verdicts = SHORT
    w.run(60)

    assert w.requests == []


def test_stale_page_asks_nothing() -> None:
    """Where nothing may be decided, compacting may not either."""
    w = short()
    w.polling = False
    w.verdicts = ()
    w.run(5)
    w.verdicts = SHORT
    w.run(60)

    assert w.requests == []


def test_observe_asks_nothing() -> None:
    """Observing is only observing."""
    w = world(target(**UNBOUND), mode=Mode.OBSERVE, verdicts=SHORT)
    w.agent = Agent()
    w.run(130)

    assert w.requests == []


def test_advise_says_what_it_would_do() -> None:
    """Every request is dry, the audit log has it, and the server is not touched."""
    w = world(target(**UNBOUND), mode=Mode.ADVISE, verdicts=SHORT)
    w.agent = Agent()
    w.run(30)

    assert w.requests
    assert all(request.dry_run for request in w.requests)
    assert w.agent.compactions == 0
    assert any("compact: device_headroom is yellow" in m and "(advice only)" in m for m in w.events)


def test_offer_of_the_fragmentation_rule() -> None:
    """The ticket's rule offers it in the audit log, once, and does nothing."""
    w = short(None, agent_verdict(), FRAGMENTED)
    w.run(120)

    assert [message for message in w.events if "could compact" in message] == [
        "chat: could compact: allocator_fragmentation is yellow; nothing needs it now"
    ]
    assert w.requests == []


def test_at_most_once_a_minute() -> None:
    """While it helps and the need goes on, a request a minute and no more."""
    w = short(Agent(reserved=200 * GIB))
    for _ in range(300):
        assert w.agent is not None
        w.agent.releasable = 4 * GIB
        w.run(1)
    times = asked_at(w)

    assert len(times) == 5
    assert all(later - sooner >= SPACING_S for sooner, later in itertools.pairwise(times))


@pytest.mark.parametrize("agent", [Agent(working=False), Agent(returns=0.4)], ids=["deaf", "little"])
def test_what_does_not_help_is_asked_ever_more_rarely(agent: Agent) -> None:
    """Less than half of what was claimed doubles the wait, up to an hour."""
    w = short(agent)
    for _ in range(4 * 3600):
        agent.releasable = 4 * GIB
        w.tick(1.0)
    waits = [later - sooner for sooner, later in itertools.pairwise(asked_at(w))]

    for sooner, later in itertools.pairwise(waits):
        assert later == pytest.approx(min(LONGEST_WAIT_S, 2 * sooner), abs=1.0)
    assert waits[0] == pytest.approx(2 * SPACING_S, abs=1.0)
    assert any("too little" in message for message in w.events)


def test_success_ends_the_backing_off() -> None:
    """Once it has helped, the wait is a minute again."""
    agent = Agent(working=False)
    w = short(agent)
    w.run(200)
    agent.working = True
    w.run(400)
    before = len(asked_at(w))
    agent.releasable = 4 * GIB
    w.run(65)
    agent.releasable = 4 * GIB
    w.run(65)

    assert len(asked_at(w)) >= before + 1
    assert w.state.targets["chat"].compaction.wait_s == SPACING_S


def test_limit_and_compaction_share_a_lease() -> None:
    """A limit keeps standing, unchanged, while the counter grows, and the counter stays with it after."""
    w = short(Agent(), agent_verdict(Level.YELLOW, Reason.CROSSED))
    w.verdicts = ()
    w.page = full(running=40)
    w.run(3)
    assert w.cap == 32
    w.page = Page(usage=0.9, running=32, waiting=3)
    w.verdicts = SHORT
    w.run(1)
    number = counters(w)[-1]
    w.run(60)

    assert w.in_force() == [Limit(server="chat", max_running=32, compact=number)]
    assert w.agent is not None
    assert w.agent.compactions == 1
    assert not any(request.event is EventKind.RESTORE for request in w.requests)


def test_red_stops_admission_and_compacts_at_once() -> None:
    """The two go out together when the device is at its end."""
    w = short(None, stop_verdict(Level.RED), agent_verdict())
    w.run(1)
    [limit] = w.in_force()

    assert not limit.admit
    assert limit.compact > 0


def test_largest_allocatable_red_stops_admission() -> None:
    """The agent's own rule stops admission as the device's does, with or without consent to compact."""
    w = world(target(), verdicts=(agent_verdict(Level.RED, Reason.CROSSED),))
    w.run(1)

    assert w.in_force() == [Limit(server="chat", admit=False)]
    assert w.requests[0].rule is RuleId.LARGEST_ALLOCATABLE


@pytest.mark.parametrize("reason", [Reason.STALE, Reason.STALE_HELD, Reason.TOO_FEW, Reason.NOT_REPORTED])
def test_largest_allocatable_that_is_not_known_stops_nothing(reason: Reason) -> None:
    """Unknown, stale and single-sample figures of an agent move nothing."""
    level = Level.RED if reason is Reason.STALE_HELD else Level.UNKNOWN
    w = world(target(), verdicts=(agent_verdict(level, reason),))
    w.run(30)

    assert w.requests == []


def test_new_number_is_above_those_of_an_earlier_daemon() -> None:
    """A daemon that starts over is still understood: readers take only growth for a request."""
    first = short()
    first.run(5)
    second = short(first.agent)
    assert second.agent is not None
    second.agent.releasable = 4 * GIB
    second.now_s = second.polled_s = first.now_s + 5
    second.run(5)

    assert counters(second)[0] > counters(first)[-1]
    assert second.agent.compactions == 2


def test_restarted_server_is_not_taken_for_a_success() -> None:
    """A new process holds less, but nobody returned anything."""
    agent = Agent(working=False)
    w = short(agent)
    w.run(2)
    agent.pid, agent.reserved, agent.counter = 8, GIB, 10**9
    w.run(20)

    assert any("too little" in message for message in w.events)


def test_lease_that_cannot_be_written_moves_no_other_lever() -> None:
    """A compaction is worth no program: the next lever is not tried for it."""

    def lever(request: ActionRequest) -> Outcome:
        return Outcome.FAILED if request.event is EventKind.LIMIT else Outcome.APPLIED

    w = short(None, *SHORT, via=(LEASE, EXEC))
    w.lever = lever
    w.run(200)

    assert {request.action for request in w.requests} == {"lease"}
    assert w.in_force() == []


def test_reload_keeps_the_spacing_and_the_number() -> None:
    """Another lever list begins anew, but not with compacting."""
    w = short()
    w.run(5)
    assert w.agent is not None
    w.agent.releasable = 4 * GIB
    w.reconfigure(target(**UNBOUND | {"via": (LEASE, EXEC)}))
    w.run(40)
    soon = len(counters(w))
    w.run(30)

    assert soon == 1
    assert len(counters(w)) == 2
    assert counters(w) == sorted(set(counters(w)))


def test_restarted_page_voids_nothing_it_should_not() -> None:
    """While a compaction is out and the data goes, the lease still ends by itself."""
    w = short(Agent(working=False))
    w.run(1)
    w.polling = False
    w.run(31)

    assert w.in_force() == []
    assert not w.state.targets["chat"].holds_something
