"""Truth tables of the rules about a server: its KV pool, its latencies, whether it works at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvwatch.model.level import Level, Reason, RuleId
from kvwatch.model.sample import Failure, FailureKind, SourceStatus
from kvwatch.model.server import Basis, Evictable, Semantics
from kvwatch.model.settings import RuleSettings, ServerSettings, Settings
from kvwatch.model.signal import Waste
from tests.rules.build import FREE, G, R, U, World, Y, engine, quantiles

HARM = {"waiting": 3, "recompute_tax_ratio": 0.03}


@pytest.mark.parametrize(
    ("semantics", "fields", "level"),
    [
        (FREE, {"kv_usage_ratio": 0.5}, G),
        (FREE, {"kv_usage_ratio": 0.8}, Y),
        (FREE, {"kv_usage_ratio": 0.99}, Y),
        (FREE, {"kv_usage_ratio": 0.99, "waiting": 9}, Y),
        (FREE, {"kv_usage_ratio": 0.99, "waiting": 9, "recompute_tax_ratio": 0.01}, Y),
        (FREE, {"kv_usage_ratio": 0.99, "waiting": 0, "recompute_tax_ratio": 0.2}, Y),
        (FREE, {"kv_usage_ratio": 0.99, "waiting": None, "recompute_tax_ratio": 0.2}, Y),
        (FREE, {"kv_usage_ratio": 0.99, **HARM}, R),
        (FREE, {"kv_usage_ratio": 0.99, "waiting": 1, "ttft": quantiles(2.1)}, R),
        (FREE, {"kv_usage_ratio": 0.99, "waiting": 1, "ttft": quantiles(2.1, count=19)}, Y),
        (FREE, {"kv_usage_ratio": 0.99, "waiting": 1, "ttft": quantiles(1.9)}, Y),
        (replace(FREE, evictable=Evictable.USED), {"kv_usage_ratio": 0.99, **HARM}, Y),
        (replace(FREE, evictable=Evictable.UNKNOWN), {"kv_usage_ratio": 0.99, **HARM}, Y),
        (replace(FREE, basis=Basis.SLOTS), {"kv_usage_ratio": 0.99, **HARM}, Y),
        (replace(FREE, basis=Basis.RESERVATION), {"kv_usage_ratio": 0.99, **HARM}, Y),
        (FREE, {"kv_usage_ratio": None}, U),
    ],
)
def test_kv_usage(semantics: Semantics, fields: dict[str, object], level: Level) -> None:
    """Usage is red only for true occupancy, with requests waiting and a sign of harm."""
    verdict = World(semantics=semantics, engine=engine(**fields)).run(10)[RuleId.KV_USAGE]

    assert verdict.level is level
    assert not verdict.pages


def test_capped_usage_says_why() -> None:
    """A person sees which condition keeps a full pool from being red."""
    verdict = World(engine=engine(kv_usage_ratio=1.0)).run(10)[RuleId.KV_USAGE]

    assert verdict.reason is Reason.CAPPED
    assert verdict.detail == "no requests are waiting"


def test_case_L2_usage_alone_is_no_alarm() -> None:
    """L2: a pool that is 70 % or 100 % full is a healthy busy server; nothing pages."""
    for usage in (0.75, 0.97, 1.0):
        verdicts = World(engine=engine(kv_usage_ratio=usage, waiting=50, running=60)).run(10).values()
        assert not [verdict.rule for verdict in verdicts if verdict.level is R]
    world = World(engine=engine(kv_usage_ratio=0.75), rules={RuleId.KV_USAGE: RuleSettings(yellow=0.9)})
    assert world.run(10)[RuleId.KV_USAGE].level is G


def test_case_H10_preemption_thrash_pages() -> None:
    """H10: a full pool with requests waiting and a high tax is red, and it is the tax that pages."""
    thrash = engine(
        kv_usage_ratio=0.99, waiting=20, running=40, preemptions_per_s=2.0, recompute_tax_ratio=0.12
    )
    verdicts = World(engine=thrash).run(10)

    assert verdicts[RuleId.KV_USAGE].level is R
    assert (verdicts[RuleId.RECOMPUTE_TAX].level, verdicts[RuleId.RECOMPUTE_TAX].pages) == (R, True)


@pytest.mark.parametrize(
    ("tax", "waiting", "level"),
    [(0.0, 5, G), (0.019, 5, G), (0.02, 0, Y), (0.05, 0, Y), (0.05, None, Y), (0.05, 1, R), (None, 5, U)],
)
def test_recompute_tax(tax: float | None, waiting: int | None, level: Level) -> None:
    """The tax is red only while requests wait."""
    world = World(engine=engine(recompute_tax_ratio=tax, waiting=waiting))

    assert world.run(10)[RuleId.RECOMPUTE_TAX].level is level


@pytest.mark.parametrize(
    ("fields", "level", "value"),
    [
        ({"ttft": quantiles(1.0)}, G, 0.5),
        ({"ttft": quantiles(2.0)}, Y, 1.0),
        ({"ttft": quantiles(3.0)}, R, 1.5),
        ({"ttft": quantiles(1.0), "tpot": quantiles(0.12)}, R, 2.0),
        ({"ttft": quantiles(9.0, count=19)}, U, None),
        ({"ttft": quantiles(9.0, count=20)}, R, 4.5),
        ({"queue": quantiles(900.0)}, U, None),  # no objective for it
        ({}, U, None),
    ],
)
def test_latency_slo(fields: dict[str, object], level: Level, value: float | None) -> None:
    """The worst p95 against its objective counts; under 20 observations nothing is known."""
    verdict = World(engine=engine(**fields)).run(10)[RuleId.LATENCY_SLO]

    assert verdict.level is level
    assert verdict.value == (None if value is None else pytest.approx(value))


def test_no_objective_no_latency_rule() -> None:
    """A server without objectives has no latency verdict at all."""
    world = World(settings=Settings(servers=(ServerSettings(name="chat"),)))

    assert RuleId.LATENCY_SLO not in world.run(10)


@pytest.mark.parametrize(("ratio", "level"), [(0.04, G), (0.3, Y), (1.0, Y), (None, U)])
def test_kv_block_waste(ratio: float | None, level: Level) -> None:
    """Waste is yellow at most."""
    waste = None if ratio is None else Waste(ratio=ratio, low=ratio, high=ratio, method="exact")

    assert World(engine=engine(waste=waste)).run(10)[RuleId.KV_BLOCK_WASTE].level is level


@pytest.mark.parametrize(("stalled", "level"), [(False, G), (True, R), (None, U)])
def test_server_stalled(stalled: bool | None, level: Level) -> None:
    """A stalled engine is red at once; one that cannot tell is unknown."""
    assert World(engine=engine(stalled=stalled)).run(10)[RuleId.SERVER_STALLED].level is level


REFUSED = SourceStatus(
    source="server/chat",
    period_s=1.0,
    errors_total=5,
    failure=Failure(kind=FailureKind.REFUSED, message="nobody listens at http://127.0.0.1:8000"),
)


def test_case_H4_server_down_pages_after_two_minutes_whatever_its_exit_code() -> None:
    """H4: an endpoint that does not answer for two minutes is red, also when its process ended cleanly."""
    world = World()
    world.run(0)
    world.up, world.server_fresh, world.server_status = False, False, REFUSED
    assert world.tick(1)[RuleId.SERVER_DOWN].level is G
    assert world.tick(120)[RuleId.SERVER_DOWN].reason is Reason.PENDING
    verdict = world.tick(121)[RuleId.SERVER_DOWN]
    assert (verdict.level, verdict.pages, verdict.detail) == (R, True, REFUSED.failure.message)  # type: ignore[union-attr]


def test_server_that_never_came_up_is_down() -> None:
    """A configured server that has never answered pages after two minutes, and was never green."""
    world = World(up=False, server_fresh=False, server_seen=False, server_status=REFUSED)

    assert [world.tick(now_s)[RuleId.SERVER_DOWN].level for now_s in (0, 60, 119.9, 120)] == [U, U, U, R]


def test_server_down_is_for_configured_servers() -> None:
    """A server that was merely discovered may go as it came."""
    settings = Settings(servers=(ServerSettings(name="chat", configured=False),))
    world = World(settings=settings, up=False, server_fresh=False, server_status=REFUSED)

    assert RuleId.SERVER_DOWN not in world.run(500)
    assert "server/chat" not in {verdict.scope.source for verdict in world.verdicts(501)}


def test_a_loading_server_is_not_down() -> None:
    """A server that answers that it is loading is not down while it says so."""
    failure = Failure(kind=FailureKind.LOADING, message="loading")
    world = World(up=False, server_fresh=False, server_status=replace(REFUSED, failure=failure))

    assert [world.tick(now_s)[RuleId.SERVER_DOWN].level for now_s in (0, 200, 600)] == [G, G, G]


def test_a_watcher_that_cannot_tell_is_not_a_server_down() -> None:
    """Where the poll itself is stuck, nothing is known of the server."""
    world = World()
    world.run(0)
    world.up, world.server_fresh = None, False

    assert world.tick(300)[RuleId.SERVER_DOWN].level is U
