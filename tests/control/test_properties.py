"""Whatever happens, in whatever order: the promises that hold for every history."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch.model.action import ActionRequest, EventKind, Limit, Outcome
from kvwatch.model.level import Level, Reason
from kvwatch.model.settings import ActionSettings, Mode, TargetSettings
from tests.control.world import (
    AGENT,
    EXEC,
    GIB,
    HTTP,
    LEASE,
    Agent,
    Page,
    World,
    agent_verdict,
    stop_verdict,
    target,
    world,
)

FLOOR, CEILING, COOLDOWN_S, MAX_MOVES, WINDOW_S = 4, 64, 10.0, 3, 120.0
# KVWATCH_EXAMPLES=1000 for a long look.
EXAMPLES = int(os.environ.get("KVWATCH_EXAMPLES", "30"))
ODD = (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.REFUSED, Outcome.NOOP, Outcome.SKIPPED_RECOVERED)


@dataclass(frozen=True)
class Step:
    """What the world looks like for a few seconds."""

    seconds: float
    usage: float | None
    running: int | None
    waiting: int | None
    samples: int
    polling: bool
    failing: bool
    restart: bool
    stop: Level | None
    outcome: Outcome
    talking: bool
    working: bool
    releasable: int | None
    reborn: bool
    judged: bool


steps = st.builds(
    Step,
    seconds=st.sampled_from([0.2, 1.0, 5.0, 12.0, 20.0]),
    usage=st.sampled_from([None, 0.1, 0.5, 0.85, 0.99, 1.0]),
    running=st.one_of(st.none(), st.integers(0, 100)),
    waiting=st.one_of(st.none(), st.integers(0, 50)),
    samples=st.sampled_from([0, 1, 2, 50]),
    polling=st.sampled_from([True, True, True, False]),
    failing=st.sampled_from([False, False, False, True]),
    restart=st.sampled_from([False, False, False, True]),
    stop=st.sampled_from([None, None, Level.GREEN, Level.YELLOW, Level.RED, Level.UNKNOWN]),
    outcome=st.sampled_from([Outcome.APPLIED] * 5 + list(ODD)),
    talking=st.sampled_from([True, True, True, False]),
    working=st.booleans(),
    releasable=st.sampled_from([None, 0, GIB, 4 * GIB]),
    reborn=st.sampled_from([False, False, False, True]),
    judged=st.sampled_from([True, True, False]),
)
histories = st.lists(steps, max_size=12)
# Steps in which little stands against a compaction: without them hardly a history would see one.
needy = steps.map(
    lambda step: replace(
        step,
        usage=step.usage or 0.5,
        samples=50,
        polling=True,
        failing=False,
        stop=Level.RED if step.stop is Level.RED else Level.YELLOW,
        judged=True,
        releasable=step.releasable or 4 * GIB,
    )
)
compacting = st.lists(st.one_of(needy, needy, steps), max_size=12)
any_histories = st.one_of(histories, compacting)
vias = st.sampled_from([(LEASE,), (EXEC,), (LEASE, EXEC), (EXEC, HTTP)])
policies = st.sampled_from(["threshold", "fixed"])


def configured(policy: str, via: tuple[ActionSettings, ...], *, compact: bool = False) -> TargetSettings:
    changes: dict[str, object] = {"params": {"max_running": 24}} if policy == "fixed" else {}
    return target(
        policy=policy, via=via, floor=FLOOR, ceiling=CEILING, cooldown_s=COOLDOWN_S, max_moves=MAX_MOVES,
        moves_window_s=WINDOW_S, compact=compact, **changes,
    )  # fmt: skip


def apply(w: World, step: Step) -> None:
    restarts = w.page.restarts + step.restart
    w.page = Page(
        usage=step.usage, running=step.running, waiting=step.waiting, samples=step.samples, restarts=restarts
    )
    w.polling, w.failing = step.polling, step.failing
    w.verdicts = () if step.stop is None else (stop_verdict(step.stop, _reason(step.stop)),)
    w.verdicts += (agent_verdict(),) if step.judged else ()
    agent = w.agent or Agent()
    agent.talking, agent.working, agent.releasable = step.talking, step.working, step.releasable
    if step.reborn:
        agent.pid, agent.compactions, agent.counter = agent.pid + 1, 0, 0
    w.agent = agent

    def lever(request: ActionRequest) -> Outcome:
        return Outcome.DRY_RUN if request.dry_run else step.outcome

    w.lever = lever


def _reason(level: Level) -> Reason:
    return {Level.UNKNOWN: Reason.STALE, Level.GREEN: Reason.BELOW}.get(level, Reason.CROSSED)


def play(w: World, history: list[Step], check: Callable[[World, Limit | None], None]) -> None:
    """Run a history tick by tick; `check` sees each tick with the limit that was wanted before it."""
    w.late = True
    for step in history:
        apply(w, step)
        for _ in range(round(step.seconds / 0.2)):
            before = w.wanted() if w.state.targets else None
            w.tick()
            check(w, before)


@settings(max_examples=EXAMPLES, deadline=None)
@given(history=any_histories, via=vias, policy=policies, compact=st.booleans())
def test_every_history_ends_without_a_limit_when_samples_stop(
    history: list[Step], via: tuple[ActionSettings, ...], policy: str, *, compact: bool
) -> None:
    """Within the lease nothing is wanted; and once the levers answer nothing is in force."""
    w = world(configured(policy, via, compact=compact))
    play(w, history, lambda _w, _before: None)
    w.polling = False
    w.run(15.4)
    assert w.wanted() is None
    assert w.limits[0].wanted is None
    w.lever = lambda _request: Outcome.APPLIED
    w.run(65)

    assert w.in_force() == []
    assert not w.state.targets["chat"].holds_something


@settings(max_examples=EXAMPLES, deadline=None)
@given(history=any_histories, via=vias, policy=policies, compact=st.booleans())
def test_no_limit_is_ever_outside_its_bounds(
    history: list[Step], via: tuple[ActionSettings, ...], policy: str, *, compact: bool
) -> None:
    """Floor and ceiling hold for every request of every history."""
    w = world(configured(policy, via, compact=compact))
    play(w, history, lambda _w, _before: None)

    for request in w.requests:
        if request.event is EventKind.LIMIT:
            assert request.limit is not None
            assert request.limit.max_running is None or FLOOR <= request.limit.max_running <= CEILING
            assert request.limit.restricts or request.limit.compact > 0
            assert compact or request.limit.compact == 0
            assert request.limit.restricts or request.action == "lease"
            assert 0 < (request.expires_in_s or 0) <= 15.0


@settings(max_examples=EXAMPLES, deadline=None)
@given(history=any_histories, policy=policies, compact=st.booleans())
def test_nothing_is_imposed_on_unknown_stale_or_single_sample_input(
    history: list[Step], policy: str, *, compact: bool
) -> None:
    """A limit is wanted, changed or renewed only on a fresh page with two good samples behind it."""

    def check(w: World, before: Limit | None) -> None:
        age_s = None if w.polled_s is None else w.now_s - w.polled_s
        good = w.page.samples >= 2 and w.page.usage is not None and not w.failing
        if good and age_s is not None and age_s <= 3.0 + 1e-9:
            return
        assert w.wanted() in (before, None)
        assert not any(
            request.event is EventKind.LIMIT and request.decided_s == w.now_s for request in w.requests[-1:]
        )

    play(world(configured(policy, (LEASE,), compact=compact)), history, check)


@settings(max_examples=EXAMPLES, deadline=None)
@given(history=compacting, via=vias, policy=policies)
def test_compactions_are_rare_and_stand_on_fresh_figures(
    history: list[Step], via: tuple[ActionSettings, ...], policy: str
) -> None:
    """The counter only grows, once a minute at most, and only while the device is short on fresh, judged
    figures of an agent that has enough to return."""
    seen: list[tuple[float, int]] = []

    def check(w: World, _before: Limit | None) -> None:
        count = w.state.targets["chat"].compaction.count
        if count == (seen[-1][1] if seen else 0):
            return
        assert not seen or count == seen[-1][1] + 1
        assert not seen or w.now_s - seen[-1][0] >= 60.0
        seen.append((w.now_s, count))
        told = w.snapshot().agents[AGENT]
        assert w.now_s - (w.polled_s or 0.0) <= 3.0 + 1e-9
        assert told.age_s(w.now_s) <= 3.0 + 1e-9
        assert told.value is not None
        assert told.value.allocator is not None
        assert (told.value.allocator.releasable_bytes or 0) >= 512 << 20
        levels = {(verdict.rule.value, verdict.level) for verdict in w.verdicts}
        assert levels & {("device_headroom", Level.YELLOW), ("device_headroom", Level.RED)}
        assert ("largest_allocatable", Level.GREEN) in levels

    w = world(configured(policy, via, compact=True))
    play(w, history, check)
    leases = [r for r in w.requests if r.event is EventKind.LIMIT and r.action == "lease"]
    asked = [request.limit.compact for request in leases if request.limit is not None]
    assert asked == sorted(asked)


@settings(max_examples=EXAMPLES, deadline=None)
@given(history=histories, via=vias)
def test_moves_are_bounded_in_number_and_in_time(
    history: list[Step], via: tuple[ActionSettings, ...]
) -> None:
    """A cooldown between moves, and at most N that tighten in a window; only a stop of admission, an
    expiry or a restart may come between."""
    moves: list[tuple[float, bool]] = []

    def check(w: World, before: Limit | None) -> None:
        after = w.wanted()
        if after == before or after is None or not after.admit:
            return
        tighter = before is None or (before.admit and _cap(after) < _cap(before))
        if moves and before is not None and before.admit:
            assert w.now_s - moves[-1][0] >= COOLDOWN_S - 1e-6
        moves.append((w.now_s, tighter))
        recent = [at_s for at_s, tight in moves if tight and at_s > w.now_s - WINDOW_S + 1e-6]
        assert len(recent) <= MAX_MOVES

    play(world(configured("threshold", via)), history, check)


def _cap(limit: Limit) -> int:
    return limit.max_running if limit.max_running is not None else 10**9


@settings(max_examples=EXAMPLES, deadline=None)
@given(history=histories)
def test_growth_is_by_a_quarter_at_most_and_only_while_the_limit_binds(history: list[Step]) -> None:
    """A planned release never jumps, and raises nothing that holds nobody back."""

    def check(w: World, before: Limit | None) -> None:
        after = w.wanted()
        if before is None or after is None or not before.admit or not after.admit:
            return
        if _cap(after) > _cap(before):
            assert _cap(after) <= max(_cap(before) + 1, _cap(before) * 1.25)
            assert w.page.running is not None
            assert w.page.running >= 0.9 * _cap(before)

    play(world(configured("threshold", (LEASE,))), history, check)


@settings(max_examples=EXAMPLES, deadline=None)
@given(history=histories, via=vias, policy=policies)
def test_observe_asks_for_nothing(history: list[Step], via: tuple[ActionSettings, ...], policy: str) -> None:
    """Observing is only observing."""
    w = world(configured(policy, via, compact=True), mode=Mode.OBSERVE)
    play(w, history, lambda _w, _before: None)

    assert w.requests == []


@settings(max_examples=EXAMPLES, deadline=None)
@given(history=histories, via=vias, policy=policies)
def test_advise_decides_the_same_moves_as_act_and_applies_none(
    history: list[Step], via: tuple[ActionSettings, ...], policy: str
) -> None:
    """On the same pages the advice is what act would have done, request by request."""
    history = [replace(step, outcome=Outcome.APPLIED) for step in history]
    acting, advising = (world(configured(policy, via), mode=mode) for mode in (Mode.ACT, Mode.ADVISE))
    for w in (acting, advising):
        play(w, history, lambda _w, _before: None)

    assert all(request.dry_run for request in advising.requests)
    assert advising.held == {}
    assert [replace(request, dry_run=True) for request in acting.requests] == advising.requests


@settings(max_examples=EXAMPLES, deadline=None)
@given(history=any_histories, via=vias, data=st.data())
def test_a_removed_target_always_gives_back(
    history: list[Step], via: tuple[ActionSettings, ...], data: st.DataObject
) -> None:
    """A reload at any moment leaves nothing in force once the levers answer."""
    w = world(configured("threshold", via, compact=data.draw(st.booleans())))
    play(w, history[: data.draw(st.integers(0, len(history)))], lambda _w, _before: None)
    w.reconfigure()
    w.lever = lambda _request: Outcome.APPLIED
    w.run(65)

    assert w.in_force() == []
    assert w.state.targets == {}
