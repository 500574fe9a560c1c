"""`kvwatch restore`: after it nothing of ours is in force, or it says what is."""

from __future__ import annotations

import argparse
import fcntl
import json
from pathlib import Path

import pytest

from kvwatch import wire
from kvwatch.cli import restore
from kvwatch.daemon.outstanding import Entry, Outstanding
from tests.actions.build import BOOT, hook
from tests.daemon.acting import config, exec_lever
from tests.daemon.page_server import PageServer
from tests.harness import Daemon


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directories of a run that is dead."""
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / "run"))
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    (tmp_path / "run/limits").mkdir(parents=True)
    (tmp_path / "state").mkdir()
    return tmp_path


def leave(home: Path, server: str, script: Path, deadline_s: float = 5.0) -> None:
    """A lever that a dead run has moved."""
    params = {"argv": (str(script),), "deadline_s": deadline_s}
    Outstanding(home / "state/outstanding.json").add(
        Entry(server=server, action="exec", params=params, since_wall_s=1.0)
    )


def run() -> int:
    return restore.main(argparse.Namespace())


def test_without_anything_left_it_says_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a clean stop it does nothing, in silence."""
    assert run() == 0
    assert capsys.readouterr() == ("", "")


def test_a_host_where_kvwatch_never_ran_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No directories: nothing to give back, and none is made."""
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / "run"))
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))

    assert run() == 0
    assert list(tmp_path.iterdir()) == []


def test_levers_and_leases_are_given_back_and_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything that a dead run left is ended and told."""
    leave(home, "chat", hook(home, f"echo $KVWATCH_EVENT $KVWATCH_SERVER >> {home}/told"))
    wire.write(home / "run/limits", wire.Lease(server="code", boot_id=BOOT, seq=1, ttl_s=15))

    assert run() == 0
    assert (home / "told").read_text() == "restore chat\n"
    assert list((home / "run/limits").iterdir()) == []
    assert capsys.readouterr().out == "given back: chat via exec\ngiven back: code via lease\n"


def test_a_lever_that_fails_stays_listed_and_does_not_hold_up_the_others(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 and a line for what is left; the rest is given back."""
    leave(home, "chat", hook(home, "echo no socket; exit 1", name="bad"))
    leave(home, "code", hook(home, "exit 0", name="good"))
    leave(home, "gone", home / "missing")

    assert run() == 1
    told = capsys.readouterr()
    assert "chat via exec: exit 1: no socket" in told.err
    assert "gone via exec" in told.err
    assert told.out == "given back: code via exec\n"
    left = [entry.server for entry in Outstanding(home / "state/outstanding.json").entries()]
    assert left == ["chat", "gone"]


def test_a_hook_that_hangs_is_ended(home: Path) -> None:
    """The command ends in bounded time."""
    leave(home, "chat", hook(home, "sleep 60"), deadline_s=0.3)

    assert run() == 1


def test_a_damaged_list_is_said_and_is_no_success(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A person must look: exit 1, and the file is kept."""
    (home / "state/outstanding.json").write_text('{"v": 1, "entries": [{"ser')

    assert run() == 1
    assert "check the levers by hand" in capsys.readouterr().err
    assert (home / "state/outstanding.damaged").exists()


def test_a_lever_of_a_kind_that_is_gone_stays_listed(home: Path) -> None:
    """After a downgrade nothing is forgotten."""
    Outstanding(home / "state/outstanding.json").add(
        Entry(server="chat", action="telepathy", params={}, since_wall_s=1.0)
    )

    assert run() == 1
    assert len(Outstanding(home / "state/outstanding.json").entries()) == 1


def test_while_the_daemon_runs_it_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The running daemon's limits are its own business."""
    lever, via = exec_lever(tmp_path)
    with PageServer() as server, Daemon(tmp_path / "d", config(server.url, via)) as daemon:
        daemon.until(lambda: server.pages >= 4, 10, "pages")
        server.full()
        daemon.until(lever.exists, 5, "the limit")
        monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / "d/run"))
        monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "d/state"))

        assert run() == 1
        assert lever.exists()


def test_no_daemon_can_start_meanwhile(home: Path) -> None:
    """The command holds the daemon's lock, so that no new limit is taken away."""
    lock = home / "run/daemon.lock"
    lock.touch()
    script = hook(home, f"flock --nonblock {lock} true; echo $? > {home}/free")
    leave(home, "chat", script)

    assert run() == 0
    assert (home / "free").read_text() == "1\n"
    with lock.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_list_is_valid_after_every_restore(home: Path) -> None:
    """An empty list is a list."""
    leave(home, "chat", Path("/bin/true"))
    run()

    assert json.loads((home / "state/outstanding.json").read_text()) == {"v": 1, "entries": []}
