"""The shipped unit under a real systemd: readiness, reload, watchdog, stop, sandbox."""

from __future__ import annotations

import time

import pytest

from tests.service.lab import PYTHON, Lab

pytestmark = [
    pytest.mark.needs("root", "systemd-nspawn", "nsenter", "dbus-daemon"),
    pytest.mark.timeout(240),
]

READS = """\
import ctypes, errno, mmap, os, socket, sys
def tried(name, act):
    try:
        act()
        print(name, "ok", flush=True)
    except OSError as error:
        print(name, errno.errorcode.get(error.errno, "?"), flush=True)
def opened(path, flags=os.O_RDWR):
    os.close(os.open(path, flags))
def written(path):
    with open(path, "w") as file:
        file.write("x")
    os.unlink(path)
tried("nvidia0", lambda: opened("/dev/nvidia0"))
tried("other-device", lambda: opened("/dev/kvwatch-other"))
tried("kmsg", lambda: opened("/dev/kmsg", os.O_RDONLY))
tried("etc", lambda: written("/etc/kvwatch/x"))
tried("usr", lambda: written("/usr/x"))
tried("runtime", lambda: written("/run/kvwatch/x"))
tried("state", lambda: written("/var/lib/kvwatch/x"))
tried("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close())
tried("unix", lambda: socket.socket(socket.AF_UNIX).close())
def executable():
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
def namespace():
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):
        raise OSError(ctypes.get_errno(), "")
tried("exec-memory", executable)
tried("namespace", namespace)
tried("init-cmdline", lambda: opened("/proc/1/cmdline", os.O_RDONLY))
print("home", len(os.listdir("/root")) if os.access("/root", os.R_OK) else "hidden", flush=True)
"""

LEAVES_A_CHILD = """\
import os, signal, socket, sys, time
def notify(text):
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    channel.connect(os.environ["NOTIFY_SOCKET"])
    channel.send(text.encode())
    channel.close()
if os.fork() == 0:
    def ended(number, frame):
        print("child ended gently", flush=True)
        os._exit(0)
    signal.signal(signal.SIGTERM, ended)
    while True:
        time.sleep(0.1)
notify("READY=1")
signal.pause()
"""


def test_ready_means_that_it_serves(lab: Lab) -> None:
    """`systemctl start` returns when the pages are served, as the service user."""
    found = lab.show("kvwatch", "ActiveState", "SubState", "User", "NRestarts", "StatusText")

    status, page = lab.get("/metrics")

    assert (found["ActiveState"], found["SubState"], found["User"]) == ("active", "running", "kvwatch")
    assert found["StatusText"]
    assert status == 200
    assert "kvwatch_build_info" in page
    assert lab.get("/-/healthy")[0] == 200


def test_unit_file_is_accepted_without_a_word(lab: Lab) -> None:
    """systemd-analyze verify finds nothing to say about the installed unit."""
    done = lab.run("systemd-analyze", "verify", "kvwatch.service")

    assert done.returncode == 0
    assert "kvwatch" not in done.stdout


def test_no_driver_is_not_an_error(lab: Lab) -> None:
    """On a host without GPUs the service runs and says that NVML is not there."""
    lab.write("/etc/kvwatch/kvwatch.yml", "{}\n")
    lab.run("systemctl", "restart", "kvwatch", check=True)
    deadline_s = time.monotonic() + 15

    while 'kvwatch_source_up{source="nvml"} 0' not in lab.get("/metrics")[1]:
        assert time.monotonic() < deadline_s, lab.get("/metrics")
        time.sleep(0.2)

    assert lab.show("kvwatch", "ActiveState")["ActiveState"] == "active"


