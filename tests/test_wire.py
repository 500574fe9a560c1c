"""The lease file: nothing but a well-formed, current lease limits anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwatch import wire

BOOT = "11111111-2222-3333-4444-555555555555"


class Clock:
    """Monotonic seconds that tests move."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def lease(**changes: object) -> wire.Lease:
    values: dict[str, object] = {
        "server": "chat", "boot_id": BOOT, "seq": 1, "ttl_s": 15.0, "max_running": 24,
        "reason": "recompute_tax",
    } | changes  # fmt: skip
    return wire.Lease(**values)  # type: ignore[arg-type]


def reader(tmp_path: Path, clock: Clock) -> wire.LeaseReader:
    return wire.LeaseReader(tmp_path / "chat.json", server="chat", clock=clock, boot=BOOT)


def test_a_lease_is_honoured_for_its_time_and_no_longer(tmp_path: Path) -> None:
    """A limit ends by itself on the reader's own clock."""
    clock = Clock()
    follower = reader(tmp_path, clock)
    wire.write(tmp_path, lease())

    first = follower.current()
    clock.now_s += 14.9
    late = follower.current()
    clock.now_s += 0.2

    assert first is not None
    assert first.limit.max_running == 24
    assert late is not None
    assert follower.current() is None


def test_only_a_newer_number_renews(tmp_path: Path) -> None:
    """Rewriting the same number gains no time; an older one is no lease at all."""
    clock = Clock()
    follower = reader(tmp_path, clock)
    wire.write(tmp_path, lease(seq=5))
    follower.current()
    clock.now_s += 10
    wire.write(tmp_path, lease(seq=5, reason="again"))
    follower.current()
    clock.now_s += 6

    assert follower.current() is None

    wire.write(tmp_path, lease(seq=6))
    assert follower.current() is not None
    wire.write(tmp_path, lease(seq=4, max_running=1))
    assert follower.current() is None


def test_a_removed_file_ends_the_limit_at_once(tmp_path: Path) -> None:
    """Clearing is immediate, and clearing twice is harmless."""
    follower = reader(tmp_path, Clock())
    wire.write(tmp_path, lease())
    follower.current()

    assert wire.clear(tmp_path, "chat") is True
    assert wire.clear(tmp_path, "chat") is False
    assert follower.current() is None


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2}, {"v": True}, {"v": None}, {"boot_id": "another"}, {"server": "other"}, {"seq": -1},
        {"seq": 1.5}, {"seq": True}, {"ttl_s": 0}, {"ttl_s": 121}, {"ttl_s": "15"}, {"ttl_s": True},
        {"ttl_s": float("nan")}, {"ttl_s": float("inf")}, {"max_running": 0}, {"max_running": -3},
        {"max_running": 2.5}, {"max_running": True}, {"max_running": "4"}, {"admit": 1}, {"admit": None},
        {"compact": -1}, {"reason": 7}, {"reason": "x" * 65}, {"extra": {"nested": 1}}, {"extra": [1]},
    ],
    ids=str,
)  # fmt: skip
def test_anything_else_is_no_limit(tmp_path: Path, change: dict[str, object]) -> None:
    """Each single fault in a lease makes it no lease."""
    record = json.loads(wire.encode(lease())) | change
    (tmp_path / "chat.json").write_text(json.dumps(record))

    assert reader(tmp_path, Clock()).current() is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(content=st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_random_content_never_limits_and_never_raises(tmp_path: Path, content: bytes) -> None:
    """Garbage is no limit."""
    (tmp_path / "chat.json").write_bytes(content)

    assert reader(tmp_path, Clock()).current() is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["write", "wait", "clear", "junk"]), st.integers(1, 30)), max_size=30
    )
)
def test_any_history_ends_without_a_limit_when_writing_stops(
    tmp_path: Path, steps: list[tuple[str, int]]
) -> None:
    """Whatever happened before, no limit outlives the last lease's time."""
    clock = Clock()
    follower = reader(tmp_path, clock)
    for number, (what, amount) in enumerate(steps, start=1):
        if what == "write":
            wire.write(tmp_path, lease(seq=number, ttl_s=float(amount)))
        elif what == "wait":
            clock.now_s += amount
        elif what == "clear":
            wire.clear(tmp_path, "chat")
        else:
            (tmp_path / "chat.json").write_bytes(b"{" * amount)
        follower.current()
    clock.now_s += 30

    assert follower.current() is None


