"""What breaks around a running daemon: drivers, servers, clocks and floods of signals."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from kvwatch.exporters.state import dumps
from tests.daemon.faulty import (
    NVML,
    PATIENCE_S,
    Host,
    ended,
    levels,
    readings,
    run_kvwatch,
    shown,
    strict,
    stuck,
    wait_for_gpus,
    watch,
    write,
)
from tests.daemon.page_server import PageServer
from tests.daemon.test_daemon import ask, config, kvwatch, up
from tests.harness import ROOT, Daemon
from tests.sources.loopback import Peer, answer, serving

# The driver


def test_a_driver_call_that_hangs(host: Host) -> None:
    """Series go and nothing is green; SIGTERM still ends it; no second worker starts beside the stuck one."""
    with host.daemon() as daemon:
        wait_for_gpus(daemon)
        host.gpus.hang().write()
        daemon.until(lambda: stuck(daemon), PATIENCE_S, "stuck")
        daemon.until(lambda: readings(daemon) == 0, PATIENCE_S, "the series to go")
        daemon.until(lambda: 0 not in levels(daemon).values(), PATIENCE_S, "no green")
        (worker,) = host.workers()
        assert ask(daemon, "/-/healthy")[0] == 200
        assert daemon.stop() == 0
        assert host.workers() == [worker]

        daemon.start()
        daemon.until(lambda: stuck(daemon), PATIENCE_S, "stuck again")
        assert host.workers() == [worker]
        assert daemon.metrics().get("kvwatch_gpu_up", gpu="0") == 0

        host.gpus.healed().write()
        wait_for_gpus(daemon)
        assert worker not in host.workers()


def test_maintenance_and_reload_during_a_hang(host: Host) -> None:
    """Neither stops the loop; GPUs that cannot be released stay stuck and are not called released."""
    with host.daemon() as daemon:
        wait_for_gpus(daemon)
        host.gpus.hang().write()
        daemon.until(lambda: stuck(daemon), PATIENCE_S, "stuck")
        unhealthy = watch(lambda: ask(daemon, "/-/healthy")[0] == 200)
        kvwatch(daemon, "maintenance", "on")
        daemon.until(
            lambda: daemon.metrics().get("kvwatch_maintenance_active") == 1, PATIENCE_S, "maintenance"
        )
        daemon.until(lambda: "left to end by itself" in daemon.log.read_text(), PATIENCE_S, "the pause")
        daemon.until(lambda: stuck(daemon), PATIENCE_S, "stuck in maintenance")
        kvwatch(daemon, "maintenance", "off")
        write(daemon.config, "gpus: {source: nvml, peak_window: 30s}\n")
        daemon.signal(signal.SIGHUP)
        daemon.until(lambda: "configuration loaded" in daemon.log.read_text(), PATIENCE_S, "the reload")
        daemon.until(lambda: stuck(daemon), PATIENCE_S, "stuck after the reload")
        assert len(host.workers()) == 1
        assert unhealthy() == 0
        host.gpus.healed().write()
        wait_for_gpus(daemon)


def test_no_gpu_is_opened_during_maintenance(host: Host) -> None:
    """Neither a start nor a reload opens the driver while maintenance holds; its end does."""
    host.gpus.call_log = host.folder / "calls"
    host.gpus.write()
    daemon = host.daemon()
    (host.folder / "run").mkdir()
    kvwatch(daemon, "maintenance", "on")
    with daemon:
        daemon.until(lambda: daemon.metrics().get("kvwatch_maintenance_active") == 1, PATIENCE_S, "it")
        write(daemon.config, "gpus: {source: nvml, peak_window: 30s}\n")
        daemon.signal(signal.SIGHUP)
        daemon.until(lambda: "configuration loaded" in daemon.log.read_text(), PATIENCE_S, "the reload")
        daemon.until(lambda: '"paused"' in shown(daemon), PATIENCE_S, "the pause")
        assert not host.gpus.call_log.exists() or not host.gpus.call_log.read_text()
        kvwatch(daemon, "maintenance", "off")
        wait_for_gpus(daemon)


def test_a_worker_that_crashes_again_and_again(host: Host) -> None:
    """The daemon outlives it, shows nothing that is old, and is back when the driver is."""
    with host.daemon() as daemon:
        wait_for_gpus(daemon)
        host.gpus.crash().write()
        daemon.until(lambda: "SIGSEGV" in shown(daemon), PATIENCE_S, "the reason")
        daemon.until(lambda: readings(daemon) == 0, PATIENCE_S, "the series to go")
        daemon.until(lambda: 0 not in levels(daemon).values(), PATIENCE_S, "no green")
        host.gpus.healed().write()
        wait_for_gpus(daemon)


def test_gpus_that_get_lost_and_go(host: Host) -> None:
    """A lost GPU is red and up 0; one that is gone is missing, also after a restart."""
    with host.daemon() as daemon:
        wait_for_gpus(daemon)
        host.gpus.error(1, "*", 15).write()
        daemon.until(lambda: daemon.level("gpu_lost", gpu="1") == 2, PATIENCE_S, "lost")
        assert daemon.metrics().get("kvwatch_gpu_up", gpu="1") == 0
        assert readings(daemon) == 1
        host.gpus.healed()
        host.gpus.gpus = 1
        host.gpus.write()
        daemon.until(lambda: daemon.level("gpu_missing", gpu="1") == 2, PATIENCE_S, "missing")
        assert daemon.stop() == 0
        daemon.start()
        daemon.until(lambda: daemon.level("gpu_missing", gpu="1") == 2, PATIENCE_S, "missing after a restart")
        assert readings(daemon) == 1


def test_library_and_driver_disagree(host: Host) -> None:
    """After an upgrade the reason is there, and a new worker takes over when they agree again."""
    host.gpus.error("*", "nvmlInitWithFlags", 18).write()
    with host.daemon() as daemon:
        daemon.until(lambda: "version_mismatch" in shown(daemon), PATIENCE_S, "the reason")
        host.gpus.healed().write()
        wait_for_gpus(daemon)


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"gpus": {"GPU-1": {"index": 1e999, "name": "x"}}}',
        '{"gpus": {"GPU-1": {"index": "z"}}}',
        "[" * 100_000,
        '{"gpus": []}',
        None,
    ],
)
def test_a_damaged_inventory(host: Host, text: str | None) -> None:
    """Whatever is in the inventory's place (None: a directory), the daemon starts and sees its GPUs."""
    state = host.folder / "state"
    state.mkdir()
    if text is None:
        (state / "inventory.json").mkdir()
    else:
        write(state / "inventory.json", text)
    with host.daemon() as daemon:
        wait_for_gpus(daemon)
        assert len(daemon.metrics().all("kvwatch_gpu_up")) == 2
        assert "inventory" in daemon.log.read_text()


