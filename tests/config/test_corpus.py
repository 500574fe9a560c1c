"""A corpus of configurations: each bad one has its finding, each good one has none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvwatch import config
from kvwatch.config.findings import Finding

ROOT = Path(__file__).parent.parent.parent
CORPUS = ROOT / "tests" / "fixtures" / "config"
BAD = sorted((CORPUS / "bad").glob("*.yml"))
GOOD = [*sorted((CORPUS / "good").glob("*.yml")), ROOT / "packaging" / "kvwatch.yml"]
EXPECT = re.compile(r"# expect: (\d+):(\d+): (\S+): (.+)")

TWENTY = [
    (2, 7, "tick"),
    (4, 11, "web.listen"),
    (6, 11, "gpus.source"),
    (8, 11, "servers[0].name"),
    (9, 11, "servers[0].kind"),
    (10, 10, "servers[0].url"),
    (11, 13, "servers[0].period"),
    (12, 14, "servers[0].timeout"),
    (13, 12, "servers[0].auth.bearer"),
    (14, 21, "servers[0].slo.ttft_p95"),
    (17, 14, "servers[1].timeout"),
    (18, 11, "servers[2].name"),
    (21, 22, "rules.kv_usage.yellow"),
    (22, 25, "rules.kv_block_waste.red"),
    (24, 16, "notify[0].on[1]"),
    (24, 38, "notify[0].exec.argv"),
    (26, 9, "control.mode"),
    (28, 15, "control.targets[0].server"),
    (29, 15, "control.targets[0].policy"),
    (30, 21, "record.max_bytes"),
]


def findings_of(path: Path) -> tuple[Finding, ...]:
    """Every finding, none for a good file."""
    try:
        config.load(path)
    except config.ConfigError as error:
        return error.findings
    return ()


def test_the_corpus_is_there() -> None:
    """An empty glob would let the other tests pass without looking at anything."""
    assert len(BAD) >= 130
    assert len(GOOD) >= 5


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_one_mistake_gives_its_one_finding(path: Path) -> None:
    """A file with one mistake gives exactly one finding, at the place and with the words it declares."""
    expected = EXPECT.match(path.read_text())
    assert expected is not None
    line, col, key, message = expected.groups()

    findings = findings_of(path)

    assert [str(one) for one in findings] == [f"{path}:{line}:{col}: {key}: {findings[0].message}"]
    assert message in findings[0].message


def test_twenty_mistakes_give_twenty_findings_at_once() -> None:
    """Nothing stops at the first mistake, and no mistake brings a second finding with it."""
    findings = findings_of(CORPUS / "twenty.yml")

    assert [(one.line, one.col, one.path) for one in findings] == TWENTY


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_a_good_file_is_silent(path: Path) -> None:
    """The public example, every key once, and files with next to nothing in them give no finding."""
    assert findings_of(path) == ()


@pytest.mark.parametrize("path", [*BAD, CORPUS / "twenty.yml"], ids=lambda path: path.stem)
def test_findings_never_show_a_secret(path: Path) -> None:
    """What was written where a secret may stand is not repeated in the finding."""
    assert all("hunter2" not in str(one) for one in findings_of(path))
