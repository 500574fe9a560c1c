"""The status page in a real browser."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from kvwatch.exporters import web_routes
from kvwatch.model.report import Event, TickReport
from kvwatch.rules.shipped import SPECS
from kvwatch.rules.spec import Unit
from tests.exporters import sample
from tests.exporters.serve import FixedProvider, serving

BROWSER = (
    "chromium",
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=3000",
    "--dump-dom",
)

EVIDENCE = "20261130T000000Z-recompute_tax-chat~0~"
KEPT = Event(
    seq=43,
    wall_s=sample.NOW_WALL_S,
    kind="evidence",
    message=f"evidence kept: /evidence/{EVIDENCE}",
    fields={"evidence": EVIDENCE},
)


def browse(report: TickReport | None, tmp_path: Path) -> tuple[str, str]:
    """The page's elements after three seconds, and what the browser logged."""
    provider = FixedProvider(current=report)
    provider.log.add((*sample.events(), KEPT))
    with serving(provider) as server:
        done = subprocess.run(
            [*BROWSER, f"--user-data-dir={tmp_path}", server.url],
            capture_output=True,
            text=True,
            timeout=90,
            check=True,
        )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_the_page_shows_each_rule_in_its_own_unit() -> None:
    """A state or a count is shown as a plain number, never as seconds; every other rule in its unit."""
    script = (web_routes.ASSETS / "status.js").read_text(encoding="utf-8")
    block = script.partition("const UNIT = {")[2].partition("}")[0]
    shown = dict(re.findall(r'(\w+): "(\w+)"', block))
    words = {Unit.RATIO: "ratio", Unit.SECONDS: "s", Unit.BYTES: "bytes", Unit.PER_MINUTE: "per_min"}
    wanted = {spec.rule.value: words[spec.unit] for spec in SPECS if spec.unit in words}

    assert shown == wanted | {"latency_slo": "times"}


@pytest.mark.needs("chromium")
@pytest.mark.timeout(120)
def test_the_page_shows_the_report_and_hostile_names_stay_text(tmp_path: Path) -> None:
    """The browser draws levels, memory, holders and unknowns; a process named like markup is only text."""
    page, console = browse(sample.report(), tmp_path)
    text = re.sub(r"<[^>]+>", " ", page)

    assert console == ""
    for wanted in (
        "▲ red",
        "380 MiB free and falling",
        "KV in use 52.0 GiB",
        "dead",
        "not filling",
        "Xid 79",
        "A 15 s reader misses",
        "vllm.service",
        "nothing reports this value here",
        "would cap chat",
    ):
        assert wanted in text, wanted
    # The link of a red rule that pages, to what was kept of the minutes before; yellow ones have none.
    links = re.findall(r'href="/evidence/latest\?rule=(\w+)&amp;server=([^&]*)&', page)
    assert {("device_headroom", ""), ("recompute_tax", "chat"), ("gpu_lost", "")} <= set(links)
    assert "kv_usage" not in {rule for rule, _ in links}
    assert f'href="/evidence/{EVIDENCE}"' in page
    assert "<img" not in page
    assert page.count("<script") == 1
    assert "&lt;img src=x" in page
    assert "hunter2" not in page
    assert "NaN" not in text
    assert "undefined" not in text
    assert "[object" not in text


@pytest.mark.needs("chromium")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("report", [sample.empty_report(), None], ids=["nothing known", "no report"])
def test_the_page_says_what_it_does_not_know(report: TickReport | None, tmp_path: Path) -> None:
    """With nothing known, or no report at all, the page says so and raises no script error."""
    page, console = browse(report, tmp_path)
    text = re.sub(r"<[^>]+>", " ", page)

    assert "TypeError" not in console
    assert ("? unknown" in text) if report is not None else ("it is starting" in text)
    assert "undefined" not in text


def test_the_assets_need_nothing_from_elsewhere() -> None:
    """Page, style and script refer to this server alone."""
    folder = Path(__file__).parents[2] / "kvwatch" / "exporters" / "assets"
    for path in folder.iterdir():
        found = set(re.findall(r"https?://[^\s\"')]+", path.read_text(encoding="utf-8")))
        assert found <= {"http://www.w3.org/2000/svg"}, path.name
