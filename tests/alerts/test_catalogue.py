"""Who is told what: the alerts of the contract, their severities, and a runbook for each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvwatch.catalogue.alerts import ALERTS, RUNBOOKS
from kvwatch.exporters.prometheus import go_float
from kvwatch.model.level import Level
from kvwatch.rules.shipped import SPECS
from tests.gen.expressions import LABELS, mistakes

ROOT = Path(__file__).parents[2]
NAMES = (
    "KvwatchDown",
    "KvwatchSourceStale",
    "KvwatchSourceStuck",
    "KvwatchConfigReloadFailed",
    "KvwatchActionFailing",
    "KvwatchLeaseStuck",
    "KvwatchServerDown",
    "KvwatchServerStalled",
    "KvwatchKvThrashing",
    "KvwatchLatencySlo",
    "KvwatchDeviceHeadroomLow",
    "KvwatchDeviceExhaustionSoon",
    "KvwatchAllocatorRetries",
    "KvwatchLargestAllocatableLow",
    "KvwatchFragmentationHigh",
    "KvwatchDeadProcessMemory",
    "KvwatchGpuLost",
    "KvwatchGpuMissing",
    "KvwatchGpuXid",
)
MEMORIES = {  # every alert about memory, and which memory it must name
    "KvwatchKvThrashing": "kv pool",
    "KvwatchDeviceHeadroomLow": "device memory",
    "KvwatchDeviceExhaustionSoon": "device memory",
    "KvwatchDeadProcessMemory": "device memory",
    "KvwatchAllocatorRetries": "allocator",
    "KvwatchLargestAllocatableLow": "allocator",
    "KvwatchFragmentationHigh": "allocator",
}
HEADINGS = (
    "## What it means",
    "## Is it urgent?",
    "## Confirm",
    "## Do now",
    "## Change later",
    "## How the threshold was chosen",
)
SAMPLE = re.compile(r"^(kvwatch_\w+)(\{[^}]*\})? \S+$")


def test_the_alerts_of_the_contract_ship() -> None:
    """All nineteen names are there, and no other."""
    assert {spec.name for spec in ALERTS} == set(NAMES)
    assert len(NAMES) == 19


def test_only_red_of_a_paging_rule_pages() -> None:
    """Each rule that pages has exactly one page, on red; no other rule has any."""
    for spec in SPECS:
        pages = [a for a in ALERTS if a.rule is spec.rule and a.severity == "page"]
        assert [a.level for a in pages] == ([Level.RED] if spec.pages else []), spec.rule


def test_case_L2_a_full_pool_tells_nobody() -> None:
    """KV usage alone neither pages nor opens a ticket: a full pool is the normal state of a busy server."""
    assert not [a for a in ALERTS if "kv_usage" in a.expr.text]


def test_tickets_are_those_of_the_contract() -> None:
    """Fragmentation, dead memory, a stale source and contained Xids are tickets."""
    tickets = {a.rule.value for a in ALERTS if a.severity == "ticket" and a.rule is not None}

    assert tickets == {"allocator_fragmentation", "dead_process_memory", "gpu_xid"}
    assert [a.severity for a in ALERTS if a.name == "KvwatchSourceStale"] == ["ticket"]


def test_pages_come_fast_and_outlive_a_dead_host() -> None:
    """A page on a level waits 15 s at most and stays until KvwatchDown has had time to fire."""
    down = next(a for a in ALERTS if a.name == "KvwatchDown")
    for spec in ALERTS:
        if spec.severity == "page" and spec.rule is not None:
            assert spec.for_s <= 15
            assert spec.keep_firing_for_s >= down.for_s + 60


def test_thresholds_are_not_repeated() -> None:
    """Alerts on rules compare levels, so a changed threshold in the configuration needs no new rules."""
    for spec in ALERTS:
        if spec.rule is not None and spec.level is not None:
            assert spec.expr.text == f'kvwatch_rule_level{{rule="{spec.rule.value}"}} == {spec.level.value}'


@pytest.mark.parametrize("spec", ALERTS, ids=[f"{a.name}-{a.severity}" for a in ALERTS])
def test_texts_help(spec: object) -> None:
    """Each alert says where, what it means and the likely cause, and links its runbook."""
    found = next(a for a in ALERTS if a is spec)
    texts = found.annotations()

    assert "$labels" in texts["summary"]
    assert len(texts["description"]) > 120
    assert texts["runbook_url"] == f"{RUNBOOKS}{found.name}.md"
    assert mistakes(found.expr.text) == []
    assert mistakes(" ".join(texts.values())) == []


def test_case_H16_memory_alerts_say_which_memory() -> None:
    """The alert on the KV pool and the one on device memory cannot be mistaken for each other."""
    texts = {a.name: a.description for a in ALERTS}

    assert "not an out-of-memory risk" in texts["KvwatchKvThrashing"].replace("\n", " ")
    assert "not the KV pool" in texts["KvwatchDeviceHeadroomLow"]
    for name, memory in MEMORIES.items():
        summary = next(a.summary for a in ALERTS if a.name == name)
        assert memory in f"{summary} {texts[name]}".lower().replace("\n", " "), name


@pytest.mark.parametrize("name", NAMES)
def test_every_alert_has_a_runbook(name: str) -> None:
    """The runbook has the headings in order, text under each, and links that lead somewhere."""
    text = (ROOT / "docs/runbooks" / f"{name}.md").read_text()

    assert text.startswith(f"# {name}\n")
    assert [line for line in text.splitlines() if line.startswith("## ")] == list(HEADINGS)
    for part in text.split("\n## ")[1:]:
        assert len(part.partition("\n")[2].strip()) > 30, part
    assert "```console" in text
    for link in re.findall(r"\]\((\w+)\.md\)", text):
        assert link in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_runbooks_show_series_that_exist(name: str) -> None:
    """Sample output in a runbook has only metrics and labels of the catalogue, all labels of each."""
    text = (ROOT / "docs/runbooks" / f"{name}.md").read_text()
    for line in text.splitlines():
        found = SAMPLE.match(line)
        if found:
            labels = set(re.findall(r"(\w+)=", found[2] or ""))
            assert labels == LABELS[found[1]] - {"job", "instance"}, line
    for word in re.findall(r"`(kvwatch_\w+)`", text):
        assert word in LABELS, word


@pytest.mark.parametrize("name", NAMES)
def test_runbooks_show_numbers_as_the_page_writes_them(name: str) -> None:
    """What a runbook shows, and its commands look for, has the form that curl gets (`1`, not `1.0`)."""
    text = (ROOT / "docs/runbooks" / f"{name}.md").read_text()
    for line in text.splitlines():
        if SAMPLE.match(line):
            value = line.rpartition(" ")[2]
            assert value == go_float(float(value)), line
        if line.startswith("$ curl"):
            assert not re.search(r" \d+\.0'", line), line


def test_no_stray_runbook() -> None:
    """No runbook is left of an alert that is gone."""
    assert {path.stem for path in (ROOT / "docs/runbooks").glob("*.md")} == set(NAMES)
