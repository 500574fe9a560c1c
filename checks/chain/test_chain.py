"""From four hosts to a webhook, through a real Prometheus and a real Alertmanager with the shipped rules.

Everything happens at once, so that all of it fits into 90 s: one host goes through an overload, the driver of
another reports errors, that of a third hangs, and on a fourth kvwatch itself is killed.
"""

from __future__ import annotations

import html
import json
import re
import time
import urllib.request
from collections.abc import Iterator

import pytest

from checks.chain.hosts import Chain, crossed_at
from tests.fakes.nvml import build
from tests.harness import ROOT

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.needs("prometheus", "prometheus-alertmanager", "gcc"),
]

THRASHING = "KvwatchKvThrashing"


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    chain = Chain(tmp_path_factory.mktemp("chain"), build(tmp_path_factory.mktemp("nvml")))
    try:
        yield chain.start()
    finally:
        chain.close()


def test_yellow_opens_a_ticket(chain: Chain) -> None:
    """A remapped row of GPU memory is yellow: it goes to the ticket route, and nobody is woken."""
    arrived_s, alert = chain.first("/ticket", "firing", chain.xid, 30, alertname="KvwatchGpuXid")
    crossed_s = crossed_at(chain.xid, "gpu_xid", "yellow")
    print(f"ticket {arrived_s - crossed_s:.1f} s after the crossing: {alert['annotations']['summary']}")

    assert alert["labels"]["level"] == "yellow"
    assert not chain.webhook.alerts("/page", "firing", instance=chain.xid.url[7:])


def test_red_pages_and_silences_yellow_of_the_same_gpu(chain: Chain) -> None:
    """An uncorrectable error on that GPU pages within 15 s; its ticket is held back from then on."""
    chain.uncorrectable()
    arrived_s, alert = chain.first("/page", "firing", chain.xid, 30, alertname="KvwatchGpuXid")
    crossed_s = crossed_at(chain.xid, "gpu_xid", "red")
    print(f"page {arrived_s - crossed_s:.1f} s after the crossing: {alert['annotations']['summary']}")
    assert arrived_s - crossed_s <= 15

    def inhibited() -> list[dict[str, object]]:
        yellow = chain.alerts_known(alertname="KvwatchGpuXid", level="yellow")
        return [alert["status"] for alert in yellow if alert["status"]["state"] == "suppressed"]

    (status,) = chain.until(inhibited, 20, "the ticket to be inhibited")
    (red,) = chain.alerts_known(alertname="KvwatchGpuXid", level="red")
    assert status["inhibitedBy"] == [red["fingerprint"]]
    assert red["status"]["state"] == "active"


def test_a_killed_kvwatch_pages(chain: Chain) -> None:
    """A watcher that died is somebody's business, and its host is named."""
    arrived_s, alert = chain.first("/page", "firing", chain.calm, 30, alertname="KvwatchDown")
    print(f"kvwatch killed: paged {arrived_s - chain.killed_s:.1f} s later")

    assert chain.calm.url[7:] in alert["annotations"]["summary"]


def test_a_hung_driver_is_stale_and_never_green(chain: Chain) -> None:
    """A ticket says that NVML is stale; no figure is shown as current, and nothing of that host is green."""
    _, alert = chain.first("/ticket", "firing", chain.hung, 60, alertname="KvwatchSourceStale")
    here = f'instance="{chain.hung.url[7:]}"'

    assert alert["labels"]["source"] == "nvml"
    chain.until(lambda: chain.query(f"kvwatch_source_stuck{{{here}}} == 1"), 20, "stuck to be told")
    chain.until(lambda: chain.query(f"kvwatch_headline_level{{{here}}} == -1"), 20, "unknown to be told")
    assert chain.query(f"kvwatch_gpu_memory_used_bytes{{{here}}}") == []
    assert chain.query(f'kvwatch_rule_level{{{here}, uuid!=""}} == 0') == []


def test_an_overload_pages_and_ends_after_recovery(chain: Chain) -> None:
    """Red reaches the page route within 15 s of the crossing; when the burst is over it resolves."""
    arrived_s, alert = chain.first("/page", "firing", chain.busy, 60, alertname=THRASHING)
    crossed_s = crossed_at(chain.busy, "recompute_tax", "red")
    print(f"page {arrived_s - crossed_s:.1f} s after the crossing: {alert['annotations']['summary']}")
    assert arrived_s - crossed_s <= 15
    assert alert["annotations"]["runbook_url"].endswith(f"/{THRASHING}.md")
    assert (ROOT / f"docs/runbooks/{THRASHING}.md").exists()

    resolved_s, _ = chain.first("/page", "resolved", chain.busy, 60, alertname=THRASHING)
    print(f"resolved {resolved_s - arrived_s:.1f} s after the page")


def test_recordings_say_the_same_of_the_fleet(chain: Chain) -> None:
    """What Prometheus keeps for overviews of many hosts is there, per host."""
    found = chain.query("instance:kvwatch_headline_level:max")

    levels = {row["metric"]["instance"]: float(row["value"][1]) for row in found}
    assert levels[chain.hung.url[7:]] == -1
    assert levels[chain.xid.url[7:]] == 2
    assert chain.calm.url[7:] not in levels
    assert chain.query("instance:kvwatch_gpu_memory_free_bytes:min")


def test_the_pages_link_opens_the_evidence(chain: Chain) -> None:
    """The link in the page leads to a page of that host that begins with the cause, in a sentence."""
    _, alert = chain.first("/page", "firing", chain.busy, 60, alertname=THRASHING)

    with urllib.request.urlopen(alert["annotations"]["evidence"], timeout=5) as answer:
        page, address = answer.read().decode(), answer.geturl()

    assert address.startswith(f"{chain.busy.url}/evidence/")
    cause = re.search(r'class="headline red">.*?<span>([^<]+)</span></p>', page)
    assert cause is not None, page[:2000]
    sentence = html.unescape(cause[1])
    print(f"evidence: {sentence}")
    assert "chat" in sentence
    document = json.loads(chain.busy.get(f"/api/v1/evidence/{address.rpartition('/')[2]}"))
    assert document["cause"] == sentence
    assert document["rule"] == "recompute_tax"
    assert time.time() - document["wall_s"] < 120
