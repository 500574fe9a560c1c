"""The rules as Prometheus itself reads and runs them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvwatch.catalogue.alert_recordings import PAGING, RECORDINGS
from kvwatch.catalogue.alerts import ALERTS
from kvwatch.rules.shipped import SPECS

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
    assert f"{len(ALERTS) + len(RECORDINGS)} rules found" in done.stdout


def test_every_case_holds() -> None:
    """Each alert fires, stays silent, recovers, and survives missing series, restarts and dead hosts."""
    done = _promtool("test", "rules", TESTS)

    assert done.returncode == 0, (done.stdout + done.stderr)[:4000]


def test_every_row_has_cases() -> None:
    """No alert, at no severity, is without a case in which it fires and one in which it does not."""
    cases = yaml.safe_load((ALERTS_DIR / TESTS).read_text())["tests"]
    checks = [check for case in cases for check in case.get("alert_rule_test", [])]
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


def test_every_recording_has_a_case() -> None:
    """Each series is computed from given input and compared, and named level:metric:operation."""
    cases = yaml.safe_load((ALERTS_DIR / TESTS).read_text())["tests"]
    asked = {check["expr"] for case in cases for check in case.get("promql_expr_test", [])}

    assert asked == {row.name for row in RECORDINGS}
    for row in RECORDINGS:
        level, name, operation = row.name.split(":")
        kept = set(level.split("_")) - {"job"}
        assert kept == set(row.expr.labels) - {"job"} or row.expr.labels >= kept
        assert operation in row.expr.text
        assert name.removesuffix("_red") in row.expr.text


def test_recordings_look_at_the_rules_that_page() -> None:
    """The list of paging rules is that of the rules themselves."""
    assert set(PAGING) == {spec.rule.value for spec in SPECS if spec.pages}


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('server!=""', 'server=""'),
        ("min by (job, instance) (kvwatch_gpu", "max by (job, instance) (kvwatch_gpu"),
        (" unless on (job, instance, uuid)", " and on (job, instance, uuid)"),
        ("(kvwatch_requests)", "(kvwatch_requests > 3)"),
        ('bound="central"', 'bound="low"'),
    ],
    ids=["server", "min", "split", "requests", "bound"],
)
def test_cases_notice_a_wrong_recording(tmp_path: Path, right: str, wrong: str) -> None:
    """A recording that is changed makes a case fail."""
    text = (ALERTS_DIR / RULES).read_text()
    cases = yaml.safe_load((ALERTS_DIR / TESTS).read_text())
    cases["tests"] = [case for case in cases["tests"] if "promql_expr_test" in case]
    assert right in text
    (tmp_path / RULES).write_text(text.replace(right, wrong))
    (tmp_path / TESTS).write_text(yaml.safe_dump(cases))

    done = _promtool("test", "rules", TESTS, cwd=tmp_path)

    assert done.returncode != 0
    assert "FAILED" in done.stdout + done.stderr


def _operator_form() -> dict[str, Any]:
    return dict(yaml.safe_load((ALERTS_DIR / "kvwatch.prometheusrule.yaml").read_text()))


def _validator() -> jsonschema.Draft202012Validator:
    crd = yaml.safe_load((Path(__file__).parent / "prometheusrule_crd.yml").read_text())
    return jsonschema.Draft202012Validator(crd["openAPIV3Schema"])


def test_operator_form_holds_the_same_rules() -> None:
    """The PrometheusRule object is the rules file in another wrapping."""
    operator = _operator_form()

    assert (operator["apiVersion"], operator["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert operator["spec"] == yaml.safe_load((ALERTS_DIR / RULES).read_text())


def test_operator_form_fits_the_operators_schema() -> None:
    """The object is what the CRD of the Prometheus operator takes; no field is unknown to it."""
    assert [error.message for error in _validator().iter_errors(_operator_form())] == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rule: rule.update({"for": "1 m"}),
        lambda rule: rule.update({"for": 60}),
        lambda rule: rule.update({"keepFiringFor": "1m"}),
        lambda rule: rule.pop("expr"),
        lambda rule: rule.update({"labels": {"severity": 1}}),
        lambda rule: rule.update({"annotations": ["x"]}),
    ],
    ids=["duration", "number", "unknown field", "no expression", "label", "annotations"],
)
def test_the_schema_notices_what_the_operator_would_refuse(spoil: Callable[[dict[str, Any]], object]) -> None:
    """The check is no decoration."""
    document = _operator_form()
    spoil(document["spec"]["groups"][1]["rules"][0])

    assert list(_validator().iter_errors(document))
