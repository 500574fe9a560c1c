"""The exec action: no program, however bad, can hold it, fill it, or read what it should not.

Every test runs twice: the action starts the program itself, and the helper outside its sandbox does.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwatch.actions.base import ActionError, Context, create
from kvwatch.actions.exec_run import MAX_OUTPUT
from kvwatch.model.action import EventKind, Limit, Outcome
from kvwatch.model.level import Level, RuleId, Scope
from kvwatch.wire_exec import SOCKET_VARIABLE
from tests.actions import inetd
from tests.actions.build import (
    BOOT,
    alive,
    gone,
    hook,
    limit_request,
    open_descriptors,
    perform,
    pid_in,
    restore_request,
    until,
)


@pytest.fixture(
    autouse=True, params=["itself", pytest.param("helper", marks=pytest.mark.needs("root"))], ids=str
)
def way(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """How programs are run. The helper looks at who asks, so that only root can try it out."""
    if request.param == "itself":
        yield "itself"
        return
    with inetd.Inetd(tmp_path_factory.mktemp("helper")) as helper:
        monkeypatch.setenv(SOCKET_VARIABLE, str(helper.socket))
        monkeypatch.setenv(inetd.CONFIG, str(helper.config))
        yield "helper"


def failure(folder: Path, argv: list[str], **changes: object) -> ActionError:
    with pytest.raises(ActionError) as caught:
        perform(folder, argv, limit_request(**changes))
    return caught.value


def test_a_hook_gets_the_request_on_standard_input_and_in_its_environment(tmp_path: Path) -> None:
    """Both ways of reading a request say the same, in the names of the contract."""
    script = hook(tmp_path, f"cat > {tmp_path}/stdin; env | grep ^KVWATCH_ | sort > {tmp_path}/env")

    attempt = perform(tmp_path, [str(script)])

    assert attempt.outcome is Outcome.APPLIED
    told = json.loads((tmp_path / "stdin").read_text())
    assert told == {
        "v": 1, "event": "limit", "request_id": "chat-1000-0", "server": "chat", "rule": "kv_usage",
        "max_running": 24, "admit": True, "expires_in_s": 15.0,
        "reason": "kv_usage above shrink_above with requests waiting",
    }  # fmt: skip
    assert (tmp_path / "env").read_text().splitlines() == [
        "KVWATCH_ADMIT=true", "KVWATCH_EVENT=limit", "KVWATCH_EXPIRES_IN_S=15", "KVWATCH_MAX_RUNNING=24",
        "KVWATCH_REASON=kv_usage above shrink_above with requests waiting", "KVWATCH_REQUEST_ID=chat-1000-0",
        "KVWATCH_RULE=kv_usage", "KVWATCH_SERVER=chat",
    ]  # fmt: skip


def test_a_restore_says_only_what_applies(tmp_path: Path) -> None:
    """A restore carries no number that a hook could take for a limit."""
    script = hook(tmp_path, f"env | grep ^KVWATCH_ | sort > {tmp_path}/env")

    perform(tmp_path, [str(script)], restore_request())

    assert (tmp_path / "env").read_text().split() == [
        "KVWATCH_EVENT=restore", "KVWATCH_REQUEST_ID=chat-1000-0", "KVWATCH_SERVER=chat",
    ]  # fmt: skip


def test_a_notice_says_rule_level_and_place(tmp_path: Path) -> None:
    """A page about a GPU names the GPU, and no limit."""
    script = hook(tmp_path, f"cat > {tmp_path}/stdin")
    scope = Scope(uuid="GPU-1", gpu="0")
    request = limit_request(
        event=EventKind.RED, rule=RuleId.GPU_LOST, level=Level.RED, scope=scope, limit=None, expires_in_s=None
    )

    perform(tmp_path, [str(script)], request)

    told = json.loads((tmp_path / "stdin").read_text())
    assert (told["event"], told["rule"], told["level"], told["gpu_uuid"]) == (
        "red",
        "gpu_lost",
        "red",
        "GPU-1",
    )
    assert "max_running" not in told


@pytest.mark.parametrize("mode", [0o644, 0o755], ids=["not executable", "no such interpreter"])
def test_a_program_that_cannot_be_started_is_said_by_name(tmp_path: Path, mode: int) -> None:
    """The error names the file and what it must be."""
    script = tmp_path / "hook"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(mode)

    error = failure(tmp_path, [str(script)])

    assert error.outcome is Outcome.FAILED
    assert str(script) in str(error)
    assert "executable" in str(error)


def test_a_missing_hook_is_said_by_name(tmp_path: Path) -> None:
    """The error names the missing file and the fix."""
    error = failure(tmp_path, ["/no/such/hook"])

    assert error.outcome is Outcome.FAILED
    assert str(error).startswith("/no/such/hook: ")
    assert "No such file" in str(error)


def test_a_hook_that_hangs_is_ended_with_its_whole_group(tmp_path: Path) -> None:
    """Program and child are gone when the deadline has passed."""
    script = hook(tmp_path, f"sleep 60 & echo $! > {tmp_path}/child; sleep 60")
    started_s = time.monotonic()

    error = failure(tmp_path, [str(script)], deadline_s=0.3)

    assert error.outcome is Outcome.TIMED_OUT
    assert time.monotonic() - started_s < 5
    assert gone(pid_in(tmp_path / "child"))


def test_a_hook_that_ignores_term_is_killed(tmp_path: Path) -> None:
    """TERM is a courtesy; KILL follows."""
    script = hook(tmp_path, f"trap '' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 1; done")

    error = failure(tmp_path, [str(script)], deadline_s=0.3)

    assert error.outcome is Outcome.TIMED_OUT
    assert gone(pid_in(tmp_path / "pid"))


def test_a_hook_that_ends_on_term_can_clean_up(tmp_path: Path) -> None:
    """Before KILL there is time for a trap."""
    script = hook(tmp_path, f"trap 'touch {tmp_path}/cleaned; exit 1' TERM; while :; do sleep 0.05; done")

    failure(tmp_path, [str(script)], deadline_s=0.3)

    assert (tmp_path / "cleaned").exists()


def test_a_child_left_in_the_group_ends_with_the_hook(tmp_path: Path) -> None:
    """A hook that succeeds leaves nothing of its group behind, and its child's pipe holds nobody."""
    script = hook(tmp_path, f"sleep 60 & echo $! > {tmp_path}/child")
    started_s = time.monotonic()

    attempt = perform(tmp_path, [str(script)])

    assert attempt.outcome is Outcome.APPLIED
    assert time.monotonic() - started_s < 3
    assert gone(pid_in(tmp_path / "child"))


