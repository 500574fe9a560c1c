"""When evidence is taken, and the sentence and the command in it."""

from __future__ import annotations

import shlex
from dataclasses import replace
from itertools import pairwise

import pytest

from kvwatch.catalogue.alerts import ALERTS
from kvwatch.core import numbered
from kvwatch.core.curves import Cut, Ring
from kvwatch.core.evidence import QUIET_S, Taken, due, gpus_of, related
from kvwatch.core.evidence_words import cause, next_step
from kvwatch.model.gpu import GpuHealth
from kvwatch.model.level import Level, RuleId, Scope, Verdict
from kvwatch.model.report import Event, TickReport
from tests.core.host import TOTAL, Host
from tests.exporters import sample

NOTHING = Cut(t_s=(), tracks=())


def names(found: tuple[Verdict, ...]) -> list[str]:
    return [verdict.rule.value for verdict in found]


def follow(host: Host, seconds: int, taken: Taken) -> tuple[Taken, list[str]]:
    """Let time pass; what evidence was taken of, in order."""
    seen: list[str] = []
    for _ in range(seconds):
        taken, found = due(taken, host.tick())
        seen += names(found)
    return taken, seen


def test_red_of_a_paging_rule_is_taken_once() -> None:
    """A rule that turns red and stays so gives one piece; one that does not page (kv_usage) gives none."""
    host = Host()
    taken, seen = follow(host, 60, Taken())
    assert seen == []
    host.waiting, host.running, host.usage, host.preemptions_per_s = 20, 60, 0.99, 20.0
    taken, seen = follow(host, 120, taken)

    assert host.level(RuleId.KV_USAGE) is Level.RED
    assert seen == ["recompute_tax"]


def test_a_rule_that_flaps_is_taken_once_in_ten_minutes() -> None:
    """A GPU that is lost and found again and again gives a piece per ten minutes, not per time."""
    host = Host()
    host.run(10)
    taken, times = Taken(), []
    for second in range(1500):
        host.health = GpuHealth.LOST if second % 100 < 40 else GpuHealth.OK
        taken, found = due(taken, host.tick())
        times += [host.now_s for verdict in found if verdict.rule is RuleId.GPU_LOST]

    assert len(times) == 3
    assert min(later - sooner for sooner, later in pairwise(times)) >= QUIET_S


def test_nothing_is_taken_on_a_single_sample() -> None:
    """The first sight of a host on which everything is wrong is no evidence of anything."""
    host = Host(health=GpuHealth.LOST, waiting=20, running=60, usage=0.99, preemptions_per_s=50.0)
    _, found = due(Taken(), host.tick())
    assert found == ()
    _, found = due(Taken(), host.step())  # the same samples once more
    assert found == ()
    _, found = due(Taken(), host.tick())
    assert set(names(found)) == {"gpu_lost", "recompute_tax"}


def test_a_restart_within_ten_minutes_is_no_new_red() -> None:
    """What an earlier run has taken counts."""
    host = Host(health=GpuHealth.LOST)
    taken = Taken(at_s={"gpu_lost-~~GPU-1": host.now_s - 60.0})

    assert follow(host, 20, taken)[1] == []
    assert follow(Host(health=GpuHealth.LOST), 20, Taken())[1] == ["gpu_lost"]


def test_the_curves_are_those_of_the_scope_and_its_neighbours() -> None:
    """A rule on a server brings the server's GPUs, one on a GPU the servers that hold memory on it."""
    host = Host()
    report = host.run(5)[-1]
    chat = report.servers[0]
    on_gpu = replace(chat, signals=replace(chat.signals, gpu_uuids=("GPU-1",)))
    report = replace(report, servers=(on_gpu,))

    assert related(report, Scope(uuid="GPU-1", gpu="0")) == (("", "", "GPU-1"), ("chat", "0", ""))
    assert related(report, Scope(server="chat", engine="0")) == (("chat", "0", ""), ("", "", "GPU-1"))
    assert [gpu.state.uuid for gpu in gpus_of(report, Scope(server="chat"))] == ["GPU-1"]
    assert gpus_of(report, Scope(server="elsewhere")) == report.gpus


