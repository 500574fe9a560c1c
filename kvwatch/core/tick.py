"""What happens in one tick? Samples become signals, levels, decisions; all of it goes into one report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvwatch.control.plan import Planned, plan
from kvwatch.core import events, headline, reports
from kvwatch.core.naming import with_whole_uuids
from kvwatch.core.state import CoreState, counted
from kvwatch.model.action import ActionResult
from kvwatch.model.level import Verdict
from kvwatch.model.report import Snapshot, TickClock, TickReport
from kvwatch.model.settings import Settings
from kvwatch.rules.evaluate import evaluate
from kvwatch.rules.memory import remember
from kvwatch.rules.views import Freshness, Inputs, gpu_states, look
from kvwatch.signals import freshness
from kvwatch.signals.derive import derive


def step(
    state: CoreState, snapshot: Snapshot, results: Iterable[ActionResult], clock: TickClock
) -> tuple[CoreState, TickReport]:
    """Advance by one tick. Pure: the same state, snapshot, results and clock give the same report."""
    settings = state.settings
    finished = tuple(results)
    snapshot = with_whole_uuids(snapshot)
    fresh = fresh_samples(snapshot, settings, clock)
    signal_state, signals = derive(state.signals, snapshot, settings, state.patterns, clock)
    memory = remember(state.memory, snapshot, gpu_states(snapshot, fresh.gpu_sources), clock.mono_s)
    inputs = look(signals, snapshot, settings, clock, memory, fresh, state.rules, state.inputs)
    levels, verdicts = evaluate(state.levels, inputs)
    planned = plan(state.control, signals, verdicts, snapshot, finished, settings, clock)
    after = replace(
        state,
        tick=state.tick + 1,
        signals=signal_state,
        levels=levels,
        memory=memory,
        control=planned.state,
        actions_total=counted(state.actions_total, finished),
        told=events.told(state.told, finished),
        inputs=inputs,
    )
    report = _report(after, inputs, fresh, verdicts, planned)
    found = events.found(state, report, finished, planned)
    report = replace(report, events=found)
    return replace(after, event_seq=state.event_seq + len(found), last=report), report


def fresh_samples(snapshot: Snapshot, settings: Settings, clock: TickClock) -> Freshness:
    """Say which samples are current. A source that is paused for maintenance is not."""
    sources = snapshot.sources
    paused = {name for name, status in sources.items() if status.paused}
    return Freshness(
        gpu_sources=frozenset(
            name
            for name, sample in snapshot.gpus.items()
            if name not in paused and freshness.gpu_fresh(sample, clock, sources.get(name))
        ),
        servers=frozenset(
            server.name
            for server in settings.servers
            if freshness.server_fresh(snapshot.servers.get(server.name), server, clock)
        ),
        agents=frozenset(
            key
            for key, sample in snapshot.agents.items()
            if freshness.agent_fresh(sample, sources.get(key), clock)
        ),
    )


def _report(
    state: CoreState, inputs: Inputs, fresh: Freshness, verdicts: tuple[Verdict, ...], planned: Planned
) -> TickReport:
    snapshot, clock = inputs.snapshot, inputs.clock
    judged = headline.judge(verdicts, state.settings)
    return TickReport(
        tick=state.tick,
        clock=clock,
        version=state.version,
        mode=state.settings.control.mode,
        headline=judged.level,
        headline_detail=judged.detail,
        period_s=state.settings.tick_s,
        gpus=reports.gpus(inputs),
        servers=reports.servers(inputs),
        agents=reports.agents(snapshot, fresh.agents),
        signals=inputs.signals,
        verdicts=verdicts,
        sources=tuple(snapshot.sources.values()),
        limits=planned.limits,
        due=planned.due,
        actions_total=tuple((action, outcome, n) for (action, outcome), n in state.actions_total.items()),
        shell=snapshot.shell,
    )
