"""`kvwatch restore`: give back what a run that is dead left behind."""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvwatch import wire
from kvwatch.actions.base import Context
from kvwatch.cli import EXIT_CANNOT_START, EXIT_FINDINGS, EXIT_OK
from kvwatch.daemon import paths
from kvwatch.daemon.giveback import give_back_all
from kvwatch.daemon.outstanding import Outstanding

LONGEST_S = 20.0


def main(_args: argparse.Namespace) -> int:
    """0 when nothing of ours is in force any more, 1 when something could not be given back."""
    try:
        where = paths.find()
    except paths.DirectoryError as error:
        print(f"kvwatch: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    with _alone(where.lock) as holder:
        if holder:
            print(
                f"kvwatch runs (pid {holder}) and gives its limits back itself; nothing was done",
                file=sys.stderr,
            )
            return EXIT_FINDINGS
        return _restore(where)


def _restore(where: paths.Paths) -> int:
    outstanding = Outstanding(where.outstanding)
    leases = sorted(where.limits.glob("*.json"))
    before = outstanding.entries()
    context = Context(limits_dir=where.limits, boot_id=wire.boot_id())
    problems = give_back_all(context, outstanding, longest_s=LONGEST_S)
    if outstanding.problem:
        problems.insert(0, outstanding.problem)
    for problem in problems:
        print(f"kvwatch: not given back: {problem}", file=sys.stderr)
    left = {entry.key for entry in outstanding.entries()}
    for entry in before:
        if entry.key not in left:
            print(f"given back: {entry.server} via {entry.action}")
    for lease in leases:
        if not lease.exists():
            print(f"given back: {lease.stem} via lease")
    return EXIT_FINDINGS if problems or left else EXIT_OK


@contextmanager
def _alone(lock: Path) -> Iterator[str]:
    """The pid of a daemon that runs, or "" and its lock for as long as this takes.

    Without the lock a daemon that starts meanwhile would have its new limits taken away.
    """
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield ""  # no lock file: no daemon has run here
        return
    try:
        yield _take(descriptor)
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> str:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
    return ""
