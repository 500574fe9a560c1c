"""A healthy server's whole life pages nobody; a sick one pages and recovers; silence is never green."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvwatch.model.gpu import GpuHealth
from kvwatch.model.level import Level, Reason, RuleId
from kvwatch.model.report import TickReport
from kvwatch.model.sample import FailureKind
from kvwatch.model.settings import MIB, Settings
from tests.core.host import CHAT, TOTAL, Host, paged

DISCOVERED = Settings(servers=(replace(CHAT, configured=False),))


def start(host: Host, load_s: int, refused_s: int = 5) -> list[TickReport]:
    """Start the server: nothing listens, memory fills to 92 % while it loads, then it serves."""
    host.serving, host.process, host.used_bytes = False, False, 0
    reports = host.run(refused_s)
    host.process = True
    for second in range(load_s):
        host.used_bytes = int(0.92 * TOTAL * min(1.0, (second + 1) / min(load_s, 60)))
        reports.append(host.tick())
    host.serving, host.usage, host.running = True, 0.0, 0
    return reports


def busy_hour(host: Host, seconds: int = 3600) -> list[TickReport]:
    """A full pool with a queue, a few preemptions that cost little, and good latency."""
    host.usage, host.running, host.waiting, host.ttft_s = 0.99, 60, 20, 0.8
    reports = []
    for second in range(seconds):
        host.preemptions_per_s = 1.0 if second % 30 == 0 else 0.0
        host.used_bytes = int(0.92 * TOTAL) + (second % 7) * 8 * MIB
        reports.append(host.tick())
    return reports


@pytest.mark.parametrize("configured", [True, False])
def test_nothing_is_red_on_a_deploy_a_load_and_a_busy_hour(configured: bool) -> None:
    """Start, load, an hour with the pool full, and the end of a healthy server page nobody."""
    host = Host() if configured else Host(settings=DISCOVERED)
    reports = start(host, load_s=80 if configured else 600)
    host.usage, host.running = 0.4, 20
    reports += host.run(400)
    reports += busy_hour(host)
    if configured:  # a planned end is a change of the configuration
        host.configure(Settings())
    host.serving, host.process, host.used_bytes = False, False, 0
    reports += host.run(300)

    assert paged(reports) == []
    assert Level.RED not in {report.headline for report in reports}
    assert Level.YELLOW in {v.level for r in reports for v in r.verdicts if v.rule is RuleId.KV_USAGE}


def test_a_deploy_that_restarts_a_configured_server_pages_nobody() -> None:
    """A restart within two minutes, with all its counters and memory starting over, is no incident."""
    host = Host()
    reports = host.run(400)
    reports += start(host, load_s=90)
    host.usage, host.running = 0.4, 20
    reports += host.run(400)

    assert paged(reports) == []


def test_a_slow_loader_that_says_so_pages_nobody() -> None:
    """A configured server that answers `loading` for ten minutes is not down."""
    host = Host(failure=FailureKind.LOADING)
    reports = start(host, load_s=600)
    reports += host.run(60)

    assert paged(reports) == []
    assert host.level(RuleId.SERVER_DOWN) is Level.GREEN


def test_overload_is_red_and_green_again() -> None:
    """Preemption thrash with a queue and late first tokens is red while it lasts, green two minutes later."""
    host = Host()
    host.run(120)
    assert host.level(RuleId.RECOMPUTE_TAX) is Level.GREEN
    host.usage, host.running, host.waiting = 0.99, 40, 30
    host.preemptions_per_s, host.ttft_s = 3.0, 4.0
    during = host.run(90)
    assert [host.level(rule) for rule in (RuleId.RECOMPUTE_TAX, RuleId.LATENCY_SLO, RuleId.KV_USAGE)] == [
        Level.RED
    ] * 3
    assert host.report is not None
    assert host.report.headline is Level.RED
    assert "recompute_tax of chat/0" in host.report.headline_detail
    host.usage, host.waiting, host.preemptions_per_s, host.ttft_s = 0.3, 0, 0.0, 0.3
    host.run(120)

    assert paged(during)
    assert paged([host.report]) == []
    assert host.report.headline is Level.GREEN


def test_silent_server_becomes_unknown_and_never_green() -> None:
    """From the moment its data is stale until there is new data, no rule about a server's engine is green."""
    host = Host()
    host.run(60)
    host.serving = False
    reports = host.run(30)
    engine_rules = {RuleId.KV_USAGE, RuleId.RECOMPUTE_TAX, RuleId.LATENCY_SLO, RuleId.SERVER_STALLED}
    stale = [r for r in reports if r.servers[0].stale]

    assert len(stale) >= 26
    for report in stale:
        for verdict in report.verdicts:
            if verdict.rule in engine_rules:
                assert (verdict.level, verdict.value) == (Level.UNKNOWN, None), verdict
        assert report.headline is Level.UNKNOWN
        assert report.servers[0].state is None


