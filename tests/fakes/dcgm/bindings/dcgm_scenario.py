"""What the stand-in's host engine is like just now: the JSON file that a test writes."""

import json
import os
import time
from pathlib import Path

LEAK = []


def read():
    return json.loads(Path(os.environ["KVWATCH_FAKE_DCGM"]).read_text())


def note(text):
    """Append to the log of calls."""
    with Path(os.environ["KVWATCH_FAKE_DCGM"] + ".calls").open("a") as calls:
        calls.write(f"{os.getpid()} {text}\n")


def misbehave(scenario):
    """Grow and hang as the scenario says; a hang ends when the scenario no longer asks for it."""
    if scenario.get("leak_mib"):
        LEAK.append(b"x" * (scenario["leak_mib"] << 20))
    while read().get("hang"):
        time.sleep(0.05)
