"""Standard input, output and error that are there, whoever started us."""

from __future__ import annotations

import os
import sys


def fill() -> None:
    """Put /dev/null where standard input, output or error is closed.

    Else the next file that is opened gets the number, and what is printed goes into it.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
            os.set_inheritable(fd, True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
