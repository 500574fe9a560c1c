"""Which alert cases are written by hand? Those of kvwatch itself, and what only shows between alerts."""

from __future__ import annotations

from kvwatch.catalogue.alert_spec import AlertSpec, Example
from kvwatch.gen.promtool import HOST, Case, case, expects, metric_series, series, spec_of

OTHER_HOST = {**HOST, "instance": "gpu-host-2:9843"}
GPU = {"uuid": "GPU-11111111-2222-3333-4444-555555555555", "gpu": "3"}
SERVER = {"server": "chat", "engine": "0"}


def _up(values: str, host: dict[str, str] = HOST) -> dict[str, str]:
    return series("up", host, values)


def _down() -> list[Case]:
    spec = spec_of("KvwatchDown")
    here = Example()
    nowhere = Example(instance="")
    node = {"instance": "gpu-host-1:9100", "job": "node"}
    return [
        case(
            "KvwatchDown fires a minute after the last good scrape and ends with the next",
            [_up("1x7 0x15 1x20")],
            expects(spec, 7),
            expects(spec, 11),
            expects(spec, 12, here),
            expects(spec, 23, here),
            expects(spec, 24),
        ),
        case(
            "KvwatchDown ignores one missed scrape", [_up("1x7 0 1x20")], expects(spec, 8), expects(spec, 14)
        ),
        case(
            "KvwatchDown fires when Prometheus knows no kvwatch at all",
            [series("up", node, "1x40")],
            expects(spec, 3),
            expects(spec, 4, nowhere),
        ),
        case(
            "KvwatchDown names the host that is down and leaves the others alone",
            [_up("1x40"), _up("0x40", OTHER_HOST)],
            expects(spec, 10, Example(instance="gpu-host-2:9843", labels={"instance": "gpu-host-2:9843"})),
        ),
        case(
            "KvwatchDown does not silence what was red: both fire when a host dies while red",
            [
                _up("1x15 0x30"),
                metric_series("rule_level", {**HOST, **GPU, "rule": "gpu_lost"}, "0x3 2x11 stale"),
            ],
            expects(spec, 20, here),
            expects(spec_of("KvwatchGpuLost"), 20, spec_of("KvwatchGpuLost").example),
        ),
    ]


def _stale() -> list[Case]:
    spec = spec_of("KvwatchSourceStale")
    chat = {**HOST, "source": "server/chat"}
    nvml = {**HOST, "source": "nvml"}
    rule = {**HOST, "rule": "source_stale"}
    named = Example(labels={"source": "server/chat"})
    return [
        case(
            "KvwatchSourceStale names the source that fails, and only that",
            [
                metric_series("source_up", chat, "1x3 0x20 1x60"),
                metric_series("source_up", nvml, "1x90"),
                metric_series("rule_level", rule, "0x3 1x20 0x60"),
            ],
            expects(spec, 7),
            expects(spec, 8, named),
            expects(spec, 24, named),
            expects(spec, 46),
        ),
        case(
            "KvwatchSourceStale leaves a failure alone that the rule does not call stale",
            [
                metric_series("source_up", chat, "0x60"),
                metric_series("rule_level", rule, "0x60"),
            ],
            expects(spec, 30),
        ),
        case(
            "KvwatchSourceStale respects a rule that is switched off",
            [metric_series("source_up", chat, "0x60")],
            expects(spec, 30),
        ),
        case(
            "KvwatchSourceStale looks at one host at a time",
            [
                metric_series("source_up", chat, "0x60"),
                metric_series("rule_level", {**OTHER_HOST, "rule": "source_stale"}, "1x60"),
            ],
            expects(spec, 30),
        ),
    ]


def _simple(name: str, metric: str, labels: dict[str, str], good: int, example: Example) -> list[Case]:
    """Cases of an alert on one gauge that is 0 or 1."""
    spec = spec_of(name)
    bad = 1 - good
    return [
        case(
            f"{name} fires after a minute and recovers",
            [metric_series(metric, {**HOST, **labels}, f"{good}x3 {bad}x20 {good}x60")],
            expects(spec, 7),
            expects(spec, 8, example),
            expects(spec, 24, example),
            expects(spec, 46),
        ),
        case(f"{name} does not fire on missing series", [_up("1x60")], expects(spec, 30)),
        case(
            f"{name} stays when kvwatch restarts or the host dies",
            [metric_series(metric, {**HOST, **labels}, f"{good}x3 {bad}x20 stale")],
            expects(spec, 30, example),
            expects(spec, 46),
        ),
    ]