# Servers


def page(**values: str) -> bytes:
    """A page of two engines, the second first; values replace those of the series."""
    fields = {"usage": "0.5", "running": "3", "preempted": "0", "tokens": "100", "model": "m"} | values
    lines = []
    for engine in ("1", "0"):
        labels = f'engine="{engine}",model_name="{fields["model"]}"'
        lines += [
            f"vllm:num_requests_running{{{labels}}} {fields['running']}",
            f"vllm:num_requests_waiting{{{labels}}} 0",
            f"vllm:kv_cache_usage_perc{{{labels}}} {fields['usage']}",
            f"vllm:num_preemptions_total{{{labels}}} {fields['preempted']}",
            f"vllm:prompt_tokens_total{{{labels}}} {fields['tokens']}",
            f"vllm:generation_tokens_total{{{labels}}} {fields['tokens']}",
            f'vllm:cache_config_info{{block_size="16",engine="{engine}",num_gpu_blocks="1000"}} 1.0',
        ]
    return ("\n".join(lines) + "\n").encode()


def odd_answers() -> list[bytes]:
    """Everything that a server, a proxy or a stranger on the port has been seen to answer."""
    good = page()
    words = ("NaN", "+Inf", "-Inf", "1e308", "-1", "N/A", "")
    pages = [page(usage=word, running=word, preempted=word, tokens=word) for word in words]
    pages += [
        page(model='a\\"b\\nc\\\\d é 漢字 \u202e'),
        good + good.replace(b"0.5", b"0.7"),
        good.replace(b"kv_cache_usage_perc", b"renamed"),
        good[:-40],
        b"",
        b"<html>",
        b"[" * 200_000,
        b"\x00" * 1000,
        good.replace(b'num_gpu_blocks="1000"', b'num_gpu_blocks="1e999"'),
    ]
    raw = [
        answer(b"boom", "500 Oops"),
        answer(b"", "302 Found", "Location: http://user:hunter22@elsewhere/\r\n"),
        answer(good, headers="Content-Type: application/x-protobuf\r\n"),
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x 1\n" * 4_000_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
    ]
    return [answer(each) for each in pages] + raw