def test_directories_are_shared_as_promised(lab: Lab) -> None:
    """Engines of other users can read leases; the state is private; both outlive a stop."""
    lab.run("systemctl", "stop", "kvwatch", check=True)

    listed = lab.run(
        "stat", "-c", "%n %a %U", "/run/kvwatch", "/run/kvwatch/limits", "/var/lib/kvwatch"
    ).stdout

    assert listed.splitlines() == [
        "/run/kvwatch 755 kvwatch",
        "/run/kvwatch/limits 755 kvwatch",
        "/var/lib/kvwatch 750 kvwatch",
    ]


def test_good_reload_is_taken(lab: Lab) -> None:
    """A reload of a changed, good file succeeds without a restart."""
    before = lab.show("kvwatch", "MainPID")
    lab.write(
        "/etc/kvwatch/kvwatch.yml",
        "gpus: {source: none}\nservers: [{name: other, kind: vllm, url: 'http://127.0.0.1:1'}]\n",
    )

    done = lab.run("systemctl", "reload", "kvwatch")
    deadline_s = time.monotonic() + 10
    while 'server="other"' not in lab.get("/metrics")[1]:
        assert time.monotonic() < deadline_s, lab.journal()
        time.sleep(0.2)

    assert done.returncode == 0, done.stdout
    assert lab.show("kvwatch", "MainPID") == before


def test_reload_without_a_file_watches_what_is_found(lab: Lab) -> None:
    """The file is removed: a reload succeeds, and what only the file named is no longer watched."""
    before = lab.show("kvwatch", "MainPID")
    lab.run("rm", "/etc/kvwatch/kvwatch.yml", check=True)

    done = lab.run("systemctl", "reload", "kvwatch")
    deadline_s = time.monotonic() + 10
    while 'server="chat"' in lab.get("/metrics")[1]:
        assert time.monotonic() < deadline_s, lab.journal()
        time.sleep(0.2)

    assert done.returncode == 0, lab.journal()
    assert lab.show("kvwatch", "MainPID") == before


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("gpus: {source: none}\nfrobnicate: 1\n", "kvwatch.yml:2:1: frobnicate"),
        ("", "kvwatch.yml:1:1: (yaml): is empty"),
    ],
    ids=["unknown key", "cut off by an editor"],
)
def test_bad_reload_is_refused_and_changes_nothing(lab: Lab, text: str, place: str) -> None:
    """`systemctl reload` of a bad file fails, the journal names the line, the daemon goes on as before."""
    lab.write("/etc/kvwatch/kvwatch.yml", text)

    done = lab.run("systemctl", "reload", "kvwatch")

    assert done.returncode != 0
    assert f"/etc/kvwatch/{place}" in lab.journal()
    assert 'server="chat"' in lab.get("/metrics")[1]
    assert "kvwatch_config_last_reload_successful 1" in lab.get("/metrics")[1]


def test_bad_file_by_signal_is_shown(lab: Lab) -> None:
    """A bad file that reaches the daemon by SIGHUP is refused and exported as refused."""
    lab.write("/etc/kvwatch/kvwatch.yml", "frobnicate: 1\n")
    lab.run("systemctl", "kill", "--signal=HUP", "--kill-who=main", "kvwatch", check=True)
    deadline_s = time.monotonic() + 10

    while "kvwatch_config_last_reload_successful 0" not in lab.get("/metrics")[1]:
        assert time.monotonic() < deadline_s, lab.journal()
        time.sleep(0.2)

    assert 'server="chat"' in lab.get("/metrics")[1]


def test_bad_configuration_at_start_is_not_retried(lab: Lab) -> None:
    """A start with a bad file fails once, with exit status 2, and stays failed."""
    lab.run("systemctl", "stop", "kvwatch", check=True)
    lab.write("/etc/kvwatch/kvwatch.yml", "frobnicate: 1\n")

    done = lab.run("systemctl", "start", "kvwatch")

    assert done.returncode != 0
    found = lab.wait("it stays failed", 5, ActiveState="failed")
    assert found["ActiveState"] == "failed"
    assert lab.show("kvwatch", "ExecMainStatus", "NRestarts") == {"ExecMainStatus": "2", "NRestarts": "0"}