def test_stuck_gpu_source_becomes_unknown_and_never_green() -> None:
    """A worker that hangs takes the memory and all levels of its GPUs away, not their names."""
    host = Host()
    host.run(60)
    host.gpu_answers = False
    host.run(10)
    report = host.report
    assert report is not None

    assert host.level(RuleId.DEVICE_HEADROOM) is Level.UNKNOWN
    assert host.level(RuleId.GPU_LOST) is Level.UNKNOWN
    gpu = report.gpus[0]
    assert (gpu.stale, gpu.up, gpu.state.memory, gpu.state.name) == (True, False, None, "H200")
    assert "GPU 0" in report.headline_detail


def test_a_single_sample_after_a_restart_triggers_nothing() -> None:
    """The first page after a restart shows its figures, and no rule judges them."""
    host = Host(usage=1.0, waiting=50, ttft_s=9.0)
    host.tick()
    assert host.verdict(RuleId.KV_USAGE).reason is Reason.TOO_FEW
    host.run(60)
    host.counters = {}
    host.ttft = [0.0] * len(host.ttft)
    host.tick()
    assert host.verdict(RuleId.KV_USAGE).reason is Reason.TOO_FEW
    assert host.level(RuleId.LATENCY_SLO) is Level.UNKNOWN


def test_two_risks_in_one_host() -> None:
    """A pool that thrashes raises no device rule, and a device that runs out raises no KV rule."""
    device = (RuleId.DEVICE_HEADROOM, RuleId.DEVICE_EXHAUSTION, RuleId.DEAD_PROCESS_MEMORY)
    host = Host()
    host.run(700)
    host.usage, host.waiting, host.running, host.preemptions_per_s = 1.0, 30, 40, 3.0
    host.run(120)
    assert host.level(RuleId.RECOMPUTE_TAX) is Level.RED
    assert {host.level(rule) for rule in device} == {Level.GREEN}

    host = Host()
    host.run(700)
    for _ in range(60):
        host.used_bytes = min(TOTAL - 100 * MIB, host.used_bytes + 200 * MIB)
        host.tick()
    host.used_bytes = TOTAL - 90 * MIB
    host.tick()
    assert host.level(RuleId.DEVICE_HEADROOM) is Level.RED
    assert host.level(RuleId.KV_USAGE) is host.level(RuleId.RECOMPUTE_TAX) is Level.GREEN


def test_case_E1_a_lost_gpu_stays_and_says_so() -> None:
    """E1: a GPU that falls off the bus stays in the report with `up` False and its reason, and pages."""
    host = Host()
    host.run(10)
    host.health, host.xids = GpuHealth.LOST, ((79, 1),)
    report = host.tick()

    gpu = report.gpus[0]
    assert (gpu.up, gpu.state.health, gpu.state.health_detail) == (False, GpuHealth.LOST, "GPU is lost")
    assert host.level(RuleId.GPU_LOST) is host.level(RuleId.GPU_XID) is Level.RED
    assert {"gpu_lost", "gpu_xid"} == {rule for _, rule in paged([report])}
    told = [event.message for event in report.events if event.kind == "gpu"]
    assert told == ["GPU 0 (GPU-1) is lost: GPU is lost", "GPU 0 (GPU-1) reported Xid 79"]


def test_maintenance_of_the_gpus_pages_nobody() -> None:
    """GPUs that were released are neither lost nor stale alarms, for as long as it takes."""
    host = Host()
    host.run(60)
    host.paused = True
    reports = host.run(120)

    assert paged(reports) == []
    assert host.verdict(RuleId.DEVICE_HEADROOM).reason is Reason.MAINTENANCE
    assert host.level(RuleId.RECOMPUTE_TAX) is Level.GREEN


def test_case_I3_a_leak_of_hours_is_told_before_it_kills() -> None:
    """I3: free memory that drifts from 1.5 GiB at 4 MiB a minute is yellow and red long before it is gone."""
    host = Host(used_bytes=TOTAL - 1517 * MIB)
    first: dict[tuple[RuleId, Level], float] = {}
    for second in range(0, 22_700, 10):
        host.used_bytes = TOTAL - 1517 * MIB + int(second / 60 * 4 * MIB)
        host.tick(10.0)
        for rule in (RuleId.DEVICE_HEADROOM, RuleId.DEVICE_EXHAUSTION):
            first.setdefault((rule, host.level(rule)), host.now_s)
    gone_s = 1000.0 + 1517 / 4 * 60

    assert gone_s - first[(RuleId.DEVICE_HEADROOM, Level.RED)] > 3600
    assert gone_s - first[(RuleId.DEVICE_EXHAUSTION, Level.YELLOW)] > 1500
    assert gone_s - first[(RuleId.DEVICE_EXHAUSTION, Level.RED)] > 240
    assert host.level(RuleId.KV_USAGE) is Level.GREEN