def test_whatever_a_server_answers(tmp_path: Path) -> None:
    """No answer of a server spoils a page of ours or opens a secret, and a good page heals all of it."""
    now = [answer(page())]

    def handle(peer: Peer) -> None:
        while peer.request():
            peer.send(now[0])
            if now[0].startswith((b"HTTP/1.1 200 OK\r\n\r\n", b"SSH")):
                return

    with serving(handle) as server, Daemon(tmp_path, config(("chat", server.url), period="200ms")) as daemon:
        for odd in odd_answers():
            now[0] = answer(page())
            daemon.until(lambda: up(daemon, "chat"), PATIENCE_S, "the good page")
            now[0] = odd
            for _ in range(2):
                time.sleep(0.15)
                text = daemon.get("/metrics")
                daemon.metrics()
                assert "NaN" not in text, odd[:200]
                state = daemon.get("/api/v1/state")
                strict(state)
                strict(daemon.get("/api/v1/events"))
                assert "hunter22" not in text + state
        assert daemon.stop() == 0
    log = daemon.log.read_text()
    assert ("Traceback" in log, "hunter22" in log) == (False, False), log[-2000:]


def test_an_infinite_counter_is_null_in_the_state() -> None:
    """A value that JSON cannot carry becomes null instead of spoiling the page."""
    assert strict(dumps({"a": float("inf"), "b": [float("nan")]}).decode()) == {"a": None, "b": [None]}


def test_sixty_four_servers_that_are_not_there(tmp_path: Path) -> None:
    """The daemon is healthy, every server is down, and it stops at once."""
    servers = [(f"s{i}", f"http://127.0.0.1:{1 + i % 9}") for i in range(64)]
    with Daemon(tmp_path, config(*servers)) as daemon:
        daemon.until(
            lambda: sum(v == 0 for _, v in daemon.metrics().all("kvwatch_server_up")) == 64,
            PATIENCE_S,
            "64 servers down",
        )
        assert ask(daemon, "/-/healthy")[0] == 200
        assert daemon.stop() == 0


def test_a_reload_of_the_gpus_forgets_no_xid(host: Host) -> None:
    """Another source reads the GPUs from then on: events counted before stay counted, and the alarm stays."""
    with host.daemon() as daemon:
        wait_for_gpus(daemon)
        host.gpus.xid(0, 79).write()
        daemon.until(lambda: daemon.level("gpu_xid", gpu="0") == 2, PATIENCE_S, "the alarm")
        write(daemon.config, NVML.replace("source: nvml", "source: nvml, peak_window: 30s"))
        first = host.workers()
        daemon.signal(signal.SIGHUP)
        daemon.until(lambda: host.workers() and host.workers() != first, PATIENCE_S, "another source")
        wait_for_gpus(daemon)

        assert daemon.metrics().get("kvwatch_gpu_xid_events_total", gpu="0", xid="79") == 1
        assert daemon.level("gpu_xid", gpu="0") == 2


