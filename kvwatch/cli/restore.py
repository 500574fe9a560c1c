"""`kvwatch restore`: give back what a run that is dead left behind."""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from pathlib import Path

from kvwatch import wire
from kvwatch.actions.base import Context
from kvwatch.cli import EXIT_FINDINGS, EXIT_OK
from kvwatch.daemon import paths
from kvwatch.daemon.dispatcher import give_back_all
from kvwatch.daemon.outstanding import Outstanding

DEADLINE_S = 10.0


def main(_args: argparse.Namespace) -> int:
    """0 when nothing of ours is in force any more, 1 when something could not be given back."""
    where = paths.find()
    holder = _running(where.lock)
    if holder:
        print(
            f"kvwatch runs (pid {holder}) and gives its limits back itself; nothing was done", file=sys.stderr
        )
        return EXIT_FINDINGS
    outstanding = Outstanding(where.outstanding)
    before = [f"{entry.server} via {entry.action}" for entry in outstanding.entries()]
    problems = give_back_all(
        Context(limits_dir=where.limits, boot_id=wire.boot_id()), outstanding, DEADLINE_S
    )
    for problem in problems:
        print(f"kvwatch: not given back: {problem}", file=sys.stderr)
    left = {f"{entry.server} via {entry.action}" for entry in outstanding.entries()}
    for name in before:
        if name not in left:
            print(f"given back: {name}")
    return EXIT_FINDINGS if problems else EXIT_OK


def _running(lock: Path) -> str:
    """The pid of a daemon that holds the lock, or ""."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
    finally:
        os.close(descriptor)
    return ""
