"""The rules as Prometheus itself reads and runs them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from kvwatch.catalogue.alerts import ALERTS

ALERTS_DIR = Path(__file__).parents[2] / "alerts"
RULES = "kvwatch.rules.yml"
TESTS = "kvwatch.rules_test.yml"

pytestmark = pytest.mark.needs("promtool")


def _promtool(*arguments: str, cwd: Path = ALERTS_DIR) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=110
    )


def test_rules_are_clean() -> None:
    """promtool's linter has nothing to say."""
    done = _promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_every_case_holds() -> None:
    """Each alert fires, stays silent, recovers, and survives missing series, restarts and dead hosts."""
    done = _promtool("test", "rules", TESTS)

    assert done.returncode == 0, (done.stdout + done.stderr)[:4000]


def test_every_row_has_cases() -> None:
    """No alert, at no severity, is without a case in which it fires and one in which it does not."""
    cases = yaml.safe_load((ALERTS_DIR / TESTS).read_text())["tests"]
    checks = [check for case in cases for check in case["alert_rule_test"]]
    for spec in ALERTS:
        mine = [check for check in checks if check["alertname"] == spec.name]
        severities = [a["exp_labels"]["severity"] for check in mine for a in check["exp_alerts"]]
        assert spec.severity in severities, spec.name
        assert [] in [check["exp_alerts"] for check in mine], spec.name


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('kvwatch_rule_level{rule="gpu_lost"} == 2', 'kvwatch_rule_level{rule="gpu_lost"} >= 1'),
        ("keep_firing_for: 5m", "keep_firing_for: 15s"),
        ("for: 1m", "for: 3m"),
        ("and on (job, instance) (kvwatch_rule_level", "or (kvwatch_rule_level"),
        (' or absent(up{job="kvwatch"})', ""),
        ("device memory left", "device memory"),
    ],
    ids=["level", "keeps-firing", "for", "stale-rule", "absent", "text"],
)
def test_cases_notice_a_wrong_rule(tmp_path: Path, right: str, wrong: str) -> None:
    """A rule that is changed makes a case fail: the cases are not decoration."""
    text = (ALERTS_DIR / RULES).read_text()
    cases = yaml.safe_load((ALERTS_DIR / TESTS).read_text())
    wanted = ("KvwatchGpuLost", "KvwatchSourceStale", "KvwatchDown", "KvwatchDeviceHeadroomLow (page) fires")
    cases["tests"] = [case for case in cases["tests"] if case["name"].startswith(wanted)]
    assert right in text
    (tmp_path / RULES).write_text(text.replace(right, wrong))
    (tmp_path / TESTS).write_text(yaml.safe_dump(cases))

    done = _promtool("test", "rules", TESTS, cwd=tmp_path)

    assert done.returncode != 0
    assert "FAILED" in done.stdout + done.stderr


def test_operator_form_holds_the_same_rules() -> None:
    """The PrometheusRule object is the rules file in another wrapping."""
    plain = yaml.safe_load((ALERTS_DIR / RULES).read_text())
    operator = yaml.safe_load((ALERTS_DIR / "prometheusrule.yml").read_text())

    assert operator["kind"] == "PrometheusRule"
    assert operator["spec"] == plain
