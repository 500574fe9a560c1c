"""The helper that runs hooks outside the sandbox: who may ask, what may be run, and what it never does."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvwatch import wire_exec
from kvwatch.actions.base import ActionError, Attempt, create
from kvwatch.exec_helper import named_programs
from kvwatch.model.action import EventKind, Outcome
from kvwatch.model.level import Level
from kvwatch.wire_exec import HookAnswer, HookRequest
from tests.actions import inetd
from tests.actions.build import alive, context, gone, hook, limit_request, pid_in, restore_request
from tests.harness import ROOT

pytestmark = pytest.mark.needs("root")
STRANGER = 65534
BECOME = f"import os, socket, sys\nos.setgroups([])\nos.setgid({STRANGER})\nos.setuid({STRANGER})\n"


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[inetd.Inetd]:
    with inetd.Inetd(tmp_path / "helper") as found:
        monkeypatch.setenv(wire_exec.SOCKET_VARIABLE, str(found.socket))
        yield found


def ask(folder: Path, argv: list[str], request: object = None) -> Attempt:
    return create("exec", {"argv": argv}, context(folder)).perform(request or limit_request())  # type: ignore[arg-type]


def refusal(folder: Path, argv: list[str], request: object = None) -> str:
    with pytest.raises(ActionError) as caught:
        ask(folder, argv, request)
    assert caught.value.outcome is Outcome.FAILED
    return str(caught.value)


def say(helper: inetd.Inetd, *pieces: bytes, shut: bool = True) -> HookAnswer:
    """Speak to the helper without our client."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(10)
        channel.connect(str(helper.socket))
        try:
            for piece in pieces:
                channel.sendall(piece)
            if shut:
                channel.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has heard enough
        return wire_exec.decode_answer(channel.makefile("rb").readline())


def line(**changes: object) -> bytes:
    record = {"v": 1, "argv": ["/bin/true"], "env": {}, "deadline_s": 5.0, "body_bytes": 0} | changes
    return json.dumps(record).encode() + b"\n"


def test_a_program_that_is_not_named_is_not_run(tmp_path: Path, helper: inetd.Inetd) -> None:
    """Only what the configuration names is run, word for word."""
    script = hook(tmp_path, f"touch {tmp_path}/ran")
    inetd.name(helper.config, [str(script), "16"])

    for argv in ([str(script)], [str(script), "17"], [str(script), "16", ""], ["/bin/sh", "-c", "true"]):
        assert "not named by any exec" in refusal(tmp_path, argv)

    assert not (tmp_path / "ran").exists()
    assert ask(tmp_path, [str(script), "16"]).outcome is Outcome.APPLIED
    assert helper.said().count("hook not run") == 4


def test_programs_are_named_in_notices_and_in_levers(tmp_path: Path) -> None:
    """Words are taken as written, numbers too; what is commented out or stands elsewhere names nothing."""
    config = tmp_path / "kvwatch.yml"
    config.write_text(
        """
notify:
  - {on: [red], exec: {argv: [/bin/page, 016, yes, ""]}}
  - {on: [red], http: {url: "http://127.0.0.1/"}}
  # - {on: [red], exec: {argv: [/bin/not]}}
control:
  targets:
    - {server: a, via: [{lease: {}}, {exec: {argv: [/bin/set, 1]}}]}
    - {server: b, via: [{exec: {argv: [/bin/set, 2], deadline: 2s}}]}
other: {exec: {argv: [/bin/no]}}
"""
    )

    assert named_programs(config) == {
        ("/bin/page", "016", "yes", ""),
        ("/bin/set", "1"),
        ("/bin/set", "2"),
    }


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "notify: {}", "control: {targets: [1, {via: [x]}]}", "a: *b"]
)
def test_a_configuration_that_names_nothing_allows_nothing(
    tmp_path: Path, helper: inetd.Inetd, text: str
) -> None:
    """Whatever stands there, nothing is run and the answer says why."""
    helper.config.write_text(text)

    assert "refused by the helper" in refusal(tmp_path, ["/bin/true"])


