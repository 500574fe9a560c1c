"""The lease action: the file is whole or absent, and every fault of the directory is said."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvwatch import wire
from kvwatch.actions.base import ActionError, create
from kvwatch.model.action import ActionRequest, Limit, Outcome
from tests.actions.build import BOOT, context, limit_request, restore_request


def perform(folder: Path, request: ActionRequest | None = None) -> object:
    return create("lease", {}, context(folder)).perform(request or limit_request())


def failure(folder: Path, request: ActionRequest | None = None) -> ActionError:
    with pytest.raises(ActionError) as caught:
        perform(folder, request)
    return caught.value


@contextmanager
def mounted(kind: str, source: Path | str, target: Path, options: str) -> Iterator[None]:
    command = ["mount", "-t", kind, "-o", options, str(source), str(target)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(target)], check=True, capture_output=True)


def test_a_limit_is_a_file_that_the_reader_honours(tmp_path: Path) -> None:
    """What was written is read back and is what the reference reader sees."""
    attempt = perform(tmp_path)

    lease = wire.LeaseReader(tmp_path / "chat.json", server="chat", boot=BOOT).current()
    assert lease is not None
    assert (lease.max_running, lease.ttl_s, lease.reason) == (24, 15.0, "kv_usage")
    assert attempt.outcome is Outcome.APPLIED  # type: ignore[attr-defined]
    assert attempt.read_back == Limit(server="chat", max_running=24)  # type: ignore[attr-defined]


def test_the_file_has_the_shape_of_the_contract(tmp_path: Path) -> None:
    """Readers in other languages depend on these names and types."""
    perform(tmp_path)

    record = json.loads((tmp_path / "chat.json").read_text())
    assert list(record) == [
        "v", "server", "boot_id", "seq", "ttl_s", "max_running", "admit", "compact", "reason",
    ]  # fmt: skip


def test_a_restore_removes_the_file_and_a_second_one_finds_nothing(tmp_path: Path) -> None:
    """Giving back is immediate and may be repeated."""
    perform(tmp_path)

    first, second = perform(tmp_path, restore_request()), perform(tmp_path, restore_request())

    assert list(tmp_path.iterdir()) == []
    assert (first.outcome, second.outcome) == (Outcome.APPLIED, Outcome.NOOP)  # type: ignore[attr-defined]


def test_numbers_grow_with_every_lease_and_over_restarts(tmp_path: Path) -> None:
    """A renewal, by this daemon or the next, is always newer for a reader."""
    numbers = []
    for _ in range(3):  # a new action each time: a restarted daemon
        action = create("lease", {}, context(tmp_path))
        for _ in range(3):
            action.perform(limit_request())
            numbers.append(json.loads((tmp_path / "chat.json").read_text())["seq"])

    assert numbers == sorted(set(numbers))


def test_a_time_beyond_the_readers_patience_is_cut(tmp_path: Path) -> None:
    """No reader honours more than 120 s, so none is promised."""
    perform(tmp_path, limit_request(expires_in_s=500.0))

    assert json.loads((tmp_path / "chat.json").read_text())["ttl_s"] == wire.MAX_TTL_S


def test_a_reason_with_braces_stays_readable(tmp_path: Path) -> None:
    """Whatever a reason holds, the lease is one that readers take."""
    perform(tmp_path, limit_request(rule=None, reason='{"a": [1]}\n' + "x" * 100))

    assert wire.LeaseReader(tmp_path / "chat.json", boot=BOOT).current() is not None


def test_a_missing_directory_is_a_failure_that_names_it(tmp_path: Path) -> None:
    """The error says where and what is needed."""
    error = failure(tmp_path / "gone")

    assert error.outcome is Outcome.FAILED
    assert str(tmp_path / "gone") in str(error)


def test_a_directory_replaced_by_a_link_is_not_followed(tmp_path: Path) -> None:
    """Nobody can lead the daemon to write elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "limits").symlink_to(tmp_path / "elsewhere")

    error = failure(tmp_path / "limits")

    assert error.outcome is Outcome.FAILED
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_in_the_directorys_place_is_a_failure(tmp_path: Path) -> None:
    """Not a directory: said, not crashed."""
    (tmp_path / "limits").write_text("")

    assert failure(tmp_path / "limits").outcome is Outcome.FAILED


def test_a_directory_in_the_files_place_is_a_failure_and_leaves_nothing(tmp_path: Path) -> None:
    """The temporary file goes when the rename fails."""
    (tmp_path / "chat.json").mkdir()

    assert failure(tmp_path).outcome is Outcome.FAILED
    assert [entry.name for entry in tmp_path.iterdir()] == ["chat.json"]


@pytest.mark.needs("root", "mount")
def test_a_read_only_directory_is_a_failure(tmp_path: Path) -> None:
    """Read-only file systems are told by name, also at giving back."""
    perform(tmp_path)
    with mounted("none", tmp_path, tmp_path, "bind"):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(tmp_path)], check=True)
        imposing, giving_back = failure(tmp_path), failure(tmp_path, restore_request())

    assert "Read-only file system" in str(imposing)
    assert "Read-only file system" in str(giving_back)


@pytest.mark.needs("root", "mount")
def test_a_full_directory_is_a_failure_and_leaves_the_old_lease_whole(tmp_path: Path) -> None:
    """A lease is never cut: the old one stands until its time is up."""
    with mounted("tmpfs", "none", tmp_path, "size=8k"):
        perform(tmp_path)
        before = (tmp_path / "chat.json").read_bytes()
        (tmp_path / "filler").write_bytes(b"x" * 4096)
        error = failure(tmp_path, limit_request(limit=Limit(server="chat", max_running=5)))
        after = (tmp_path / "chat.json").read_bytes()
        left = sorted(entry.name for entry in tmp_path.iterdir())

    assert "No space left" in str(error)
    assert before == after
    assert left == ["chat.json", "filler"]


@pytest.mark.needs("root", "mount")
def test_a_directory_on_another_mount_works(tmp_path: Path) -> None:
    """The temporary file is beside the lease, so the rename never crosses a mount."""
    with mounted("tmpfs", "none", tmp_path, "size=64k"):
        attempt = perform(tmp_path)

    assert attempt.outcome is Outcome.APPLIED  # type: ignore[attr-defined]


def test_what_a_killed_writer_left_is_overwritten_and_cleared(tmp_path: Path) -> None:
    """Crashes leave at most one temporary file per server, and a restore removes it."""
    (tmp_path / ".chat.tmp").write_text("half a lea")

    perform(tmp_path)
    (tmp_path / ".chat.tmp").write_text("half a lea")
    perform(tmp_path, restore_request())

    assert list(tmp_path.iterdir()) == []


def test_parameters_are_refused(tmp_path: Path) -> None:
    """A lease takes none; a mistaken one is not ignored."""
    with pytest.raises(ActionError) as caught:
        create("lease", {"dir": "/tmp"}, context(tmp_path))

    assert caught.value.outcome is Outcome.REFUSED
