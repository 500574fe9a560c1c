"""The ladder around the policies: stale data, restarts, levers that fail, admission, reloads."""

from __future__ import annotations

import itertools

import pytest

from kvwatch.model.action import ActionRequest, EventKind, Limit, Outcome
from kvwatch.model.level import Level, Reason
from kvwatch.model.settings import Mode
from tests.control.world import EXEC, HTTP, LEASE, Agent, Page, World, full, stop_verdict, target, world


def limited(*, via: tuple[object, ...] = (LEASE,)) -> World:
    """A world with a limit of 32 out."""
    w = world(target(via=via), page=full(running=40))
    w.run(3)
    w.page.running = 32
    assert w.cap == 32
    return w


@pytest.mark.parametrize("lever", [LEASE, EXEC, HTTP], ids=lambda lever: lever.kind)
def test_a_limit_on_stale_data_ends_within_the_lease_and_quiet_follows(lever: object) -> None:
    """No page: no renewal; the lease's end is a restore, and two minutes without a limit."""
    w = limited(via=(lever,))
    w.polling = False
    w.run(15.2)
    ended = w.in_force()
    w.polling = True
    before = len(w.requests)
    w.run(100)
    quiet = [request for request in w.requests[before:] if request.event is EventKind.LIMIT]
    w.run(30)

    assert ended == []
    assert w.requests[before - 1].event is EventKind.RESTORE
    assert quiet == []
    assert w.cap is not None


def test_a_short_gap_in_the_data_ends_nothing_and_moves_nothing() -> None:
    """Within the lease a limit is held as it is."""
    w = limited()
    w.page = Page(usage=0.9, running=20, waiting=3)
    w.run(30)
    w.polling = False
    asked = len(w.requests)
    w.run(8)
    w.polling = True
    w.run(2)

    assert [request.limit for request in w.requests[asked:]] == [Limit(server="chat", max_running=32)] * len(
        w.requests[asked:]
    )
    assert w.cap == 32


@pytest.mark.parametrize("lever", [LEASE, EXEC], ids=lambda lever: lever.kind)
def test_expiry_while_a_request_is_under_way_still_gives_back(lever: object) -> None:
    """A limit that is confirmed after its data went unknown is taken back at once."""
    w = world(target(via=(lever,)), page=full())
    w.tick()
    late = w.results.pop()  # the lever has not answered yet
    w.polling = False
    w.run(20)
    w.results.append(late)
    w.run(1)

    assert w.in_force() == []
    assert w.requests[-1].event is EventKind.RESTORE


@pytest.mark.parametrize("fault", ["single sample", "failed poll", "never polled", "unknown server"])
def test_nothing_is_decided_on_what_is_not_known(fault: str) -> None:
    """Unknown, stale and single-sample input moves nothing."""
    w = world(page=full())
    if fault == "single sample":
        w.page.samples = 1
    elif fault == "failed poll":
        w.failing = True
    elif fault == "never polled":
        w.polled_s, w.polling = None, False
    else:
        w.reconfigure(target(server="other"))
    w.run(60)

    assert w.requests == []


def test_a_server_that_restarts_under_a_limit_loses_it() -> None:
    """What was decided for the old process is void: restored at once, then quiet."""
    w = limited()
    w.page = Page(usage=0.1, running=0, samples=1, restarts=1)
    w.run(1)
    after = w.in_force()
    w.page = full()
    w.page.restarts = 1
    w.run(100)

    assert after == []
    assert w.in_force() == []
    assert any("restarted" in message for message in w.events)


def test_a_red_device_stops_admission_at_once_whatever_the_cooldown() -> None:
    """The device does not wait for a cooldown; running requests may finish."""
    w = limited()
    w.verdicts = (stop_verdict(Level.RED),)
    w.tick()
    w.tick()

    assert w.in_force() == [Limit(server="chat", max_running=32, admit=False)]


@pytest.mark.parametrize("reason", [Reason.STALE, Reason.STALE_HELD, Reason.MAINTENANCE, Reason.DISABLED])
def test_a_red_that_is_only_held_stops_nothing(reason: Reason) -> None:
    """`on_stale: red` or a held level is for people; nothing acts on it."""
    w = world(verdicts=(stop_verdict(Level.RED, reason),))
    w.run(5)

    assert w.requests == []


def test_stopped_admission_is_said_again_within_two_minutes() -> None:
    """A reader ends it after 120 s without a new number, so it is renewed far more often."""
    w = world(target(lease_s=120.0), verdicts=(stop_verdict(Level.RED),))
    w.run(300)
    times = [request.decided_s for request in w.requests]

    assert max(b - a for a, b in itertools.pairwise(times)) <= 41
    assert not w.in_force()[0].admit


