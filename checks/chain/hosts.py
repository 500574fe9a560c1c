"""Four hosts, one Prometheus, one Alertmanager and a webhook: everything real but the GPUs and servers."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.daemon.faulty import Host
from tests.harness import ROOT, Daemon, free_port

Alert = dict[str, Any]


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
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def alerts(self, route: str, status: str, **labels: str) -> list[tuple[float, Alert]]:
        """(arrival, alert) of every alert with these labels and this status that came on this route."""
        return [
            (arrived, alert)
            for arrived, path, body in list(self.seen)
            for alert in body["alerts"]
            if path == route and alert["status"] == status and labels.items() <= alert["labels"].items()
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def shortened(rules: str) -> str:
    """The shipped rules with only their waiting cut down, so that the chain fits a check."""
    rules = re.sub(r"keep_firing_for: \w+$", "keep_firing_for: 10s", rules, flags=re.MULTILINE)
    return re.sub(r"(\bfor|interval): (?:\d+m|\d{2,}s)$", r"\1: 3s", rules, flags=re.MULTILINE)


def alertmanager_config(port: int) -> str:
    """The shipped example: its routes and inhibitions as they are, receivers and waiting replaced."""
    text = (ROOT / "alerts/alertmanager.example.yml").read_text()
    text = text.replace("http://127.0.0.1:9099/", f"http://127.0.0.1:{port}/")
    return re.sub(r"(group_wait|group_interval): [1-9]\w*", r"\1: 1s", text)


class Chain:
    """`busy` goes through an overload; `xid` and `hung` have fake drivers; `calm` is there to be killed."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder = folder
        self.webhook = Webhook()
        self.busy = Daemon(folder / "busy", None, "--demo", "overload")
        self.calm = Daemon(folder / "calm", None, "--demo", "calm")
        self._hosts = {name: self._fake_host(folder / name, library) for name in ("xid", "hung")}
        self.xid, self.hung = (host.daemon() for host in self._hosts.values())
        self.prometheus = f"http://127.0.0.1:{free_port()}"
        self.alertmanager = f"http://127.0.0.1:{free_port()}"
        self.killed_s = 0.0
        self._processes: list[subprocess.Popen[bytes]] = []

    @staticmethod
    def _fake_host(folder: Path, library: Path) -> Host:
        folder.mkdir()
        return Host(folder, library)

    @property
    def daemons(self) -> tuple[Daemon, ...]:
        """All four."""
        return (self.busy, self.xid, self.hung, self.calm)

    def start(self) -> Chain:
        """Start everything at once; when Prometheus has seen every host well, things go wrong."""
        (self.folder / "kvwatch.rules.yml").write_text(
            shortened((ROOT / "alerts/kvwatch.rules.yml").read_text())
        )
        (self.folder / "alertmanager.yml").write_text(alertmanager_config(self.webhook.port))
        (self.folder / "prometheus.yml").write_text(f"""
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [kvwatch.rules.yml]
alerting: {{alertmanagers: [{{static_configs: [{{targets: ['{self.alertmanager[7:]}']}}]}}]}}
scrape_configs:
  - {{job_name: kvwatch, static_configs: [{{targets: {[daemon.url[7:] for daemon in self.daemons]}}}]}}
""")
        self._run(
            "prometheus-alertmanager",
            f"--config.file={self.folder}/alertmanager.yml",
            f"--storage.path={self.folder}/alertmanager",
            f"--web.listen-address={self.alertmanager[7:]}",
            "--cluster.listen-address=",
        )
        starting = [threading.Thread(target=daemon.start) for daemon in self.daemons]
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join()
        self._run(
            "prometheus",
            f"--config.file={self.folder}/prometheus.yml",
            f"--storage.tsdb.path={self.folder}/tsdb",
            f"--web.listen-address={self.prometheus[7:]}",
        )
        self.until(self._all_seen, 30, "Prometheus to see every host")
        self._break()
        return self

    def _all_seen(self) -> bool:
        gpus = self.query("count by (instance) (kvwatch_gpu_memory_used_bytes)")
        return {row["metric"]["instance"] for row in gpus} == {daemon.url[7:] for daemon in self.daemons}

    def _break(self) -> None:
        """A row of GPU memory is remapped; the driver of another host hangs; a third kvwatch is killed."""
        self._hosts["xid"].gpus.xid(0, 63).write()
        self._hosts["hung"].gpus.hang().write()
        assert self.calm.process is not None
        self.killed_s = time.time()
        self.calm.process.kill()
        self.calm.process.wait(5)

    def uncorrectable(self) -> None:
        """The GPU with the remapped row now has an uncorrectable error as well."""
        self._hosts["xid"].gpus.xid(0, 48).write()

    def _run(self, *command: str) -> None:
        log = self.folder / f"{command[0]}.log"
        with log.open("wb") as stream:
            self._processes.append(subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT))

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Series of an instant query; none while Prometheus is not up."""
        asked = urllib.parse.urlencode({"query": expression})
        found = self._get(f"{self.prometheus}/api/v1/query?{asked}")
        return list(found["data"]["result"]) if found else []

    def alerts_known(self, **labels: str) -> list[Alert]:
        """What Alertmanager knows, suppressed alerts included."""
        found = self._get(f"{self.alertmanager}/api/v2/alerts") or []
        return [alert for alert in found if labels.items() <= alert["labels"].items()]

    def _get(self, url: str) -> Any:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return json.load(answer)
        except OSError:
            return None

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

    def first(
        self, route: str, status: str, daemon: Daemon, seconds: float, **labels: str
    ) -> tuple[float, Alert]:
        """The first such alert of a host, waited for: when it came, and what it was."""
        wanted = {"instance": daemon.url[7:], **labels}
        what = f"{status} {labels} on {route}"
        return self.until(lambda: self.webhook.alerts(route, status, **wanted), seconds, what)[0]

    def close(self) -> None:
        """End everything; a hung worker is let go first."""
        for host in self._hosts.values():
            host.gpus.healed().write()
        for daemon in self.daemons:
            if daemon.process is not None and daemon.process.poll() is None:
                daemon.stop()
        for process in self._processes:
            process.terminate()
            process.wait(10)
        self.webhook.close()


def crossed_at(daemon: Daemon, rule: str, level: str) -> float:
    """When kvwatch itself says that a rule reached a level (Unix seconds)."""
    events = json.loads(daemon.get("/api/v1/events?since=0"))["events"]
    return next(
        float(event["wall_s"])
        for event in events
        if event.get("rule") == rule and event.get("level_to") == level
    )
