"""The real daemon acts on a real page: what is imposed, and that it always ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.acting import HttpLever, config, exec_lever
from tests.daemon.page_server import PageServer
from tests.harness import ROOT, Daemon


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer() as made:
        yield made


def crossing(daemon: Daemon, server: PageServer) -> None:
    """Two calm pages, then a full pool."""
    daemon.until(lambda: server.pages >= 4, 10, "pages")
    server.full()


def applied(daemon: Daemon, action: str = "exec") -> float:
    return daemon.metrics().get("kvwatch_actions_total", action=action, outcome="applied") or 0.0


def restore(folder: Path) -> subprocess.CompletedProcess[str]:
    """`kvwatch restore` with this daemon's directories."""
    environment = os.environ | {
        "RUNTIME_DIRECTORY": str(folder / "run"),
        "STATE_DIRECTORY": str(folder / "state"),
    }
    command = [sys.executable, "-m", "kvwatch", "restore"]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_crossing_limits_and_a_stop_gives_back(tmp_path: Path, server: PageServer) -> None:
    """The whole way: page, decision, hook, metrics, audit, SIGTERM, restore."""
    lever, via = exec_lever(tmp_path)
    with Daemon(tmp_path / "d", config(server.url, via)) as daemon:
        crossing(daemon, server)
        daemon.until(lever.exists, 5, "the limit")
        first = lever.read_text()
        daemon.until(lambda: applied(daemon) >= 1, 5, "the count")
        page = daemon.metrics()
        status = daemon.stop()

    assert first == "32\n"
    assert page.get("kvwatch_limit_running", server="chat") is not None
    assert status == 0
    assert not lever.exists()
    assert json.loads((tmp_path / "d/state/outstanding.json").read_text())["entries"] == []
    audit = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    assert any("limit running to 32" in event["message"] for event in audit)


def test_a_lease_is_written_renewed_and_cleared_at_stop(tmp_path: Path, server: PageServer) -> None:
    """The file of the contract, and no file afterwards."""
    with Daemon(tmp_path / "d", config(server.url, "[{lease: {}}]", cooldown="60s")) as daemon:
        crossing(daemon, server)
        path = tmp_path / "d/run/limits/chat.json"
        daemon.until(path.exists, 5, "the lease")
        first = json.loads(path.read_text())
        daemon.until(lambda: json.loads(path.read_text())["seq"] > first["seq"], 6, "a renewal")
        daemon.stop()

    assert (first["max_running"], first["admit"], first["reason"]) == (32, True, "kv_usage")
    assert 5 < first["ttl_s"] <= 6
    assert not path.exists()


@pytest.mark.parametrize("kind", ["exec", "http", "lease"])
def test_stale_data_ends_the_limit_within_the_lease(tmp_path: Path, server: PageServer, kind: str) -> None:
    """The server stops answering while a limit is out: restored in time, and quiet when it is back."""
    lever, via = exec_lever(tmp_path)
    lease = tmp_path / "d/run/limits/chat.json"
    with HttpLever() as http:
        vias = {"exec": via, "http": http.via, "lease": "[{lease: {}}]"}

        def out() -> bool:
            return {"exec": lever.exists, "http": lambda: http.limit is not None, "lease": lease.exists}[
                kind
            ]()

        with Daemon(tmp_path / "d", config(server.url, vias[kind])) as daemon:
            crossing(daemon, server)
            daemon.until(out, 5, "the limit")
            server.broken = True
            stopped_s = time.monotonic()
            daemon.until(lambda: not out(), 10, "the end of the limit")
            took_s = time.monotonic() - stopped_s
            server.broken = False
            time.sleep(2)  # full and waiting all the while: nothing may be imposed for two minutes
            again = out()

    assert took_s < 6.5
    assert not again


def test_a_server_that_restarts_under_a_limit_gets_its_own_limit_back(
    tmp_path: Path, server: PageServer
) -> None:
    """Counters that begin anew void what was decided."""
    lever, via = exec_lever(tmp_path)
    with Daemon(tmp_path / "d", config(server.url, via)) as daemon:
        crossing(daemon, server)
        daemon.until(lever.exists, 5, "the limit")
        server.restart()
        daemon.until(lambda: not lever.exists(), 4, "the restore")
        time.sleep(1.5)
        again = lever.exists()

    assert not again


def test_a_reload_that_removes_a_target_restores_it(tmp_path: Path, server: PageServer) -> None:
    """SIGHUP with a limit out: given back although nothing names the target any more."""
    lever, via = exec_lever(tmp_path)
    with Daemon(tmp_path / "d", config(server.url, via)) as daemon:
        crossing(daemon, server)
        daemon.until(lever.exists, 5, "the limit")
        daemon.config.write_text(daemon.config.read_text().split("control:")[0])
        daemon.signal(signal.SIGHUP)
        daemon.until(lambda: not lever.exists(), 5, "the restore")
        daemon.until(
            lambda: daemon.metrics().get("kvwatch_limit_running", server="chat") is None, 5, "no limit shown"
        )