def test_a_daemon_in_a_session_of_its_own_holds_nobody(tmp_path: Path) -> None:
    """A setsid child that keeps our pipe open is left alone and not waited for."""
    script = hook(tmp_path, f"setsid sh -c 'echo $$ > {tmp_path}/child; exec sleep 60' & sleep 0.3")
    started_s = time.monotonic()

    attempt = perform(tmp_path, [str(script)])

    child = pid_in(tmp_path / "child")
    assert attempt.outcome is Outcome.APPLIED
    assert time.monotonic() - started_s < 3
    assert alive(child)
    os.kill(child, signal.SIGKILL)


def test_output_is_capped_and_what_is_kept_is_printable(tmp_path: Path) -> None:
    """A page of escape codes cannot reach the log."""
    script = hook(tmp_path, r"printf 'hello\033[31m\n'; head -c 300000 /dev/zero | tr '\0' x")

    attempt = perform(tmp_path, [str(script)])

    assert attempt.detail.startswith("hello [31m x")
    assert len(attempt.detail) < MAX_OUTPUT + 50
    assert "bytes in all" in attempt.detail


def test_endless_output_ends_at_the_deadline(tmp_path: Path) -> None:
    """A flood costs neither memory nor time beyond the deadline."""
    script = hook(tmp_path, "exec yes flood")
    started_s = time.monotonic()

    error = failure(tmp_path, [str(script)], deadline_s=0.5)

    assert error.outcome is Outcome.TIMED_OUT
    assert time.monotonic() - started_s < 4
    assert len(str(error)) < MAX_OUTPUT + 300


def test_try_later_is_told_from_failing(tmp_path: Path) -> None:
    """75 is refused, anything else failed, and what the hook said is kept."""
    later = failure(tmp_path, [str(hook(tmp_path, "echo busy; exit 75"))])
    broken = failure(tmp_path, [str(hook(tmp_path, "echo no socket >&2; exit 3"))])

    assert (later.outcome, broken.outcome) == (Outcome.REFUSED, Outcome.FAILED)
    assert str(later) == "exit 75, try later: busy"
    assert str(broken) == "exit 3: no socket"


def test_a_hook_that_does_not_read_is_not_waited_for(tmp_path: Path) -> None:
    """More input than a pipe holds, and a hook that closes its end: still applied."""
    evidence = {f"figure_{number}": "x" * 100 for number in range(2000)}

    closing = perform(tmp_path, [str(hook(tmp_path, "exec 0<&-; exit 0"))], limit_request(evidence=evidence))
    started_s = time.monotonic()
    error = failure(tmp_path, [str(hook(tmp_path, "exec sleep 60"))], evidence=evidence, deadline_s=0.3)

    assert closing.outcome is Outcome.APPLIED
    assert error.outcome is Outcome.TIMED_OUT
    assert time.monotonic() - started_s < 4


