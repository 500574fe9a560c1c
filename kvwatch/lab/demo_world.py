"""What is the simulated host doing now? One engine and its load, moved along the demo's script."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random

from kvwatch.lab.demo_script import MAX_PER_S, Phase, Scenario
from kvwatch.lab.sim_load import poisson
from kvwatch.lab.vllm_page import PageInfo, render
from kvwatch.lab.vllm_sim import SimConfig, StepTime, VllmSim

MODEL = "Qwen3-32B"
# 64 layers x 8 KV heads x 128 x 2 (K and V) x 2 bytes.
KV_BYTES_PER_TOKEN = 262_144
# About an H200 with 32 B bf16 parameters: 65.5 GB over 4.8 TB/s; 64 GFLOP a token; the KV over the same bus.
STEP_TIME = StepTime(base_s=0.014, per_token_s=90e-6, per_kv_token_s=55e-9)
CONFIG = SimConfig(num_blocks=4097, max_model_len=8192, step_time=STEP_TIME)
POOL_BYTES = CONFIG.capacity_tokens * KV_BYTES_PER_TOKEN
_SEED = 20


class World:
    """The simulated host. Moved only by whoever asks, to the time of asking; safe from any thread.

    The script's clock starts with the first reading, of the page or of the load, and stands at zero
    before. `mono` and `wall` are clocks in seconds.
    """

    def __init__(self, scenario: Scenario, mono: Callable[[], float], wall: Callable[[], float]) -> None:
        self.scenario = scenario
        self._mono = mono
        self._wall = wall
        self._lock = threading.Lock()
        self._began_s: float | None = None
        self._moved_s = -1.0  # script time reached, less than any phase's start at first
        self._entered_s = 0.0  # when the present phase began
        self._boots = 0
        self._boot(0.0)

    def elapsed_s(self) -> float:
        """Seconds of script time."""
        return 0.0 if self._began_s is None else self._mono() - self._began_s

    def phase(self) -> Phase:
        """The script's phase now."""
        return self.scenario.phase_at(self.elapsed_s())

    def page(self) -> str:
        """The server's `/metrics` page now."""
        with self._lock:
            self._move()
            return render(self._sim, self._info)

    def load(self) -> tuple[int, float]:
        """Requests running, and busy seconds of the engine since it started."""
        with self._lock:
            self._move()
            return self._sim.gauges.running, self._sim.stats.busy_s

    def leaked_bytes(self) -> int:
        """What the neighbour has leaked in this round of the script."""
        return self.scenario.leaked_bytes(self.elapsed_s())

    @property
    def boots(self) -> int:
        """How often the server has started."""
        return self._boots

    def _boot(self, at_s: float) -> None:
        """A fresh engine whose load begins at script time `at_s`."""
        self._boots += 1
        self._origin_s = at_s

        def rate_at(t_s: float) -> float:
            return self.scenario.phase_at(at_s + t_s).load.rate_per_s

        def lengths(t_s: float, rng: Random) -> tuple[int, int]:
            load = self.scenario.phase_at(at_s + t_s).load
            return rng.randint(*load.prompt), rng.randint(*load.output)

        rng = Random(_SEED + self._boots)  # noqa: S311 - reproducible load, guards nothing
        self._sim = VllmSim(CONFIG, poisson(rng, rate_at, MAX_PER_S, lengths))
        self._info = PageInfo(model=MODEL, created_wall_s=self._wall(), kv_cache_memory_bytes=POOL_BYTES)

    def _move(self) -> None:
        """Bring the engine to the present, one phase after the other."""
        if self._began_s is None:
            self._began_s = self._mono()
        now_s = self.elapsed_s()
        for at_s, phase in self.scenario.begun(self._moved_s, now_s):
            self._run_to(at_s)
            self._enter(at_s, phase)
        self._run_to(now_s)

    def _run_to(self, script_s: float) -> None:
        if not self.scenario.phase_at(max(0.0, self._moved_s)).server_down:
            self._sim.advance(script_s - self._origin_s)
        self._moved_s = script_s

    def _enter(self, at_s: float, phase: Phase) -> None:
        """What a phase does as it begins."""
        previous = self.scenario.phase_at(at_s - 1e-6) if at_s > 0 else phase
        if previous.server_down and not phase.server_down:
            self._boot(at_s)
        if phase.engine_hung:
            self._sim.stall(self.scenario.next_start_s(at_s) - at_s)
        if phase.hang_up:
            since_s = self._entered_s - self._origin_s
            self._sim.abort(lambda request: request.arrival_s >= since_s)
        self._entered_s = at_s