def test_a_reload_that_moves_every_server_shows_nothing_of_the_old_ones(tmp_path: Path) -> None:
    """A name that gets another address never shows the old address's figures again."""
    with PageServer() as old, PageServer() as new:
        old.usage, new.usage = 0.25, 0.75
        names = [f"s{i}" for i in range(8)]
        with Daemon(tmp_path, config(*((name, old.url) for name in names))) as daemon:
            daemon.until(lambda: all(up(daemon, name) for name in names), PATIENCE_S, "the old servers")
            for turn in range(6):
                here, usage = (new.url, 0.75) if turn % 2 == 0 else (old.url, 0.25)
                write(daemon.config, config(*((name, here) for name in names)))
                loaded = daemon.log.read_text().count("configuration loaded")
                daemon.signal(signal.SIGHUP)
                daemon.until(
                    lambda loaded=loaded: daemon.log.read_text().count("configuration loaded") > loaded,  # type: ignore[misc]
                    PATIENCE_S,
                    "the reload",
                )
                daemon.until(lambda: all(up(daemon, name) for name in names), PATIENCE_S, "all servers")
                found = {value for _, value in daemon.metrics().all("kvwatch_kv_usage_ratio")}
                assert found == {usage}


# Signals, clocks and clients


def test_storms_of_reloads(tmp_path: Path) -> None:
    """Hundreds of SIGHUPs and POSTs: /metrics answers, the loop is healthy, the last configuration holds."""
    with PageServer() as page_server:
        text = config(("chat", page_server.url))
        with Daemon(tmp_path, text, "--web.enable-lifecycle") as daemon:
            daemon.until(lambda: up(daemon, "chat"), PATIENCE_S, "the server")
            failed = watch(lambda: ask(daemon, "/metrics")[0] == ask(daemon, "/-/healthy")[0] == 200)
            seen: set[int] = set()
            posters = [
                threading.Thread(
                    target=lambda: seen.update(ask(daemon, "/-/reload", "POST")[0] for _ in range(25))
                )
                for _ in range(4)
            ]
            for poster in posters:
                poster.start()
            for _ in range(200):
                daemon.signal(signal.SIGHUP)
                time.sleep(0.01)
            for poster in posters:
                poster.join()
            assert seen <= {200, 503}
            assert failed() == 0
            write(daemon.config, config(("last", page_server.url)))
            daemon.signal(signal.SIGHUP)
            daemon.until(lambda: up(daemon, "last"), PATIENCE_S, "the last configuration")
            assert daemon.stop() == 0


def test_a_stopped_process_goes_on_without_a_burst(host: Host) -> None:
    """After seconds in SIGSTOP the missed ticks are counted, not made up, and nothing is red for it."""
    with PageServer() as page_server:
        with host.daemon(config(("chat", page_server.url), more=NVML)) as daemon:
            wait_for_gpus(daemon)
            daemon.until(lambda: up(daemon, "chat"), PATIENCE_S, "the server")
            before = daemon.state()
            daemon.signal(signal.SIGSTOP)
            time.sleep(6)
            pages = page_server.pages
            daemon.signal(signal.SIGCONT)
            daemon.until(lambda: page_server.pages > pages, PATIENCE_S, "polls")
            daemon.until(lambda: up(daemon, "chat"), PATIENCE_S, "the server again")
            wait_for_gpus(daemon)
            after = daemon.state()
            assert int(after["ticks_missed_total"]) > int(before["ticks_missed_total"]) + 10
            assert daemon.metrics().all("kvwatch_rule_level") != []
            assert 2 not in levels(daemon).values()
            events = json.loads(daemon.get("/api/v1/events"))["events"]
            assert not [event for event in events if event.get("level_to") == "red"]


