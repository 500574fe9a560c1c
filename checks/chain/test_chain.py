"""From the demo to a webhook, through a real Prometheus and a real Alertmanager."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT, Daemon, free_port

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.needs("prometheus", "prometheus-alertmanager"),
]


class Webhook:
    """Receives Alertmanager's notifications and keeps them with their time of arrival."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, str, dict[str, Any]]] = []
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                webhook.seen.append((time.time(), self.path, body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def alerts(self, route: str, name: str, status: str) -> list[tuple[float, dict[str, Any]]]:
        """(arrival, alert) of every alert of this name and status that came on this route."""
        return [
            (arrived, alert)
            for arrived, path, body in list(self.seen)
            for alert in body["alerts"]
            if path == route and alert["labels"]["alertname"] == name and alert["status"] == status
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def shortened(rules: str) -> str:
    """The shipped rules with only their waiting cut down, so that the chain fits a test."""
    return re.sub(r"(keep_firing_for|for|interval): (?:\d+m|\d{2,}s)$", r"\1: 3s", rules, flags=re.MULTILINE)


def alertmanager_config(webhook: Webhook) -> str:
    """The shipped example: its routes and inhibitions as they are, receivers and waiting replaced."""
    text = (ROOT / "alerts/alertmanager.example.yml").read_text()
    text = text.replace("http://127.0.0.1:9099/", f"http://127.0.0.1:{webhook.port}/")
    return re.sub(r"(group_wait|group_interval): \w+", r"\1: 1s", text)


class Chain:
    """kvwatch, Prometheus, Alertmanager and the webhook."""

    def __init__(self, folder: Path, *demo: str) -> None:
        self.folder = folder
        self.webhook = Webhook()
        self.daemon = Daemon(folder / "kvwatch", None, *demo)
        self.prometheus = f"http://127.0.0.1:{free_port()}"
        self.alertmanager = f"http://127.0.0.1:{free_port()}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> Chain:
        (self.folder / "kvwatch.rules.yml").write_text(
            shortened((ROOT / "alerts/kvwatch.rules.yml").read_text())
        )
        (self.folder / "alertmanager.yml").write_text(alertmanager_config(self.webhook))
        (self.folder / "prometheus.yml").write_text(f"""
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [kvwatch.rules.yml]
alerting: {{alertmanagers: [{{static_configs: [{{targets: ['{self.alertmanager[7:]}']}}]}}]}}
scrape_configs: [{{job_name: kvwatch, static_configs: [{{targets: ['{self.daemon.url[7:]}']}}]}}]
""")
        self._run(
            "prometheus-alertmanager",
            f"--config.file={self.folder}/alertmanager.yml",
            f"--storage.path={self.folder}/alertmanager",
            f"--web.listen-address={self.alertmanager[7:]}",
            "--cluster.listen-address=",
        )
        self._run(
            "prometheus",
            f"--config.file={self.folder}/prometheus.yml",
            f"--storage.tsdb.path={self.folder}/tsdb",
            f"--web.listen-address={self.prometheus[7:]}",
        )
        self.until(lambda: self._ready(self.alertmanager) and self._ready(self.prometheus), 30, "the chain")
        self.daemon.start()
        return self

    def _run(self, *command: str) -> None:
        log = self.folder / f"{command[0]}.log"
        with log.open("wb") as stream:
            self._processes.append(subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT))

    def _ready(self, base: str) -> bool:
        try:
            urllib.request.urlopen(f"{base}/-/ready", timeout=2).close()
        except OSError:
            return False
        return True

    def until(self, look: Callable[[], Any], seconds: float, what: str) -> Any:
        """Ask until `look` gives something true."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            found = look()
            if found:
                return found
            time.sleep(0.1)
        names = [(path, body["status"], body["groupLabels"]) for _, path, body in self.webhook.seen]
        raise AssertionError(f"waited {seconds} s for {what}; arrived: {names}")

    def crossed_at(self, rule: str, level: str) -> float:
        """When kvwatch itself says that a rule reached a level (Unix seconds)."""
        events = json.loads(self.daemon.get("/api/v1/events?since=0"))["events"]
        return next(
            float(event["wall_s"])
            for event in events
            if event.get("rule") == rule and event.get("level_to") == level
        )

    def close(self) -> None:
        if self.daemon.process is not None and self.daemon.process.poll() is None:
            self.daemon.stop()
        for process in self._processes:
            process.terminate()
            process.wait(10)
        self.webhook.close()


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Chain]:
    chain = Chain(tmp_path, "--demo", "overload")
    yield chain.start()
    chain.close()


def test_overload_pages_resolves_and_a_dead_watcher_pages(chain: Chain) -> None:
    """Red reaches the page route within 15 s of the crossing and resolves; a killed kvwatch pages."""
    webhook = chain.webhook
    firing = chain.until(
        lambda: webhook.alerts("/page", "KvwatchKvThrashing", "firing"), 60, "the page of the overload"
    )
    arrived_s, alert = firing[0]
    crossed_s = chain.crossed_at("recompute_tax", "red")
    print(f"page {arrived_s - crossed_s:.1f} s after the crossing: {alert['annotations']['summary']}")
    assert arrived_s - crossed_s <= 15
    assert alert["annotations"]["runbook_url"].endswith("/KvwatchKvThrashing.md")
    assert (ROOT / "docs/runbooks/KvwatchKvThrashing.md").exists()

    resolved = chain.until(
        lambda: webhook.alerts("/page", "KvwatchKvThrashing", "resolved"), 90, "the end of the page"
    )
    recovered_s = time.time()
    print(f"resolved {resolved[0][0] - arrived_s:.1f} s after the page")

    assert chain.daemon.process is not None
    chain.daemon.process.kill()
    chain.daemon.process.wait(5)
    down = chain.until(lambda: webhook.alerts("/page", "KvwatchDown", "firing"), 30, "the page of the death")
    print(f"kvwatch killed: paged {down[0][0] - recovered_s:.1f} s later")
