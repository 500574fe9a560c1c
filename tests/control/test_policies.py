"""The policies: what they want, within which bounds, and how they let go."""

from __future__ import annotations

import pytest

from kvwatch.model.action import EventKind, Limit
from kvwatch.model.server import Basis, Evictable, Semantics
from kvwatch.model.settings import Mode
from tests.control.world import THRESHOLD, Agent, Page, full, target, world


def test_a_full_pool_with_a_queue_shrinks_by_the_factor() -> None:
    """max(floor, ⌊factor × running⌋)."""
    w = world(page=full(running=41))
    w.run(2)

    assert w.cap == 32


@pytest.mark.parametrize(
    "page",
    [
        Page(usage=0.99, running=40, waiting=0), Page(usage=0.99, running=40, waiting=None),
        Page(usage=0.95, running=40, waiting=9), Page(usage=None, running=40, waiting=9),
        Page(usage=0.99, running=None, waiting=9),
    ],
    ids=["nobody waits", "queue unknown", "at the bound", "usage unknown", "running unknown"],
)  # fmt: skip
def test_without_all_its_grounds_threshold_does_nothing(page: Page) -> None:
    """A full pool alone is normal, and what is unknown is no ground."""
    w = world(page=page)
    w.run(5)

    assert w.requests == []


@pytest.mark.parametrize(
    ("running", "floor", "ceiling", "expected"),
    [(3, 4, 64, 4), (200, 4, 64, 64), (40, 36, 64, 36)],
    ids=["floor", "ceiling", "floor above the factor"],
)
def test_the_first_limit_is_within_the_bounds(running: int, floor: int, ceiling: int, expected: int) -> None:
    """Never below the floor, never above the ceiling."""
    w = world(target(floor=floor, ceiling=ceiling), page=full(running=running))
    w.run(2)

    assert w.cap == expected


def test_the_servers_own_limit_wins_over_floor_and_ceiling() -> None:
    """A limit above what the server allows would limit nothing."""
    w = world(target(floor=4, ceiling=64), page=full(running=3))
    w.page.own_limit = 2
    w.run(2)

    assert w.cap == 2


def test_one_page_gives_one_move() -> None:
    """Without a cooldown the next move still waits for a page that shows the last one's effect."""
    w = world(target(cooldown_s=0.0), page=full(running=40))
    w.run(0.8)

    assert w.caps() == [32]


def test_a_second_shrink_waits_until_the_first_has_taken_effect() -> None:
    """As long as more run than the limit allows, the last move is not judged."""
    w = world(page=full(running=40))
    w.run(65)
    still = w.cap
    w.page.running = 32
    w.run(5)

    assert still == 32
    assert w.cap == 25


def test_a_release_ramps_by_a_quarter_per_cooldown_and_ends_at_the_ceiling() -> None:
    """Planned growth is bounded, goes on until the ceiling, and then the limit goes altogether."""
    w = world(page=full(running=40))
    w.run(2)
    w.page = Page(usage=0.5, running=32, waiting=0)
    for _ in range(200):
        w.run(1)
        w.page.running = w.cap if w.cap is not None else 32  # binding throughout
    caps = w.caps()

    assert caps == [32, 40, 50, 62, 64, None]


def test_no_growth_while_the_limit_does_not_bind_and_in_the_end_it_goes() -> None:
    """A limit that nobody feels is not raised; after a minute it is given back."""
    w = world(page=full(running=40))
    w.run(2)
    w.page = Page(usage=0.3, running=10, waiting=0)
    w.run(55)
    meanwhile = w.caps()
    w.run(20)

    assert meanwhile == [32]
    assert w.caps() == [32, None]
    assert w.in_force() == []


def test_a_limit_with_somebody_behind_it_is_not_given_back_at_once() -> None:
    """Requests that wait are the queue that an opened gate would let into one prefill."""
    w = world(page=full(running=40))
    w.run(2)
    w.page = Page(usage=0.3, running=10, waiting=50)
    w.run(200)

    assert w.cap == 32


def test_tightening_is_rationed_and_a_release_is_not() -> None:
    """At most N moves that tighten within the window; growth goes on at its own pace."""
    w = world(target(max_moves=2, moves_window_s=600.0), page=full(running=50))
    for _ in range(300):
        w.run(1)
        w.page.running = w.cap or 50
    tight = w.caps()
    w.page = Page(usage=0.5, running=w.cap, waiting=0)
    w.run(31)

    assert tight == [40, 32]
    assert w.cap == 40


def test_what_a_move_did_is_said_before_the_next() -> None:
    """Each move is followed by its judgement, with figures from before and after."""
    w = world(page=full(running=40))
    for _ in range(100):
        w.run(1)
        w.page.running = w.cap or 40
    moves = [message for message in w.events if "limit running to" in message or "last move did" in message]

    assert [("did" in message) for message in moves] == [number % 2 == 1 for number in range(len(moves))]
    assert len(moves) >= 6


