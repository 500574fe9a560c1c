"""The HAProxy recipe, with a real HAProxy: set, read back, queued, given back, whatever dies."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwatch.model.action import Limit, Outcome
from tests.actions.build import limit_request, perform, restore_request, until
from tests.actions.proxy import CONFIGURED, RECIPE, Proxy
from tests.daemon.acting import config
from tests.daemon.page_server import PageServer
from tests.harness import Daemon

pytestmark = pytest.mark.needs("haproxy")


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    with Proxy(tmp_path / "proxy") as made:
        yield made


def recipe(proxy: Proxy, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program as it is, with arguments of our own."""
    variables = {f"KVWATCH_{key}": text for key, text in environment.items()}
    return subprocess.run(
        [sys.executable, str(RECIPE), *(arguments or proxy.argv[1:])],
        env={"PATH": "/usr/bin:/bin", **variables}, capture_output=True, text=True, timeout=10, check=False,
    )  # fmt: skip


def test_a_limit_is_set_and_read_back_and_a_restore_undoes_it(proxy: Proxy, tmp_path: Path) -> None:
    """Through the exec action: HAProxy's own figure is what counts."""
    attempt = perform(tmp_path, proxy.argv, limit_request(limit=Limit(server="chat", max_running=6)))
    limited = proxy.maxconn
    perform(tmp_path, proxy.argv, restore_request())

    assert attempt.outcome is Outcome.APPLIED
    assert attempt.detail == "engine/s1: maxconn 6"
    assert (limited, proxy.maxconn) == (6, CONFIGURED)


def test_the_surplus_waits_in_the_proxy_and_the_server_sees_no_queue(proxy: Proxy, tmp_path: Path) -> None:
    """The lesson for policies: once the proxy holds the queue, the server's own is empty."""
    perform(tmp_path, proxy.argv, limit_request(limit=Limit(server="chat", max_running=2)))
    clients = proxy.load(10)
    queued = until(lambda: proxy.stat("BACKEND", "qcur") + proxy.stat("s1", "qcur") >= 4)
    for client in clients:
        client.join(10)

    assert queued
    assert proxy.engine.most == 2


def test_raising_the_limit_lets_the_queue_in(proxy: Proxy, tmp_path: Path) -> None:
    """Waiting requests need no new one to move them."""
    perform(tmp_path, proxy.argv, limit_request(limit=Limit(server="chat", max_running=1)))
    clients = proxy.load(12)
    assert until(lambda: proxy.stat("BACKEND", "qcur") + proxy.stat("s1", "qcur") >= 5)
    perform(tmp_path, proxy.argv, restore_request())
    for client in clients:
        client.join(10)

    assert proxy.engine.most > 2


def test_a_limit_above_the_configured_one_sets_the_configured_one(proxy: Proxy) -> None:
    """kvwatch only ever takes away."""
    done = recipe(proxy, EVENT="limit", MAX_RUNNING="500")

    assert (done.returncode, proxy.maxconn) == (0, CONFIGURED)


def test_stopping_admission_is_the_least_that_the_proxy_knows(proxy: Proxy) -> None:
    """maxconn 0 would mean no limit at all."""
    done = recipe(proxy, EVENT="limit", ADMIT="false")

    assert (done.returncode, proxy.maxconn) == (0, 1)