def test_a_missing_configuration_allows_nothing(tmp_path: Path, helper: inetd.Inetd) -> None:
    """Without a file there is no hook."""
    assert str(helper.config) in refusal(tmp_path, ["/bin/true"])


def test_what_moved_a_lever_may_give_it_back_when_it_is_no_longer_named(
    tmp_path: Path, helper: inetd.Inetd
) -> None:
    """A reload that takes a lever away gives it back through the same program, once."""
    script = hook(tmp_path, f"echo $KVWATCH_EVENT >> {tmp_path}/told; exit $(cat {tmp_path}/code)")
    (tmp_path / "code").write_text("0")
    inetd.name(helper.config, [str(script)])
    ask(tmp_path, [str(script)])
    assert helper.noted() == 1
    inetd.name(helper.config, ["/bin/true"])

    assert "not named" in refusal(tmp_path, [str(script)])
    (tmp_path / "code").write_text("75")
    with pytest.raises(ActionError):
        ask(tmp_path, [str(script)], restore_request())
    (tmp_path / "code").write_text("0")
    ask(tmp_path, [str(script)], restore_request())

    assert helper.noted() == 0
    assert "not named" in refusal(tmp_path, [str(script)], restore_request())
    assert (tmp_path / "told").read_text().split() == ["limit", "restore", "restore"]


def test_a_notice_notes_nothing(tmp_path: Path, helper: inetd.Inetd) -> None:
    """Only limits can be out."""
    inetd.name(helper.config, ["/bin/true"])
    ask(tmp_path, ["/bin/true"], limit_request(event=EventKind.RED, level=Level.RED, limit=None))

    assert helper.noted() == 0


def as_stranger(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python as somebody who is neither root nor the service."""
    return subprocess.run(
        [sys.executable, "-c", BECOME + code,
         *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


ASKS = """
# Nothing can be imported any more: the interpreter may lie where only root can read.
channel = socket.socket(socket.AF_UNIX)
channel.settimeout(10)
channel.connect(sys.argv[1])
try:
    channel.sendall(sys.argv[2].encode() + b"\\n")
except OSError:
    pass
print(channel.makefile("rb").readline().decode())
"""


def open_to_all(folder: Path) -> None:
    """Folders of pytest are closed; strangers must get as far as the socket."""
    for part in (folder, *folder.parents):
        if part != Path("/tmp") and part.owner() == "root" and part != Path("/"):
            part.chmod(part.stat().st_mode | 0o011)


def test_a_stranger_is_refused_by_the_kernels_word(tmp_path: Path, helper: inetd.Inetd) -> None:
    """Who asks is not what the request says; anybody but the service and root gets nothing run."""
    open_to_all(helper.socket.parent)
    script = hook(tmp_path, f"touch {tmp_path}/ran")
    inetd.name(helper.config, [str(script)])

    done = as_stranger(ASKS, helper.socket, line(argv=[str(script)]).decode().strip())

    assert "only root and root may" in done.stdout, done
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("mine", ["config", "its folder", "program", "config by mode", "link"])
def test_what_the_asker_could_change_is_not_trusted(tmp_path: Path, mine: str) -> None:
    """What the service's user can write, itself or through a folder above it, is refused."""
    etc, program = tmp_path / "etc", tmp_path / "program"
    etc.mkdir(mode=0o755)
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    config = etc / "kvwatch.yml"
    with inetd.Inetd(tmp_path / "helper", user="nobody", config=config) as helper:
        open_to_all(helper.socket.parent)
        inetd.name(config, [str(program)])
        good = as_stranger(ASKS, helper.socket, line(argv=[str(program)]).decode().strip())
        assert json.loads(good.stdout)["code"] == 0, good
        (tmp_path / "ran").unlink()
        if mine == "config by mode":
            config.chmod(0o666)
        elif mine == "link":
            elsewhere, middle = tmp_path / "elsewhere", tmp_path / "middle"
            for folder in (elsewhere, middle):
                folder.mkdir()
            config.rename(elsewhere / "kvwatch.yml")
            (middle / "link").symlink_to(Path("..") / "elsewhere" / "kvwatch.yml")
            config.symlink_to(middle / "link")
            os.chown(middle, STRANGER, STRANGER)
        else:
            os.chown({"config": config, "its folder": etc, "program": program}[mine], STRANGER, STRANGER)

        bad = as_stranger(ASKS, helper.socket, line(argv=[str(program)]).decode().strip())

    assert f"can be changed by uid {STRANGER}" in bad.stdout, bad
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([b"\n"], "no JSON"),
        ([b"GET / HTTP/1.0\r\n\r\n"], "no JSON"),
        ([b"{" * 5 + b"\n"], "nested"),
        ([line(argv=[["/bin/true"]])], "argv"),
        ([line(argv=[])], "argv"),
        ([line(argv=["/bin/true\0"])], "argv"),
        ([line(argv=["/bin/true\ud800"])], "argv"),
        ([line(argv=["x"] * 257)], "argv"),
        ([line(env={"LD_PRELOAD": "/tmp/x.so"})], "not in the hook contract"),
        ([line(env={"KVWATCH_REASON": "x" * 501})], "KVWATCH_REASON"),
        ([line(env={"KVWATCH_REASON": "a\nb"})], "KVWATCH_REASON"),
        ([line(env={"KVWATCH_LEVEL": 1})], "KVWATCH_LEVEL"),
        ([line(deadline_s=0)], "deadline_s"),
        ([line(deadline_s=61)], "deadline_s"),
        ([line(deadline_s=True)], "deadline_s"),
        ([line().replace(b"5.0", b"NaN")], "deadline_s"),
        ([line(body_bytes=-1)], "body_bytes"),
        ([line(body_bytes=2**21)], "body_bytes"),
        ([line(body_bytes=5), b"1234"], "too early"),
        ([line(body_bytes=5), b"123456"], "more than"),
        ([line(v=2)], "version"),
        ([line().rstrip(b"\n")], "too early"),
        ([b" " * 70000], "at most"),
        ([b"[" * 60000 + b"\n"], "nested"),
    ],
    ids=str,
)  # fmt: skip
def test_anything_but_a_well_formed_request_is_refused(
    tmp_path: Path, helper: inetd.Inetd, pieces: list[bytes], says: str
) -> None:
    """Sizes, depth, types and ranges are checked before anything is done."""
    inetd.name(helper.config, ["/bin/true"])

    answer = say(helper, *pieces)

    assert says in answer.problem
    assert answer.code is None


