"""`python -m kvwatch.agent run -- COMMAND …`: the command, with its PyTorch allocator published.

For programs that cannot be changed. Every Python process of the command is watched once it imports torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

USAGE = """usage: python -m kvwatch.agent run [--server NAME] -- COMMAND [ARGUMENT …]

  KVWATCH_SERVER=train python -m kvwatch.agent run -- python train.py --epochs 3

NAME is the server's name in kvwatch.yml (default: KVWATCH_SERVER). The command takes this process's place."""
PRELOAD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "preload")  # noqa: PTH100, PTH118, PTH120


def main(arguments: Sequence[str]) -> int:
    """Replace this process by the command; returns only when that cannot be done (2)."""
    from kvwatch.agent.environment import PlaceError, place

    server, command = _split(arguments)
    if not command:
        print(USAGE, file=sys.stderr)
        return 2
    environment = dict(os.environ)
    if server is not None:
        environment["KVWATCH_SERVER"] = server
    try:
        named = place(environ=environment) is not None
    except PlaceError as error:
        print(f"kvwatch.agent: {error}", file=sys.stderr)
        return 2
    if not named:
        print("kvwatch.agent: no server is named; give --server NAME or set KVWATCH_SERVER", file=sys.stderr)
        return 2
    path = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = f"{PRELOAD}{os.pathsep}{path}" if path else PRELOAD
    try:
        os.execvpe(command[0], list(command), environment)  # noqa: S606 - the command is what was asked for
    except OSError as error:
        print(f"kvwatch.agent: {command[0]}: {error.strerror}", file=sys.stderr)
    return 2


def _split(arguments: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """(server, command) of `run [--server NAME] -- COMMAND …`; no command when it is anything else."""
    if not arguments or arguments[0] != "run":
        return None, ()
    rest, server = arguments[1:], None
    if len(rest) >= 2 and rest[0] == "--server":
        server, rest = rest[1], rest[2:]
    return server, rest[1:] if rest and rest[0] == "--" else ()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
