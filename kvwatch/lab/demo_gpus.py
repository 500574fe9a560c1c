"""Which GPUs does the demo show? Two H200-like GPUs whose memory, processes and faults follow the script."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from kvwatch.lab.demo_world import POOL_BYTES, World
from kvwatch.model.gpu import GpuHealth, GpuMemory, GpuProcess, GpuState, HostGpus, LedgerPass
from kvwatch.model.settings import GIB, MIB

DRIVER = "580.159.04"
# An H200 as its driver reports it: 143,771 MiB, of which 644,939,776 bytes are the driver's own.
TOTAL_BYTES = 143_771 * MIB
RESERVED_BYTES = 644_939_776
WEIGHTS_BYTES = 65_527_752_704
ENGINE_OTHER_BYTES = 6 * GIB  # CUDA context, graphs, activations
BYTES_PER_RUNNING = MIB // 4  # what follows the load outside the pool: far less than a change of level
EMBEDDER_BYTES = 24 * GIB
TRAINER_BYTES = 52 * GIB
UUIDS = ("GPU-5eed0000-0000-4000-8000-00000000000a", "GPU-5eed0000-0000-4000-8000-00000000000b")
_IDLE_WATTS, _FULL_WATTS = 118.0, 640.0
_FREE_AT_LEAST = 192 * MIB  # where the leak stops: the driver keeps some


class DemoGpus:
    """A `Source[HostGpus]` named like the real one; during the script's hang, `poll` hangs as NVML does."""

    def __init__(
        self, world: World, port: int, mono: Callable[[], float], peak_window_s: float = 60.0
    ) -> None:
        self.name = "nvml"
        self.period_s = 0.2
        self.expected_period_s = 0.2
        self.deadline_s = 2.0
        self._world = world
        self._port = port
        self._mono = mono
        self._closed = threading.Event()
        self._cards = tuple(_Card(index, uuid, peak_window_s) for index, uuid in enumerate(UUIDS))

    def poll(self) -> HostGpus:
        """Read both GPUs; blocks for as long as the script says that NVML hangs."""
        while self._world.phase().nvml_hung and not self._closed.wait(self.period_s):
            pass
        now_s = self._mono()
        elapsed_s = self._world.elapsed_s()
        running, busy_s = self._world.load()
        phase = self._world.phase()
        server = () if phase.server_down else (self._engine(running),)
        first = self._cards[0].read(now_s, elapsed_s, (*server, self._embedder()), busy_s)
        trainer = self._trainer(elapsed_s)
        second = self._cards[1].read(now_s, elapsed_s, (trainer,), 0.9 * elapsed_s, lost=phase.gpu_lost)
        return HostGpus(
            gpus=(first, second), driver_version=DRIVER, expected_count=len(UUIDS), host_pid_namespace=True
        )

    def close(self) -> None:
        """End a hang; may be called twice."""
        self._closed.set()

    def _engine(self, running: int) -> GpuProcess:
        """The engine's process; a little memory follows the number of running requests."""
        pid = 41_000 + 200 * self._world.boots
        command = (
            f"python -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-32B --host 127.0.0.1 "
            f"--port {self._port} --kv-cache-memory-bytes {POOL_BYTES}"
        )
        return GpuProcess(
            pid=pid + 37,
            used_bytes=WEIGHTS_BYTES + POOL_BYTES + ENGINE_OTHER_BYTES + running * BYTES_PER_RUNNING,
            alive=True,
            name="VLLM::EngineCor",
            command="VLLM::EngineCore",
            cgroup="/system.slice/vllm-chat.service",
            unit="vllm-chat.service",
            ancestors=((pid, command), (1, "/sbin/init")),
            started_ticks=100 * pid,
        )

    def _embedder(self) -> GpuProcess:
        """The neighbour on GPU 0, which leaks when the script says so."""
        room = TOTAL_BYTES - RESERVED_BYTES - _FREE_AT_LEAST - EMBEDDER_BYTES
        room -= WEIGHTS_BYTES + POOL_BYTES + ENGINE_OTHER_BYTES + 256 * MIB
        return GpuProcess(
            pid=38_112,
            used_bytes=EMBEDDER_BYTES + min(room, self._world.leaked_bytes()) // (2 * MIB) * (2 * MIB),
            alive=True,
            name="python3",
            command="python3 -m embedder --model bge-m3 --listen 127.0.0.1:7997",
            cgroup="/system.slice/embedder.service",
            unit="embedder.service",
            ancestors=((1, "/sbin/init"),),
            started_ticks=3_811_200,
        )

    def _trainer(self, elapsed_s: float) -> GpuProcess:
        """Another team's job on GPU 1: its memory swings with its steps of seven seconds."""
        swing = int(768 * (1.0 + math.sin(elapsed_s * math.tau / 7.0))) // 2 * 2
        return GpuProcess(
            pid=39_770,
            used_bytes=TRAINER_BYTES + swing * MIB,
            alive=True,
            name="python3",
            command="python3 train_adapter.py --rank 64",
            cgroup="/user.slice/user-1004.slice/session-11.scope",
            ancestors=((39_702, "-bash"), (1, "/sbin/init")),
            started_ticks=3_977_000,
        )


