"""How long the agent takes to load inside a server: fresh interpreters, median of 15, bound 20 ms.

    python -m checks.agent.load_time [RUNS]

Each run is a new process that has imported what an engine has anyway; then the entry point is loaded and
called, and everything that a first step will need. Bytecode is there, as `pip install` leaves it; what a
load without any costs is printed beside it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BOUND_MS = 20.0
BEFORE = (
    "collections.abc, contextlib, dataclasses, functools, json, logging, os, re, socket, threading, typing"
)
PROGRAM = f"""
import sys, time, {BEFORE}
before, began_s = len(sys.modules), time.perf_counter()
{{load}}
print((time.perf_counter() - began_s) * 1e3, len(sys.modules) - before)
"""
REST = "kvwatch.agent.publisher, kvwatch.agent.torch_memory"
WAYS = {
    "vLLM registers its plugins": "from kvwatch.agent import vllm_plugin as p; p.register()",
    "vLLM, with all a step needs": "from kvwatch.agent import vllm_plugin as p; p.register(); p._load()",
    "transformers": f"import kvwatch.agent.transformers, {REST}",
    "a program": f"import kvwatch.agent.program, {REST}",
}


def measured(load: str, cache: str | None) -> tuple[float, int]:
    """Milliseconds and modules of one load in a fresh interpreter; without `cache` it has no bytecode."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(ROOT), "KVWATCH_SERVER": "chat"}
    environment["PYTHONPYCACHEPREFIX"] = cache or tempfile.mkdtemp()
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(load=load)],
        env=environment, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    took_ms, modules = ended.stdout.split()
    return float(took_ms), int(modules)


def main(runs: int) -> int:
    """Print a line for each way in; 1 when one of them takes longer than 20 ms."""
    worst_ms = 0.0
    with tempfile.TemporaryDirectory() as cache:
        for name, load in WAYS.items():
            first_ms, _ = measured(load, None)
            measured(load, cache)
            found = [measured(load, cache) for _ in range(runs)]
            median_ms = statistics.median(took for took, _ in found)
            worst_ms = max(worst_ms, median_ms)
            spread = f"{min(found)[0]:.1f} to {max(found)[0]:.1f}"
            print(
                f"{name:>28}: median {median_ms:5.1f} ms of {runs} ({spread}), {found[0][1]} modules; "
                f"without bytecode {first_ms:.0f} ms"
            )
    print(f"bound {BOUND_MS:g} ms: {'kept' if worst_ms < BOUND_MS else 'BROKEN'}")
    return int(worst_ms >= BOUND_MS)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 15))
