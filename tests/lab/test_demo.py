"""A demo starts, says what it will show, shows it on real sockets, and leaves nothing behind."""

from __future__ import annotations

import threading
import urllib.request

import pytest

from kvwatch.lab import demo
from kvwatch.lab.demo_script import ALL, MAX_PER_S, SCENARIOS
from kvwatch.model.level import RuleId
from kvwatch.model.settings import Settings
from kvwatch.sources.servers import vllm


def test_a_demo_serves_a_page_that_its_own_settings_point_at() -> None:
    """The server of the settings answers with a vLLM page, and closing twice ends every thread."""
    before = set(threading.enumerate())
    running = demo.start("calm", Settings())
    (server,) = running.settings.servers
    with urllib.request.urlopen(server.url + "/metrics", timeout=5) as answer:
        state = vllm.parse({"metrics": answer.read()}, server)
    assert state.engines[0].kv.usage_ratio is not None
    assert server.slo.ttft_p95_s is not None
    assert str(server.url) in running.describe()
    running.close()
    running.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(5.0)
    assert set(threading.enumerate()) <= before


def test_the_gpus_show_the_process_that_the_settings_recognise() -> None:
    """The engine's ancestor carries the port that the server's `match` looks for."""
    running = demo.start("calm", Settings())
    try:
        processes = running.gpu_source.poll().gpus[0].ledger_pass.processes
        match = running.settings.servers[0].match.cmdline
        assert match is not None
        assert [any(match in line for _, line in each.ancestors) for each in processes] == [True, False]
    finally:
        running.close()


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_phase_is_told_once_per_round_and_none_asks_for_too_much(name: str) -> None:
    """`narrate` gives each line as its phase begins; no load exceeds what arrivals are thinned from."""
    scenario = SCENARIOS[name]
    assert scenario.phases[0].at_s == 0
    assert all(phase.load.rate_per_s <= MAX_PER_S for phase in scenario.phases)
    running = demo.start(name, Settings())
    try:
        told = [running.narrate(tick / 2) for tick in range(2 * int(min(scenario.period_s, 400.0)))]
        assert [line for line in told if line] == [phase.line for phase in scenario.phases]
        assert all(phase.line in running.describe() for phase in scenario.phases)
    finally:
        running.close()


def test_all_is_every_story_in_turn_and_begins_again() -> None:
    """The phases of `all` are those of the stories that end, in their order, each at its own distance."""
    parts = [SCENARIOS[name] for name in ("tour", "overload", "leak", "faults")]
    assert [phase.line for phase in ALL.phases] == [phase.line for one in parts for phase in one.phases]
    assert ALL.period_s == sum(one.period_s for one in parts)
    assert ALL.phase_at(ALL.period_s + 15.0) == ALL.phase_at(15.0)
    assert [ALL.phase_at(120.0 + at_s).line for at_s in (5.0, 20.0, 60.0)] == [
        SCENARIOS["overload"].phase_at(at_s).line for at_s in (5.0, 20.0, 60.0)
    ]


def test_a_fast_story_moves_the_load_and_not_the_clock_of_the_readings() -> None:
    """At ten times the speed the script is ten times as far; GPUs are read on the daemon's own clock."""
    now = [100.0]
    running = demo.start("calm", Settings(), mono=lambda: now[0], speed=10.0)
    try:
        running.world.page()
        now[0] += 3.0
        assert running.world.elapsed_s() == pytest.approx(30.0)
        assert running.gpu_source.poll().gpus[0].ledger_pass.observed_s == 103.0
    finally:
        running.close()


def test_an_unknown_scenario_is_refused_by_name_with_the_choices() -> None:
    """The error names what was asked for and what there is."""
    with pytest.raises(ValueError, match=r"'nope'.*calm.*tour"):
        demo.start("nope", Settings())


def test_the_demo_changes_timings_only_never_a_threshold() -> None:
    """What is yellow or red in the demo is yellow or red on a host."""
    from kvwatch.rules.shipped import DEFAULTS

    quick = demo.demo_rules({})
    assert set(quick) == set(RuleId)
    assert all(
        (quick[rule].yellow, quick[rule].red) == (DEFAULTS[rule].yellow, DEFAULTS[rule].red) for rule in quick
    )
