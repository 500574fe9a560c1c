"""`kvwatch maintenance`: release the GPUs, or take them back."""

from __future__ import annotations

import argparse
import sys
import time

from kvwatch.cli import EXIT_CANNOT_START, EXIT_OK, EXIT_USAGE
from kvwatch.config import units
from kvwatch.daemon import maintenance, paths


def main(args: argparse.Namespace) -> int:
    """Write or remove the switch that the daemon follows within a second."""
    try:
        where = paths.find()
    except paths.DirectoryError as error:
        print(f"kvwatch: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    try:
        if args.state == "off":
            was_on = maintenance.switch_off(where.maintenance)
            print("maintenance ended" if was_on else "there was no maintenance")
            return EXIT_OK
        duration_s = units.duration_s(args.duration)
        where.runtime.mkdir(parents=True, exist_ok=True, mode=0o755)
        state = maintenance.switch_on(where.maintenance, duration_s)
    except ValueError as error:
        print(f"kvwatch: --for: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        print(
            f"kvwatch: {where.maintenance}: {error.strerror}; run this as root or as the service's user",
            file=sys.stderr,
        )
        return EXIT_CANNOT_START
    ends = time.strftime("%H:%M:%S", time.localtime(state.until_wall_s))
    print(f"GPUs are released until {ends}; `kvwatch maintenance off` takes them back earlier")
    if not where.lock.exists():
        print(f"no kvwatch has run here yet; one that starts before {ends} leaves the GPUs alone")
    return EXIT_OK