def test_admission_opens_at_what_runs_and_then_by_steps() -> None:
    """The gate opens for what is there, not for the whole queue."""
    w = world(page=Page(usage=0.6, running=10, waiting=40), verdicts=(stop_verdict(Level.RED),))
    w.run(20)
    w.page.running = 6
    w.verdicts = (stop_verdict(Level.GREEN, Reason.BELOW),)
    w.run(15)
    opened = w.in_force()
    w.run(35)

    assert opened == [Limit(server="chat", max_running=6)]
    assert w.cap == 7


def test_admission_does_not_open_because_the_rule_went_unknown() -> None:
    """The stop stands while its rule cannot tell, and ends as a lease ends."""
    w = world(page=Page(usage=0.6, running=10), verdicts=(stop_verdict(Level.RED),))
    w.run(40)
    w.verdicts = (stop_verdict(Level.UNKNOWN, Reason.STALE),)
    w.run(8)
    meanwhile = w.in_force()
    w.run(10)

    assert meanwhile
    assert not meanwhile[0].admit
    assert w.in_force() == []


def test_stopping_and_opening_cannot_be_held_up_by_the_ration() -> None:
    """Used-up moves keep a server neither open nor shut."""
    w = world(target(max_moves=1), page=Page(usage=0.6, running=10))
    for level in (Level.RED, Level.GREEN) * 3:
        reason = Reason.CROSSED if level is Level.RED else Reason.BELOW
        w.verdicts = (stop_verdict(level, reason),)
        w.run(35)

        assert w.in_force()[0].admit is (level is Level.GREEN)


def failing(*actions: str, outcome: Outcome = Outcome.FAILED, event: EventKind | None = None) -> object:
    def lever(request: ActionRequest) -> Outcome:
        wrong = request.action in actions and (event is None or request.event is event)
        return outcome if wrong else Outcome.APPLIED

    return lever


def test_the_next_lever_is_tried_when_one_fails() -> None:
    """The first that works is used."""
    w = world(target(via=(LEASE, EXEC)), page=full(), lever=failing("lease"))
    w.run(1)

    assert [request.action for request in w.requests][:2] == ["lease", "exec"]
    assert w.cap == 32


def test_a_lever_that_timed_out_is_given_back_once_another_works() -> None:
    """It may hold an old limit unseen; only one lever limits in the end."""
    w = world(target(via=(EXEC, HTTP)), page=full())

    def late(request: ActionRequest) -> Outcome:
        if request.action == "exec" and request.event is EventKind.LIMIT and request.limit is not None:
            w.held["exec"] = (request.limit, None)  # it did apply, and then hung
            return Outcome.TIMED_OUT
        return Outcome.APPLIED

    w.lever = late
    w.run(2)

    assert list(w.held) == ["http"]
    assert w.cap == 32


def test_a_stray_lever_that_cannot_be_given_back_does_not_hold_up_renewals() -> None:
    """Cleaning up comes after what is in force."""
    w = world(target(via=(EXEC, LEASE)), page=full(), lever=failing("exec", outcome=Outcome.TIMED_OUT))
    w.run(2)
    w.page.running = 32
    for _ in range(50):
        w.run(1)
        assert w.held["lease"][1] is not None
        assert w.in_force() != []


def test_a_lost_renewal_is_tried_again_on_its_own_lever() -> None:
    """One hiccup moves no second lever."""
    w = limited(via=(EXEC, HTTP))
    calls: list[str] = []

    def hiccup(request: ActionRequest) -> Outcome:
        calls.append(request.action)
        return Outcome.FAILED if len(calls) == 1 else Outcome.APPLIED

    w.lever = hiccup
    w.run(20)

    assert set(calls) == {"exec"}
    assert w.cap == 32


def test_a_hook_that_says_try_later_for_ever_is_asked_ever_less_often() -> None:
    """Retries pause up to a minute; each carries the same absolute limit."""
    w = world(target(via=(EXEC,)), page=full(), lever=failing("exec", outcome=Outcome.REFUSED))
    w.run(600)
    times = [request.decided_s for request in w.requests]

    assert 10 <= len(times) <= 18
    assert {request.limit for request in w.requests} == {Limit(server="chat", max_running=32)}
    assert len({request.request_id for request in w.requests}) == len(times)


def test_a_failed_limits_pause_does_not_delay_giving_back() -> None:
    """Unknown data after failed renewals: the restore goes out at the lease's end, not a minute later."""
    w = limited(via=(EXEC,))
    w.lever = failing("exec", event=EventKind.LIMIT)
    w.run(40)
    w.polling = False
    w.run(4.5)

    assert w.in_force() == []


