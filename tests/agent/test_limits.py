"""Leases as the agent reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwatch import wire
from kvwatch.agent.limits import LOOK_PERIOD_S, NO_ADMISSION_S, NOTHING, Limits, Wish


class Desk:
    """A lease file, a clock, and the agent's view of both."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now_s, self.seq = folder, 1000.0, 0
        self.limits = Limits(str(folder / "chat.json"), "chat", clock=lambda: self.now_s)

    def lease(self, **limit: object) -> None:
        self.seq += 1
        fields: dict[str, object] = {
            "server": "chat",
            "boot_id": wire.boot_id(),
            "seq": self.seq,
            "ttl_s": 15,
        }
        wire.write(self.folder, wire.Lease(**fields | limit))  # type: ignore[arg-type]

    def look(self, after_s: float = 1.0) -> Wish:
        self.now_s += after_s
        return self.limits.look(self.now_s)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_no_file(desk: Desk) -> None:
    """Without kvwatch nothing is asked for."""
    assert desk.look() is NOTHING


def test_limit_and_its_end(desk: Desk) -> None:
    """A lease holds for its time and no longer."""
    desk.lease(max_running=4)

    assert desk.look() == Wish(4)
    assert desk.look(14.0) == Wish(4)
    assert desk.look(1.5) is NOTHING


def test_file_is_looked_at_ten_times_a_second(desk: Desk) -> None:
    """Between looks the answer stays the same object, so that a step can compare by identity."""
    desk.lease(max_running=4)
    first = desk.look()
    desk.lease(max_running=8)

    assert desk.look(LOOK_PERIOD_S / 2) is first
    assert desk.look(LOOK_PERIOD_S) == Wish(8)


def test_admission_comes_back(desk: Desk) -> None:
    """A stop of admission ends after 120 s of one number, renewed or not."""
    desk.lease(admit=False, ttl_s=120)
    assert desk.look() == Wish(None, False)
    assert desk.look(NO_ADMISSION_S - 2) == Wish(None, False)
    assert desk.look(3.0).admit


@pytest.mark.parametrize("text", ["", "{}", "nonsense", "[" * 4000, '{"v":2}'])
def test_anything_else_is_no_limit(desk: Desk, text: str) -> None:
    """What is not a lease asks for nothing."""
    desk.lease(max_running=4)
    desk.look()
    (desk.folder / "chat.json").write_text(text)

    assert desk.look() is NOTHING


def test_compaction_once_for_each_growth(desk: Desk) -> None:
    """The counter's growth is acted on once; renewals, gaps and a daemon that starts over are not growth."""
    asked = []
    for compact in (0, 1, 1, 2, 2, None, 2, 1, 1, 2):
        if compact is None:
            wire.clear(desk.folder, "chat")
        else:
            desk.lease(compact=compact)
        desk.look()
        asked.append(desk.limits.take_compaction())

    assert asked == [False, True, False, True, False, False, False, False, False, True]
