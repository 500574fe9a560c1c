"""The example for Alertmanager, as Alertmanager itself reads and runs it."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "alerts/alertmanager.example.yml"
HOST = "gpu-host-1:9843"


def _amtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["amtool", *arguments], capture_output=True, text=True, check=False, timeout=30)


@pytest.mark.needs("amtool")
def test_example_is_accepted() -> None:
    """amtool finds no mistake."""
    done = _amtool("check-config", str(EXAMPLE))

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.needs("amtool")
@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        (("alertname=KvwatchGpuLost", "severity=page"), "kvwatch-page"),
        (("alertname=KvwatchSourceStale", "severity=ticket"), "kvwatch-ticket"),
        (("alertname=KvwatchKvThrashing", "severity=info"), "kvwatch-info"),
        (("alertname=SomethingElse", "severity=page"), "default"),
    ],
    ids=["page", "ticket", "info", "other"],
)
def test_severities_are_routed(labels: tuple[str, ...], receiver: str) -> None:
    """Each severity goes to its receiver; alerts of others are left alone."""
    done = _amtool("config", "routes", "test", f"--config.file={EXAMPLE}", *labels)

    assert done.stdout.strip() == receiver


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running Alertmanager with the example; receivers are not reached, nothing leaves the machine."""
    folder = tmp_path_factory.mktemp("alertmanager")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus-alertmanager",
                f"--config.file={EXAMPLE}",
                f"--storage.path={folder}",
                f"--web.listen-address={url.removeprefix('http://')}",
                "--cluster.listen-address=",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        _wait(url)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=20)


def _wait(url: str) -> None:
    deadline_s = time.monotonic() + 20
    while True:
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=2):
                return
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


def _states(url: str, *alerts: dict[str, str]) -> list[str]:
    """Send alerts and return the state of each: active or suppressed."""
    body = json.dumps([{"labels": labels} for labels in alerts]).encode()
    request = urllib.request.Request(
        f"{url}/api/v2/alerts", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=5):
        pass
    deadline_s = time.monotonic() + 10
    states: list[str] = []
    while time.monotonic() < deadline_s:
        with urllib.request.urlopen(f"{url}/api/v2/alerts", timeout=5) as answer:
            found = json.load(answer)
        by_labels = {json.dumps(a["labels"], sort_keys=True): a["status"]["state"] for a in found}
        states = [by_labels.get(json.dumps(labels, sort_keys=True), "missing") for labels in alerts]
        if not {"missing", "unprocessed"} & set(states):
            return states
        time.sleep(0.1)
    return states


@pytest.mark.needs("prometheus-alertmanager")
def test_a_watcher_that_is_down_silences_no_page(alertmanager: str) -> None:
    """KvwatchDown suppresses tickets of its host, never a page, and nothing of another host."""
    down = {"alertname": "KvwatchDown", "severity": "page", "instance": HOST}
    page = {"alertname": "KvwatchGpuLost", "severity": "page", "instance": HOST, "level": "red"}
    ticket = {"alertname": "KvwatchSourceStale", "severity": "ticket", "instance": HOST}
    other = {"alertname": "KvwatchSourceStale", "severity": "ticket", "instance": "gpu-host-2:9843"}

    states = _states(alertmanager, down, page, ticket, other)

    assert states == ["active", "active", "suppressed", "active"]


@pytest.mark.needs("prometheus-alertmanager")
def test_red_silences_yellow_of_the_same_thing(alertmanager: str) -> None:
    """Yellow of the same rule and GPU is suppressed by red; yellow of another GPU is not."""
    same = {"alertname": "KvwatchDeviceHeadroomLow", "instance": "gpu-host-3:9843", "rule": "device_headroom"}
    red = {**same, "severity": "page", "level": "red", "uuid": "GPU-1", "gpu": "0"}
    yellow = {**same, "severity": "info", "level": "yellow", "uuid": "GPU-1", "gpu": "0"}
    elsewhere = {**same, "severity": "info", "level": "yellow", "uuid": "GPU-2", "gpu": "1"}

    assert _states(alertmanager, red, yellow, elsewhere) == ["active", "suppressed", "active"]