def red(rule: RuleId, report: TickReport) -> Verdict:
    """A red verdict of this rule somewhere on the sample host."""
    for verdict in report.verdicts:
        if verdict.rule is rule and verdict.level is Level.RED:
            return verdict
    of_server = rule.value.startswith(("alloc", "largest", "server", "latency"))
    scope = Scope(server="chat", engine="0") if of_server else Scope(uuid=sample.uuid(0), gpu="0")
    return Verdict(rule=rule, scope=scope, level=Level.RED, since_s=0.0, since_wall_s=0.0, pages=True)


PAGED = [alert.rule for alert in ALERTS if alert.severity == "page" and alert.rule]


@pytest.mark.parametrize("rule", PAGED, ids=str)
def test_every_paging_rule_has_a_sentence_and_a_command(rule: RuleId) -> None:
    """One sentence without a hole, and a command that a shell can read and no hostile name reaches."""
    report = sample.report()
    verdict = red(rule, report)
    said, step = cause(report, verdict, NOTHING), next_step(report, verdict)

    assert said.endswith(".")
    assert said[0].isupper() or not said[0].isalpha()
    assert "{" not in said
    assert "None" not in said
    assert "\n" not in step.command
    assert shlex.split(step.command)
    assert len(step.why) > 20
    assert "script" not in step.command
    assert "img" not in step.command


def test_memory_says_what_grew_and_who_holds_it() -> None:
    """The sentence of low headroom has the figure, the growth, and the largest holder."""
    host = Host()
    host.run(400)
    start = host.now_s
    ring = Ring()
    for second in range(400):
        host.used_bytes = int(0.92 * TOTAL) + second * 40 * 2**20
        ring.offer(host.tick())
        if host.level(RuleId.DEVICE_HEADROOM) is Level.RED:
            break
    assert host.report is not None
    cut = ring.cut([("", "", "GPU-1")], start, zero_s=host.now_s)
    said = cause(host.report, host.verdict(RuleId.DEVICE_HEADROOM), cut)

    assert "GPU 0 on this host has 509 MiB of device memory left" in said
    assert "grew by 10.7 GiB in 5 min" in said
    assert "process 100 (vllm) of chat holds 140 GiB" in said


def test_the_sentence_names_an_xid_once() -> None:
    """What the alert says and what the rule says of an Xid become one clause."""
    report = Host().run(5)[-1]
    gpu = report.gpus[0]
    report = replace(report, gpus=(replace(gpu, state=replace(gpu.state, last_xid=79)),))
    verdict = Verdict(
        rule=RuleId.GPU_XID,
        scope=Scope(uuid=gpu.state.uuid, gpu="0"),
        level=Level.RED,
        since_s=0.0,
        since_wall_s=0.0,
        pages=True,
        detail="Xid 79: the GPU has fallen off the bus",
    )

    assert cause(report, verdict, NOTHING).endswith("reported Xid 79: the GPU has fallen off the bus.")
    assert cause(report, verdict, NOTHING).count("Xid") == 1


def test_a_question_at_the_end_gets_no_full_stop() -> None:
    """A rule's detail may be a question; the sentence then ends with it."""
    report = sample.report()
    verdict = replace(red(RuleId.SERVER_STALLED, report), rule=RuleId.SERVER_STALLED, detail="is it paused?")

    assert cause(report, verdict, NOTHING).endswith("is it paused?")


def test_events_of_the_shell_are_numbered_with_the_others() -> None:
    """An event that the core did not find takes the next number, and the core goes on after it."""
    host = Host()
    host.run(3)
    assert host.state is not None
    last = host.state.event_seq
    host.state, event = numbered(host.state, Event(seq=0, wall_s=1.0, kind="evidence", message="m"))
    host.health = GpuHealth.LOST
    later = [each.seq for each in host.tick().events]

    assert event.seq == last + 1
    assert later
    assert min(later) == last + 2
