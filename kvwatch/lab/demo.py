"""How does the demo run? A simulated server on loopback and simulated GPUs, watched by the real daemon."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from kvwatch.lab.demo_gpus import DemoGpus
from kvwatch.lab.demo_script import ALL, SCENARIOS, Scenario
from kvwatch.lab.demo_server import DemoServer
from kvwatch.lab.demo_world import World
from kvwatch.model.level import RuleId
from kvwatch.model.settings import MatchSettings, RuleSettings, ServerSettings, Settings, SloSettings
from kvwatch.rules import shipped

SERVER = "chat"
SETTLE_S = 5.0  # instead of five minutes: nobody would watch a demo for that long
HOLD_S = 2.0  # how long a rule stays up after its value has recovered
DOWN_FOR_S = 5.0


class Demo:
    """A running demo: give `settings` and `gpu_source` to the daemon, and `close` it at the end."""

    def __init__(
        self,
        scenario: Scenario,
        base: Settings,
        mono: Callable[[], float],
        wall: Callable[[], float],
        speed: float = 1.0,
    ) -> None:
        self._scenario = scenario
        self._told_s = -1.0
        self.world = World(scenario, lambda: speed * mono(), wall)
        self.server = DemoServer(self.world.page, lambda: not self.world.phase().server_down)
        self.gpu_source = DemoGpus(self.world, self.server.port, mono, base.gpus.peak_window_s)
        self.settings = settings_for(base, self.server.port)

    def describe(self) -> str:
        """What will happen when, for the terminal."""
        scenario = self._scenario
        lines = [
            f"  scenario     {scenario.name}: {scenario.summary}",
            f"  simulated    2 GPUs, and server `{SERVER}` at {self.server.url}; nothing real is touched",
        ]
        lines += [f"  {phase.at_s:6.0f} s     {phase.line}" for phase in scenario.phases]
        return "\n".join(lines)

    def narrate(self, elapsed_s: float) -> str | None:
        """The line of a phase that has begun since the last call, if any; each is told once. Script time."""
        begun = self._scenario.begun(self._told_s, elapsed_s)
        self._told_s = elapsed_s
        return begun[-1][1].line if begun else None

    def close(self) -> None:
        """Stop the simulated server and end a simulated hang; may be called twice."""
        self.gpu_source.close()
        self.server.close()


def start(
    scenario: str,
    base: Settings,
    *,
    mono: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    speed: float = 1.0,
) -> Demo:
    """Start a demo on top of complete settings; its story and load run at `speed`, the daemon does not.

    Raises ValueError for a name that is neither in SCENARIOS nor `all`.
    """
    found = {**SCENARIOS, ALL.name: ALL}.get(scenario)
    if found is None:
        raise ValueError(f"no demo scenario {scenario!r}; there are {', '.join(SCENARIOS)}, {ALL.name}")
    return Demo(found, base, mono, wall, speed)


def settings_for(base: Settings, port: int) -> Settings:
    """The base with the simulated server in place of any other, and rules that settle within a demo."""
    server = ServerSettings(
        name=SERVER,
        kind="vllm",
        url=f"http://127.0.0.1:{port}",
        match=MatchSettings(cmdline=f"--port {port}"),
        slo=SloSettings(ttft_p95_s=1.5, tpot_p95_s=0.1),
    )
    return replace(
        base,
        gpus=replace(base.gpus, settle_s=SETTLE_S, expect_count=2, expect_uuids=()),
        servers=(server,),
        rules=demo_rules(base.rules),
    )


def demo_rules(rules: Mapping[RuleId, RuleSettings]) -> dict[RuleId, RuleSettings]:
    """The same thresholds with shorter holds; the tax may clear at 0.015, not only at zero."""
    complete = {**shipped.DEFAULTS, **rules}
    quick = {rule: replace(settings, hold_s=HOLD_S) for rule, settings in complete.items()}
    quick[RuleId.RECOMPUTE_TAX] = replace(quick[RuleId.RECOMPUTE_TAX], clear=0.005)
    quick[RuleId.SERVER_DOWN] = replace(quick[RuleId.SERVER_DOWN], for_s=DOWN_FOR_S)
    return quick