def test_a_second_daemon_is_refused(tmp_path: Path, server: PageServer) -> None:
    """Two would undo each other's limits: the second ends with 3 and names the first."""
    _, via = exec_lever(tmp_path)
    with Daemon(tmp_path / "d", config(server.url, via)) as daemon:
        assert daemon.process is not None
        environment = os.environ | {
            "RUNTIME_DIRECTORY": str(tmp_path / "d/run"),
            "STATE_DIRECTORY": str(tmp_path / "d/state"),
        }
        command = [sys.executable, "-m", "kvwatch", "run", "--config", str(daemon.config)]
        second = subprocess.run(
            [*command, "--web.listen-address", "127.0.0.1:0"], cwd=ROOT, env=environment,
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip

        assert second.returncode == 3
        assert f"pid {daemon.process.pid}" in second.stderr


def test_a_hanging_hook_holds_up_neither_ticks_nor_metrics(tmp_path: Path, server: PageServer) -> None:
    """The loop goes on while a hook is waited for, and the outcome is counted."""
    _, via = exec_lever(tmp_path, "exec sleep 60")
    with Daemon(tmp_path / "d", config(server.url, via)) as daemon:
        crossing(daemon, server)
        time.sleep(0.7)
        before = daemon.state()["tick"]
        time.sleep(1.0)
        after = daemon.state()["tick"]
        daemon.until(
            lambda: daemon.metrics().get("kvwatch_actions_total", action="exec", outcome="timed_out"), 8,
            "the outcome",
        )  # fmt: skip

    assert after - before >= 4


def test_a_notify_hook_is_told_in_observe(tmp_path: Path, server: PageServer) -> None:
    """Paging needs no right to act."""
    script = tmp_path / "page"
    script.write_text(f"#!/bin/sh\necho $KVWATCH_EVENT $KVWATCH_RULE $KVWATCH_SERVER >> {tmp_path}/pages\n")
    script.chmod(0o755)
    notify = f"[{{on: [yellow, restore], rules: [kv_usage], exec: {{argv: [{script}]}}}}]"
    text = config(server.url, "[{lease: {}}]", mode="observe", notify=notify)
    with Daemon(tmp_path / "d", text) as daemon:
        daemon.until(lambda: server.pages >= 4, 10, "pages")
        server.usage = 0.9
        daemon.until((tmp_path / "pages").exists, 5, "the page")

    assert (tmp_path / "pages").read_text() == "yellow kv_usage chat\n"


@pytest.mark.needs("strace")
@pytest.mark.parametrize("mode", ["observe", "advise"])
def test_without_act_no_hook_is_run_and_no_lease_is_written(
    tmp_path: Path, server: PageServer, mode: str
) -> None:
    """Seen from the kernel: no program, no foreign connection, no rename into the lease directory."""
    lever, via = exec_lever(tmp_path)
    with HttpLever() as http:
        both = via.removesuffix("]") + ", {lease: {}}, " + http.via.removeprefix("[")
        daemon = Daemon(tmp_path / "d", config(server.url, both, mode=mode))
        trace = tmp_path / "trace"
        with daemon:
            assert daemon.process is not None
            tracer = subprocess.Popen(
                ["strace", "-f", "-qq", "-e", "trace=execve,connect,rename,renameat,renameat2,unlinkat",
                 "-o", str(trace), "-p", str(daemon.process.pid)],
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
            daemon.until(trace.exists, 5, "the tracer")
            crossing(daemon, server)
            if mode == "advise":
                daemon.until(
                    lambda: daemon.metrics().get("kvwatch_actions_total", action="exec", outcome="dry_run"),
                    8, "the advice",
                )  # fmt: skip
            else:
                time.sleep(2)
            tracer.terminate()
            tracer.wait(10)
            left = list((tmp_path / "d/run/limits").iterdir())
        seen = http.seen
    calls = [line for line in trace.read_text().splitlines() if "resumed" not in line]

    assert not lever.exists()
    assert seen == []
    assert left == []
    assert not [line for line in calls if "execve(" in line or "limits" in line]
    assert all(f"htons({server.port})" in line for line in calls if "connect(" in line)


@pytest.mark.parametrize("moment_s", [0.0, 0.15, 0.4])
def test_a_killed_daemon_is_cleaned_up_after_by_the_next(
    tmp_path: Path, server: PageServer, moment_s: float
) -> None:
    """SIGKILL while or after the hook runs: the next start restores before anything else."""
    lever, via = exec_lever(tmp_path, '[ "$KVWATCH_EVENT" = restore ] || sleep 0.2')
    daemon = Daemon(tmp_path / "d", config(server.url, via)).start()
    crossing(daemon, server)
    noted = tmp_path / "d/state/outstanding.json"
    daemon.until(noted.exists, 5, "the note")
    time.sleep(moment_s)
    daemon.signal(signal.SIGKILL)
    assert daemon.process is not None
    daemon.process.wait()
    server.calm()
    with daemon:
        daemon.until(lambda: json.loads(noted.read_text())["entries"] == [], 10, "the restore")
        time.sleep(0.5)
        assert not lever.exists()


def test_a_killed_daemons_limits_are_restored_by_the_command(tmp_path: Path, server: PageServer) -> None:
    """`kvwatch restore` says what it gave back; a second run finds nothing."""
    lever, via = exec_lever(tmp_path)
    daemon = Daemon(tmp_path / "d", config(server.url, via)).start()
    crossing(daemon, server)
    daemon.until(lever.exists, 5, "the limit")
    daemon.signal(signal.SIGKILL)
    assert daemon.process is not None
    daemon.process.wait()
    first, second = restore(tmp_path / "d"), restore(tmp_path / "d")

    assert (first.returncode, first.stdout) == (0, "given back: chat via exec\n")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert not lever.exists()


def test_the_checks_of_killing_at_random_moments_pass(tmp_path: Path) -> None:
    """The long check, short: after SIGKILL at random moments no lever keeps a limit."""
    command = [sys.executable, str(ROOT / "checks/act/sigkill.py"), "6"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
