"""Which servers are watched when some come and some go, and no file names any."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import pytest

from kvwatch.daemon.newcomers import GONE_S, LOOK_EVERY_S, MAX_FOUND, Newcomers, merged
from kvwatch.model.level import Level
from kvwatch.model.report import ServerReport, TickClock, TickReport
from kvwatch.model.settings import Mode, ServerSettings
from kvwatch.model.signal import ServerSignals


def server(port: int, kind: str = "vllm", *, configured: bool = False) -> ServerSettings:
    return ServerSettings(
        name=f"{kind}-{port}", kind=kind, url=f"http://127.0.0.1:{port}", configured=configured
    )


def report(*servers: tuple[ServerSettings, float | None]) -> TickReport:
    """A report of servers, each with how long it has been down (None: up)."""
    shown = tuple(
        ServerReport(
            server=one.name, kind=one.kind, url=one.url, state=None, up=down_s is None, age_s=None,
            signals=ServerSignals(server=one.name, down_for_s=down_s),
        )
        for one, down_s in servers
    )  # fmt: skip
    clock = TickClock(mono_s=0.0, wall_s=0.0)
    return TickReport(tick=1, clock=clock, version="", mode=Mode.ADVISE, headline=Level.GREEN, servers=shown)


@dataclass
class Host:
    """A host on which a look finds what a test puts there, when the test lets it end."""

    found: list[ServerSettings] = field(default_factory=list)
    active: bool = True
    looks: list[set[str]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def look(self, answering: Collection[str], users: Collection[int]) -> Sequence[ServerSettings]:
        self.looks.append(set(answering))
        self.gate.wait(10)
        return list(self.found)


def ended(newcomers: Newcomers) -> None:
    """Wait for the look that is under way."""
    end_s = time.monotonic() + 10
    while any(thread.name == "newcomers" for thread in threading.enumerate()):
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_what_a_look_finds_is_watched_at_the_next_turn() -> None:
    """Looks are apart by their period, and ask nothing of a server that answers."""
    old, new = server(8000), server(8001)
    host = Host([new])
    newcomers, shown = Newcomers(host, 0.0), report((old, None))
    early = newcomers.follow(shown, [old], LOOK_EVERY_S - 1)
    newcomers.follow(shown, [old], LOOK_EVERY_S)
    ended(newcomers)
    later = newcomers.follow(shown, [old], LOOK_EVERY_S + 1)

    assert early == (old,)
    assert later == (old, new)
    assert host.looks == [{old.url}]


def test_a_look_that_takes_long_holds_up_nobody() -> None:
    """The loop goes on, and no second look begins beside the first."""
    host = Host([server(8001)])
    host.gate.clear()
    newcomers, shown = Newcomers(host, 0.0), report()
    turns = [newcomers.follow(shown, [], second * LOOK_EVERY_S) for second in range(1, 6)]
    host.gate.set()
    ended(newcomers)

    assert turns == [()] * 5
    assert len(host.looks) == 1


def test_a_reload_voids_the_look_under_way() -> None:
    """What it finds belongs to a configuration that no longer stands."""
    host = Host([server(8001)])
    host.gate.clear()
    newcomers = Newcomers(host, 0.0)
    newcomers.follow(report(), [], LOOK_EVERY_S)
    newcomers.reloaded([], [])
    host.gate.set()
    ended(newcomers)

    assert newcomers.follow(report(), [], LOOK_EVERY_S + 1) == ()


def test_with_a_file_nothing_comes_or_goes() -> None:
    """A configured server that has been down for a day stays: its absence is an alarm."""
    named = server(8000, configured=True)
    host = Host([server(8001)], active=False)
    newcomers = Newcomers(host, 0.0)

    assert newcomers.follow(report((named, 86_400.0)), [named], 1e6) == (named,)
    assert merged([named], [], {named.name}) == (named,)
    assert host.looks == []


def test_a_server_that_is_gone_for_an_hour_is_forgotten() -> None:
    """It was found, not named, so it may go as it came."""
    gone, short = server(8000), server(8001)
    shown = report((gone, GONE_S + 1), (short, GONE_S - 1))

    assert Newcomers(Host(), 0.0).follow(shown, [gone, short], 1.0) == (short,)


def test_a_place_that_changed_its_kind_is_told_by_the_new_one() -> None:
    """Another engine on the port of a dead one: the old name would fail for ever."""
    old, new = server(8000), server(8000, "sglang")

    assert merged([old], [new], ()) == (new,)
    assert merged([new], [new], ()) == (new,)


def test_two_that_name_the_same_place_are_one() -> None:
    """Any user can start a process whose command line names somebody else's port: what answers there is
    watched once, and stays what it was."""
    one, other = server(8000), server(8000, "nim")

    assert merged([], [one, other], ()) == (one,)
    assert merged([one], [other, one], ()) == (one,)


def test_a_reload_without_a_file_keeps_who_was_found() -> None:
    """A server too busy to answer just then keeps its place and its history; what a file named goes."""
    busy, new, named = server(8000), server(8001), server(8002, configured=True)

    assert Newcomers(Host(), 0.0).reloaded([busy, named], [new]) == (busy, new)
    assert Newcomers(Host(active=False), 0.0).reloaded([busy], [named]) == (named,)


def test_what_has_no_room_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Hundreds of servers without a place fill no log, look after look."""
    host = Host([server(port) for port in range(8000, 8000 + MAX_FOUND + 100)])
    newcomers, servers = Newcomers(host, 0.0), tuple[ServerSettings, ...]()
    for second in range(1, 5):
        servers = newcomers.follow(report(), servers, second * LOOK_EVERY_S)
        ended(newcomers)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    assert len(servers) == MAX_FOUND
    assert [text.split()[0] for text in told] == ["100"]


def test_there_is_room_for_so_many() -> None:
    """A host that starts servers without end fills no memory."""
    many = [server(port) for port in range(8000, 8000 + 2 * MAX_FOUND)]

    assert merged([], many, ()) == tuple(many[:MAX_FOUND])