def test_a_restore_that_fails_is_tried_until_it_succeeds_and_others_are_not_held_up() -> None:
    """Of two touched levers the one that answers is given back although the other never does."""
    w = world(target(via=(EXEC, HTTP)), page=full(), lever=failing("exec", outcome=Outcome.TIMED_OUT))
    w.run(2)
    assert list(w.held) == ["http"]
    w.polling = False
    w.run(30)
    assert w.held == {}
    assert w.state.targets["chat"].touched == (0,)
    w.lever = lambda _request: Outcome.APPLIED
    w.run(70)

    assert w.state.targets["chat"].touched == ()


def test_a_skipped_request_is_asked_again_only_while_it_is_wanted() -> None:
    """Skipping what has recovered ends; it does not go round."""
    w = world(page=full(), lever=lambda _request: Outcome.SKIPPED_RECOVERED)
    w.tick()
    w.page = Page(usage=0.3, running=5)
    w.polling = False
    w.run(30)
    asked = len(w.requests)
    w.lever = lambda _request: Outcome.NOOP
    w.run(30)

    assert w.requests[-1].event is EventKind.RESTORE
    assert len(w.requests) - asked <= 1


def test_only_one_request_is_out_at_a_time() -> None:
    """While the lever has not answered nothing else is asked of it."""
    w = world(target(cooldown_s=0.0), page=full())
    w.tick()
    w.results.clear()
    for number in range(100):
        w.page = full(running=100 - number)
        w.tick()

    assert len(w.requests) == 1


def test_a_removed_target_gives_its_limit_back_and_is_forgotten() -> None:
    """A reload leaves nothing behind."""
    w = limited(via=(EXEC,))
    w.reconfigure()
    w.run(1)

    assert w.in_force() == []
    assert w.state.targets == {}
    assert w.limits == ()


def test_other_levers_at_a_reload_take_over_after_the_old_gave_back() -> None:
    """Never two levers at once."""
    w = limited(via=(EXEC,))
    w.reconfigure(target(via=(HTTP,)))
    for _ in range(50):
        w.tick()
        assert len(w.in_force()) <= 1

    assert list(w.held) == ["http"]


def test_act_to_advise_gives_back_and_goes_on_advising() -> None:
    """Taking the hands off is complete."""
    w = limited(via=(EXEC,))
    w.reconfigure(target(via=(EXEC,)), mode=Mode.ADVISE)
    w.run(40)

    assert w.in_force() == []
    assert w.requests[-1].dry_run


def test_a_lever_that_forgot_is_told_again_within_the_lease() -> None:
    """A proxy that restarted has its own limit again until the next renewal, at most a third of a lease."""
    w = limited(via=(EXEC,))
    w.held.clear()
    w.run(5.4)

    assert w.cap == 32


def test_a_lease_that_could_not_be_renewed_is_not_reported_as_active() -> None:
    """What ended by itself is not shown as in force."""
    w = limited()
    w.lever = failing("lease")
    w.run(25)

    assert w.limits[0].active is None
    assert any("run out" in message for message in w.events)


def test_setting_the_clock_changes_no_decision() -> None:
    """Only monotonic time is used: wall time may jump an hour either way."""
    plain, stepped = limited(), limited()
    for number in range(300):
        stepped.wall_s += 3600 if number % 2 else -3600
        plain.tick()
        stepped.tick()

    assert [(r.event, r.limit, r.decided_s) for r in plain.requests] == [
        (r.event, r.limit, r.decided_s) for r in stepped.requests
    ]


def test_what_control_remembers_does_not_grow() -> None:
    """Days of flapping leave a state of the same size."""
    w = world(target(cooldown_s=1.0, moves_window_s=60.0, max_moves=1000))
    for number in range(1500):
        w.page = full(running=w.cap or 60) if number % 2 else Page(usage=0.3, running=w.cap or 60)
        w.run(0.4)

    state = w.state.targets["chat"]
    assert len(state.moves) <= 65
    assert len(state.touched) <= 1


@pytest.mark.parametrize(
    ("agent", "warned"),
    [
        (None, True),
        (Agent(), False),
        (Agent(limits="unknown version"), True),
        (Agent(talking=False), True),
    ],
    ids=["no agent", "obeys", "refuses", "silent"],
)
def test_a_lease_that_nobody_reads_is_told(agent: Agent | None, warned: bool) -> None:
    """Writing the file always succeeds; whether a server obeys it only its agent says."""
    w = world(page=full())
    w.agent = agent
    w.run(45)
    told = [message for message in w.events if "what the last move did" in message]

    assert w.in_force()
    assert told
    assert all(("no agent of chat" in message) is warned for message in told)