def test_a_request_that_drips_ends_in_time(helper: inetd.Inetd) -> None:
    """The whole request has two seconds, however it comes."""
    began_s = time.monotonic()
    answer = say(helper, b'{"v": 1', shut=False)

    assert "too slow" in answer.problem
    assert time.monotonic() - began_s < 8


def test_a_hook_ends_when_its_asker_dies(tmp_path: Path, helper: inetd.Inetd) -> None:
    """A daemon that was killed leaves no hook behind that would move a lever later."""
    script = hook(tmp_path, f"sleep 60 & echo $! > {tmp_path}/child; echo $$ > {tmp_path}/pid; wait")
    inetd.name(helper.config, [str(script)])
    code = (
        "import sys; from pathlib import Path; from tests.actions.build import *\n"
        "action = create('exec', {'argv': [sys.argv[1]]}, context(Path('/tmp')))\n"
        "action.perform(limit_request(deadline_s=50.0))"
    )
    asker = subprocess.Popen([sys.executable, "-c", code, str(script)], cwd=ROOT)
    try:
        child = pid_in(tmp_path / "child")
        assert alive(child)
    finally:
        asker.kill()
        asker.wait(5)

    assert gone(child)
    assert gone(pid_in(tmp_path / "pid"))


def test_a_hook_under_way_is_broken_off_at_stop(tmp_path: Path, helper: inetd.Inetd) -> None:
    """A stop ends a limit that is being imposed and hears what came of it."""
    stopping = threading.Event()
    script = hook(tmp_path, f"echo begun; echo $$ > {tmp_path}/pid; exec sleep 60")
    inetd.name(helper.config, [str(script)])
    action = create(
        "exec",
        {"argv": [str(script)]},
        type(context(tmp_path))(limits_dir=tmp_path, boot_id="x", stopping=stopping),
    )
    threading.Thread(target=lambda: (pid_in(tmp_path / "pid"), stopping.set()), daemon=True).start()
    began_s = time.monotonic()

    with pytest.raises(ActionError) as caught:
        action.perform(limit_request(deadline_s=50.0))

    assert caught.value.outcome is Outcome.TIMED_OUT
    assert str(caught.value).endswith(": begun")
    assert time.monotonic() - began_s < 20
    assert gone(pid_in(tmp_path / "pid"))