@pytest.mark.needs("gcc")
def test_the_wall_clock_jumps(tmp_path: Path) -> None:
    """A wall clock that jumps by a year either way moves no level, no lamp and no maintenance."""
    source = ROOT / "tests" / "fakes" / "wall_clock.c"
    library = tmp_path / "clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source)], check=True)
    shift = write(tmp_path / "shift", "0")
    variables = {"LD_PRELOAD": str(library), "KVWATCH_FAKE_WALL_CLOCK": str(shift)}
    with PageServer() as page_server:
        text = config(("chat", page_server.url))
        with Daemon(tmp_path / "d", text, environment=variables) as daemon:
            daemon.until(lambda: up(daemon, "chat"), PATIENCE_S, "the server")
            kvwatch(daemon, "maintenance", "on", "--for", "1h")
            daemon.until(lambda: daemon.metrics().get("kvwatch_maintenance_active") == 1, PATIENCE_S, "it")
            for seconds in (-31_536_000, 31_536_000, 0):
                write(shift, str(seconds))
                tick = int(daemon.state()["tick"])
                daemon.until(lambda tick=tick: int(daemon.state()["tick"]) > tick + 3, PATIENCE_S, "ticks")  # type: ignore[misc]
                assert abs(float(daemon.state()["wall_s"]) - time.time() - seconds) < 3600
                assert up(daemon, "chat")
                assert 2 not in levels(daemon).values()
                assert daemon.metrics().get("kvwatch_maintenance_active") == 1
                assert ask(daemon, "/-/healthy")[0] == 200
            assert daemon.stop() == 0


def test_secrets_stay_inside(tmp_path: Path) -> None:
    """Tokens, passwords and addresses with a user appear on no page and in no log, whatever goes wrong."""
    token, password = "tok3n-very-secret", "passw0rd-very-secret"
    bearer, basic = write(tmp_path / "bearer", token + "\n"), write(tmp_path / "basic", password + "\n")

    def echo(peer: Peer) -> None:
        while head := peer.request():
            peer.send(answer(head, "401 Unauthorized", f"X-Echo: {token}\r\n"))

    with serving(echo) as server:
        text = (
            "gpus: {source: none}\nservers:\n"
            f"  - {{name: a, kind: vllm, url: '{server.url}', period: 200ms, "
            f"auth: {{bearer_file: {bearer}}}}}\n"
            f"  - {{name: b, kind: vllm, url: '{server.url}', period: 200ms, "
            f"auth: {{basic: {{user: u, password_file: {basic}}}}}}}\n"
        )
        with Daemon(tmp_path / "d", text, "--log.level", "debug", "--web.enable-lifecycle") as daemon:
            daemon.until(
                lambda: sum(v > 1 for _, v in daemon.metrics().all("kvwatch_source_errors_total")) == 2,
                PATIENCE_S,
                "refusals",
            )
            write(daemon.config, f"servers: [{{name: a, url: 'http://u:{password}@h:1', kind: vllm}}]\n")
            replied = ask(daemon, "/-/reload", "POST")[1]
            said = replied + "".join(
                daemon.get(path) for path in ("/metrics", "/api/v1/state", "/api/v1/events")
            )
            assert daemon.stop() == 0
        said += daemon.log.read_text()
        code, refused = ended(run_kvwatch(tmp_path / "e", "--config", str(daemon.config)))
    assert code == 2
    assert "url" in refused
    pair = base64.b64encode(f"u:{password}".encode()).decode()
    for secret in (token, password, pair):
        assert secret not in said + refused


def test_servers_that_come_and_go_leave_nothing_behind(tmp_path: Path) -> None:
    """Reloads that replace every server leave no thread and no descriptor behind."""
    with PageServer() as page_server:
        sets = [config(*((f"{c}{i}", page_server.url) for i in range(12))) for c in "ab"]
        with Daemon(tmp_path, sets[0]) as daemon:
            assert daemon.process is not None
            process = Path(f"/proc/{daemon.process.pid}")

            def used() -> tuple[int, int]:
                return len(list((process / "task").iterdir())), len(list((process / "fd").iterdir()))

            daemon.until(lambda: all(up(daemon, f"a{i}") for i in range(12)), PATIENCE_S, "the servers")
            threads, descriptors = used()
            for turn in range(1, 7):
                write(daemon.config, sets[turn % 2])
                daemon.signal(signal.SIGHUP)
                last = f"{'ab'[turn % 2]}11"
                daemon.until(lambda last=last: up(daemon, last), PATIENCE_S, "the reload")  # type: ignore[misc]
            daemon.until(
                lambda: used()[0] <= threads + 2 and used()[1] <= descriptors + 4, PATIENCE_S, "the old to go"
            )