class _Card:
    """One GPU: what it remembers between two readings."""

    def __init__(self, index: int, uuid: str, peak_window_s: float) -> None:
        self._facts = GpuState(
            uuid=uuid,
            index=index,
            name="NVIDIA H200 (simulated)",
            driver_version=DRIVER,
            ecc_corrected_total=0,
            ecc_uncorrected_total=0,
            remapped_rows_pending=False,
            remapped_rows_failed=False,
            bar1_total_bytes=256 * GIB,
            bar1_used_bytes=3 * MIB,
            sample_interval_s=0.2,
        )
        self._window_s = peak_window_s
        self._used: deque[tuple[float, int]] = deque()
        self._scraped = 0  # the last value that a 15 s reader saw
        self._scraped_round = -1
        self._before: tuple[float, float] | None = None  # (time, busy seconds) of the last reading
        self._energy_j = 8.4e7
        self._busy = 0.0  # smoothed share of time
        self._falls = 0
        self._last_fall_s: float | None = None
        self._was_lost = False

    def read(
        self,
        now_s: float,
        elapsed_s: float,
        processes: tuple[GpuProcess, ...],
        busy_s: float,
        lost: bool = False,
    ) -> GpuState:
        """One reading; what a lost GPU says is that it is lost."""
        if lost and not self._was_lost:
            self._falls += 1
            self._last_fall_s = now_s
        self._was_lost = lost
        if lost:
            return self._lost()
        memory = _memory(processes)
        self._remember(now_s, elapsed_s, memory.used_bytes)
        watts = self._work(now_s, busy_s)
        peak = max(used for _, used in self._used)
        recent = max(used for at_s, used in self._used if at_s > now_s - 15.0)
        return replace(
            self._facts,
            memory=memory,
            used_peak_bytes=peak,
            free_low_bytes=memory.free_bytes - (peak - memory.used_bytes),
            hidden_from_15s_bytes=max(0, recent - self._scraped),
            ledger_pass=LedgerPass(observed_s=now_s, memory=memory, processes=processes),
            utilization_ratio=round(self._busy, 2),
            memory_bandwidth_utilization_ratio=round(0.6 * self._busy, 2),
            power_watts=round(watts, 1),
            temperature_celsius=round(31.0 + 38.0 * self._busy),
            clock_event_reasons=() if self._busy > 0.05 else ("gpu_idle",),
            energy_joules=round(self._energy_j, 3),
            xid_events_total=self._xids(),
            last_xid=79 if self._falls else None,
            last_xid_s=self._last_fall_s,
        )

    def _lost(self) -> GpuState:
        self._used.clear()
        self._before = None
        return GpuState(
            uuid=self._facts.uuid,
            index=self._facts.index,
            health=GpuHealth.LOST,
            health_detail="GPU is lost",
            name=self._facts.name,
            driver_version=DRIVER,
            xid_events_total=self._xids(),
            last_xid=79,
            last_xid_s=self._last_fall_s,
        )

    def _xids(self) -> tuple[tuple[int, int], ...]:
        return ((79, self._falls),) if self._falls else ()

    def _remember(self, now_s: float, elapsed_s: float, used: int) -> None:
        self._used.append((now_s, used))
        while self._used[0][0] < now_s - self._window_s:
            self._used.popleft()
        if int(elapsed_s // 15.0) != self._scraped_round:
            self._scraped_round, self._scraped = int(elapsed_s // 15.0), used

    def _work(self, now_s: float, busy_s: float) -> float:
        """Smooth the busy share over about a second, add up the energy; returns watts."""
        before, self._before = self._before, (now_s, busy_s)
        if before is not None and now_s > before[0]:
            passed_s = now_s - before[0]
            share = min(1.0, max(0.0, busy_s - before[1]) / passed_s)
            self._busy += (share - self._busy) * min(1.0, passed_s)
            self._energy_j += passed_s * (_IDLE_WATTS + (_FULL_WATTS - _IDLE_WATTS) * self._busy)
        return _IDLE_WATTS + (_FULL_WATTS - _IDLE_WATTS) * self._busy


def _memory(processes: tuple[GpuProcess, ...]) -> GpuMemory:
    """Memory as NVML v2 reports it: total = reserved + used + free."""
    used = sum(process.used_bytes or 0 for process in processes)
    return GpuMemory(
        total_bytes=TOTAL_BYTES,
        used_bytes=used,
        free_bytes=TOTAL_BYTES - RESERVED_BYTES - used,
        reserved_bytes=RESERVED_BYTES,
    )