def locked(path: Path) -> bool:
    with path.open("r") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_the_levers_lock_travels_to_the_hook_and_no_further(tmp_path: Path, helper: inetd.Inetd) -> None:
    """While the program runs the lever is busy; when the answer is there only the asker still has it."""
    lock = tmp_path / "lock"
    lock.touch()
    script = hook(tmp_path, f"echo $$ > {tmp_path}/pid; ls -l /proc/self/fd > {tmp_path}/fds; sleep 0.5")
    inetd.name(helper.config, [str(script)])
    seen: list[bool] = []

    def look(release: Callable[[], None]) -> None:
        pid_in(tmp_path / "pid")
        release()
        seen.append(locked(lock))

    descriptor = os.open(lock, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    watcher = threading.Thread(target=look, args=(lambda: os.close(descriptor),))
    watcher.start()
    create("exec", {"argv": [str(script)]}, context(tmp_path)).perform(limit_request(), os.dup(descriptor))
    watcher.join()

    assert str(lock) in (tmp_path / "fds").read_text()
    assert str(helper.socket) not in (tmp_path / "fds").read_text()
    assert "socket:" not in (tmp_path / "fds").read_text()
    assert seen == [True]


def test_a_helper_that_dies_leaves_the_outcome_open(tmp_path: Path) -> None:
    """Nobody knows whether the lever was moved: it counts as moved, so that it is given back."""
    path = tmp_path / "exec.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def hang_up() -> None:
            channel, _ = listener.accept()
            with channel:
                channel.recv(65536)

        thread = threading.Thread(target=hang_up)
        thread.start()
        os.environ[wire_exec.SOCKET_VARIABLE] = str(path)
        try:
            with pytest.raises(ActionError) as caught:
                ask(tmp_path, ["/bin/true"])
        finally:
            del os.environ[wire_exec.SOCKET_VARIABLE]
            thread.join()

    assert caught.value.outcome is Outcome.TIMED_OUT
    assert "no answer" in str(caught.value)


def test_without_its_socket_hooks_run_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper that is not installed or was disabled changes nothing."""
    monkeypatch.setenv(wire_exec.SOCKET_VARIABLE, str(tmp_path / "none.sock"))

    assert ask(tmp_path, ["/bin/true"]).outcome is Outcome.APPLIED


def test_nobody_listens_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that is there and does not answer is a failure that says where to look."""
    path = tmp_path / "exec.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        monkeypatch.setenv(wire_exec.SOCKET_VARIABLE, str(path))

        assert "systemctl status kvwatch-exec.socket" in refusal(tmp_path, ["/bin/true"])


def test_a_request_is_the_same_on_the_other_side() -> None:
    """Every text survives the wire, half of a surrogate pair too."""
    request = HookRequest(
        argv=("/bin/x", "", 'ä\n\ud800{[\\"'),
        variables={"KVWATCH_EVENT": "limit"},
        deadline_s=0.1,
        body_bytes=7,
    )

    assert wire_exec.decode_request(wire_exec.encode_request(request)) == request
    answer = HookAnswer(code=-9, ended=False, output="… x", problem="")
    assert wire_exec.decode_answer(wire_exec.encode_answer(answer)) == answer


def test_without_a_socket_on_standard_input_it_says_so() -> None:
    """Started by hand it explains itself."""
    done = subprocess.run(
        [sys.executable, "-m", "kvwatch.exec_helper"], cwd=ROOT, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 2
    assert "systemd starts" in done.stderr