def test_hung_daemon_is_restarted(lab: Lab) -> None:
    """A daemon that stops beating is ended by the watchdog and started again."""
    lab.drop_in("watchdog", "[Service]\nWatchdogSec=2s\n")
    lab.run("systemctl", "restart", "kvwatch", check=True)
    before = lab.show("kvwatch", "MainPID")["MainPID"]

    lab.run("kill", "-STOP", before, check=True)
    lab.wait("restarted by the watchdog", 40, NRestarts="1", ActiveState="active")

    assert lab.show("kvwatch", "MainPID")["MainPID"] != before
    journal = lab.journal()
    assert "Watchdog timeout" in journal
    assert "Current thread" in journal or "Thread 0x" in journal, "no stacks in the journal"


def test_loop_that_runs_is_left_alone(lab: Lab) -> None:
    """The daemon beats in time: a watchdog of four seconds does not end one that works."""
    lab.drop_in("watchdog", "[Service]\nWatchdogSec=4s\n")
    lab.run("systemctl", "restart", "kvwatch", check=True)

    time.sleep(9)

    assert lab.show("kvwatch", "NRestarts", "ActiveState") == {"NRestarts": "0", "ActiveState": "active"}


def test_killed_daemon_comes_back(lab: Lab) -> None:
    """After a hard kill of the daemon it is started again."""
    lab.run("systemctl", "kill", "--signal=KILL", "--kill-who=main", "kvwatch", check=True)

    lab.wait("restarted", 30, NRestarts="1", ActiveState="active")

    assert lab.get("/-/healthy")[0] == 200


