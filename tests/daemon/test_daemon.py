"""The everyday life of the daemon: it starts, gets ready, shows, reloads, pauses and stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from tests.daemon.page_server import PageServer
from tests.harness import ROOT, Daemon
from tests.sources.loopback import always, answer, serving


def config(*servers: tuple[str, str], more: str = "gpus: {source: none}\n", period: str = "1s") -> str:
    """A configuration that watches these (name, url).

    A server has 0.8 of its period to answer: short ones are for servers that may look down on a busy machine.
    """
    lines = [f"  - {{name: {name}, kind: vllm, url: '{url}', period: {period}}}\n" for name, url in servers]
    return more + ("servers:\n" + "".join(lines) if lines else "")


def up(daemon: Daemon, server: str) -> bool:
    """Whether every engine of this server is shown as up."""
    return {value for _, value in daemon.metrics().all("kvwatch_server_up", server=server)} == {1}


def ask(daemon: Daemon, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and body of a request, whatever the status is."""
    request = urllib.request.Request(daemon.url + path, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def kvwatch(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run another kvwatch command on the daemon's directories."""
    environment = os.environ | {
        "RUNTIME_DIRECTORY": str(daemon.folder / "run"),
        "STATE_DIRECTORY": str(daemon.folder / "state"),
    }
    command = [sys.executable, "-m", "kvwatch", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def test_a_day_in_its_life(tmp_path: Path) -> None:
    """It starts, gets ready when its server has answered, shows that server, and stops with status 0."""
    with PageServer() as page, Daemon(tmp_path, config(("chat", page.url))) as daemon:
        daemon.until(lambda: ask(daemon, "/-/ready")[0] == 200, 20, "readiness")
        daemon.until(lambda: up(daemon, "chat"), 10, "the server")
        metrics, state = daemon.metrics(), daemon.state()

        assert metrics.get("kvwatch_kv_usage_ratio", server="chat", engine="0") == 0.5
        assert metrics.get("kvwatch_requests", server="chat", state="running") == 10
        assert state["servers"][0]["engines"][0]["kv_usage_ratio"] == 0.5
        assert "kvwatch is healthy" in daemon.get("/-/healthy")
        assert "<html" in daemon.get("/")
        assert daemon.stop() == 0
    assert "Traceback" not in daemon.log.read_text()


def test_without_driver_and_servers_it_runs_and_says_so(tmp_path: Path) -> None:
    """No NVIDIA driver is no error: the daemon runs, and the source is down with the reason."""
    with Daemon(tmp_path, "gpus: {source: nvml}\n", environment={"LD_LIBRARY_PATH": ""}) as daemon:
        daemon.until(lambda: daemon.metrics().get("kvwatch_source_up", source="nvml") == 0, 20, "the source")
        daemon.until(lambda: "libnvidia-ml" in daemon.get("/api/v1/state"), 20, "the reason")
        assert daemon.stop() == 0


def test_sighup_takes_a_new_configuration(tmp_path: Path) -> None:
    """SIGHUP adds and drops servers; one that is configured as before keeps its connection."""
    with PageServer() as page, serving(always(answer(page.page().encode()))) as kept:
        with Daemon(tmp_path, config(("old", page.url), ("kept", kept.url))) as daemon:
            daemon.until(lambda: up(daemon, "old") and up(daemon, "kept"), 20, "both servers")
            daemon.config.write_text(config(("new", page.url), ("kept", kept.url)))
            daemon.signal(signal.SIGHUP)
            daemon.until(lambda: up(daemon, "new"), 20, "the new server")

            assert daemon.metrics().all("kvwatch_server_up", server="old") == []
            assert up(daemon, "kept")
            assert kept.connections == 1
            assert daemon.metrics().get("kvwatch_config_last_reload_successful") == 1


def test_a_bad_configuration_changes_nothing(tmp_path: Path) -> None:
    """A reload of a bad file answers 400 with the line, the metric says so, and the old servers stay."""
    with PageServer() as page:
        with Daemon(tmp_path, config(("chat", page.url)), "--web.enable-lifecycle") as daemon:
            daemon.until(lambda: up(daemon, "chat"), 20, "the server")
            daemon.config.write_text("servers: [\nfrobnicate: 1\n")
            status, text = ask(daemon, "/-/reload", "POST")
            assert (status, str(daemon.config) in text) == (400, True)
            assert daemon.metrics().get("kvwatch_config_last_reload_successful") == 0
            daemon.signal(signal.SIGHUP)  # the same by signal
            daemon.until(lambda: daemon.log.read_text().count("configuration not loaded") == 2, 20, "the log")
            assert up(daemon, "chat")

            daemon.config.write_text(config(("chat", page.url)))
            assert ask(daemon, "/-/reload", "POST")[0] == 200
            assert daemon.metrics().get("kvwatch_config_last_reload_successful") == 1
            assert up(daemon, "chat")


def test_reload_over_http_is_off_by_default(tmp_path: Path) -> None:
    """Without --web.enable-lifecycle nobody can reload over HTTP."""
    with Daemon(tmp_path, config()) as daemon:
        assert ask(daemon, "/-/reload", "POST")[0] == 403


def test_maintenance_begins_and_ends(tmp_path: Path) -> None:
    """`maintenance on` shows within seconds, `off` ends it, and one with `--for` ends by itself."""
    with Daemon(tmp_path, "gpus: {source: nvml}\n") as daemon:

        def active() -> float | None:
            return daemon.metrics().get("kvwatch_maintenance_active")

        daemon.until(lambda: active() == 0, 10, "the first report")
        assert kvwatch(daemon, "maintenance", "on").returncode == 0
        daemon.until(lambda: active() == 1, 10, "maintenance")
        assert kvwatch(daemon, "maintenance", "off").stdout == "maintenance ended\n"
        daemon.until(lambda: active() == 0, 10, "its end")
        assert kvwatch(daemon, "maintenance", "on", "--for", "4s").returncode == 0
        daemon.until(lambda: active() == 1, 10, "maintenance again")
        daemon.until(lambda: active() == 0, 20, "the end by itself")


def test_the_demo_needs_nothing(tmp_path: Path) -> None:
    """`run --demo` shows two GPUs and a server that it simulates, and leaves no file behind."""
    with Daemon(tmp_path, None, "--demo", "calm") as daemon:
        daemon.until(lambda: len(daemon.metrics().all("kvwatch_gpu_up")) == 2, 20, "two GPUs")
        daemon.until(lambda: up(daemon, "chat"), 20, "the server")
        assert daemon.stop() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["daemon.log"]