def _actions() -> list[Case]:
    spec = spec_of("KvwatchActionFailing")

    def runs(outcome: str, values: str) -> dict[str, str]:
        return metric_series("actions_total", {**HOST, "action": "exec", "outcome": outcome}, values)

    two = Example(labels={"action": "exec"}, shown="2")
    return [
        case(
            "KvwatchActionFailing fires at the second failure and ends ten minutes later",
            [runs("failed", "0x40 1x3 2x160"), runs("applied", "0x200")],
            expects(spec, 43),
            expects(spec, 45, two),
            expects(spec, 84 + 21),
        ),
        case(
            "KvwatchActionFailing leaves one failure alone",
            [runs("failed", "0x40 1x160"), runs("applied", "0x20 1+1x160")],
            expects(spec, 45),
            expects(spec, 60),
        ),
        case(
            "KvwatchActionFailing does not take a restart of the counters for failures",
            [runs("failed", "7x40 0x100"), runs("timed_out", "3x40 0x100")],
            expects(spec, 42),
            expects(spec, 60),
        ),
        case("KvwatchActionFailing does not fire on missing series", [_up("1x60")], expects(spec, 30)),
    ]


def _leases() -> list[Case]:
    spec = spec_of("KvwatchLeaseStuck")
    labels = {**HOST, **SERVER}

    def lease(expiry: str, active: str) -> list[dict[str, str]]:
        return [
            metric_series("lease_expiry_timestamp_seconds", labels, expiry),
            metric_series("limit_active", labels, active),
        ]

    # Time starts at 0, so a lease that ends at 60 s ran out 140 s before 200 s.
    after = Example(labels=SERVER, shown="2m 30s")
    return [
        case(
            "KvwatchLeaseStuck fires when a limit outlives its lease by two minutes",
            lease("60x60", "1x60"),
            expects(spec, 12),
            expects(spec, 14, after),
        ),
        case(
            "KvwatchLeaseStuck leaves a lease alone that is renewed",
            lease("15+15x60", "1x60"),
            expects(spec, 20),
            expects(spec, 59),
        ),
        case(
            "KvwatchLeaseStuck leaves a limit alone that was given back",
            lease("60x60", "1x5 0x60"),
            expects(spec, 20),
            expects(spec, 59),
        ),
        case("KvwatchLeaseStuck does not fire on missing series", [_up("1x60")], expects(spec, 30)),
    ]


def _fleet() -> list[Case]:
    spec: AlertSpec = spec_of("KvwatchDeviceHeadroomLow", "page")
    rule = {"rule": "device_headroom"}
    bytes_left, limit = 268435456, 805306368
    changed = Example(
        labels=GPU, where="GPU 3", value=bytes_left, shown="256MiB", threshold=limit, shown_threshold="768MiB"
    )
    facts = [
        metric_series("rule_value", {**HOST, **GPU, **rule}, f"{bytes_left}x60"),
        metric_series("rule_threshold", {**HOST, **GPU, **rule, "level": "red"}, f"{limit}x60"),
    ]
    return [
        case(
            "A red GPU says nothing about another host; a changed threshold needs no new rules",
            [
                *facts,
                metric_series("rule_level", {**HOST, **GPU, **rule}, "2x60"),
                metric_series("rule_level", {**OTHER_HOST, **GPU, **rule}, "0x60"),
            ],
            expects(spec, 10, changed),
        )
    ]


def cases() -> list[Case]:
    """Every case that is not generated from an example."""
    stuck = Example(labels={"source": "nvml"})
    return [
        *_down(),
        *_stale(),
        *_simple("KvwatchSourceStuck", "source_stuck", {"source": "nvml"}, 0, stuck),
        *_simple("KvwatchConfigReloadFailed", "config_last_reload_successful", {}, 1, Example()),
        *_actions(),
        *_leases(),
        *_fleet(),
    ]