def test_stop_takes_five_seconds_at_most(lab: Lab) -> None:
    """A stop ends within five seconds and counts as clean."""
    begun_s = time.monotonic()
    lab.run("systemctl", "stop", "kvwatch", check=True)
    took_s = time.monotonic() - begun_s

    assert lab.show("kvwatch", "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
    assert took_s < 5


def test_what_is_left_gets_term_never_kill(lab: Lab) -> None:
    """A worker that outlives its daemon is asked to end (E9: a hard kill of an NVML client froze a GPU)."""
    lab.write("/opt/kvwatch/leaves-a-child.py", LEAVES_A_CHILD)
    program = f"[Service]\nExecStart=\nExecStart={PYTHON} /opt/kvwatch/leaves-a-child.py\nWatchdogSec=0\n"
    lab.drop_in("stub", program)
    lab.run("systemctl", "restart", "kvwatch", check=True)

    lab.run("systemctl", "stop", "kvwatch", timeout=100)

    assert "child ended gently" in lab.journal()
    assert lab.show("kvwatch", "ActiveState")["ActiveState"] == "inactive"


def test_sandbox_allows_what_is_needed_and_nothing_else(lab: Lab) -> None:
    """NVIDIA's devices (major 195) can be opened even without a driver; other devices and places cannot."""
    for command in (
        ("mknod", "-m", "0666", "/dev/nvidia0", "c", "195", "0"),
        ("mknod", "-m", "0666", "/dev/kvwatch-other", "c", "240", "0"),
    ):
        lab.run(*command)
    lab.write("/opt/kvwatch/reads.py", READS)
    lab.drop_in("reads", f"[Service]\nExecStartPre={PYTHON} /opt/kvwatch/reads.py\n")
    lab.run("systemctl", "restart", "kvwatch", check=True)

    lines = [line.split() for line in lab.journal().splitlines()]
    found = {line[0]: line[1] for line in lines if len(line) == 2}

    assert found["nvidia0"] == "ENXIO", "allowed, and no driver behind it"
    assert found["other-device"] == "EPERM"
    assert found["kmsg"] in ("EPERM", "EACCES", "ENOENT")
    assert found["etc"] in ("EROFS", "EACCES")
    assert found["usr"] == "EROFS"
    assert (found["runtime"], found["state"]) == ("ok", "ok")
    assert (found["netlink"], found["unix"]) == ("EAFNOSUPPORT", "ok")
    assert found["exec-memory"] in ("EPERM", "EACCES")
    assert found["namespace"] == "EPERM"
    assert found["init-cmdline"] == "ok", "processes of others must be readable, for attribution"
    assert found["home"] in ("hidden", "0")


HOOK = """\
#!/bin/sh
cat > /dev/null
setsid sleep 300 &
echo "$KVWATCH_EVENT $(id -un) $! $(sed -n s/^0:://p /proc/self/cgroup)" >> /srv/hook/told
"""
WITH_A_HOOK = """\
gpus: {source: none}
servers:
  - {name: chat, kind: vllm, url: "http://127.0.0.1:8000", period: 500ms, timeout: 200ms}
rules: {server_down: {for: 1s}}
notify: [{on: [red], rules: [server_down], exec: {argv: [/opt/hooks/page, word]}}]
"""
OUT = """\
{"v": 1, "entries": [{"server": "chat", "action": "exec", "since_wall_s": 1.0,
 "params": {"argv": ["/opt/hooks/page", "word"], "deadline_s": 5.0}}]}
"""


def _with_hook(lab: Lab) -> None:
    """A hook that leaves a mark where the daemon cannot write, and a daemon in a session of its own."""
    lab.write("/opt/hooks/page", HOOK, 0o755)
    lab.run("rm", "-rf", "/srv/hook", check=True)
    lab.run("install", "-d", "-o", "kvwatch-exec", "/srv/hook", check=True)
    lab.write("/etc/kvwatch/kvwatch.yml", WITH_A_HOOK)


def _note_a_limit(lab: Lab) -> None:
    """What a daemon has on disk while a lever of its is moved."""
    lab.write("/var/lib/kvwatch/outstanding.json", OUT, 0o600)
    lab.run("chown", "kvwatch:kvwatch", "/var/lib/kvwatch/outstanding.json", check=True)


def _told(lab: Lab, event: str) -> list[str]:
    """The words of the hook's first mark for this event, waited for."""
    deadline_s = time.monotonic() + 30
    while True:
        path = lab.root / "srv/hook/told"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        found = [words for words in lines if words[0] == event]
        if found:
            return found[0]
        assert time.monotonic() < deadline_s, lab.journal() + lab.journal("kvwatch-exec@*")
        time.sleep(0.1)


def _counted(lab: Lab, outcome: str) -> None:
    """Wait until one hook has come out like this."""
    deadline_s = time.monotonic() + 20
    while f'action="exec",outcome="{outcome}"}} 1' not in lab.get("/metrics")[1]:
        assert time.monotonic() < deadline_s, lab.journal() + lab.journal("kvwatch-exec@*")
        time.sleep(0.2)


def test_hooks_run_outside_the_sandbox(lab: Lab) -> None:
    """A hook writes where the daemon cannot, as its own user; its unit leaves nothing behind."""
    _with_hook(lab)
    lab.run("systemctl", "restart", "kvwatch", check=True)

    _, user, child, group = _told(lab, "red")

    assert user == "kvwatch-exec"
    assert "kvwatch-exec@" in group
    _counted(lab, "applied")
    deadline_s = time.monotonic() + 10
    while lab.run("test", "-e", f"/proc/{child}").returncode == 0:
        assert time.monotonic() < deadline_s, "a daemon that the hook left is still there"
        time.sleep(0.1)
    assert lab.show("kvwatch-exec.socket", "ActiveState")["ActiveState"] == "active"


def test_only_root_and_the_service_reach_the_hooks(lab: Lab) -> None:
    """The socket is for the group alone, in a folder where the service's user cannot replace it."""
    connects = "import socket; socket.socket(socket.AF_UNIX).connect('/run/kvwatch-exec.sock')"
    as_nobody = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")

    stat = lab.run("stat", "-c", "%a %U %G", "/run/kvwatch-exec.sock", "/run").stdout.split("\n")
    refused = lab.run(*as_nobody, PYTHON, "-c", connects)

    assert stat[0] == "660 root kvwatch"
    assert stat[1].startswith("755 root")
    assert "PermissionError" in refused.stdout


def test_a_hook_the_daemons_user_could_change_is_not_run(lab: Lab) -> None:
    """A program that belongs to the service's user would be its way out of the sandbox."""
    _with_hook(lab)
    lab.run("chown", "kvwatch", "/opt/hooks/page", check=True)
    lab.run("systemctl", "restart", "kvwatch", check=True)

    _counted(lab, "failed")

    assert "/opt/hooks/page can be changed by uid" in lab.journal("kvwatch-exec@*")
    assert not (lab.root / "srv/hook/told").exists()
    lab.run("chown", "root", "/opt/hooks/page", check=True)


def test_a_killed_daemons_limit_is_given_back_outside_the_sandbox(lab: Lab) -> None:
    """After SIGKILL `kvwatch restore` runs the hook through the helper, too."""
    _with_hook(lab)
    lab.run("systemctl", "restart", "kvwatch", check=True)
    _note_a_limit(lab)

    lab.run("systemctl", "kill", "--signal=KILL", "--kill-who=main", "kvwatch", check=True)

    assert _told(lab, "restore")[1] == "kvwatch-exec"
    assert "given back: chat via exec" in lab.journal()


def test_without_the_helper_hooks_run_in_the_sandbox(lab: Lab) -> None:
    """Told to use none, the daemon runs the hook itself, which then cannot write there."""
    _with_hook(lab)
    lab.run("chmod", "0777", "/srv/hook", check=True)
    lab.drop_in("inside", "[Service]\nEnvironment=KVWATCH_EXEC_SOCKET=\n")
    lab.run("systemctl", "restart", "kvwatch", check=True)

    _counted(lab, "failed")

    assert not (lab.root / "srv/hook/told").exists()


def test_limits_are_given_back_while_the_host_shuts_down() -> None:
    """A hook can still be started after the shutdown has begun."""
    with Lab() as lab:
        lab.write("/etc/kvwatch/kvwatch.yml", WITH_A_HOOK.replace("on: [red]", "on: [green]"))
        lab.install()
        _with_hook(lab)
        lab.run("systemctl", "restart", "kvwatch", check=True)
        _note_a_limit(lab)

        lab.power_off()

        assert _told(lab, "restore")[1] == "kvwatch-exec"


def test_service_goes_away_again() -> None:
    """Uninstalled, only configuration, state and users are left; installing again works."""
    with Lab() as lab:
        lab.write("/etc/kvwatch/kvwatch.yml", "gpus: {source: none}\n")
        said = lab.install()
        assert "running" in said
        assert lab.show("kvwatch", "ActiveState", "UnitFileState") == {
            "ActiveState": "active",
            "UnitFileState": "enabled",
        }
        assert lab.run("systemctl", "is-enabled", "kvwatch-exec.socket").stdout.strip() == "enabled"

        lab.run("/opt/kvwatch/bin/kvwatch", "install-service", "--uninstall", check=True)

        assert lab.show("kvwatch", "ActiveState", "LoadState") == {
            "ActiveState": "inactive",
            "LoadState": "not-found",
        }
        assert lab.run("systemctl", "is-active", "kvwatch-exec.socket").stdout.strip() == "inactive"
        assert not list(lab.root.glob("etc/systemd/system/**/kvwatch*"))
        assert not (lab.root / "usr/lib/sysusers.d/kvwatch.conf").exists()
        assert (lab.root / "etc/kvwatch/kvwatch.yml").exists()
        assert (lab.root / "var/lib/kvwatch").is_dir()

        lab.run("/opt/kvwatch/bin/kvwatch", "install-service", check=True)

        assert lab.show("kvwatch", "ActiveState")["ActiveState"] == "active"
