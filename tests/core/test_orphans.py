"""What a dead server leaves in GPU memory is told; what a new one is loading is not."""

from __future__ import annotations

from kvwatch.model.level import Level, RuleId
from tests.core.host import TOTAL, Host


def test_case_F8_an_engine_that_outlives_its_server_is_told_with_pid_and_name() -> None:
    """The API server was killed and its engine process keeps the memory: a ticket after two minutes."""
    host = Host()
    host.run(320)
    assert host.level(RuleId.DEAD_PROCESS_MEMORY) is Level.GREEN
    host.serving = False
    host.run(119)
    early = host.level(RuleId.DEAD_PROCESS_MEMORY)
    host.run(10)
    verdict = host.verdict(RuleId.DEAD_PROCESS_MEMORY)

    assert early is Level.GREEN
    assert (verdict.level, verdict.pages, verdict.value) == (Level.YELLOW, False, host.used_bytes)
    assert "process 100 (vllm) of chat" in verdict.detail
    host.process, host.used_bytes = False, 0
    host.run(60)
    assert host.level(RuleId.DEAD_PROCESS_MEMORY) is Level.GREEN


def test_case_F8_a_server_that_loads_leaves_nothing_behind() -> None:
    """A new process whose memory grows while nothing answers yet is a start, however long it takes."""
    host = Host(serving=False, used_bytes=0)
    host.run(5)
    seen = set()
    for second in range(400):
        host.used_bytes = int(0.9 * TOTAL * (second + 1) / 400)
        host.tick()
        seen.add(host.level(RuleId.DEAD_PROCESS_MEMORY))

    assert seen == {Level.GREEN}


def test_a_server_that_answers_again_is_forgotten_as_an_orphan() -> None:
    """When the endpoint is back, its processes' memory is its own again."""
    host = Host()
    host.run(320)
    host.serving = False
    host.run(130)
    host.serving = True
    host.run(60)

    assert host.level(RuleId.DEAD_PROCESS_MEMORY) is Level.GREEN
