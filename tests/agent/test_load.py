"""What the agent brings into a server: few modules, none of them dear (timed: checks/agent/load_time.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT

OWN = {
    "kvwatch",
    "kvwatch.agent",
    "kvwatch.agent.allocator",
    "kvwatch.agent.environment",
    "kvwatch.agent.guard",
    "kvwatch.agent.limits",
    "kvwatch.agent.publisher",
    "kvwatch.agent.torch_memory",
    "kvwatch.wire",
    "kvwatch.wire_record",
}
VLLM = {"kvwatch.agent.hooks", "kvwatch.agent.vllm_plugin", "kvwatch.agent.vllm_scheduler"}
# Every engine has imported these long before a plugin is loaded.
ENGINE = (
    "collections.abc, contextlib, functools, importlib.machinery, json, logging, os, re, socket, threading, "
    "typing"
)
# What Python itself may add on the way.
PYTHON = {"__future__"}


def brought(folder: Path, program: str, *, before: str = ENGINE) -> set[str]:
    """The modules that a program adds to a process which has imported `before`."""
    code = (
        f"import sys, time, {before}\nseen = set(sys.modules)\n{program}\nprint(*(set(sys.modules) - seen))"
    )
    ended = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT), "KVWATCH_SERVER": "chat", "KVWATCH_RUNTIME": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(ended.stdout.split())


def test_vllm(tmp_path: Path) -> None:
    """Registered and with all that a step needs: the agent's own modules, none of the model's dataclasses."""
    found = brought(tmp_path, "from kvwatch.agent import vllm_plugin as p; p.register(); p._load()")

    assert found <= OWN | VLLM | PYTHON, sorted(found - OWN - VLLM - PYTHON)


def test_vllm_process_that_never_schedules(tmp_path: Path) -> None:
    """In vLLM's other processes registering brings in five small modules."""
    found = brought(tmp_path, "from kvwatch.agent import vllm_plugin as p; p.register()")

    assert found - PYTHON == {
        "kvwatch",
        "kvwatch.agent",
        "kvwatch.agent.environment",
        "kvwatch.agent.guard",
        "kvwatch.agent.hooks",
        "kvwatch.agent.vllm_plugin",
    }


@pytest.mark.parametrize(
    ("program", "own"),
    [
        ("import kvwatch.agent; assert kvwatch.agent.start()", {"kvwatch.agent.program"}),
        (
            "import kvwatch.agent.transformers as t, types; assert t.attach(types.SimpleNamespace())",
            {"kvwatch.agent.transformers"},
        ),
    ],
    ids=["program", "transformers"],
)
def test_other_hosts(tmp_path: Path, program: str, own: set[str]) -> None:
    """A program and transformers get the same modules and the one that knows them."""
    found = brought(tmp_path, program)

    assert found <= OWN | own | PYTHON, sorted(found - OWN - own - PYTHON)


def test_nothing_heavy_in_a_bare_process(tmp_path: Path) -> None:
    """Even where nobody else has imported them, dataclasses, inspect, pathlib and the like stay away."""
    found = brought(tmp_path, "import kvwatch.agent; assert kvwatch.agent.start()", before="types")

    heavy = {
        "dataclasses",
        "inspect",
        "pathlib",
        "tempfile",
        "asyncio",
        "subprocess",
        "ssl",
        "http",
        "urllib",
    }
    assert not found & heavy


def test_reference_reader_of_leases(tmp_path: Path) -> None:
    """`kvwatch.wire`, which scripts run, needs nothing else of kvwatch."""
    assert brought(tmp_path, "import kvwatch.wire") - PYTHON == {"kvwatch", "kvwatch.wire"}
