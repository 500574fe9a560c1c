"""How is every alert shown to work? Cases for `promtool test rules`, made from the examples in the catalogue.

Each alert on a rule gets the same six cases; alerts of kvwatch itself have theirs written by hand.
Time is in steps of 15 s. Expected texts come from the examples, not from the templates.
"""

from __future__ import annotations

from collections.abc import Callable

from kvwatch.catalogue.alert_spec import SCOPE_LABELS, AlertSpec
from kvwatch.catalogue.alerts import ALERTS
from kvwatch.catalogue.promql import number
from kvwatch.gen import alert_cases, recording_cases, yamltext
from kvwatch.gen.promtool import HOST, STEP_S, Case, case, expects, metric_series
from kvwatch.model.level import Level

TESTS_FILE = "alerts/kvwatch.rules_test.yml"
# Long enough for every `for` (at most 5 min) and every `keep_firing_for`.
ONSET, LASTS, CALM = 8, 32, 60


def _facts(spec: AlertSpec) -> list[dict[str, str]]:
    """The series beside the level that the texts quote."""
    example = spec.example
    scope = {name: example.labels.get(name, "") for name in SCOPE_LABELS}
    labels = {**HOST, **scope, "rule": spec.rule.value if spec.rule else ""}
    inputs = []
    if example.value is not None:
        inputs.append(metric_series("rule_value", labels, f"{number(example.value)}x200"))
    if example.threshold is not None and spec.level is not None:
        level = {"level": spec.level.name.lower()}
        inputs.append(metric_series("rule_threshold", labels | level, f"{number(example.threshold)}x200"))
    if example.xid:
        gpu = {**HOST, "uuid": example.labels["uuid"], "gpu": example.labels["gpu"], "xid": example.xid}
        # The event comes with the level; a second one later keeps it within the window of the text.
        inputs.append(metric_series("gpu_xid_events_total", gpu, f"0x{ONSET - 1} 1x15 2x150"))
    return inputs


def _rule_cases(spec: AlertSpec) -> list[Case]:
    """Fires and recovers; not at another level; not when unknown or missing; restart and death bridged."""
    if spec.rule is None or spec.level is None:
        return []
    bad = spec.level.value
    labels = {**HOST, **{k: v for k, v in spec.example.labels.items() if k in SCOPE_LABELS}}
    title = f"{spec.name} ({spec.severity})"
    wait = ONSET + -(-spec.for_s // STEP_S)
    keep = spec.keep_firing_for_s // STEP_S
    end = ONSET + LASTS

    def level(values: str) -> list[dict[str, str]]:
        return [*_facts(spec), metric_series("rule_level", labels | {"rule": _rule(spec)}, values)]

    fires = expects(spec, wait, spec.example)
    during = [fires]
    if wait > ONSET:
        during.insert(0, expects(spec, wait - 1))
    # Short enough that the alert which the other level may have does not fire either.
    other = Level.YELLOW if spec.level is Level.RED else Level.GREEN
    cases = [
        case(
            f"{title} fires and recovers",
            level(f"0x{ONSET - 1} {bad}x{LASTS - 1} 0x{CALM}"),
            expects(spec, ONSET - 1),
            *during,
            expects(spec, end - 1, spec.example),
            expects(spec, end + keep + 1),
        ),
        case(
            f"{title} does not fire at another level",
            level(f"0x{ONSET - 1} {other.value}x2 -1x{CALM}"),
            *(expects(spec, step) for step in (ONSET + 2, end, end + 20)),
        ),
        case(f"{title} does not fire on missing series", _facts(spec), expects(spec, 4), expects(spec, 60)),
    ]
    return [*cases, *_bridges(spec, title, level)] if keep else cases


def _rule(spec: AlertSpec) -> str:
    return spec.rule.value if spec.rule is not None else ""


def _bridges(spec: AlertSpec, title: str, level: Callable[[str], list[dict[str, str]]]) -> list[Case]:
    """The series goes away without anything being better: the alert stays."""
    if spec.level is None:
        return []
    bad = spec.level.value
    end = ONSET + LASTS
    soon = end + spec.keep_firing_for_s // STEP_S - 1
    return [
        case(
            f"{title} stays when kvwatch restarts and knows nothing at first",
            level(f"0x{ONSET - 1} {bad}x{LASTS - 1} stale _x2 -1x1 {bad}x{CALM}"),
            *(expects(spec, step, spec.example) for step in (end - 1, end + 2, end + 4, end + 20)),
        ),
        case(
            f"{title} stays when the host dies in that state",
            level(f"0x{ONSET - 1} {bad}x{LASTS - 1} stale"),
            expects(spec, end, spec.example),
            expects(spec, soon, spec.example),
            expects(spec, soon + 3),
        ),
    ]


def files() -> dict[str, str]:
    """The rule tests."""
    tests = [
        *alert_cases.cases(),
        *(case for spec in ALERTS for case in _rule_cases(spec)),
        *recording_cases.cases(),
    ]
    document = {
        "rule_files": ["kvwatch.rules.yml"],
        "evaluation_interval": f"{STEP_S}s",
        "tests": tests,
    }
    return {
        TESTS_FILE: yamltext.dump(
            document, "\nRun: cd alerts && promtool test rules kvwatch.rules_test.yml\n"
        )
    }