@pytest.mark.parametrize(
    "environment",
    [
        {"EVENT": "limit", "MAX_RUNNING": "6; disable frontend in"}, {"EVENT": "limit", "MAX_RUNNING": "0"},
        {"EVENT": "limit", "MAX_RUNNING": "-1"}, {"EVENT": "red"}, {},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_limit_changes_nothing(proxy: Proxy, environment: dict[str, str]) -> None:
    """Nothing but a whole number reaches HAProxy's command line."""
    done = recipe(proxy, **environment)

    assert done.returncode == 2
    assert proxy.maxconn == CONFIGURED
    assert "OPEN" in proxy.ask("show stat")


@pytest.mark.parametrize("name", ["engine/s1; disable frontend in", "engine", "engine/s1\nquit", "../s1"])
def test_a_name_with_anything_else_in_it_is_refused(proxy: Proxy, name: str) -> None:
    """No command can be slipped in by a name; an unknown server is said."""
    done = recipe(proxy, str(proxy.socket), name, "16", EVENT="limit", MAX_RUNNING="3")

    assert done.returncode in (1, 2)
    assert proxy.maxconn == CONFIGURED


def test_an_unknown_server_is_said_by_name(proxy: Proxy) -> None:
    """A typing mistake is a failure, not a limit that is nowhere."""
    done = recipe(proxy, str(proxy.socket), "engine/s9", "16", EVENT="limit", MAX_RUNNING="3")

    assert done.returncode == 1
    assert "engine/s9" in done.stdout


def test_a_proxy_that_is_away_means_try_later(proxy: Proxy) -> None:
    """While HAProxy restarts neither a limit nor a restore is called failed."""
    proxy.stop()
    away = recipe(proxy, EVENT="restore")
    proxy.start()
    back = recipe(proxy, EVENT="restore")

    assert (away.returncode, back.returncode, proxy.maxconn) == (75, 0, CONFIGURED)


def daemon(tmp_path: Path, proxy: Proxy, server: PageServer) -> Daemon:
    via = f"[{{exec: {{argv: [{', '.join(repr(word) for word in proxy.argv)}], deadline: 2s}}}}]"
    text = config(server.url, via, cooldown="60s", lease="3s")
    return Daemon(tmp_path / "d", text.replace("ceiling: 64", "ceiling: 16"))


def crossing(running: Daemon, server: PageServer, proxy: Proxy) -> None:
    running.until(lambda: server.pages >= 4, 10, "pages")
    server.full(running=10)
    running.until(lambda: proxy.maxconn == 8, 5, "the limit in HAProxy")


def test_the_daemon_drives_the_proxy_and_gives_it_back_at_stop(tmp_path: Path, proxy: Proxy) -> None:
    """Crossing, limit, SIGTERM, configured value."""
    with PageServer() as server, daemon(tmp_path, proxy, server) as running:
        crossing(running, server, proxy)
        running.stop()

    assert proxy.maxconn == CONFIGURED


def test_a_killed_daemons_limit_leaves_the_proxy_with_the_next_start(tmp_path: Path, proxy: Proxy) -> None:
    """SIGKILL with the limit out: the next run puts the configured value back."""
    with PageServer() as server:
        running = daemon(tmp_path, proxy, server).start()
        crossing(running, server, proxy)
        running.signal(9)
        assert running.process is not None
        running.process.wait()
        assert proxy.maxconn == 8
        server.calm()
        with running:
            running.until(lambda: proxy.maxconn == CONFIGURED, 5, "the configured value")


def test_a_restarted_proxy_gets_the_limit_again_and_is_given_back(tmp_path: Path, proxy: Proxy) -> None:
    """HAProxy forgets at its restart; the next renewal tells it again; the stop still restores."""
    with PageServer() as server, daemon(tmp_path, proxy, server) as running:
        crossing(running, server, proxy)
        proxy.stop()
        time.sleep(0.3)
        proxy.start()
        running.until(lambda: proxy.maxconn == 8, 8, "the limit again")
        running.stop()

    assert proxy.maxconn == CONFIGURED


def test_a_proxy_that_is_away_at_stop_keeps_the_lever_on_the_list(tmp_path: Path, proxy: Proxy) -> None:
    """What could not be given back is given back by the next start."""
    with PageServer() as server:
        running = daemon(tmp_path, proxy, server)
        with running:
            crossing(running, server, proxy)
            proxy.stop()
            running.stop()
        noted = (tmp_path / "d/state/outstanding.json").read_text()
        proxy.start()
        proxy.ask("set maxconn server engine/s1 8")  # as if it had been away and not restarted
        server.calm()
        with running:
            running.until(lambda: proxy.maxconn == CONFIGURED, 5, "the configured value")

    assert '"chat"' in noted