def test_the_file_is_readable_by_engines_and_leaves_no_temporary(tmp_path: Path) -> None:
    """0644 whatever the umask, and nothing but the lease in the directory."""
    old = os.umask(0o077)
    try:
        wire.write(tmp_path, lease())
    finally:
        os.umask(old)

    assert (tmp_path / "chat.json").stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in tmp_path.iterdir()] == ["chat.json"]


def test_a_symlink_is_neither_followed_nor_written_through(tmp_path: Path) -> None:
    """A directory or file swapped for a symlink is refused."""
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "limits").symlink_to(real)
    with pytest.raises(OSError):
        wire.write(tmp_path / "limits", lease())
    wire.write(real, lease())
    (tmp_path / "chat.json").symlink_to(real / "chat.json")

    assert reader(tmp_path, Clock()).current() is None
    assert list(real.glob(".*")) == []


def test_what_lies_at_the_writers_own_name_is_never_opened(tmp_path: Path) -> None:
    """Whoever may write in the directory (a container that mounts it) can neither hold the writer up with a
    pipe nor lead it into another file by a link of either kind."""
    temporary, other = tmp_path / ".chat.tmp", tmp_path / "precious"
    other.write_text("precious")
    for lay in (
        lambda: os.mkfifo(temporary),
        lambda: temporary.hardlink_to(other),
        lambda: temporary.symlink_to(other),
    ):
        lay()
        wire.write(tmp_path, lease())
        assert wire.decode((tmp_path / "chat.json").read_bytes()) == lease()

    assert other.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chat.json", "precious"]


def test_a_pipe_in_place_of_the_file_blocks_nobody(tmp_path: Path) -> None:
    """A reader never waits."""
    os.mkfifo(tmp_path / "chat.json")

    assert reader(tmp_path, Clock()).current() is None


def test_the_reference_reader_tells_a_live_lease_from_a_dead_one(tmp_path: Path) -> None:
    """A script gets 0 and the lease, or 3 and "no limit"."""
    command = [sys.executable, "-m", "kvwatch.wire", "read", str(tmp_path / "chat.json")]
    wire.write(tmp_path, lease(boot_id=wire.boot_id()))
    live = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    os.utime(tmp_path / "chat.json", (1, 1))
    dead = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)

    assert (live.returncode, json.loads(live.stdout)["max_running"]) == (0, 24)
    assert (dead.returncode, dead.stdout.strip()) == (3, "no limit")


def test_numbers_grow_over_restarts() -> None:
    """A restarted daemon's first number is above the old one's last."""
    first = wire.next_seq(-1)

    assert wire.next_seq(first) > first
    assert wire.next_seq(-1) >= first


@pytest.mark.needs("root", "unshare")
def test_the_readers_clock_counts_suspended_time() -> None:
    """A lease from before a suspend is over after it: the clock is the one that runs on meanwhile.

    A time namespace moves CLOCK_BOOTTIME alone, which is what a suspend does.
    """
    code = "import time; from kvwatch import wire; print(wire.clock_s() - time.monotonic())"
    plain = [sys.executable, "-c", code]
    suspended = ["unshare", "--time", "--boottime", "100000", *plain]
    before, after = (
        float(subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout)
        for command in (plain, suspended)
    )

    assert after - before == pytest.approx(100000, abs=5)


def test_the_readers_clock_is_not_the_wall_clock(tmp_path: Path) -> None:
    """Setting the clock neither ends nor prolongs a lease: the file's own times are not looked at."""
    clock = Clock()
    follower = reader(tmp_path, clock)
    wire.write(tmp_path, lease())
    os.utime(tmp_path / "chat.json", (1, 1))

    assert follower.current() is not None
    clock.now_s += 15
    os.utime(tmp_path / "chat.json", (4e9, 4e9))
    assert follower.current() is None


def test_admission_stopped_for_ever_ends_after_two_minutes(tmp_path: Path) -> None:
    """A reader ends `admit: false` after 120 s without a new number, whatever the file says."""
    clock = Clock()
    follower = reader(tmp_path, clock)
    record = json.loads(wire.encode(lease(admit=False))) | {"ttl_s": 120}
    (tmp_path / "chat.json").write_text(json.dumps(record))
    follower.current()
    clock.now_s += 120

    assert follower.current() is None


@settings(max_examples=200, deadline=None)
@given(reason=st.text(max_size=200))
def test_whatever_the_reason_a_written_lease_can_be_read(reason: str) -> None:
    """No text in a reason makes a lease unreadable."""
    assert wire.decode(wire.encode(lease(reason=reason))).max_running == 24