def test_fixed_holds_its_number() -> None:
    """A fixed limit stands whatever the load."""
    w = world(target(policy="fixed", params={"max_running": 20}), page=Page(usage=0.1, running=1))
    w.run(100)

    assert set(w.caps()) == {20}


def test_a_larger_fixed_limit_after_a_reload_is_reached_by_steps() -> None:
    """A planned release ramps, whichever policy plans it."""
    w = world(target(policy="fixed", params={"max_running": 8}), page=Page(usage=0.1, running=8))
    w.run(5)
    w.reconfigure(target(policy="fixed", params={"max_running": 20}))
    w.run(300)

    assert w.caps() == [8, 10, 12, 15, 18, 20]


def test_a_lower_ceiling_after_a_reload_is_obeyed() -> None:
    """New bounds hold for the limit that stands."""
    w = world(page=full(running=60))
    w.run(2)
    w.reconfigure(target(ceiling=20))
    w.page.running = 48
    w.run(40)

    assert w.caps() == [48, 20]


def test_threshold_refuses_to_act_without_consent_and_says_so() -> None:
    """The operator must accept what it costs."""
    w = world(target(accept_goodput_loss=False), page=full())
    w.run(5)

    assert w.requests == []
    assert any("accept_goodput_loss" in message for message in w.events)


@pytest.mark.parametrize(
    "meaning",
    [
        Semantics(evictable=Evictable.USED), Semantics(evictable=Evictable.UNKNOWN),
        Semantics(evictable=Evictable.FREE, basis=Basis.RESERVATION),
        Semantics(evictable=Evictable.USED, basis=Basis.SLOTS),
    ],
    ids=["LMDeploy", "vLLM V0", "TGI", "llama.cpp"],
)  # fmt: skip
@pytest.mark.parametrize("mode", [Mode.ADVISE, Mode.ACT])
def test_threshold_refuses_a_usage_that_is_no_shortage(meaning: Semantics, mode: Mode) -> None:
    """A warm cache or a reservation reads as full with requests waiting; a limit would only cost."""
    w = world(page=full(), mode=mode)
    w.page.semantics = meaning
    w.run(60)

    assert w.requests == []
    assert any("goes by the usage" in message for message in w.events)


def test_a_ceiling_that_nobody_tells_is_refused_in_act() -> None:
    """`auto` needs a server that tells its limit."""
    w = world(target(ceiling=None), page=full())
    w.run(5)
    refused = list(w.requests)
    w.page.own_limit = 48
    w.run(5)

    assert refused == []
    assert w.cap == 32


def test_the_agents_word_on_the_servers_own_limit_counts() -> None:
    """vLLM's pages do not tell its limit; its agent does, and its last word bounds a limit for good."""
    w = world(target(ceiling=None), page=full())
    w.agent = Agent(max_running=24)
    w.run(2)
    told, bounded = w.limits[0].configured, w.cap
    w.agent.talking = False
    w.run(8)

    assert (told, bounded) == (24, 24)
    assert w.limits[0].configured == 24
    assert w.in_force()


def test_consent_withdrawn_at_a_reload_gives_the_limit_back() -> None:
    """A refusal leaves nothing in force."""
    w = world(page=full())
    w.run(3)
    w.reconfigure(target(accept_goodput_loss=False))
    w.run(1)

    assert w.in_force() == []
    assert w.requests[-1].event is EventKind.RESTORE


def test_observe_decides_nothing_and_advise_applies_nothing() -> None:
    """Only act hands out anything that is carried out."""
    watching, advising = world(page=full(), mode=Mode.OBSERVE), world(page=full(), mode=Mode.ADVISE)
    watching.run(60)
    advising.run(60)

    assert watching.requests == []
    assert advising.requests
    assert all(request.dry_run for request in advising.requests)
    assert advising.in_force() == []
    assert advising.limits[0].would_be == Limit(server="chat", max_running=32)
    assert advising.limits[0].active is None


def test_a_decision_is_told_once_however_long_it_holds() -> None:
    """The audit log gets changes, not ticks: not even when the figures move with every page."""
    w = world(page=full(running=40))
    w.run(2)
    told = len(w.events)
    for number in range(25):
        w.page = full(running=32 - number % 3, waiting=number)
        w.run(1)

    assert len(w.events) - told <= 3


def test_the_shipped_parameters_are_the_documented_ones() -> None:
    """docs/policies.md quotes these figures."""
    assert THRESHOLD == {"shrink_above": 0.95, "regrow_below": 0.8, "factor": 0.8}
