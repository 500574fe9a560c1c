"""The list of what must be given back: on disk before it matters, and never silently lost."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwatch.daemon.outstanding import Entry, Outstanding
from tests.harness import ROOT


def entry(server: str = "chat", **params: object) -> Entry:
    return Entry(server=server, action="exec", params=params or {"argv": ("/bin/set",)}, since_wall_s=1.0)


def test_entries_survive_a_restart(tmp_path: Path) -> None:
    """What was added is there for the next run; what was removed is not."""
    path = tmp_path / "outstanding.json"
    first = Outstanding(path)
    first.add(entry("chat"))
    first.add(entry("code"))
    first.remove(entry("chat"))

    assert [found.server for found in Outstanding(path).entries()] == ["code"]


def test_the_same_lever_is_one_entry_over_restarts(tmp_path: Path) -> None:
    """Lists from JSON and tuples from the configuration are the same parameters."""
    path = tmp_path / "outstanding.json"
    Outstanding(path).add(entry(argv=("/bin/set", "x")))
    second = Outstanding(path)
    second.add(entry(argv=["/bin/set", "x"]))

    assert len(second.entries()) == 1
    second.remove(entry(argv=("/bin/set", "x")))
    assert second.entries() == []


def test_the_file_is_private(tmp_path: Path) -> None:
    """It names programs and addresses: 0600."""
    Outstanding(tmp_path / "outstanding.json").add(entry())

    assert (tmp_path / "outstanding.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"entries": {}}x', '{"entries": [1]}', '{"entries": [{"server": "a"}]}',
     '{"entries": [{"server": 1, "action": "exec", "params": {}, "since_wall_s": 0}]}',
     '{"entries": [{"server": "a", "action": "exec", "params": [], "since_wall_s": 0}]}',
     '{"entries": [{"server": "a", "action": "exec", "params": {}, "since_wall_s": null}]}',
     "[" * 100000, "\x00" * 100, '{"entries": "' + "x" * 300000 + '"}'],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_a_damaged_file_is_kept_aside_and_said_aloud(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A person must look at the levers; kvwatch goes on."""
    path = tmp_path / "outstanding.json"
    path.write_text(content)
    with caplog.at_level(logging.ERROR):
        found = Outstanding(path)

    assert found.entries() == []
    assert "check the levers by hand" in found.problem
    assert "check the levers by hand" in caplog.text
    assert (tmp_path / "outstanding.damaged").read_text() == content
    found.add(entry())
    assert len(Outstanding(path).entries()) == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100, deadline=None)
@given(content=st.binary(max_size=200))
def test_random_content_never_raises(tmp_path: Path, content: bytes) -> None:
    """Any file is read or set aside."""
    path = tmp_path / "outstanding.json"
    path.write_bytes(content)

    assert Outstanding(path).entries() == []


def test_a_file_that_cannot_be_read_forbids_adding(tmp_path: Path) -> None:
    """What is on it is unknown, so it must not be written over."""
    path = tmp_path / "outstanding.json"
    path.mkdir()
    found = Outstanding(path)

    assert "cannot be given back" in found.problem
    with pytest.raises(OSError):
        found.add(entry())


@pytest.mark.needs("root", "mount")
def test_a_full_disk_refuses_new_entries_and_keeps_the_old(tmp_path: Path) -> None:
    """Adding fails loudly; removing fails quietly, and the old list stays whole."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "none", str(tmp_path)], check=True)
    try:
        path = tmp_path / "outstanding.json"
        found = Outstanding(path)
        found.add(entry("chat"))
        (tmp_path / "filler").write_bytes(b"x" * 4096)
        with pytest.raises(OSError, match="space"):
            found.add(entry("code"))
        found.remove(entry("chat"))
        servers = [kept.server for kept in Outstanding(path).entries()]
        names = sorted(each.name for each in tmp_path.iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)

    assert servers == ["chat"]
    assert names == ["filler", "outstanding.json"]


def test_a_lever_is_locked_against_others_and_free_afterwards(tmp_path: Path) -> None:
    """One at a time, between threads and between processes."""
    first, second = (Outstanding(tmp_path / "outstanding.json") for _ in range(2))
    with first.lever(entry(), 1.0) as (_, had), second.lever(entry(), 0.1) as (_, also_had):
        assert (had, also_had) == (True, False)
        with second.lever(entry("code"), 0.1) as (_, other_had):
            assert other_had
    with second.lever(entry(), 0.1) as (_, had):
        assert had


def test_a_child_in_a_session_of_its_own_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A hook that leaves a daemon behind has still ended."""
    outstanding = Outstanding(tmp_path / "outstanding.json")
    with outstanding.lever(entry(), 1.0) as (held, _):
        assert held is not None
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(held,))
    try:
        with outstanding.lever(entry(), 0.1) as (_, had):
            assert had
    finally:
        child.communicate(b"\n")


def test_a_program_that_outlives_the_daemon_keeps_the_lock(tmp_path: Path) -> None:
    """The lock says whether a dead run's hook is still at the lever."""
    script = (
        "import os, subprocess, sys; from pathlib import Path\n"
        "from tests.daemon import test_outstanding as t\n"
        "with t.Outstanding(Path(sys.argv[1])).lever(t.entry(), 1.0) as (held, _):\n"
        "    subprocess.Popen(['/bin/sleep', '0.8'], pass_fds=(held,))\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    argv = [sys.executable, "-c", script, str(tmp_path / "outstanding.json")]
    subprocess.run(argv, cwd=ROOT, check=False)
    outstanding = Outstanding(tmp_path / "outstanding.json")
    with outstanding.lever(entry(), 0.05) as (_, at_once):
        pass
    with outstanding.lever(entry(), 5.0) as (_, later):
        pass

    assert (at_once, later) == (False, True)


def test_the_format_is_the_documented_one(tmp_path: Path) -> None:
    """A person can read what is out."""
    Outstanding(tmp_path / "outstanding.json").add(entry())

    assert json.loads((tmp_path / "outstanding.json").read_text()) == {
        "v": 1,
        "entries": [
            {"server": "chat", "action": "exec", "params": {"argv": ["/bin/set"]}, "since_wall_s": 1.0}
        ],
    }
