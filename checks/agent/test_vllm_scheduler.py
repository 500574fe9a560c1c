"""The agent on vLLM's own scheduler class, step by step (no server, no model): limits, exactness, cost."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from checks.engines.vllm import ENGINES, ROOT

pytestmark = pytest.mark.timeout(600)


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program in the environment that has vLLM."""
    return subprocess.run(
        [str(ENGINES / "vllm/bin/python"), "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    ended = run("checks.agent.gate")
    line = next((one for one in ended.stdout.splitlines() if one.startswith("RESULT ")), None)
    assert line is not None, ended.stderr[-3000:]
    return dict(json.loads(line.removeprefix("RESULT ")))


@pytest.mark.parametrize("kind", ["new", "old"], ids=["with_max_num_active_reqs", "without"])
def test_limit_lowered_far_below_what_runs(found: dict[str, Any], kind: str) -> None:
    """Nothing is admitted above the limit, the running set drains to it, and preemptions stop."""
    story = found[kind]

    assert story["preempted_before"] > 0
    assert story["before"] > 15
    assert not story["admitted_above"]
    assert story["drained"] <= 5
    assert story["held"] <= 5
    assert story["preempted_held"] == 0


@pytest.mark.parametrize("kind", ["new", "old"], ids=["with_max_num_active_reqs", "without"])
def test_admission_and_release(found: dict[str, Any], kind: str) -> None:
    """Without admission all running ones finish; after the lease's time the server's own limits are back."""
    story = found[kind]

    assert story["without_admission"] == 0
    assert story["waiting"] >= 40
    assert story["after"] > 5
    assert story["seconds_to_release"] <= 15.4
    assert story["own_again"] == [64, 64]


def test_state_is_exact(found: dict[str, Any]) -> None:
    """Used, free, evictable, held blocks and tokens equal those counted from vLLM's own tables."""
    assert len(found["exact"]) == 40
    for told, counted in found["exact"]:
        assert told == counted
    assert any(counted["evictable"] > 0 for _, counted in found["exact"])
    assert any(counted["tokens"] < counted["held"] * 16 for _, counted in found["exact"])


def test_unknown_release_is_not_limited(found: dict[str, Any]) -> None:
    """It publishes, says that it refuses, and leaves the limits alone."""
    story = found["unknown"]

    assert story["limits"].startswith("refused: vLLM 0.99.0")
    assert story["max"] == 64
    assert story["told"] == story["running"] > 2


def test_the_trap_is_real(found: dict[str, Any]) -> None:
    """Lowered without care, the old bound ends the engine: what the gate is there to avoid."""
    assert found["trap"] is True


def test_a_day_of_steps_leaves_nothing(found: dict[str, Any]) -> None:
    """A day's steps with a lease renewed every five seconds and a datagram a second grow nothing."""
    day = found["day"]

    assert day["steps"] >= 24 * 3600 * 50
    assert day["grown_bytes"] < 256 * 1024, "pages, not a leak: one byte a step would be 4 MiB"


def test_long_runs_through_the_plugins_entry_leave_nothing() -> None:
    """Two hours and a half of steps, and whole steps of the real scheduler, grow nothing (steps.py)."""
    ended = run("checks.agent.steps", "450000", "20")

    assert ended.returncode == 0, ended.stdout[-3000:]
