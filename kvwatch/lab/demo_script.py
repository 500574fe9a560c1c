"""What happens when in each demo? Scenarios as data: phases with a load, faults, and a line to tell."""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_PER_S = 13.0  # no phase asks for more


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests per second, and the ranges their prompt and output lengths are drawn from, in tokens."""

    rate_per_s: float
    prompt: tuple[int, int]
    output: tuple[int, int]


CALM = Load(rate_per_s=5.0, prompt=(150, 400), output=(150, 350))
# Answers far longer than the prompts fill the pool by growing, so that many requests are preempted.
LONG_ANSWERS = Load(rate_per_s=13.0, prompt=(300, 450), output=(900, 1500))
# More requests than can be served: they queue, and those that are served at last were slow.
RUSH = Load(rate_per_s=12.0, prompt=(300, 450), output=(400, 700))
TRICKLE = Load(rate_per_s=1.0, prompt=(150, 400), output=(150, 350))


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One stretch of a scenario, from `at_s` to the next phase.

    `hang_up` drops the requests of the phase before as this one begins: their clients are gone.
    `leak_bytes_per_s` is what the neighbour on GPU 0 grows by.
    """

    at_s: float
    line: str
    load: Load = CALM
    hang_up: bool = False
    leak_bytes_per_s: float = 0.0
    server_down: bool = False
    engine_hung: bool = False
    gpu_lost: bool = False
    nvml_hung: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A named story; it begins again after `period_s`."""

    name: str
    summary: str
    period_s: float
    phases: tuple[Phase, ...]

    def phase_at(self, elapsed_s: float) -> Phase:
        """The phase that holds at this time."""
        local_s = elapsed_s % self.period_s
        return next(phase for phase in reversed(self.phases) if phase.at_s <= local_s)

    def next_start_s(self, elapsed_s: float) -> float:
        """When the phase that holds at this time ends."""
        cycle_s = elapsed_s - elapsed_s % self.period_s
        starts = (cycle_s + phase.at_s for phase in self.phases)
        return min((at_s for at_s in starts if at_s > elapsed_s), default=cycle_s + self.period_s)

    def leaked_bytes(self, elapsed_s: float) -> int:
        """What the neighbour has leaked since the last phase without a leak began."""
        local_s, leaked = elapsed_s % self.period_s, 0.0
        ends = [phase.at_s for phase in self.phases[1:]] + [self.period_s]
        for phase, end_s in zip(self.phases, ends, strict=True):
            if phase.at_s > local_s:
                break
            leaked += phase.leak_bytes_per_s * (min(local_s, end_s) - phase.at_s)
            leaked = leaked if phase.leak_bytes_per_s else 0.0
        return int(leaked)

    def begun(self, after_s: float, until_s: float) -> list[tuple[float, Phase]]:
        """Phases that begin in (after, until], with the time at which they do."""
        first, last = int(max(0.0, after_s) // self.period_s), int(until_s // self.period_s)
        starts = (
            (cycle * self.period_s + phase.at_s, phase)
            for cycle in range(first, last + 1)
            for phase in self.phases
        )
        return [(at_s, phase) for at_s, phase in starts if after_s < at_s <= until_s]


def _overload(calm_s: float, end_s: float, load: Load) -> tuple[Phase, ...]:
    return (
        Phase(at_s=0.0, line="calm: a few chats at a time, everything should be green"),
        Phase(
            at_s=calm_s,
            line="overload: a burst of requests fills the KV pool, yellow; then preemptions, red",
            load=load,
        ),
        Phase(
            at_s=end_s,
            line="recovery: the burst's clients hang up; kv_usage falls at once, recompute_tax after 60 s",
            hang_up=True,
        ),
    )


_CALM = Scenario(
    name="calm",
    summary="a steady, modest load; stays green for ever",
    period_s=1e9,
    phases=(Phase(at_s=0.0, line="calm: a few chats at a time, everything stays green"),),
)
_TOUR = Scenario(
    name="tour",
    summary="calm, overload (yellow, then red), recovery (green); again every 2 min",
    period_s=120.0,
    phases=_overload(calm_s=8.0, end_s=26.0, load=LONG_ANSWERS),
)
_OVERLOAD = Scenario(
    name="overload",
    summary="overload for 45 s: KV full, preemptions, recompute tax, slow answers; again every 2½ min",
    period_s=150.0,
    phases=_overload(calm_s=10.0, end_s=55.0, load=RUSH),
)
_LEAK = Scenario(
    name="leak",
    summary="the neighbour on GPU 0 leaks device memory until nearly nothing is free; again every 2 min",
    period_s=120.0,
    phases=(
        Phase(at_s=0.0, line="calm: device memory is level"),
        Phase(
            at_s=12.0,
            line="leak: the embedder on GPU 0 grows by 800 MiB/s",
            leak_bytes_per_s=800.0 * 2**20,
        ),
        Phase(
            at_s=50.0,
            line="leak: little is free now; the headroom goes yellow at 2 GiB, red at 512 MiB",
            leak_bytes_per_s=110.0 * 2**20,
        ),
        Phase(at_s=95.0, line="recovery: the embedder was restarted and its memory came back"),
    ),
)
_FAULTS = Scenario(
    name="faults",
    summary="server down, GPU lost, NVML hung, engine hung, one after another; again every 3 min",
    period_s=180.0,
    phases=(
        Phase(at_s=0.0, line="calm: all is well"),
        Phase(at_s=15.0, line="fault: the server went down (connection refused)", server_down=True),
        Phase(at_s=40.0, line="the server is back, with counters at zero"),
        Phase(at_s=55.0, line="fault: GPU 1 fell off the bus (Xid 79)", gpu_lost=True),
        Phase(at_s=80.0, line="GPU 1 is back after a reset"),
        Phase(at_s=95.0, line="fault: an NVML call hangs; the source is stuck", nvml_hung=True),
        Phase(at_s=110.0, line="NVML answers again"),
        Phase(
            at_s=125.0,
            line="fault: the engine hangs; its page still answers with frozen figures",
            load=TRICKLE,
            engine_hung=True,
        ),
        Phase(at_s=150.0, line="the engine moves again"),
    ),
)
SCENARIOS = {scenario.name: scenario for scenario in (_CALM, _OVERLOAD, _LEAK, _FAULTS, _TOUR)}


def chained(name: str, summary: str, scenarios: tuple[Scenario, ...]) -> Scenario:
    """One scenario after the other, each for one of its rounds; then again from the first."""
    phases: list[Phase] = []
    at_s = 0.0
    for scenario in scenarios:
        phases += [replace(phase, at_s=at_s + phase.at_s) for phase in scenario.phases]
        at_s += scenario.period_s
    return Scenario(name=name, summary=summary, period_s=at_s, phases=tuple(phases))


ALL = chained("all", "every other story, one after the other", (_TOUR, _OVERLOAD, _LEAK, _FAULTS))