def test_arguments_stay_literal(tmp_path: Path) -> None:
    """Nothing in an argument or in a reason is ever read by a shell."""
    nasty = "$(touch pwned) `touch pwned`; touch pwned | * ~ \\ '\" \n && touch pwned"
    script = hook(
        tmp_path, f'printf %s "$1" > {tmp_path}/argument; printf %s "$KVWATCH_REASON" > {tmp_path}/reason'
    )

    perform(tmp_path, [str(script), nasty], limit_request(reason=nasty + "\0"))

    assert (tmp_path / "argument").read_text() == nasty
    assert (tmp_path / "reason").read_text() == nasty.replace("\n", " ") + " "
    assert not list(Path.cwd().glob("pwned"))


def test_the_daemons_secrets_stay_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the daemon's own environment a hook sees the search path and the like, nothing else."""
    monkeypatch.setenv("API_TOKEN", "s3cret")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/run/credentials/kvwatch.service")
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    script = hook(tmp_path, f"env > {tmp_path}/env")

    perform(tmp_path, [str(script)])

    names = {line.split("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    allowed = {"PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PWD", "SHLVL", "_", "OLDPWD"}
    assert {name for name in names if not name.startswith("KVWATCH_")} <= allowed


def test_a_hook_inherits_no_descriptors_but_the_locks(tmp_path: Path) -> None:
    """Sockets and files of the daemon are closed in its children."""
    script = hook(tmp_path, f"ls -l /proc/self/fd > {tmp_path}/fds")
    with (tmp_path / "open").open("w") as stream:
        os.set_inheritable(stream.fileno(), True)
        perform(tmp_path, [str(script)])

    assert str(tmp_path / "open") not in (tmp_path / "fds").read_text()


def test_figures_that_json_cannot_say_are_left_out(tmp_path: Path) -> None:
    """A hook gets strict JSON: no NaN and no Infinity."""
    script = hook(tmp_path, f"cat > {tmp_path}/stdin")
    evidence = {"a": float("inf"), "b": float("nan"), "c": 0.5, "d": None, "e": [1]}

    perform(tmp_path, [str(script)], limit_request(evidence=evidence))

    assert json.loads((tmp_path / "stdin").read_text())["evidence"] == {"c": 0.5}


def test_a_limit_under_way_is_broken_off_at_stop_and_a_restore_is_not(tmp_path: Path) -> None:
    """A stop waits for no limit that it would take back anyway."""
    stopping = threading.Event()
    stopping.set()
    script = hook(tmp_path, f"sleep 0.5; echo $KVWATCH_EVENT >> {tmp_path}/done")
    inetd.allow([str(script)])
    action = create(
        "exec", {"argv": [str(script)]}, Context(limits_dir=tmp_path, boot_id=BOOT, stopping=stopping)
    )

    with pytest.raises(ActionError):
        action.perform(limit_request())
    action.perform(restore_request())

    assert (tmp_path / "done").read_text() == "restore\n"


def test_a_hundred_hooks_leave_no_descriptor_and_no_child(tmp_path: Path, way: str) -> None:
    """Nothing piles up."""
    perform(tmp_path, ["/bin/true"])
    before = open_descriptors()
    for _ in range(100 if way == "itself" else 10):
        perform(tmp_path, ["/bin/true"])

    assert until(lambda: open_descriptors() <= before)
    if way == "helper":
        return  # those are its children
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.parametrize("argv", [None, [], "ls", [1], ["/bin/true", None]], ids=str)
def test_bad_parameters_are_refused(tmp_path: Path, argv: object) -> None:
    """Only a list of text is a command."""
    with pytest.raises(ActionError) as caught:
        create("exec", {"argv": argv}, Context(limits_dir=tmp_path, boot_id=BOOT))

    assert caught.value.outcome is Outcome.REFUSED


def test_stopping_admission_is_told_as_false(tmp_path: Path) -> None:
    """A script compares text: true or false, in lower case."""
    script = hook(tmp_path, f"echo $KVWATCH_ADMIT ${{KVWATCH_MAX_RUNNING-none}} > {tmp_path}/told")

    perform(tmp_path, [str(script)], limit_request(limit=Limit(server="chat", admit=False)))

    assert (tmp_path / "told").read_text() == "false none\n"
